"""Three functions of transformers' layers, faster in training; the model stays transformers' own.

On an H200 its triangular solver, its depthwise convolution and the gradient of its gathers take
most of a training step. `install` puts these in their place; `python fast_layers.py` compares
values and gradients with the originals.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

CHUNK = 64


@torch.compile(dynamic=False, disable=not torch.cuda.is_available())
def causal_conv(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """silu of the causal depthwise convolution of x [B, C, T] with weight [C, K]."""
    taps = weight.shape[-1]
    padded = F.pad(x.float(), (taps - 1, 0))
    y = sum(padded[..., j : j + x.shape[-1]] * weight[:, j, None].float() for j in range(taps))
    return F.silu(y).to(x.dtype)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 of strictly lower a [..., 64, 64]: blocks of 16 by their series, then doubled."""
    block, n = 16, a.shape[-1]
    eye = torch.eye(block, dtype=a.dtype, device=a.device)
    diagonal = torch.stack(
        [a[..., i : i + block, i : i + block] for i in range(0, n, block)], dim=-3
    )
    power, inverse = diagonal, eye - diagonal  # (I - a)(I + a^2)(I + a^4)(I + a^8): a^16 is zero
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    parts = list(inverse.unbind(-3))
    while len(parts) > 1:
        size, joined = parts[0].shape[-1], []
        for i in range(0, len(parts), 2):
            upper, lower, at = parts[i], parts[i + 1], i * size
            below = a[..., at + size : at + 2 * size, at : at + size]
            corner = -(lower @ below @ upper)
            top = torch.cat([upper, torch.zeros_like(upper)], -1)
            joined.append(torch.cat([top, torch.cat([corner, lower], -1)], -2))
        parts = joined
    return parts[0]


def chunk_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """The gated delta rule from a zero state; shapes as transformers' function has them."""
    dtype, (b, t, h, d) = value.dtype, value.shape
    q, k, v = (x.transpose(1, 2).float() for x in (query, key, value))
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    q, k, v = (x.reshape(b, h, t // CHUNK, CHUNK, -1) for x in (q, k, v))
    beta, log_decay = (x.transpose(1, 2).float().reshape(b, h, -1, CHUNK) for x in (beta, g))
    total = log_decay.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    k_beta = k * beta[..., None]
    inverse = unit_lower_inverse(((k_beta @ k.mT) * decay).tril(-1))
    new = inverse @ (v * beta[..., None])
    read = inverse @ (k_beta * total.exp()[..., None])
    inside = (q @ k.mT) * decay
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    keep = total[..., -1].exp()[..., None, None]
    state = v.new_zeros(b, h, k.shape[-1], d)
    out = []
    for i in range(t // CHUNK):
        added = new[:, :, i] - read[:, :, i] @ state
        out.append(q[:, :, i] @ state + inside[:, :, i] @ added)
        state = state * keep[:, :, i] + k[:, :, i].mT @ added
    return torch.stack(out, 2).reshape(b, h, t, d).transpose(1, 2).to(dtype), None


class Permute(torch.autograd.Function):
    """x[order], whose gradient is a gather too: `inverse` undoes `order`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.saved_tensors[0]], None, None


def experts(self: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The routed experts of rows x [N, H], chosen [N, k], as grouped products."""
    n, k = chosen.shape
    order = chosen.flatten().argsort()
    inverse = order.argsort()
    counts = torch.zeros(self.num_experts, dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order, dtype=torch.int32))
    ends = counts.cumsum(0).to(torch.int32)
    rows = Permute.apply(x.repeat_interleave(k, 0), order, inverse)
    gate, up = F.grouped_mm(rows, self.gate_up_proj.mT, offs=ends).chunk(2, -1)
    rows = F.grouped_mm(F.silu(gate) * up, self.down_proj.mT, offs=ends)
    return (Permute.apply(rows, inverse, order).view(n, k, -1) * weights[..., None]).sum(1)


def install() -> None:
    modeling.Qwen3_5MoeExperts.forward = experts
    modeling.causal_conv1d_fn = causal_conv
    modeling.torch_chunk_gated_delta_rule = chunk_delta_rule


def check_experts() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = modeling.Qwen3_5MoeTextConfig(
        hidden_size=128, num_experts=8, moe_intermediate_size=64, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    layer = modeling.Qwen3_5MoeExperts(config).to(device, torch.bfloat16)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.05)
    x = torch.randn(300, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    weights, chosen = torch.rand(300, 8, device=device).topk(2)
    leaves = [x, *layer.parameters()]
    results = []
    for function in (type(layer).forward, experts):
        out = function(layer, x, chosen, weights.bfloat16()).float()
        results.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)])
    for a, b in zip(*results, strict=True):
        print(f"{'experts (bf16)':20s} {((a - b).norm() / a.norm()).item():.1e}")


def main() -> None:
    torch.manual_seed(0)
    check_experts()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    b, t, h, d = 2, 256, 4, 128
    q, k, v = (torch.randn(b, t, h, d, device=device, requires_grad=True) for _ in range(3))
    g = (-torch.rand(b, t, h, device=device) * 0.2).requires_grad_()
    beta = torch.rand(b, t, h, device=device, requires_grad=True)
    x = torch.randn(b, 64, t, device=device, requires_grad=True)
    w = torch.randn(64, 4, device=device, requires_grad=True)
    cases = (
        (modeling.torch_chunk_gated_delta_rule, chunk_delta_rule, (q, k, v, g, beta)),
        (modeling.causal_conv1d_fn, causal_conv, (x, w, None, "silu")),
    )
    for theirs, ours, inputs in cases:
        rule = theirs is modeling.torch_chunk_gated_delta_rule
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True} if rule else {}
        leaves = [t for t in inputs if isinstance(t, Tensor)]
        results = []
        for function in (theirs, ours):
            result: Any = function(*inputs, **options)
            out: Tensor = result[0] if rule else result
            results.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)])
        for a, b_ in zip(*results, strict=True):
            print(f"{ours.__name__:20s} {((a - b_).norm() / a.norm()).item():.1e}")


if __name__ == "__main__":
    main()
