"""Replies and generations as live output of a notebook's cell.

A thread of its own draws the tokens, so that the cell returns at once: other cells can run, and
the Stop button is heard. Needs IPython, which every notebook has; with ipywidgets there are
buttons, and with markdown-it the finished answer is set as Markdown. Elsewhere `show` prints.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from lily.generation import Generation, Result
from lily.html import block, markdown_html
from lily.stream import Piece

if TYPE_CHECKING:
    from lily.chat_reply import Reply, ReplyPiece, ReplyResult

PERIOD_S = 0.08
"""Least time between two drawings of what is short; longer texts are drawn less often."""

PERIOD_CHARACTERS = 20_000
"""Characters of an output that may be sent each period."""

BAR_AFTER_S = 1.0
"""A prompt that takes longer has a progress bar."""

TAIL = 4_000
"""Characters of a running thought that are shown; a finished one is shown whole."""


def show(reply: Reply | Generation) -> Live:
    """Show a reply or a generation as it comes, as a cell does whose last line it is.

    In a notebook this returns at once and the text goes on to appear. Elsewhere it prints the text
    and returns at its end. What is shown a second time appears a second time; it is drawn once.

    Returns:
        A handle to wait for the reply, or to stop it. `reply.result()` waits, too.

    Raises:
        ValueError: another thread is reading the reply at this moment.
    """
    running = reply._run
    live = running.live if isinstance(running, _Followed) else Live(reply)
    live._appear()
    return live


class Live:
    """A reply that is being shown. Made by `show`.

    Attributes:
        reply: what is shown.
        button, thinking_button: the widgets that stop it, or its thinking; None without ipywidgets.
    """

    def __init__(self, reply: Reply | Generation) -> None:
        self.reply = reply
        self.button: Any = None
        self.thinking_button: Any = None
        self._state = State.of(reply)
        self._cell: int | None = None  # that showed it last
        self._page: _Page | None = None
        self._ready: deque[Any] = deque()  # drawn, and not yet taken by an iteration
        self._changed = threading.Condition()
        self._done = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._driver: threading.Thread | None = None  # whose loop takes the pieces
        self._source: Iterator[Any] = reply._run
        reply._check_at_rest()
        reply._run = _Followed(self)
        self._report_prompt()

    def wait(self) -> Live:
        """Return when the reply has ended; an interrupt of the kernel stops it.

        Raises:
            Exception: what went wrong in the reply.
        """
        self._wait_until(lambda: self._done)
        if self._error is not None:
            raise self._error
        return self

    def result(self) -> ReplyResult | Result:
        """The finished reply; waits for it."""
        self.wait()
        return self.reply.result()

    def stop(self) -> None:
        """End the reply here: its result says "cancelled"."""
        self.reply.cancel()

    def stop_thinking(self) -> None:
        """End the thinking, if there is any, and go on with the answer."""
        if not isinstance(self.reply, Generation):
            self.reply.stop_thinking()

    def _ipython_display_(self) -> None:
        """Shows it, unless this is the cell in which `show` has just done so."""
        if _cell(_kernel_shell()) != self._cell:
            self._appear()

    def __repr__(self) -> str:
        return f"Live({'done' if self._done else 'running'}: {self.reply!r})"

    # Showing

    def _appear(self) -> None:
        shell = _kernel_shell()
        self._cell = _cell(shell)
        if shell is None:
            self._print()
            return
        if self._page is None:
            self._page = _Page(self._state)
            if self.reply.finish_reason is None:
                self._make_buttons()
        self._page.show()
        if self._thread is None and not self._done:
            if self.reply.finish_reason is not None:
                self._run()
                return
            _running.add(self)
            self.reply.session._turn = self._give_turn
            self._thread = threading.Thread(target=self._run, name="lily-live", daemon=True)
            self._thread.start()

    def _print(self) -> None:
        from lily.terminal import Output

        output = Output()
        state = self._state
        output.write(state.reasoning, dim=True)
        output.write(state.content)
        if not self._done:
            self._driver = threading.current_thread()
            try:
                for piece in self._source:
                    thought, text = _texts(piece)
                    if text and not state.content and state.reasoning:
                        output.write("\n\n")
                    self._take(piece)
                    output.write(thought, dim=True)
                    output.write(text)
            finally:
                self._finish()
        output.end()
        if state.calls or state.statistics:
            print("\n".join([*(call.line() for call in state.calls), state.statistics]))

    def _make_buttons(self) -> None:
        if importlib.util.find_spec("ipywidgets") is None:
            return
        import ipywidgets

        def button(text: str, tip: str, click: Callable[[], None]) -> Any:
            made = ipywidgets.Button(description=text, tooltip=tip)
            made.on_click(lambda _: click())
            return made

        self.button = button("Stop", "End the reply here", self.stop)
        buttons = [self.button]
        if self._state.thinks:
            self.thinking_button = button("Answer now", "End the thinking", self.stop_thinking)
            buttons.append(self.thinking_button)
        assert self._page is not None
        self._page.controls = ipywidgets.HBox(buttons)

    # The thread

    def _run(self) -> None:
        self._driver = threading.current_thread()
        try:
            for piece in self._source:
                self._take(piece)
                self._draw()
        except Exception as error:
            self._error = error
            self._state.error = f"{type(error).__name__}: {error}"
            self._source.close()  # type: ignore[attr-defined]
        finally:
            _running.discard(self)
            self._finish()

    def _take(self, piece: Piece | ReplyPiece) -> None:
        was_thinking = self._state.thinking
        self._state.add(piece)
        if was_thinking and not self._state.thinking and self.thinking_button is not None:
            self.thinking_button.layout.display = "none"
        with self._changed:
            self._ready.append(piece)
            self._changed.notify_all()

    def _draw(self) -> None:
        if self._page is not None:
            self._page.draw()

    def _finish(self) -> None:
        """Draw the end, and only then let those go on who wait for it."""
        try:
            if self._error is None:
                self._state.end(self.reply.result())
            if self._page is not None:
                self._page.end()
        except Exception as error:
            self._error = self._error or error
        finally:
            self.reply.session._turn = None
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _report_prompt(self) -> None:
        """Have the progress of the prompt told here, beside whoever asked for it."""
        reply = self.reply
        generation = reply if isinstance(reply, Generation) else reply._generation
        asked = generation._progress

        def report(done: int, total: int) -> None:
            if asked is not None:
                asked(done, total)
            self._state.prompt = (done, total)
            self._draw()

        generation._progress = report

    # Those who iterate the reply elsewhere

    def _wait_until(self, ready: Callable[[], Any]) -> None:
        try:
            with self._changed:
                self._changed.wait_for(ready)
        except KeyboardInterrupt:
            self.stop()
            with self._changed:  # soon: within a token, or a chunk of the prompt
                self._changed.wait_for(lambda: self._done)
            raise

    def _give_turn(self) -> None:
        """Have other threads wait that would use the session: it is one thread's at a time."""
        if threading.current_thread() not in (self._thread, self._driver):
            self._wait_until(lambda: self._done)

    def _next(self) -> Any:
        if threading.current_thread() is self._driver and not self._done:
            raise StopIteration  # all pieces have come; those waiting here are for others
        self._wait_until(lambda: self._ready or self._done)
        with self._changed:
            if self._ready:
                return self._ready.popleft()
        if self._error is not None:
            raise self._error
        raise StopIteration


