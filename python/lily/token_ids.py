"""Token ids as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.integer[Any]]


def token_array(tokens: Tokens) -> NDArray[np.uint32]:
    """Token ids as uint32 [T].

    Raises:
        ValueError: not a sequence of integers that fit.
    """
    try:
        array = np.asarray(tokens)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"tokens: {error}") from None
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"tokens: {array.dtype} with {array.ndim} dimensions, expected integers with one"
        )
    bad = np.flatnonzero((array < 0) | (array > 0xFFFFFFFF))
    if bad.size:
        raise ValueError(f"tokens[{bad[0]}]: {array[bad[0]]}, expected an id in [0, V)")
    return np.ascontiguousarray(array, dtype=np.uint32)
