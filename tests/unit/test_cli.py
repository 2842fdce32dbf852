"""The command line, with a model that only pretends."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from lily import bench, cli
from lily.chat_reply import ReplyPiece, ReplyResult
from lily.errors import ContextError, DeviceError, Error
from lily.generation import Result, Timings, Usage
from lily.memory import MemoryPlan
from lily.reply import ReplyParser
from lily.sampling import Sampling
from lily.stream import Piece
from lily.terminal import Bar

PIECES = ["Hel", "lo", "", " wörld"]


class Pretend:
    """A model, its session and a generation in one; remembers how it was called."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.pieces: list[str] = list(PIECES)
        self.on_load: Callable[[], None] = lambda: None
        self.on_piece: Callable[[int], None] = lambda _: None
        self.error: Exception | None = None
        self.opened_thought = False
        self.cancelled = False
        self.resets = 0
        self.info = SimpleNamespace(
            source="pretend", device="cpu", folder=Path("/pretend"), load_s=1.0, precision="fast"
        )

    def load(self, source: str, **options: Any) -> Pretend:
        self.loaded = {"source": source, **options}
        self.on_load()
        return self

    def session(self, context: int | None = None) -> Pretend:
        return self

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return [len(text), int(special)]

    def chat(self, messages: Any, **options: Any) -> PretendReply:
        return PretendReply(self.generate(messages, **options))

    def generate(self, prompt: Any, **options: Any) -> Pretend:
        self.asked.append((prompt, options))
        if self.error:
            raise self.error
        self.cancelled = False
        return self

    def __iter__(self) -> Iterator[Piece]:
        for i, text in enumerate(self.pieces):
            self.on_piece(i)
            if self.cancelled:
                return
            yield Piece(text, i)

    def result(self) -> Result:
        return Result(
            text="".join(self.pieces),
            tokens=(1, 2, 3),
            finish_reason="cancelled" if self.cancelled else "length",
            stop=None,
            seed=7,
            usage=Usage(5, 2, 3),
            timings=Timings(0.25, 0.2, 15.0, 0.1, 20.0),
        )

    def cancel(self) -> None:
        self.cancelled = True

    def reset(self) -> None:
        self.resets += 1

    @property
    def context(self) -> int:
        return 100

    def close(self) -> None: ...

    def __enter__(self) -> Pretend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...


class PretendReply:
    """What a model says, with the thinking told apart."""

    def __init__(self, model: Pretend) -> None:
        self._model = model
        self._parser = ReplyParser(thinking=model.opened_thought)
        self.cancel = model.cancel

    def __iter__(self) -> Iterator[ReplyPiece]:
        for piece in self._model:
            for part in self._parser.push(piece.text):
                yield ReplyPiece(part.reasoning, part.content)
        for part in self._parser.finish():
            yield ReplyPiece(part.reasoning, part.content)

    def result(self) -> ReplyResult:
        done = self._model.result()
        return ReplyResult(
            content=self._parser.content,
            reasoning=self._parser.reasoning,
            tool_calls=(),
            finish_reason=done.finish_reason,
            thinking_end=None,
            stop=None,
            seed=7,
            tokens=done.tokens,
            sampling=Sampling(),
            usage=done.usage,
            timings=done.timings,
        )

    def close(self) -> None: ...

    def __enter__(self) -> PretendReply:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    pretend = Pretend()
    monkeypatch.setattr("lily.model.Model", pretend)
    # A shell that runs the tests in the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield pretend
    signal.signal(signal.SIGINT, before)


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


Captured = pytest.CaptureFixture[str]


def fails(capsys: Captured, *argv: str, code: int) -> str:
    """Run a command that must fail; its message, which must be one line and perhaps a hint."""
    assert cli.main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    first, *more = err.splitlines()
    assert first.startswith("lily: error: ")
    assert len(more) <= 1
    assert all(line.startswith("hint: ") for line in more)
    return err.removeprefix("lily: error: ").removesuffix("\n")


# Where things go