class _Followed(Iterator[Any]):
    """Stands in for the iterator of a reply that is shown: hands on what the thread has drawn."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def __next__(self) -> Any:
        return self.live._next()

    def close(self) -> None:
        if not self.live._done:
            self.live.stop()
            self.live._wait_until(lambda: self.live._done)


_running: weakref.WeakSet[Live] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """No thread may be inside the core when the interpreter goes."""
    running = list(_running)
    for live in running:
        live.stop()
    for live in running:
        if live._thread is not None:
            live._thread.join(timeout=10)


def _kernel_shell() -> Any:
    """IPython's shell, if it is that of a notebook's kernel."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell if hasattr(shell, "kernel") else None


def _cell(shell: Any) -> int:
    """Number of the cell that runs."""
    return getattr(shell, "execution_count", 0)


# What is shown


class _Call:
    def __init__(self, name: str) -> None:
        self.name = name
        self.arguments = ""

    def line(self) -> str:
        return f"{self.name}({self.arguments})"


def _texts(piece: Piece | ReplyPiece) -> tuple[str, str]:
    """Thinking and text of a piece."""
    if isinstance(piece, Piece):
        return "", piece.text
    return piece.reasoning, piece.content


class State:
    """What is known of a reply so far."""

    def __init__(self, *, thinks: bool = False, chat: bool = False) -> None:
        self.reasoning = self.content = self.statistics = self.error = ""
        self.calls: list[_Call] = []
        self.prompt = (0, 0)
        self.thinks = self.thinking = thinks
        self.chat = chat
        self.done = False
        self.thought_s, self.thought_tokens = 0.0, 0
        self._n_tokens = 0
        self._started = time.monotonic()
        self._first = self._last = 0.0

    @classmethod
    def of(cls, reply: Reply | Generation) -> State:
        """Of a reply, which may have begun."""
        if isinstance(reply, Generation):
            state = cls()
            state.content = "".join(reply._pieces)
            return state
        parser = reply._parser
        state = cls(thinks=parser.in_thinking, chat=True)
        state.reasoning, state.content = parser.reasoning, parser.content
        return state

    @classmethod
    def at_end(cls, result: ReplyResult | Result) -> State:
        state = cls(chat=not isinstance(result, Result))
        state.end(result)
        return state

    def add(self, piece: Piece | ReplyPiece) -> None:
        thought, text = _texts(piece)
        call = getattr(piece, "call", None)
        self._last = time.monotonic()
        self._first = self._first or self._last
        self._n_tokens += piece.token is not None
        self.reasoning += thought
        self.content += text
        if thought:
            self.thinking = True
        elif self.thinking and (text or call is not None):
            self.thinking = False
            self.thought_s = self._last - self._first
        if call is not None:
            while len(self.calls) <= call.index:
                self.calls.append(_Call(call.name))
            self.calls[call.index].arguments += call.arguments

    def end(self, result: ReplyResult | Result) -> None:
        """Show what the finished reply says of itself."""
        self.done, self.thinking = True, False
        self.statistics = statistics(result)
        if isinstance(result, Result):
            self.content = result.text
            return
        self.content, self.reasoning = result.content, result.reasoning
        self.thought_tokens = result.usage.reasoning
        if result.finish_reason == "tool_calls" or not self.calls:
            self.calls = []
            for call in result.tool_calls:
                self.calls.append(_Call(call.name))
                self.calls[-1].arguments = call.arguments_json

    def bar(self) -> tuple[int, int] | None:
        """Tokens done and in all of a prompt that takes long."""
        done, total = self.prompt
        slow = time.monotonic() - self._started > BAR_AFTER_S
        return self.prompt if slow and 0 < done < total and not self._first else None

    def speed(self) -> str:
        seconds = self._last - self._first
        if self._n_tokens < 2 or seconds <= 0:
            return ""
        return f"{self._n_tokens} tokens · {(self._n_tokens - 1) / seconds:.1f} tok/s"

    # As HTML: all text of the model is escaped

    def thinking_html(self) -> str:
        if not self.reasoning:
            return ""
        if self.thinking:
            tail = self.reasoning[-TAIL:]
            text = escape("…" + tail if len(tail) < len(self.reasoning) else tail)
            body = f'<div class="lily-tail"><div class="lily-plain">{text}</div></div>'
            return block(f"<details open><summary>Thinking…</summary>{body}</details>")
        took = f" for {self.thought_s:.1f} s" if self.thought_s else ""
        if self.thought_tokens:
            took += f", {self.thought_tokens:,} tokens"
        is_all = self.done and not self.content and not self.calls
        body = f'<div class="lily-plain">{escape(self.reasoning.strip())}</div>'
        return block(f"<details{' open' * is_all}><summary>Thought{took}</summary>{body}</details>")

    def answer_html(self) -> str:
        parts = []
        if (bar := self.bar()) is not None:
            done, total = bar
            parts.append(
                f'<div class="lily-note"><progress value="{done}" max="{total}"></progress>'
                f" prompt: {done:,} of {total:,} tokens</div>"
            )
        if self.content:
            text = markdown_html(self.content) if self.done and self.chat else None
            parts.append(text or f'<div class="lily-plain">{escape(self.content)}</div>')
        parts += [
            f'<div class="lily-call"><b>{escape(call.name)}</b>({escape(call.arguments)})</div>'
            for call in self.calls
        ]
        if self.error:
            parts.append(f'<div class="lily-error">{escape(self.error)}</div>')
        if note := self.statistics or self.speed():
            parts.append(f'<div class="lily-note">{escape(note)}</div>')
        return block("".join(parts)) if parts else ""

    def answer_text(self) -> str:
        lines = [self.content, *(call.line() for call in self.calls), self.error, self.statistics]
        return "\n".join(line for line in lines if line)


