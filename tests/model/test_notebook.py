"""A notebook's cells in a real kernel, with the demo checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipywidgets")

ROOT = Path(__file__).resolve().parents[2]

BEGIN = f"""
import os, signal, threading
import lily
from lily.notebook import show
model = lily.Model.load({str(ROOT / "examples/demo_model/checkpoint")!r})
going = {{id: -100 for id in model.stop_ids}}
endless = {{"logit_bias": going, "max_tokens": 20_000}}
"""


class Notebook:
    """Runs cells in one kernel."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, source: str) -> list[Any]:
        """The outputs of a new cell, whose output may go on to change."""
        cells = self._client.nb.cells
        cells.append(nbformat.v4.new_code_cell(source))
        outputs: list[Any] = self._client.execute_cell(cells[-1], len(cells) - 1).outputs
        return outputs


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=120)
    with client.setup_kernel():
        made = Notebook(client)
        made.run(BEGIN)
        yield made


def shown(outputs: list[Any]) -> str:
    """HTML of a cell's last output, without the style sheet."""
    found: str = [o for o in outputs if "data" in o][-1].data["text/html"]
    return found.partition("</style>")[2]


def printed(outputs: list[Any]) -> str:
    return "".join(output.get("text", "") for output in outputs)


def test_the_last_line_of_a_cell_shows_itself_while_other_cells_run(notebook: Notebook) -> None:
    outputs = notebook.run("text = model.generate('It was a', max_tokens=20, temperature=0)\ntext")
    same = notebook.run(
        "print(text.text() == model.generate('It was a', max_tokens=20, temperature=0).text())"
    )
    assert printed(same) == "True\n"
    assert "20 generated" in shown(outputs)
    assert "end: length" in shown(outputs)
    again = notebook.run("text")
    assert shown(again) == shown(outputs)


def test_the_stop_button_stops_a_text_that_would_not_end(notebook: Notebook) -> None:
    outputs = notebook.run("text = model.generate('It was a', **endless)\nlive = show(text)\nlive")
    assert "application/vnd.jupyter.widget-view+json" in outputs[0].data
    result = notebook.run(
        "next(text)\n"  # it has begun
        "live.button.click()\n"
        "result = text.result()\n"
        "print(result.finish_reason, 0 < len(result.tokens) < 20_000)"
    )
    assert printed(result) == "cancelled True\n"
    assert "end: cancelled" in shown(outputs)
    assert "application/vnd.jupyter.widget-view+json" not in outputs[0].data
    assert printed(notebook.run("print(model.generate('x', max_tokens=2).result().finish_reason)"))


def test_an_interrupt_of_the_kernel_stops_what_a_cell_waits_for(notebook: Notebook) -> None:
    """Jupyter's Interrupt is this signal, sent to the kernel."""
    cell = """
text = model.generate('It was a', **endless)
live = show(text)
next(text)
wait_for = live._changed.wait_for
def waiting(ready):
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    live._changed.wait_for = wait_for
    return wait_for(ready)
live._changed.wait_for = waiting
try:
    live.wait()
except KeyboardInterrupt:
    print('interrupted', live.result().finish_reason)
"""
    outputs = notebook.run(cell)
    assert printed(outputs) == "interrupted cancelled\n"
    assert "end: cancelled" in shown(outputs)


def test_a_session_waits_for_the_reply_that_is_shown_in_it(notebook: Notebook) -> None:
    notebook.run(
        "session = model.session()\n"
        "text = session.generate('It was a', max_tokens=100, temperature=0, logit_bias=going)\n"
        "text"
    )
    cell = "print(session.position, text.finish_reason, len(text.result().tokens))"
    assert printed(notebook.run(cell)) == "102 length 100\n"


def test_a_model_says_what_it_is(notebook: Notebook) -> None:
    (output,) = notebook.run("model")
    assert "<th>largest context</th>" in output.data["text/html"]
    assert output.data["text/plain"].startswith("Model(")