def test_text_on_stdout_and_numbers_on_stderr(model: Pretend, capsys: Captured) -> None:
    assert cli.main(["generate", "folder", "Hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello wörld\n"
    assert err == (
        "5 prompt tokens (2 reused), 3 generated, end: length\n"
        "first token 0.25 s, prefill 15.0 tok/s, decode 20.0 tok/s, seed 7\n"
    )
    assert model.loaded["source"] == "folder"
    assert model.loaded["progress"] is None


def test_quiet_leaves_the_numbers_out(model: Pretend, capsys: Captured) -> None:
    assert cli.main(["generate", "folder", "Hi", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_each_piece_is_flushed(model: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flushes(io.StringIO):
        seen: list[str] = []  # noqa: RUF012

        def flush(self) -> None:
            self.seen.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Flushes())
    assert cli.main(["generate", "folder", "Hi"]) == 0
    assert Flushes.seen[:3] == ["Hel", "Hello", "Hello wörld"]


def test_no_progress_without_a_terminal(model: Pretend, capsys: Captured) -> None:
    bar = Bar()
    bar.DELAY_S = -1
    bar("load", 1, 2)
    bar.status("at it")
    bar.clear()
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Bar, "DELAY_S", -1)
    bar = Bar()
    bar("load", 1_000_000_000, 4_000_000_000)
    shown = stderr.getvalue()
    assert "load     [######..................]  25%  1.00 of 4.00 GB" in shown
    bar.clear()
    assert stderr.getvalue().endswith("\r\033[K")


def test_a_stdout_that_lacks_characters(model: Pretend) -> None:
    script = """
        import sys
        from lily import cli
        from test_cli import Pretend
        import lily.model
        lily.model.Model = Pretend()
        sys.exit(cli.main(["generate", "folder", "Hi", "--quiet"]))
    """
    done = run_python(script, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello w?rld\n", b"")


def run_python(script: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": path} | variables,
        capture_output=True,
        timeout=60,
    )


def test_control_characters_are_shown_on_a_terminal() -> None:
    """A model may draw an escape sequence; it must not reach the terminal as one."""
    script = """
        import sys
        from lily.terminal import Output
        output = Output()
        output.write("a\\x1b[31mb\\rc\\td")
        output.end()
    """
    leader, follower = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], stdout=follower, timeout=60, check=True
        )
        assert os.read(leader, 1000).decode() == "a␛[31mb␍c\td\r\n"
    finally:
        os.close(leader)
        os.close(follower)


# Arguments


def test_options_reach_the_model(model: Pretend, capsys: Captured) -> None:
    command = """generate org/name Hi --max-tokens 9 --temperature 0.5 --top-k 3 --top-p 0.9
        --min-p 0.1 --seed 11 --repetition-penalty 1.1 --presence-penalty -0.5 --stop END
        --stop X --device cpu --precision float32 --kv int8 --context 77 --threads 2 --revision main
        --offline --memory-limit 1.5GiB --reuse-memory 0"""
    assert cli.main(command.split()) == 0
    assert model.loaded == {
        "source": "org/name",
        "device": "cpu",
        "precision": "float32",
        "kv": "int8",
        "context": 77,
        "threads": 2,
        "memory_limit": 3 << 29,
        "reuse_memory": 0,
        "revision": "main",
        "offline": True,
        "progress": None,
    }
    prompt, options = model.asked[0]
    assert prompt == "Hi"
    assert options == {
        "max_tokens": 9,
        "stop": ["END", "X"],
        "thinking": None,
        "progress": None,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 11,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
    }


@pytest.mark.parametrize(
    "line",
    [
        "generate folder Hi --max-tokens 9 --quiet",
        "generate folder --max-tokens 9 Hi --quiet",
        "generate folder --max-tokens 9 --quiet Hi",
        "generate --max-tokens 9 folder --quiet Hi",
        "generate --quiet --max-tokens 9 -- folder Hi",
    ],
)
def test_a_prompt_may_stand_anywhere(line: str, model: Pretend, capsys: Captured) -> None:
    assert cli.main(line.split()) == 0
    assert model.loaded["source"] == "folder"
    ((prompt, options),) = model.asked
    assert (prompt, options["max_tokens"]) == ("Hi", 9)


def test_options_not_given_are_left_to_the_checkpoint(model: Pretend, capsys: Captured) -> None:
    assert cli.main(["generate", "folder", "Hi"]) == 0
    assert "temperature" not in model.asked[0][1]


def test_chat_wraps_the_prompt(model: Pretend, capsys: Captured) -> None:
    argv = ["generate", "folder", "Hi", "--chat", "--system", "Be brief", "--no-thinking"]
    assert cli.main(argv) == 0
    prompt, options = model.asked[0]
    assert prompt == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]
    assert options["thinking"] is False


def test_special_spellings_are_tokens_on_request(model: Pretend, capsys: Captured) -> None:
    assert cli.main(["generate", "folder", "<|im_end|>", "--special"]) == 0
    assert model.asked[0][0] == [10, 1]


def test_prompt_from_a_file(model: Pretend, capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("  Grüße\n", encoding="utf-8")
    assert cli.main(["generate", "folder", "--file", str(tmp_path / "p.txt")]) == 0
    assert model.asked[0][0] == "  Grüße\n"


def test_prompt_from_standard_input(
    model: Pretend, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße".encode())))
    assert cli.main(["generate", "folder", "--file", "-"]) == 0
    assert model.asked[0][0] == "Grüße"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: COMMAND"),
        (["frobnicate", "folder"], "invalid choice: 'frobnicate'"),
        (["generate"], "required: MODEL"),
        (["generate", "folder"], "a PROMPT or --file"),
        (["generate", "folder", "Hi", "--file", "x"], "a PROMPT or --file"),
        (["generate", "folder", ""], "the prompt is empty"),
        (["generate", "folder", "--quiet", "Hi", "Ho"], "unrecognized arguments: Ho"),
        (["generate", "folder", "--frob", "Hi"], "unrecognized arguments: --frob"),
        (["generate", "folder", "Hi", "--frob"], "unrecognized arguments: --frob"),
        (["generate", "folder", "Hi", "--temp", "1"], "unrecognized arguments: --temp"),
        (["generate", "folder", "Hi", "--max-tokens", "0"], "--max-tokens: '0'"),
        (["generate", "folder", "Hi", "--context", "9" * 10], "--context: '9999999999'"),
        (["generate", "folder", "Hi", "--temperature", "-1"], "temperature: -1.0"),
        (["generate", "folder", "Hi", "--temperature", "nan"], "temperature: nan"),
        (["generate", "folder", "Hi", "--top-p", "1.1"], "top_p: 1.1"),
        (["generate", "folder", "Hi", "--top-k", "x"], "--top-k: invalid int value: 'x'"),
        (["generate", "folder", "Hi", "--seed", "-1"], "seed: -1"),
        (["generate", "folder", "Hi", "--stop", ""], "stop[0]"),
        (["generate", "folder", "Hi", "--system", "x"], "--system needs --chat"),
        (["generate", "folder", "Hi", "--thinking"], "--thinking needs --chat"),
        (["generate", "folder", "Hi", "--chat", "--special"], "--special does not go"),
        (["generate", "folder", "Hi", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["generate", "folder", "Hi", "--memory-limit", "many"], "'many', expected a size"),
        (["generate", "folder", "Hi\udcff"], "argument 3: 'Hi\\udcff', expected valid Unicode"),
        (["bench", "folder", "--peers", "vllm"], "--peers: 'vllm'"),
        (["bench", "folder", "--peer-model", "mlx-lm"], "expected PEER=PATH"),
        (["bench", "folder", "--contexts", "1,,2"], "--contexts: ''"),
    ],
)
def test_wrong_usage(argv: list[str], said: str, model: Pretend, capsys: Captured) -> None:
    assert said in fails(capsys, *argv, code=2)
    assert not model.loaded


def test_an_empty_file_and_one_that_is_not_text(
    model: Pretend, capsys: Captured, tmp_path: Path
) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.touch()
    binary.write_bytes(b"ab\xff")
    assert fails(capsys, "generate", "m", "--file", str(empty), code=2) == "the prompt is empty"
    said = fails(capsys, "generate", "m", "--file", str(binary), code=2)
    assert said == f"{binary}: byte 2: expected UTF-8 text"
    absent = str(tmp_path / "absent")
    said = fails(capsys, "generate", "m", "--file", absent, code=1)
    assert said == f"{absent}: No such file or directory"


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["generate", "--help"]])
def test_help_and_version(argv: list[str], capsys: Captured) -> None:
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert "lily" in out
    assert err == ""


