"""Live output of a notebook, with a reply that only pretends and a page that is a list."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lily import notebook
from lily.asynchronous import Pieces
from lily.generation import Timings, Usage
from lily.notebook import State, show


def piece(reasoning: str = "", content: str = "", call: Any = None, token: int | None = 1) -> Any:
    return SimpleNamespace(reasoning=reasoning, content=content, call=call, token=token)


def call(index: int, name: str, arguments: str) -> Any:
    return SimpleNamespace(index=index, id=f"call_{index}", name=name, arguments=arguments)


class PretendReply(Pieces[Any]):
    """A reply whose pieces come as a test says."""

    def __init__(self, pieces: list[Any], *, thinks: bool = False) -> None:
        self._parser = SimpleNamespace(in_thinking=thinks, reasoning="", content="")
        self._generation = SimpleNamespace(_progress=None)
        self.session: Any = SimpleNamespace(_turn=None)
        self.finish_reason: str | None = None
        self.calls: list[Any] = []
        self.asked = False
        self.before: Callable[[int], None] = lambda _: None
        self._run = self._pieces(pieces)

    def _pieces(self, pieces: list[Any]) -> Iterator[Any]:
        try:
            for i, one in enumerate(pieces):
                self.before(i)
                if self.finish_reason:
                    return
                self._parser.reasoning += one.reasoning
                self._parser.content += one.content
                yield one
            self.finish_reason = self.finish_reason or "stop"
        finally:
            self.finish_reason = self.finish_reason or "cancelled"

    def cancel(self) -> None:
        self.finish_reason = "cancelled"

    def stop_thinking(self) -> None:
        self.asked = True

    def close(self) -> None:
        self._run.close()  # type: ignore[attr-defined]

    def result(self) -> Any:
        for _ in self:
            pass
        return SimpleNamespace(
            content=self._parser.content,
            reasoning=self._parser.reasoning,
            tool_calls=tuple(self.calls),
            finish_reason=self.finish_reason,
            thinking_end=None,
            stop=None,
            usage=Usage(1200, 1000, 7),
            timings=Timings(0.5, 0.4, 500.0, 0.2, 30.0),
        )


class Page:
    """What a notebook shows: the outputs by their id, and what was sent."""

    def __init__(self) -> None:
        self.outputs: dict[str, Any] = {}
        self.sent: list[tuple[str, str]] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, thing: Any, *, display_id: str, update: bool = False, **_: Any) -> None:
        assert update == (display_id in self.outputs) or not update
        self.outputs[display_id] = thing
        self.threads.add(threading.current_thread())
        if isinstance(thing, dict):
            self.sent.append((display_id.rpartition("-")[2], thing["text/html"]))

    def html(self, name: str) -> str:
        (found,) = (v for k, v in self.outputs.items() if k.endswith(name))
        text: str = found["text/html"]
        return text.partition("</style>")[2]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    made = Page()
    monkeypatch.setattr(notebook, "_display", made)
    monkeypatch.setattr(notebook, "_kernel_shell", lambda: object())
    monkeypatch.setattr(notebook, "PERIOD_S", 0.0)
    return made


WHOLE = [
    piece(reasoning="Let me "),
    piece(reasoning="think"),
    piece(content="The *answer*"),
    piece(content=" is <b>"),
    piece(call=call(0, "look", "")),
    piece(call=call(0, "look", '{"x": 1}')),
]


def test_a_reply_appears_while_it_comes_and_the_cell_is_free(page: Page) -> None:
    going = threading.Event()
    reply = PretendReply(WHOLE, thinks=True)
    reply.before = lambda i: i == 2 and going.wait(30)
    live = show(reply)
    assert not live._done, "the cell has returned before the reply has ended"
    going.set()
    live.wait()
    thoughts = [html.partition("</style>")[2] for name, html in page.sent if name == "thinking"]
    assert "<details open><summary>Thinking…" in thoughts[1]
    assert "<details><summary>Thought for" in thoughts[-1]
    assert "Let me think" in thoughts[-1]
    answers = [html.partition("</style>")[2] for name, html in page.sent if name == "answer"]
    assert any(">The *answer*</div>" in html for html in answers)
    assert "The <em>answer</em> is &lt;b&gt;" in answers[-1]
    assert "<b>look</b>({&quot;x&quot;: 1})" in answers[-2]
    assert "1,200 prompt tokens (1,000 reused) · 7 generated" in answers[-1]
    assert "30.0 tok/s · end: stop" in answers[-1]
    assert page.threads == {threading.current_thread(), live._thread}


def test_result_waits_and_iterates_nothing_twice(page: Page) -> None:
    going = threading.Event()
    reply = PretendReply(WHOLE, thinks=True)
    reply.before = lambda i: i == 3 and going.wait(30)
    show(reply)
    threading.Timer(0.05, going.set).start()
    assert reply.result().content == "The *answer* is <b>"
    assert list(reply) == []
    assert reply.result().content == "The *answer* is <b>"


def test_pieces_that_were_shown_can_still_be_iterated(page: Page) -> None:
    reply = PretendReply(WHOLE, thinks=True)
    first = next(reply)
    show(reply)
    assert [first, *reply] == WHOLE
    assert "Let me think" in page.html("thinking"), "what came before it was shown is shown, too"


def test_a_reply_that_another_thread_reads_is_left_alone(page: Page) -> None:
    reply = PretendReply(WHOLE)
    refused: list[str] = []

    def interfere(i: int) -> None:
        if i == 1:
            with pytest.raises(ValueError, match="another thread") as error:
                show(reply)
            refused.append(str(error.value))

    reply.before = interfere
    assert list(reply) == WHOLE
    assert refused
    assert not page.sent


def test_shown_twice_while_it_runs_it_is_drawn_by_one_thread(page: Page) -> None:
    going = threading.Event()
    reply = PretendReply(WHOLE)
    reply.before = lambda i: i == 2 and going.wait(30)
    live = show(reply)
    assert show(reply) is live
    going.set()
    live.wait()
    assert len(page.threads) == 2


def test_shown_after_its_end_it_shows_the_end_at_once(page: Page) -> None:
    reply = PretendReply(WHOLE, thinks=True)
    reply.result()
    show(reply)
    assert "end: stop" in page.html("answer")
    assert "<details><summary>Thought" in page.html("thinking")
    assert page.threads == {threading.current_thread()}
    page.outputs.clear()
    page.sent.clear()
    show(reply)
    assert len(page.sent) == 2
    assert "end: stop" in page.html("answer")


def test_the_stop_button_stops_it(page: Page) -> None:
    pressed = threading.Event()
    reply = PretendReply(WHOLE, thinks=True)
    reply.before = lambda i: i == 1 and pressed.wait(30)
    live = show(reply)
    live.thinking_button.click()
    assert reply.asked
    live.button.click()
    pressed.set()
    assert live.result().finish_reason == "cancelled"
    assert "end: cancelled" in page.html("answer")
    assert page.html("controls") == "", "the buttons are gone"


def test_without_the_optional_packages_it_works_plainly(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    live = show(PretendReply(WHOLE, thinks=True)).wait()
    assert live.button is None
    assert live.thinking_button is None
    assert '<div class="lily-plain">The *answer* is &lt;b&gt;</div>' in page.html("answer")


def test_close_stops_it_and_waits_for_the_thread(page: Page) -> None:
    stopped = threading.Event()
    reply = PretendReply(WHOLE)
    reply.before = lambda i: i == 2 and stopped.wait(30)
    cancel = reply.cancel
    reply.cancel = lambda: (cancel(), stopped.set())  # type: ignore[assignment, func-returns-value]
    live = show(reply)
    reply.close()
    assert live._done
    assert reply.finish_reason == "cancelled"


def test_an_interrupt_stops_what_is_waited_for(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = PretendReply(WHOLE)
    stopped = threading.Event()
    reply.before = lambda i: i == 2 and stopped.wait(30)
    live = show(reply)
    wait_for = live._changed.wait_for

    def interrupted(ready: Callable[[], Any]) -> None:
        monkeypatch.setattr(live._changed, "wait_for", wait_for)
        raise KeyboardInterrupt

    monkeypatch.setattr(live._changed, "wait_for", interrupted)
    cancel = reply.cancel
    reply.cancel = lambda: (cancel(), stopped.set())  # type: ignore[assignment, func-returns-value]
    with pytest.raises(KeyboardInterrupt):
        live.wait()
    assert live._done
    assert reply.finish_reason == "cancelled"


def test_an_error_is_shown_and_raised_to_who_waits(page: Page) -> None:
    reply = PretendReply(WHOLE)

    def fail(i: int) -> None:
        if i == 3:
            raise RuntimeError("no <luck>")

    reply.before = fail
    live = show(reply)
    for wait in (live.wait, live.result, reply.result):
        with pytest.raises(RuntimeError, match="no <luck>"):
            wait()
    assert '<div class="lily-error">RuntimeError: no &lt;luck&gt;' in page.html("answer")


def test_a_page_that_fails_does_not_hold_up_who_waits(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, update: bool = False, **__: Any) -> None:
        if update:
            raise RuntimeError("no page")

    monkeypatch.setattr(notebook, "_display", fail)
    with pytest.raises(RuntimeError, match="no page"):
        show(PretendReply(WHOLE)).wait()


def test_a_thought_that_is_all_there_is_stays_open(page: Page) -> None:
    show(PretendReply(WHOLE[:2], thinks=True)).wait()
    assert "<details open><summary>Thought" in page.html("thinking")


def test_a_prompt_that_takes_long_has_a_bar(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "BAR_AFTER_S", -1.0)
    reply = PretendReply(WHOLE)
    asked: list[tuple[int, int]] = []
    reply._generation._progress = lambda done, total: asked.append((done, total))

    def prompt(i: int) -> None:
        if i == 0:
            reply._generation._progress(512, 4096)

    reply.before = prompt
    show(reply).wait()
    assert any('<progress value="512" max="4096">' in html for _, html in page.sent)
    assert "<progress" not in page.html("answer")
    assert asked == [(512, 4096)], "who asked for the progress still hears of it"


def test_drawings_keep_their_distance(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "PERIOD_S", 3600.0)
    show(PretendReply([piece(content="x")] * 500)).wait()
    assert len(page.sent) < 8, "the beginning, one drawing and the end"
    assert "x" * 500 in page.html("answer")


def test_nothing_of_the_model_s_can_act_in_the_page() -> None:
    evil = (
        "<script>alert(1)</script> ![p](http://evil/?q) [a](javascript:alert(1)) <img src=x>\n\n"
        "<div onclick=x>\n\n```html\n<script>\n```\n\n[ok](https://example.org) `<i>`"
    )
    for chat in (False, True):
        state = State(chat=chat)
        state.reasoning = state.content = evil
        state.done = True
        html = state.thinking_html() + state.answer_html()
        for wrong in ("<script", "<img", "onclick=x>", 'href="javascript', "<i>"):
            assert wrong not in html
    assert 'href="https://example.org"' in html


def test_elsewhere_it_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notebook, "_kernel_shell", lambda: None)
    reply = PretendReply(WHOLE, thinks=True)
    live = show(reply)
    out = capsys.readouterr().out
    assert out.startswith('Let me think\n\nThe *answer* is <b>\nlook({"x": 1})\n1,200 prompt')
    assert live.result().content == "The *answer* is <b>"
    show(reply)
    assert capsys.readouterr().out.startswith("Let me think")


def test_ctrl_c_where_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "_kernel_shell", lambda: None)
    reply = PretendReply(WHOLE)

    def press(i: int) -> None:
        if i == 3:
            raise KeyboardInterrupt

    reply.before = press
    with pytest.raises(KeyboardInterrupt):
        show(reply)
    assert reply.finish_reason == "cancelled"
    assert reply.result().content == "The *answer*"


def test_a_handle_that_is_a_cell_s_last_line_is_not_shown_twice(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = SimpleNamespace(execution_count=1)
    monkeypatch.setattr(notebook, "_kernel_shell", lambda: shell)
    live = show(PretendReply(WHOLE)).wait()
    page.sent.clear()
    live._ipython_display_()
    assert not page.sent
    shell.execution_count = 2
    live._ipython_display_()
    assert len(page.sent) == 2
