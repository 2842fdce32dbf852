"""Prefill's row, delta rule and attention kernels in float64, for many tokens at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
from numpy.typing import ArrayLike, NDArray
from oracle import Array, f64

Ints = NDArray[np.uint32]


def gated_norm(o: ArrayLike, z: ArrayLike, gamma: ArrayLike, eps: float) -> Array:
    return oracle.norm(o, gamma, eps) * oracle.silu(*f64(z))


def route(logits: ArrayLike, experts: int, top: int) -> tuple[Ints, Array]:
    ids, shares = zip(*(oracle.choose(row, experts, top) for row in f64(logits)[0]), strict=True)
    return np.stack(ids).astype(np.uint32), np.stack(shares)


def group(ids: Ints, experts: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """First row of each expert, token of each row, row of each choice; tokens in order."""
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(flat))
    offsets = np.searchsorted(flat[order], np.arange(experts + 1))
    return offsets, order // ids.shape[1], inverse.reshape(ids.shape)


def combine(
    x: ArrayLike, out: ArrayLike, shared_out: ArrayLike, inv: Ints, shares: ArrayLike
) -> Array:
    x, out, shared_out, shares = f64(x, out, shared_out, shares)
    result: Array = x + np.einsum("tk,tkd->td", shares[:, :-1], out[inv])
    return result + shares[:, -1:] * shared_out


def delta_inputs(
    qkv: ArrayLike,
    ring: ArrayLike,
    conv: ArrayLike,
    gates: ArrayLike,
    decay: ArrayLike,
    position: int,
    shape: tuple[int, int, int, int],
) -> dict[str, Array]:
    """q, k, v and steps; `shape` is key heads, heads, Dk, Dv."""
    qkv, ring, conv, gates, decay = f64(qkv, ring, conv, gates, decay)
    key_heads, heads, dk, dv = shape
    older = ring[[(position - 3 + j) & 3 for j in range(3)]]
    rows = np.concatenate([older, qkv])
    mixed = oracle.silu(sum(rows[j : j + len(qkv)] * conv[:, j] for j in range(4)))
    q, k, v = np.split(mixed, [key_heads * dk, 2 * key_heads * dk], axis=1)

    def unit(a: Array) -> Array:
        a = a.reshape(len(qkv), key_heads, dk)
        result: Array = a / np.sqrt(np.sum(a * a, -1, keepdims=True) + 1e-6)
        return result

    g = np.exp(decay[0] * np.logaddexp(0, gates[:, 1] + decay[1]))
    return {
        "q": unit(q) * dk**-0.5,
        "k": unit(k),
        "v": v.reshape(len(qkv), heads, dv),
        "steps": np.stack([g, oracle.sigmoid(gates[:, 0])], axis=1),
    }


def delta_scan(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, steps: ArrayLike, state: ArrayLike
) -> tuple[Array, Array]:
    """The last state and o."""
    q, k, v, steps, state = f64(q, k, v, steps, state)
    repeat = v.shape[1] // q.shape[1]
    q, k = np.repeat(q, repeat, axis=1), np.repeat(k, repeat, axis=1)
    o = np.empty_like(v)
    for t in range(len(v)):
        g, beta = steps[t]
        state = state * g[:, None, None]
        correction = beta[:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
        state = state + correction[:, :, None] * k[t][:, None, :]
        o[t] = np.einsum("hvk,hk->hv", state, q[t])
    return state, o


def split_qkv(qkv: ArrayLike, heads: int, kv_heads: int, dh: int) -> tuple[Array, ...]:
    """Queries and gates [T, H, Dh], keys and values [T, Hkv, Dh]."""
    rows = (oracle.split_qkv(row, heads, kv_heads, dh) for row in f64(qkv)[0])
    return tuple(np.stack(part) for part in zip(*rows, strict=True))


def rotate(x: Array, first: int, frequencies: NDArray[np.float32]) -> Array:
    """x [T, heads, Dh] from position `first` on. The angle is a float32 product."""
    positions = np.arange(first, first + len(x), dtype=np.float32)
    (angles,) = f64(positions[:, None] * frequencies)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    n = len(frequencies)
    a, b = x[..., :n], x[..., n : 2 * n]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * n :]], -1)


def attend(
    q: ArrayLike, keys: ArrayLike, values: ArrayLike, gates: ArrayLike, position: int
) -> Array:
    """Scaled queries and gates [T, H, Dh] over keys and values [Hkv, …, Dh], row t over the keys up
    to position + t."""
    q, keys, values, gates = f64(q, keys, values, gates)
    repeat = q.shape[1] // len(keys)
    keys, values = np.repeat(keys, repeat, axis=0), np.repeat(values, repeat, axis=0)
    u = np.empty_like(q)
    for t in range(len(q)):
        n = position + t + 1
        scores = np.einsum("hd,hnd->hn", q[t], keys[:, :n])
        u[t] = np.einsum("hn,hnd->hd", oracle.softmax(scores), values[:, :n])
    return u * oracle.sigmoid(gates)