# Errors


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Error("weights: torn", hint="mend them"), "weights: torn\nhint: mend them"),
        (ContextError("prompt: 9 tokens, expected at most 3"), None),
        (ValueError("prompt: no good"), None),
        (OSError(28, "No space left on device", "/x"), "/x: No space left on device"),
        (MemoryError(), "out of memory"),
        (Error("a\x1b[31m"), "a\\x1b[31m"),
        (Error(""), "failed"),
    ],
)
def test_errors_are_one_line(
    error: Exception, said: str | None, model: Pretend, capsys: Captured
) -> None:
    model.error = error
    assert fails(capsys, "generate", "m", "Hi", code=1) == (said or str(error))


def test_a_bug_is_one_line_too(
    model: Pretend, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.error = TypeError("two\nlines")
    said = fails(capsys, "generate", "m", "Hi", code=1)
    assert said.startswith("unexpected TypeError: two lines\nhint: this is a bug")
    monkeypatch.setenv("LILY_TRACEBACK", "1")
    with pytest.raises(TypeError):
        cli.main(["generate", "m", "Hi"])


def test_ctrl_c_is_quiet(model: Pretend, capsys: Captured) -> None:
    def press(i: int) -> None:
        if i == 2:
            signal.raise_signal(signal.SIGINT)

    model.on_piece = press
    assert cli.main(["generate", "m", "Hi"]) == 130
    out, err = capsys.readouterr()
    assert out == "Hello"
    assert err == ""


def test_ctrl_c_while_loading(model: Pretend, capsys: Captured) -> None:
    model.on_load = lambda: signal.raise_signal(signal.SIGINT)
    assert cli.main(["generate", "m", "Hi"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    script = """
        import os, sys
        from lily import cli
        from test_cli import Pretend
        import lily.model
        lily.model.Model = Pretend()
        lily.model.Model.pieces = ["x" * 1000] * 1000
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
        sys.exit(cli.main(["generate", "folder", "Hi"]))
    """
    done = run_python(script)
    assert (done.returncode, done.stderr) == (141, b"")


def test_closed_standard_streams() -> None:
    script = """
        import os, sys
        sys.stdin = sys.stdout = sys.stderr = None
        from lily import cli
        from test_cli import Pretend
        import lily.model
        lily.model.Model = Pretend()
        os._exit(cli.main(["generate", "folder", "Hi"]))
    """
    assert run_python(script).returncode == 0


# Chat


def test_chat_keeps_the_conversation(
    model: Pretend, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "one\n\n  two  \n/undo\nthree\n/reset\nfour\n/exit\nnever\n")
    assert cli.main(["chat", "m", "--system", "S"]) == 0
    said = [[m["content"] for m in prompt] for prompt, _ in model.asked]
    reply = "".join(PIECES)
    assert said == [
        ["S", "one"],
        ["S", "one", reply, "  two  "],
        ["S", "one", reply, "three"],
        ["S", "four"],
    ]
    assert model.resets == 1
    assert capsys.readouterr().out == f"{reply}\n" * 4


def test_chat_tells_unknown_commands_from_text(
    model: Pretend, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "/frob\n/undo\n/help\n/etc/passwd is a file\n")
    assert cli.main(["chat", "m"]) == 0
    assert [prompt[0]["content"] for prompt, _ in model.asked] == ["/etc/passwd is a file"]
    err = capsys.readouterr().err
    assert "[no command /frob; /help lists them]" in err
    assert "[nothing to take back]" in err


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(
    model: Pretend, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    presses = iter([2])

    def press(i: int) -> None:
        if i == 2 and next(presses, None):
            signal.raise_signal(signal.SIGINT)

    model.on_piece = press
    type_in(monkeypatch, "one\ntwo\n")
    before = signal.getsignal(signal.SIGINT)
    assert cli.main(["chat", "m"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    out, err = capsys.readouterr()
    assert out == "Hello\nHello wörld\n"
    assert "[stopped]" in err
    assert [m["content"] for m in model.asked[1][0]] == ["one", "Hello", "two"]


def test_a_question_stopped_before_its_answer_is_forgotten(
    model: Pretend, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    presses = iter([1])

    def press(i: int) -> None:
        if next(presses, None):
            signal.raise_signal(signal.SIGINT)

    model.on_piece = press
    type_in(monkeypatch, "one\ntwo\n")
    assert cli.main(["chat", "m"]) == 0
    assert [m["content"] for m in model.asked[1][0]] == ["two"]


def test_ctrl_c_twice_interrupts(
    model: Pretend, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(i: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    model.on_piece = press
    type_in(monkeypatch, "one\n")
    assert cli.main(["chat", "m"]) == 130


@pytest.mark.parametrize("error", [ContextError("prompt: too long"), DeviceError("cpu: gone")])
def test_chat_errors_end_a_script(
    error: Error, model: Pretend, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.error = error
    type_in(monkeypatch, "one\n")
    assert cli.main(["chat", "m"]) == 1
    assert capsys.readouterr().err == f"lily: error: {error}\n"


def test_chat_hands_thinking_back_apart(
    model: Pretend, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.opened_thought = True
    model.pieces = ["hm", "m\n</thi", "nk>\n\nYes", "."]
    type_in(monkeypatch, "one\ntwo\n")
    assert cli.main(["chat", "m"]) == 0
    assert capsys.readouterr().out == "hmm\n\nYes.\n" * 2
    assert model.asked[1][0][1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "hmm",
    }


def test_chat_on_a_terminal() -> None:
    script = """
        import sys
        from lily import cli
        from test_cli import Pretend
        import lily.model
        lily.model.Model = Pretend()
        lily.model.Model.opened_thought = True
        lily.model.Model.pieces = ["hm</think>", "Yes"]
        sys.exit(cli.main(["chat", "folder"]))
    """
    leader, follower = pty.openpty()
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        with (
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(script)],
                env=os.environ | {"PYTHONPATH": path, "TERM": "xterm"},
                stdin=follower,
                stdout=follower,
                stderr=follower,
            ) as process,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(process.kill)
            os.close(follower)  # so that reading ends if the process does
            read_until(leader, "> $")
            os.write(leader, "Grüße\n".encode())
            shown = read_until(leader, r"tok/s\](?s:.*)> $")
            assert "\033[2mhm\r\n\r\n\033[0mYes\r\n" in shown
            os.write(leader, b"\x04")
            assert process.wait(timeout=60) == 0
    finally:
        os.close(leader)


def test_generate_chat_on_a_terminal_tells_thinking_apart_and_sets_the_answer() -> None:
    pytest.importorskip("rich")
    script = """
        import sys
        from lily import cli
        from test_cli import Pretend
        import lily.model
        lily.model.Model = Pretend()
        lily.model.Model.opened_thought = True
        lily.model.Model.pieces = ["h**m**</think>", "**Y", "es**"]
        sys.exit(cli.main(["generate", "folder", "Hi", "--chat", "--quiet"]))
    """
    leader, follower = pty.openpty()
    try:
        here = str(Path(__file__).parent)
        path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=os.environ | {"PYTHONPATH": path, "TERM": "xterm"},
            stdout=follower,
            timeout=60,
            check=True,
        )
        shown = read_until(leader, "\033\\[0m\r\n$")
        assert shown.startswith("\033[2mh**m**\r\n\r\n\033[0m**Yes**")
        assert shown.endswith("\r\033[J\033[1mYes\033[0m\r\n")
    finally:
        os.close(leader)
        os.close(follower)


def read_until(terminal: int, pattern: str) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character
    seen = ""
    while not re.search(pattern, seen):
        assert select.select([terminal], [], [], 60)[0], seen
        seen += decoder.decode(os.read(terminal, 1000))
    return seen


# Plan


PLAN = MemoryPlan(
    weights=10**9,
    session=10**6,
    per_1000_tokens=10**7,
    scratch=10**6,
    available=2 * 10**9,
    largest_context=50_000,
    native_context=262_144,
    token_dispatches=252,
    chunk_dispatches=542,
)


def test_plan(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lily.memory.plan", lambda *_, **__: PLAN)
    assert cli.main(["plan", "m"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "total               1.33 GB with 32,768 tokens: fits"
    )
    assert cli.main(["plan", "m", "--context", "200000"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "total               3.00 GB with 200,000 tokens: more than the 2.00 GB available"
    )
    assert cli.main(["plan", "m", "--json", "--context", "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weights"] == 10**9
    assert found["total"] == 10**9 + 10**7 + 2 * 10**6
    assert found["default_context"] == 32_768


# Bench


class Clockwork:
    """An engine of known speed."""

    def __init__(self, name: str, n_tokens: int, decode_s: float, fails_at: int = 99) -> None:
        self.about = bench.About(name, "1", "m", "", n_tokens, 0.5)
        self.turns: list[tuple[tuple[int, ...], int]] = []
        self._decode_s = decode_s
        self._fails_at = fails_at

    def turn(self, tokens: Sequence[int], steps: int) -> bench.Turn:
        if len(self.turns) == self._fails_at:
            raise bench.PeerError("broke down")
        self.turns.append((tuple(tokens), steps))
        return bench.Turn(0.1, steps * self._decode_s, steps)

    def peak_bytes(self) -> int:
        return 3 * 10**9

    def close(self) -> None: ...


OPTIONS = bench.Options(contexts=(8, 4), prefill=6, decode=10, rounds=3, rest_s=0)


def test_bench_gives_all_engines_the_same_turns() -> None:
    one, two = Clockwork("lily", 50, 0.01), Clockwork("peer", 20, 0.02)
    said: list[str] = []
    report = bench.run([one, two], OPTIONS, status=said.append)
    assert one.turns == two.turns
    assert [(len(tokens), steps) for tokens, steps in one.turns] == [(4, 10), (6, 0), (8, 10)] * 4
    assert len({tokens for tokens, _ in one.turns}) == 12
    assert max(max(tokens) for tokens, _ in one.turns) < 20
    order = [line.split(": ")[1].split(",")[0] for line in said if "8 tokens" in line]
    assert order == ["lily", "peer", "lily", "peer", "peer", "lily", "lily", "peer"]

    rows = {(s.engine, s.measure, s.tokens): s.median for s in report.summary()}
    assert rows["lily", "decode", 8] == pytest.approx(100)
    assert rows["peer", "decode", 4] == pytest.approx(50)
    assert rows["lily", "prefill", 6] == pytest.approx(60)
    assert ("lily", "decode", 6) not in rows
    table = report.table()
    assert "50.0 (50.0–50.0)  2.00×" in table
    assert "3.00" in table

    found = json.loads(json.dumps(report.to_json()))
    assert len(found["rounds"]) == 2 * 3 * 5
    assert found["machine"]["logical_cores"] == os.cpu_count()
    assert found["engines"][1]["peak_bytes"] == 3 * 10**9


def test_bench_goes_on_without_a_peer_that_breaks() -> None:
    one, two = Clockwork("lily", 50, 0.01), Clockwork("peer", 50, 0.02, fails_at=4)
    report = bench.run([one, two], OPTIONS, absent={"other": "not installed"})
    assert len(one.turns) == 12
    assert report.absent == {"other": "not installed", "peer": "broke down"}
    assert "peer: not measured: broke down" in report.table()
    with pytest.raises(bench.PeerError):
        bench.run([Clockwork("lily", 50, 0.01, fails_at=0)], OPTIONS)


@pytest.mark.parametrize(
    "options", [{"rounds": 0}, {"decode": 0}, {"prefill": 0}, {"contexts": ()}, {"contexts": (0,)}]
)
def test_bench_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        bench.Options(**options)


def test_peers_that_cannot_be_started_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    find: dict[str, Any] = {"threads": 2, "cpu": True}
    assert bench.peers(["auto"], "m", {}, {}, **find) == ([], {})
    assert bench.peers([], "m", {}, {}, **find) == ([], {})
    assert bench.peers(["transformers"], "m", {}, {}, **find)[1] == {
        "transformers": "not installed"
    }
    found, absent = bench.peers(
        ["auto"], "m", {"mlx-lm": "x"}, {"mlx-lm": "py", "llama-cpp-python": "py"}, **find
    )
    assert found == [bench.Peer("mlx-lm", "x", "py", 2, True)]
    assert absent == {"llama-cpp-python": "needs a GGUF file: --peer-model llama-cpp-python=FILE"}


def test_a_peer_that_cannot_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(bench.PeerError, match="no-such-python: No such file"):
        bench.Worker(bench.Peer("mlx-lm", "m", str(tmp_path / "no-such-python")), 10)
    # A module of the peer's name that fails: an error is told, a crash is noticed.
    module = tmp_path / "llama_cpp.py"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$2"\n')
    python.chmod(0o755)
    for body, said in (
        ("print('noise'); raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("import os, sys; print('last words', file=sys.stderr); os._exit(3)", "status 3: last"),
    ):
        module.write_text(body + "\n")
        with pytest.raises(bench.PeerError, match=said):
            bench.Worker(bench.Peer("llama-cpp-python", "m", str(python)), 10)
