"""What the contracts say, in float64 and as plainly as NumPy allows.

Arrays are single tokens: x [D], weights [rows, D], heads as leading axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def f64(*arrays: ArrayLike) -> tuple[Array, ...]:
    return tuple(np.asarray(a, np.float64) for a in arrays)


def sigmoid(x: Array) -> Array:
    result: Array = np.exp(-np.logaddexp(0, -x))
    return result


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(-1, keepdims=True))
    result: Array = e / e.sum(-1, keepdims=True)
    return result


def norm(x: ArrayLike, gamma: ArrayLike, eps: float) -> Array:
    x, gamma = f64(x, gamma)
    result: Array = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * gamma
    return result


def gated(weight_gate: Array, weight_up: Array, y: Array) -> Array:
    """silu(W_gate · y) ⊙ W_up · y"""
    return silu(weight_gate @ y) * (weight_up @ y)


def choose(logits: Array, experts: int, top: int) -> tuple[NDArray[Any], Array]:
    """Ids in falling order of logit, lowest first on ties; shares, then the shared gate."""
    ids = np.argsort(-logits[:experts], kind="stable")[:top]
    return ids, np.append(softmax(logits[ids]), sigmoid(logits[experts]))


def head_scales(squares: ArrayLike, width: int, eps: float) -> Array:
    """rsqrt(Σ squares / width + eps) for each head, whose squares come in parts."""
    (squares,) = f64(squares)
    result: Array = 1 / np.sqrt(squares.sum(-1) / width + eps)
    return result


def convolve(ring: Array, taps: Array, position: int) -> Array:
    """silu of the causal convolution; input of position p is in slot p & 3."""
    inputs = np.stack([ring[(position - 3 + j) & 3] for j in range(4)])
    return silu(np.einsum("jc,cj->c", inputs, taps))


def delta_step(
    ring: ArrayLike,
    conv: ArrayLike,
    z: ArrayLike,
    gates: ArrayLike,
    decay: ArrayLike,
    gamma: ArrayLike,
    state: ArrayLike,
    position: int,
    key_heads: int,
) -> tuple[Array, Array, Array]:
    """The next state [Hv, Dv, Dk], u [Hv, Dv] and Σ o² [Hv]."""
    ring, conv, z, gates, decay, gamma, state = f64(ring, conv, z, gates, decay, gamma, state)
    heads, dv, dk = state.shape
    mixed = convolve(ring, conv, position)
    q = mixed[: key_heads * dk].reshape(key_heads, dk)
    k = mixed[key_heads * dk : 2 * key_heads * dk].reshape(key_heads, dk)
    v = mixed[2 * key_heads * dk :].reshape(heads, dv)
    q = q / np.sqrt(np.sum(q * q, -1, keepdims=True) + 1e-6) * dk**-0.5
    k = k / np.sqrt(np.sum(k * k, -1, keepdims=True) + 1e-6)
    q, k = (np.repeat(a, heads // key_heads, axis=0) for a in (q, k))
    g = np.exp(decay[0] * np.logaddexp(0, gates[1] + decay[1]))
    beta = sigmoid(gates[0])
    state = state * g[:, None, None]
    correction = beta[:, None] * (v - np.einsum("hvk,hk->hv", state, k))
    state = state + correction[:, :, None] * k[:, None, :]
    o = np.einsum("hvk,hk->hv", state, q)
    return state, o * gamma * silu(z.reshape(heads, dv)), np.sum(o * o, -1)


def rotate(x: Array, position: int, frequencies: Array) -> Array:
    """Pairs (i, i + n) of the first 2n values of each head."""
    n = len(frequencies)
    cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
    a, b = x[..., :n], x[..., n : 2 * n]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * n :]], -1)


def split_qkv(qkv: Array, heads: int, kv_heads: int, dh: int) -> tuple[Array, ...]:
    """Queries and gates [H, Dh], keys and values [Hkv, Dh]."""
    q, gate = np.moveaxis(qkv[: 2 * heads * dh].reshape(heads, 2, dh), 1, 0)
    k, v = qkv[2 * heads * dh :].reshape(2, kv_heads, dh)
    return q, gate, k, v


def attend(q: Array, gate: Array, keys: Array, values: Array) -> Array:
    """Gated attention of one row: q [H, Dh] over keys and values [Hkv, T, Dh]."""
    groups = len(q) // len(keys)
    keys, values = (np.repeat(a, groups, axis=0) for a in (keys, values))
    scores = np.einsum("hd,htd->ht", q, keys) * q.shape[-1] ** -0.5
    return np.einsum("ht,htd->hd", softmax(scores), values) * sigmoid(gate)


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """The four words of a Philox4x32-10 block."""
    mask = 0xFFFFFFFF
    x, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ k[0], b & mask, a >> 32 ^ x[3] ^ k[1], a & mask]
        k = [k[0] + 0x9E3779B9 & mask, k[1] + 0xBB67AE85 & mask]
    return x


def uniform(seed: int, step: int) -> float:
    """The number in [0, 1) that a step draws."""
    words = [n >> shift & 0xFFFFFFFF for n in (step, seed) for shift in (0, 32)]
    return philox([*words[:2], 0, 0], words[2:])[0] / 2**32


def distribution(
    logits: ArrayLike,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Array:
    """Probabilities after temperature, top-k, top-p and min-p, in this order."""
    (logits,) = f64(logits)
    order = np.argsort(-logits, kind="stable")
    p = softmax(logits / temperature)[order]
    if top_k:
        p[top_k:] = 0
    if top_p < 1:
        before = np.cumsum(p) - p
        p[before >= top_p * p.sum()] = 0
    p[p < min_p * p[0]] = 0
    result = np.zeros_like(p)
    result[order] = p / p.sum()
    return result
