"""Qwen3.6 (`qwen3_5_moe`) in NumPy, unfused, one token at a time.

First the operations, as pure functions of arrays; then the layers, in the order of a paper.
Slow on purpose: it is here to be read, and to be stepped through beside an engine.

Heads are leading axes: q [H, D], recurrent state [Hv, Dv, Dk], cached keys [T, Hkv, D].
Every function computes in the type of its arguments, float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .weights import load_dequantised, read_config

Array: TypeAlias = NDArray[np.floating[Any]]
Record: TypeAlias = Callable[[str, NDArray[Any]], None]

# --- Operations ---------------------------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    y: Array = np.exp(-np.logaddexp(0, -x))
    return y


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    y: Array = np.logaddexp(0, x)
    return y


def softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(-1, keepdims=True))
    p: Array = e / e.sum(-1, keepdims=True)
    return p


def rms_norm(x: Array, g: Array, eps: float = 1e-6) -> Array:
    """x / sqrt(mean(x²) + eps) ⊙ g, over the last axis."""
    y: Array = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * g
    return y


def l2_norm(x: Array, eps: float = 1e-6) -> Array:
    """x / sqrt(Σx² + eps), over the last axis."""
    y: Array = x / np.sqrt(np.sum(x * x, -1, keepdims=True) + eps)
    return y


def gated_norm(o: Array, z: Array, g: Array, eps: float = 1e-6) -> Array:
    """Normalise first, gate second: rms_norm(o) ⊙ silu(z), per head."""
    return rms_norm(o, g, eps) * silu(z)


def conv_step(window: Array, u: Array, w: Array) -> tuple[Array, Array]:
    """One step of a causal depthwise convolution, then SiLU.

    Args:
        window: the last taps - 1 inputs [taps - 1, C], oldest first; zeros before the start.
        u: this step's input [C].
        w: [C, taps]; the last tap multiplies `u`.

    Returns:
        The output [C] and the next window.
    """
    taps = np.concatenate([window, u[None]])
    return silu(np.sum(taps * w.T, axis=0)), taps[1:]


def decay(a: Array, a_log: Array, dt_bias: Array) -> Array:
    """Decay = exp(-exp(A_log) · softplus(a + dt_bias)), in (0, 1)."""
    return np.exp(-np.exp(a_log) * softplus(a + dt_bias))


def delta_step(
    state: Array, q: Array, k: Array, v: Array, gamma: Array, beta: Array
) -> tuple[Array, Array]:
    """One step of the gated delta rule, per value head.

        S ← gamma S;   d = beta (v - S k);   S ← S + d kᵀ;   o = S q

    Args:
        state: S [Hv, Dv, Dk].
        q, k: [Hk, Dk], normalised, q scaled; each serves Hv / Hk consecutive value heads.
        v: [Hv, Dv].
        gamma, beta: [Hv].

    Returns:
        o [Hv, Dv] and the next state.
    """
    groups = len(v) // len(k)
    q, k = np.repeat(q, groups, axis=0), np.repeat(k, groups, axis=0)
    state = state * gamma[:, None, None]
    d = beta[:, None] * (v - (state @ k[:, :, None])[:, :, 0])
    state = state + d[:, :, None] * k[:, None, :]
    return (state @ q[:, :, None])[:, :, 0], state


def rope(x: Array, position: int, theta: float, rotary: int) -> Array:
    """Rotate pairs (i, i + rotary/2) of the first `rotary` values of each head.

    The angle is position · theta^(-2i / rotary), in float64.
    """
    half = rotary // 2
    angle = position * theta ** (-2.0 * np.arange(half) / rotary)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attend(q: Array, keys: Array, values: Array) -> Array:
    """softmax(q · keysᵀ / √D) · values for one query per head.

    Args:
        q: [H, D].
        keys, values: [T, Hkv, D]; each serves H / Hkv consecutive query heads.
    """
    heads, size = q.shape
    out = np.empty_like(q)
    for h in range(heads):
        kv = h * keys.shape[1] // heads
        p = softmax(keys[:, kv] @ q[h] * size**-0.5)
        out[h] = p @ values[:, kv]
    return out


def route(probs: Array, n: int) -> tuple[NDArray[np.intp], Array]:
    """The `n` most probable experts, most probable first, and their renormalised weights."""
    chosen = np.argsort(-probs, kind="stable")[:n]
    return chosen, probs[chosen] / probs[chosen].sum()


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """W_down (silu(W_gate x) ⊙ W_up x)."""
    return down @ (silu(gate @ x) * (up @ x))


def experts(
    x: Array, chosen: NDArray[np.intp], weights: Array, gate: Array, up: Array, down: Array
) -> Array:
    """Σ over the chosen experts of weight · swiglu; gate, up [E, F, D], down [E, D, F]."""
    out = np.zeros_like(x)
    for e, r in zip(chosen, weights, strict=True):
        out += r * swiglu(x, gate[e], up[e], down[e])
    return out


# --- The model ----------------------------------------------------------------------------------


class ReferenceModel:
    """One sequence of one model, from position 0.

    `step` appends a token. Its `trace`, a dict to fill, receives intermediate values under
    `embedding`, `layers.N.NAME`, `final` (the last norm) and `logits`. In order, NAME is:

    - `input`, `normed`: the residual stream, and its input_layernorm;
    - delta net: `u` (before convolution), `z`, `a`, `b`, `conv` (after it and SiLU), `q` and `k`
      (normalised, q scaled, [Hk, Dk]), `v`, `decay`, `beta`, `state` (after), `o`, `gated`;
    - attention: `q_raw`, `gate`, `k_raw`, `q`, `k` (normalised and rotated), `v`, `o`, `gated`;
    - `mix` (the branch's output), `middle` (the residual after it), `middle_normed`;
    - `router_logits`, `router_probs`, `chosen`, `chosen_weights`, `routed`, `shared` (before its
      gate), `shared_gate`, `moe`, `output` (the residual after the layer).
    """

    def __init__(self, folder: str | Path, dtype: DTypeLike = np.float32) -> None:
        whole = read_config(Path(folder))
        self.config: dict[str, Any] = whole.get("text_config", whole)
        self.w = load_dequantised(folder, dtype)
        self.dtype = np.dtype(dtype)
        self.eps = float(self.config["rms_norm_eps"])
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        c = self.config
        heads, dv = c["linear_num_value_heads"], c["linear_value_head_dim"]
        dk, taps = c["linear_key_head_dim"], c["linear_conv_kernel_dim"]
        channels = 2 * c["linear_num_key_heads"] * dk + heads * dv
        kv = (0, c["num_key_value_heads"], c["head_dim"])
        self.position = 0
        self.windows: dict[int, Array] = {}
        self.states: dict[int, Array] = {}
        self.keys: dict[int, Array] = {}
        self.values: dict[int, Array] = {}
        for layer in range(c["num_hidden_layers"]):
            if self.is_attention(layer):
                self.keys[layer] = np.zeros(kv, self.dtype)
                self.values[layer] = np.zeros(kv, self.dtype)
            else:
                self.windows[layer] = np.zeros((taps - 1, channels), self.dtype)
                self.states[layer] = np.zeros((heads, dv, dk), self.dtype)

    def is_attention(self, layer: int) -> bool:
        types = self.config.get("layer_types")
        if types is None:
            return (layer + 1) % int(self.config["full_attention_interval"]) == 0
        return bool(types[layer] == "full_attention")

    def step(self, token: int, trace: dict[str, NDArray[Any]] | None = None) -> Array:
        """Append `token` and return the logits after it, [V]."""

        def record(name: str, value: NDArray[Any]) -> None:
            if trace is not None:
                trace[name] = np.array(value)

        def prefixed(at: str) -> Record:
            return lambda name, value: record(at + name, value)

        h = self.w["embed_tokens"][token]
        record("embedding", h)
        for layer in range(self.config["num_hidden_layers"]):
            h = self.layer(layer, h, prefixed(f"layers.{layer}."))
        self.position += 1
        h = rms_norm(h, self.w["norm"], self.eps)
        record("final", h)
        logits: Array = self.w.get("lm_head", self.w["embed_tokens"]) @ h
        record("logits", logits)
        return logits

    def layer(self, layer: int, h: Array, record: Record) -> Array:
        record("input", h)
        x = rms_norm(h, self.w[f"layers.{layer}.input_layernorm"], self.eps)
        record("normed", x)
        mix = self.gated_attention if self.is_attention(layer) else self.delta_net
        y = mix(layer, x, record)
        record("mix", y)
        h = h + y
        record("middle", h)
        x = rms_norm(h, self.w[f"layers.{layer}.post_attention_layernorm"], self.eps)
        record("middle_normed", x)
        y = self.moe(layer, x, record)
        record("moe", y)
        h = h + y
        record("output", h)
        return h

    def delta_net(self, layer: int, x: Array, record: Record) -> Array:
        c, at = self.config, f"layers.{layer}.linear_attn."
        hk, dk = c["linear_num_key_heads"], c["linear_key_head_dim"]
        hv, dv = c["linear_num_value_heads"], c["linear_value_head_dim"]

        u = self.w[at + "in_proj_qkv"] @ x
        z = (self.w[at + "in_proj_z"] @ x).reshape(hv, dv)
        a = self.w[at + "in_proj_a"] @ x
        b = self.w[at + "in_proj_b"] @ x
        conv, self.windows[layer] = conv_step(self.windows[layer], u, self.w[at + "conv1d"])
        q, k, v = np.split(conv, [hk * dk, 2 * hk * dk])
        q = l2_norm(q.reshape(hk, dk)) * dk**-0.5
        k = l2_norm(k.reshape(hk, dk))
        v = v.reshape(hv, dv)
        gamma = decay(a, self.w[at + "A_log"], self.w[at + "dt_bias"])
        beta = sigmoid(b)
        o, self.states[layer] = delta_step(self.states[layer], q, k, v, gamma, beta)
        gated = gated_norm(o, z, self.w[at + "norm"], self.eps)

        for name, value in (
            ("u", u), ("z", z), ("a", a), ("b", b), ("conv", conv), ("q", q), ("k", k), ("v", v),
            ("decay", gamma), ("beta", beta), ("state", self.states[layer]), ("o", o),
            ("gated", gated),
        ):  # fmt: skip
            record(name, value)
        y: Array = self.w[at + "out_proj"] @ gated.ravel()
        return y

    def gated_attention(self, layer: int, x: Array, record: Record) -> Array:
        c, at = self.config, f"layers.{layer}.self_attn."
        heads, kv_heads, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        theta = float(c["rope_parameters"]["rope_theta"])
        rotary = int(size * c["rope_parameters"]["partial_rotary_factor"])

        # Per head: the query, then its gate.
        q_raw, gate = np.split((self.w[at + "q_proj"] @ x).reshape(heads, 2 * size), 2, axis=-1)
        k_raw = (self.w[at + "k_proj"] @ x).reshape(kv_heads, size)
        v = (self.w[at + "v_proj"] @ x).reshape(kv_heads, size)
        q = rope(rms_norm(q_raw, self.w[at + "q_norm"], self.eps), self.position, theta, rotary)
        k = rope(rms_norm(k_raw, self.w[at + "k_norm"], self.eps), self.position, theta, rotary)
        self.keys[layer] = np.concatenate([self.keys[layer], k[None]])
        self.values[layer] = np.concatenate([self.values[layer], v[None]])
        o = attend(q, self.keys[layer], self.values[layer])
        gated = o * sigmoid(gate)

        for name, value in (
            ("q_raw", q_raw), ("gate", gate), ("k_raw", k_raw), ("q", q), ("k", k), ("v", v),
            ("o", o), ("gated", gated),
        ):  # fmt: skip
            record(name, value)
        y: Array = self.w[at + "o_proj"] @ gated.ravel()
        return y

    def moe(self, layer: int, x: Array, record: Record) -> Array:
        at = f"layers.{layer}.mlp."

        def projections(of: str) -> list[Array]:
            return [self.w[f"{at}{of}.{name}_proj"] for name in ("gate", "up", "down")]

        logits = self.w[at + "gate"] @ x
        probs = softmax(logits)
        chosen, weights = route(probs, self.config["num_experts_per_tok"])
        routed = experts(x, chosen, weights, *projections("switch_mlp"))
        shared = swiglu(x, *projections("shared_expert"))
        shared_gate = sigmoid(self.w[at + "shared_expert_gate"] @ x)

        for name, value in (
            ("router_logits", logits), ("router_probs", probs), ("chosen", chosen),
            ("chosen_weights", weights), ("routed", routed), ("shared", shared),
            ("shared_gate", shared_gate),
        ):  # fmt: skip
            record(name, value)
        return routed + shared_gate * shared
