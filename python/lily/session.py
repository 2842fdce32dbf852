"""A session: one sequence of tokens with its KV cache and recurrent state."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from lily import _core
from lily.asynchronous import in_thread
from lily.generation import Generation
from lily.reuse import latest
from lily.sampling import Sampling
from lily.session_file import load_session, save_session
from lily.stream import Stream
from lily.token_ids import Tokens, token_array
from lily.whole_numbers import check_whole

if TYPE_CHECKING:
    from lily.chat import Message
    from lily.chat_reply import Reply
    from lily.grammar import Constraint
    from lily.model import Model

Progress = Callable[[int, int], None]
Observer = Callable[[str, str, dict[str, NDArray[Any] | None], float | None], None]


class Logits:
    """Unnormalised scores of the next token: float32 [V].

    `numpy.asarray(logits)` gives the array. Rows from `n_tokens` on are padding that no text has:
    the methods here leave them out.
    """

    def __init__(self, values: NDArray[np.float32], n_tokens: int) -> None:
        self._values = values
        self.n_tokens = n_tokens

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        return np.array(self._values, dtype=dtype, copy=bool(copy) or dtype is not None)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def argmax(self) -> int:
        """The id of the largest logit, the lowest of equals."""
        return int(self._values[: self.n_tokens].argmax())

    def log_softmax(self) -> NDArray[np.float32]:
        """Log probabilities, float32 [n_tokens]."""
        v = self._values[: self.n_tokens].astype(np.float64)
        v -= v.max()
        scores: NDArray[np.float32] = (v - np.log(np.exp(v).sum())).astype(np.float32)
        return scores

    def top(self, n: int = 10) -> list[tuple[int, float]]:
        """The `n` likeliest ids with their log probabilities, best first."""
        scores = self.log_softmax()
        best = np.argsort(-scores, kind="stable")[:n]
        return [(int(i), float(scores[i])) for i in best]

    def __repr__(self) -> str:
        return f"Logits([{len(self)}], argmax={self.argmax()})"


class Snapshot:
    """A session's state at one position, to be restored exactly and any number of times.

    Attributes:
        position: tokens consumed.
        bytes: memory of the copied recurrent state; the KV cache is shared, not copied.
    """

    def __init__(self, core: _core.Snapshot, model: Model) -> None:
        self._core = core
        self._model = model

    @property
    def position(self) -> int:
        return self._core.position

    @property
    def bytes(self) -> int:
        return self._core.nbytes

    @property
    def tokens(self) -> list[int]:
        """The consumed tokens."""
        return self._core.tokens

    @property
    def exact(self) -> bool:
        """Whether prefill alone made the state."""
        return self._core.exact

    def __repr__(self) -> str:
        return f"Snapshot(position={self.position}, {self.bytes / 1e6:.1f} MB)"


class Session:
    """One sequence of tokens and its state. Made by `Model.session`.

    One thread uses a session at a time: what another would change meanwhile is refused with
    ValueError; only `cancel` may come from it. Every call checks its arguments before it changes
    anything. After a stream, the last token it returned is `pending`:
    part of the text, but not consumed yet. The next call consumes it first.
    """

    def __init__(self, model: Model, core: _core.Session) -> None:
        self._model = model
        self._core: _core.Session | None = core
        self._kept: Snapshot | None = None
        self._turn: Callable[[], None] | None = None  # waits, while a notebook's thread draws here
        self.cancels = 0  # calls of cancel() so far
        self.streams = 0  # streams started so far; only the last may draw
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()

    def _live(self) -> _core.Session:
        if (wait := self._turn) is not None:
            wait()
        return self._open()

    def _open(self) -> _core.Session:
        if self._core is None:
            raise ValueError("the session is closed")
        return self._core

    @property
    def model(self) -> Model:
        """The model whose session it is."""
        return self._model

    @property
    def position(self) -> int:
        """Tokens consumed so far."""
        return self._live().position

    @property
    def context(self) -> int:
        """Most tokens that the session holds."""
        return self._live().context

    @property
    def tokens(self) -> list[int]:
        """The consumed tokens."""
        return self._live().tokens

    @property
    def pending(self) -> int | None:
        """The last token of a stream, not consumed yet."""
        return self._live().pending

    @property
    def exact(self) -> bool:
        """Whether prefill alone made the present state: then it is, bit for bit, that of a new
        session after the same tokens. Decode steps round otherwise."""
        return self._live().exact

    @property
    def device_s(self) -> float:
        """Seconds that the device has worked on this session's passes, on the device's clock."""
        return self._live().device_s

    @property
    def logits(self) -> Logits | None:
        """Logits after the last consumed token; None where a stream or a cancel left none."""
        values = self._live().logits()
        return None if values is None else Logits(values, self._model.n_tokens)

    def prefill(self, tokens: Tokens, *, progress: Progress | None = None) -> Logits:
        """Append `tokens` and return the logits after the last one.

        Ctrl-C, `cancel` or an exception from `progress` stop it between two chunks; the session
        then holds the chunks before, and has no logits.

        Args:
            tokens: ids in [0, V), at least one.
            progress: called with (tokens done, tokens in all) between chunks.

        Returns:
            float32 [V], unnormalised.

        Raises:
            ValueError: `tokens` is empty, or an id is out of range.
            ContextError: the session would outgrow `context`; it is unchanged.
            Cancelled: `cancel` was called.
        """
        self._live().prefill(token_array(tokens), progress)
        return cast(Logits, self.logits)

    def decode(self, token: int) -> Logits:
        """Append one token by a decode step and return the logits after it.

        Raises:
            ValueError: the id is out of range.
            ContextError: the session is full; it is unchanged.
        """
        self._live().decode(int(token_array([token])[0]))
        return cast(Logits, self.logits)

    def score(self, tokens: Tokens, *, progress: Progress | None = None) -> NDArray[np.float32]:
        """Append `tokens` and return the logits after each of them, float32 [T, V].

        Row t is what `prefill(tokens[: t + 1])` returns. Raises as `prefill` does.
        """
        return self._live().score(token_array(tokens), progress)

    def observe(self, tokens: Tokens, observer: Observer, *, prefill: bool = False) -> Logits:
        """Append `tokens` one dispatch at a time and show each to `observer`: for profiles, dumps
        and comparisons. The numbers are those of `decode` (one token) or, with `prefill`, of
        `prefill` (at most a chunk).

        `observer(stage, kernel, slots, seconds)` is called before each dispatch, with seconds None,
        and after it. `stage` is "layer.3/experts"; `slots` maps names to flat arrays that share the
        device's memory (float32, uint32, or uint16 holding bf16), None for packed weights and
        unbound slots. The arrays are valid during the call only, and writable.
        """
        self._live().observe(token_array(tokens), prefill, observer)
        return cast(Logits, self.logits)

    def stream(
        self,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        *,
        stop_ids: Sequence[int] | None = None,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
    ) -> Stream:
        """Draw tokens one after another, starting from the session's logits.

        Args:
            max_tokens: most tokens to draw; None goes on to the end of the context.
            sampling: how to draw; None takes the model's default.
            stop: strings that end the text; they are never part of it.
            stop_ids: ids that end the text; None takes the checkpoint's. () goes past them.
            constraint: what the text may look like, as `lily.grammar.compile_format` makes it.
            logprobs: tell how likely each token was, beside so many of the likeliest (0…20).

        Returns:
            An iterator of `Piece`. Leaving its loop early stops it.

        Raises:
            ValueError: an option is out of range, or the session has no logits yet.
        """
        return Stream(
            self,
            max_tokens,
            sampling or self._model.sampling,
            stop,
            stop_ids,
            constraint=constraint,
            logprobs=logprobs,
        )

    def generate(
        self, prompt: str | Sequence[int] | Sequence[Message], **options: Any
    ) -> Generation:
        """As `Model.generate`, in this session: what it holds of the prompt is not computed again.

        The session goes on from its whole state if the prompt starts with it, otherwise from the
        latest snapshot inside the common part, its own or one that the model keeps, or starts over.
        """
        return self._model.generate(prompt, session=self, **options)

    def chat(self, messages: Sequence[Message], **options: Any) -> Reply:
        """As `Model.chat`, in this session."""
        return self._model.chat(messages, session=self, **options)

    async def aprefill(self, tokens: Tokens, *, progress: Progress | None = None) -> Logits:
        """As `prefill`, for event loops; cancelling the task stops it between two chunks."""
        return await in_thread(lambda: self.prefill(tokens, progress=progress), self.cancel)

    async def adecode(self, token: int) -> Logits:
        """As `decode`, for event loops."""
        return await in_thread(lambda: self.decode(token))

    async def ascore(
        self, tokens: Tokens, *, progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """As `score`, for event loops; cancelling the task stops it between two chunks."""
        return await in_thread(lambda: self.score(tokens, progress=progress), self.cancel)

    def cancel(self) -> None:
        """End a running prefill (within a chunk), stream (within a token) or generation. From any
        thread."""
        self.cancels += 1
        self._open().cancel()

    def reset(self) -> None:
        """Forget everything: as new."""
        self._live().reset()

    def snapshot(self) -> Snapshot:
        """Keep the present state. Ends a running stream."""
        taken = Snapshot(self._live().snapshot(), self._model)
        self._snapshots.add(taken)
        return taken

    def restore(self, snapshot: Snapshot) -> None:
        """Go to a snapshot of this model, taken from any of its sessions.

        Raises:
            ValueError: the snapshot is another model's.
            ContextError: it is longer than this session's context.
        """
        self._live().restore(snapshot._core)
        self._snapshots.add(snapshot)

    def _restore_stored(self, core: _core.Snapshot) -> None:
        """Go to a snapshot of the model's store and hold it, in place of the one held before."""
        snapshot = Snapshot(core, self._model)
        self.restore(snapshot)
        self._kept = snapshot

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole state to a file: tokens, KV rows in use, recurrent state, logits. Ends a
        running stream; a pending token goes along.

        The file takes the place of one that is there only once it is complete and on the disk.

        Raises:
            OSError: it cannot be written; a file that was there is as before.
        """
        save_session(self._live(), self._model, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: Model, *, context: int | None = None
    ) -> Session:
        """A session in the state that `save` wrote, of the same model, precision and KV type.

        On another device, or with another version of lily, it is no longer `exact`.

        Args:
            path: the file.
            model: whose session it was.
            context: most tokens it will hold; None takes what the saved one had.

        Raises:
            SessionFileError: the file is damaged, or not of this model; says what differs.
            ContextError: the session does not fit.
            OSError: the file cannot be read.
        """
        snapshot, saved_context = load_session(path, model)
        session = model.session(saved_context if context is None else context)
        session.restore(Snapshot(snapshot, model))
        return session

    def fork(self, context: int | None = None) -> Session:
        """A new session in the same state; the two then go their own ways.

        They share the KV cache until one of them overwrites what the other sees.
        """
        other = self._model.session(self.context if context is None else context)
        other.restore(self.snapshot())
        return other

    def rewind(self, position: int) -> int:
        """Go back to the latest snapshot of this sequence at or before `position`: one of this
        session that is still referred to, or one that the model keeps.

        Returns:
            The position reached, 0 if there is no such snapshot.

        Raises:
            ValueError: `position` is negative or ahead of the session.
        """
        check_whole("position", position, 0, self.position)
        tokens = self._live().token_bytes[: 4 * position]
        best = latest(self._snapshots, tokens)
        stored = self._model._store.find(tokens)
        if stored is not None and (best is None or stored.position > best.position):
            self._restore_stored(stored)
        elif best is not None:
            self.restore(best)
        else:
            self.reset()
        return self.position

    def discard_pending(self) -> None:
        """Drop the pending token. The session then has no logits until something is appended."""
        self._live().discard_pending()

    def close(self) -> None:
        """Free the session's memory. Calls after this raise ValueError; closing again is fine."""
        if self._core is not None:
            self._core = self._kept = None
            self._model._store.settle()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._core is None:
            return "Session(closed)"
        pending = "" if self.pending is None else f", pending={self.pending}"
        return f"Session(position={self.position}, context={self.context}{pending})"
