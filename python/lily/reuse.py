"""Which part of a prompt a session need not compute again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lily.session import Session


def reuse(session: Session, prompt: list[int]) -> tuple[int, str]:
    """Bring `session` to the longest prefix of `prompt` that it can reach; at least one token of
    the prompt is always left to compute.

    Returns:
        How many tokens it then holds, and why not more.
    """
    if session.pending is not None:
        session.discard_pending()
    held = session.tokens
    common = 0
    for ours, theirs in zip(held, prompt[:-1], strict=False):
        if ours != theirs:
            break
        common += 1
    if common == len(held):
        return common, ""
    reached = session.rewind(common)
    note = f"the prompt leaves the session's text after {common} of its {len(held)} tokens"
    return reached, note
