"""Which part of a prompt a session need not compute again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from lily.errors import DeviceError
from lily.token_ids import token_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lily.session import Session, Snapshot

Reuse = Literal["any", "exact", "off"]
"""Where a generation may go on from: any state that fits; only states that prefill alone made, so
that the result is that of a cold start, token for token; none."""


def check_reuse(value: str) -> Reuse:
    """Raises ValueError for anything but the three words."""
    for word in get_args(Reuse):
        if value == word:
            return word  # type: ignore[no-any-return]
    raise ValueError(f'reuse: found {value!r}, expected "any", "exact" or "off"')


def take_up(session: Session, prompt: Sequence[int], mode: Reuse) -> tuple[int, str]:
    """Bring `session` to the longest prefix of `prompt` that can be reached from its own state,
    its snapshots and the model's store. At least one token is always left to compute.

    Returns:
        How many tokens it then holds, and why not more; "" if there was no more.
    """
    if mode == "off":
        session.reset()
        return 0, "reuse is off"
    session.discard_pending()
    core, store = session._live(), session.model._store
    exact = mode == "exact"
    usable = token_array(prompt)[:-1]
    tokens = usable.tobytes()
    held = np.frombuffer(core.token_bytes, np.uint32)
    common = _common(held, usable)
    stays = common == len(held) and (core.exact or not exact)
    best = latest(session._snapshots, tokens, exact=exact)
    reached = max(common if stays else 0, best.position if best else 0)
    left_out = len(held) if common == len(held) and not stays else 0
    stored = store.take(tokens, exact=exact, beyond=reached)
    if stored is not None:
        session._restore_stored(stored)
        reached = stored.position
    elif best is not None and not (stays and reached == common):
        session.restore(best)
    elif not stays:
        session.reset()
    session.discard_pending()  # a restored one

    if reached == len(usable):
        return reached, ""
    if exact:
        decoded = store.find(tokens)
        left_out = max(left_out, decoded.position if decoded else 0)
    if left_out > reached:
        return reached, f"exact: a state after {left_out} tokens has decode steps in it"
    if stored is None and common < len(held):
        of = f"{common} of its {len(held)} tokens"
        return reached, f"the prompt leaves the session's text after {of}"
    if stored is None and reached:
        return reached, ""
    if reached:
        return reached, f"no stored state of this prompt lies beyond token {reached}"
    return 0, "nothing stored begins this prompt" if store.budget else "reuse_memory is 0"


def latest(snapshots: Iterable[Snapshot], tokens: bytes, *, exact: bool = False) -> Snapshot | None:
    """Of some snapshots the one with the longest text that `tokens` (uint32) begins with."""
    usable = [
        s for s in snapshots if (s.exact or not exact) and tokens.startswith(s._core.token_bytes)
    ]
    return max(usable, key=lambda s: s.position, default=None)


def _common(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


def keep_points(
    session: Session, prompt: Sequence[int], reused: int, *, stores: bool, holds: bool
) -> tuple[list[int], int]:
    """Where a prefill of `prompt` from `reused` on shall keep the state: the ends of the first
    turn and of the last before the reply's own, and every so many tokens. A prompt without turns:
    before its last token, which a repetition must compute anyway.

    Args:
        stores: whether the model's store takes them.
        holds: whether the session does, for the reply's turn.

    Returns:
        Positions, ascending, and that of the reply's own turn (0 if there is none).
    """
    model = session.model
    n = len(prompt)
    core = session._live()
    starts = model._turn_starts(prompt)
    turn = starts[-1] if starts else 0
    points = {turn} if holds else set()
    size = core.snapshot_bytes(0)
    if stores and model._store.accepts(core.snapshot_bytes(n)):
        points.add(turn)
        points |= {n - 1} if not starts else {starts[min(1, len(starts) - 1)]}
        points |= set(range(0, n, model._store.spacing(n, size)))
    return sorted(p for p in points if reused < p < n), turn


def keep(session: Session, *, store: bool = True, holds: bool = False) -> None:
    """Keep the session's present state.

    Args:
        store: in the model's store.
        holds: in the session, in place of the one held before.
    """
    core, kept = session._live(), session.model._store
    store = store and kept.accepts(core.snapshot_bytes(core.position))
    if not (store or holds):
        return
    try:
        snapshot = session.snapshot()
    except DeviceError:  # no memory for it, or no state: the generation does not depend on it
        return
    if holds:
        session._kept = snapshot
    if store:
        kept.put(snapshot._core)