def statistics(result: ReplyResult | Result) -> str:
    """Counts, speed and end, in one line."""
    usage, timings = result.usage, result.timings
    reused = f" ({usage.reused:,} reused)" if usage.reused else ""
    parts = [f"{usage.prompt:,} prompt tokens{reused}", f"{usage.generated:,} generated"]
    if timings.first_token_s:
        parts.append(f"first after {timings.first_token_s:.2f} s")
    if timings.decode_tok_s:
        parts.append(f"{timings.decode_tok_s:.1f} tok/s")
    if getattr(result, "thinking_end", None) in ("budget", "asked"):
        parts.append("thinking cut short")
    end: str = result.finish_reason
    parts.append(f"end: {end}" + (f" at {result.stop!r}" if result.stop is not None else ""))
    return " · ".join(parts)


def result_html(result: ReplyResult | Result) -> str:
    """A finished reply."""
    state = State.at_end(result)
    return state.thinking_html() + state.answer_html()


class _Page:
    """The outputs of a cell: the thinking, the answer, the buttons. Each is sent when it changed.

    They are apart so that a reader may open a thought while the answer still comes.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._id = f"lily-{uuid.uuid4().hex}"
        self._sent: dict[str, dict[str, str]] = {}
        self._next = 0.0
        self.controls: Any = None

    def show(self) -> None:
        """A new copy; later drawings reach all of them."""
        if self.controls is not None:  # above, where they stay while the text grows
            _display(self.controls, display_id=f"{self._id}-controls")
        for name, bundle in self._bundles().items():
            self._send(name, bundle, update=False)

    def draw(self) -> None:
        """What changed, unless the last time was a moment ago."""
        now = time.monotonic()
        if now < self._next:
            return
        size = 0
        for name, bundle in self._bundles().items():
            if bundle != self._sent[name]:
                self._send(name, bundle, update=True)
                size += len(bundle["text/html"])
        self._next = now + PERIOD_S * max(1.0, size / PERIOD_CHARACTERS)

    def end(self) -> None:
        self._next = 0.0
        self.draw()
        if self.controls is not None:
            nothing = {"text/html": "", "text/plain": ""}
            _display(nothing, raw=True, display_id=f"{self._id}-controls", update=True)
            for button in self.controls.children:
                button.close()
            self.controls.close()
            self.controls = None

    def _bundles(self) -> dict[str, dict[str, str]]:
        state = self._state
        answer = {"text/html": state.answer_html(), "text/plain": state.answer_text()}
        if not state.chat:
            return {"answer": answer}
        thinking = {"text/html": state.thinking_html(), "text/plain": state.reasoning}
        return {"thinking": thinking, "answer": answer}

    def _send(self, name: str, bundle: dict[str, str], *, update: bool) -> None:
        self._sent[name] = bundle
        _display(bundle, raw=True, display_id=f"{self._id}-{name}", update=update)


def _display(thing: Any, **options: Any) -> None:
    from IPython.display import display

    # A front end that has gone must not end the reply.
    with contextlib.suppress(OSError):
        display(thing, **options)  # type: ignore[no-untyped-call]
