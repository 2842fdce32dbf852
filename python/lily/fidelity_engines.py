"""The engines of `lily fidelity`: lily in both precisions, and peers in float32 on the CPU.

mlx-lm takes the files as they are. transformers knows no packed weights: it gets the same weights
unpacked to float32 in the published layout.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lily import bench
from lily.perplexity import chunks
from lily.workers import About, Peer, PeerError, Process

if TYPE_CHECKING:
    from lily.checkpoint import Checkpoint
    from lily.loading import Precision
    from lily.model import Model

Rows = NDArray[np.float32]
Status = Callable[[str], None]

FAST, FLOAT32 = "lily fast", "lily float32"
PEERS = ("mlx-lm", "transformers")


class Engine(Protocol):
    """An engine that is loaded."""

    about: About

    def logits(self, tokens: NDArray[np.uint32], n_vocabulary: int) -> Iterator[Rows]:
        """The logits after each token of a window, from nothing, in pieces [T, V]."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Candidate:
    """An engine, and how to load it."""

    name: str
    load: Callable[[Status], Engine]


class LilyEngine:
    """A loaded `lily.Model`, in this process."""

    def __init__(self, name: str, model: Model, window: int) -> None:
        info = model.info
        commit = bench.commit_of_lily()
        from lily import __version__

        self._model = model
        self._session = model.session(context=window)
        self.about = About(
            name=name,
            version=__version__ + (f" ({commit})" if commit else ""),
            model=info.source,
            detail=f"{info.device}, {info.precision}",
            n_tokens=model.n_tokens,
            load_s=info.load_s,
        )

    def logits(self, tokens: NDArray[np.uint32], n_vocabulary: int) -> Iterator[Rows]:
        self._session.reset()
        for start, stop in chunks(0, len(tokens), n_vocabulary):
            yield self._session.score(tokens[start:stop])

    def close(self) -> None:
        self._model.close()


class PeerEngine:
    """A peer in its own process, which hands logits over in a file.

    Args:
        peer: what to start.
        window: most tokens of a window.
        on_close: called when the process has ended, also if it does not start.
    """

    def __init__(
        self, peer: Peer, window: int, on_close: Callable[[], None] = lambda: None
    ) -> None:
        with ExitStack() as stack:
            stack.callback(on_close)
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lily-")))
            self._process = Process(peer, {"work": "scores", "context": window})
            stack.callback(self._process.close)
            self.about = self._process.about
            self._open = stack.pop_all()

    def logits(self, tokens: NDArray[np.uint32], n_vocabulary: int) -> Iterator[Rows]:
        file = self._folder / "logits"
        self._process.ask({"score": tokens.tolist()})
        for start, stop in chunks(0, len(tokens), n_vocabulary):
            reply = self._process.ask({"rows": [start, stop], "into": str(file)})
            rows = np.fromfile(file, np.float32)
            if rows.size != math.prod(reply["shape"]) or len(reply["shape"]) != 2:
                raise PeerError(f"{rows.size} logits, expected {reply['shape']}")
            yield rows.reshape(reply["shape"])

    def close(self) -> None:
        self._open.close()


def lily_candidate(name: str, window: int, source: str, **options: Any) -> Candidate:
    """lily in the precision that its name says; `options` are those of `Model.load`."""
    precision: Precision = "fast" if name == FAST else "float32"

    def load(status: Status) -> Engine:
        from lily.model import Model

        model = Model.load(source, precision=precision, **options)
        try:
            return LilyEngine(name, model, window)
        except BaseException:
            model.close()
            raise

    return Candidate(name, load)


def peer_candidate(
    peer: Peer,
    window: int,
    checkpoint: Checkpoint,
    *,
    own: bool,
    progress: Callable[[str, int, int], None] | None = None,
) -> Candidate:
    """A peer on the weights of `checkpoint`; `own` says that it loads files of its own choice.

    Unpacked weights are written to the temporary folder, and go when the peer is closed.
    """

    def load(status: Status) -> Engine:
        if own or peer.name != "transformers" or checkpoint.form == "published":
            return PeerEngine(peer, window)
        from lily.convert import unpack

        parent = tempfile.TemporaryDirectory(prefix="lily-unpacked-")
        try:
            status(f"{peer.name}: unpacking the weights to float32")
            copy = Path(parent.name, "model")
            unpack(checkpoint.folder, copy, dtype="float32", progress=progress)
        except BaseException:
            parent.cleanup()
            raise
        status(f"{peer.name}: loading")
        return PeerEngine(replace(peer, model=str(copy)), window, parent.cleanup)

    return Candidate(peer.name, load)
