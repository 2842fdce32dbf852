"""Kernels and variants of kernels that only a plan without one of its techniques takes: on every
instruction set and, with the detector, on the Metal device, against the formulas in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle
import oracle_rows
import pytest
import test_metal_decode as decode
import test_metal_prefill as prefill
from harness import (
    PRECISIONS,
    SOFTMETAL,
    Result,
    is_metal,
    isas,
    metal_missing,
    normals,
    random_weight,
    round_bf16,
    rounded,
)
from metal_cases import Case, dispatch
from metal_cases import check as check_metal

EPS = 1e-6
DEVICES = [*isas(), "metal"]
builds = pytest.mark.parametrize(
    ("precision", "isa"), [(precision, isa) for precision in PRECISIONS for isa in DEVICES]
)


def check(case: Case, isa: str, orders: Sequence[Any] = ("in_turn", "ahead")) -> Result:
    if is_metal(isa) and SOFTMETAL and not metal_missing(case.op):
        return check_metal(case, orders, isa)
    got = dispatch(case, isa)
    for name, (values, act) in case.expected.items():
        got.expect(name, np.asarray(values), act=act)
    return got


@builds
def test_delta_step_leaves_the_norm_to_another(precision: str, isa: str) -> None:
    key_heads, heads, dk, dv = 2, 4, 64, 96
    channels = 2 * key_heads * dk + heads * dv
    rng = np.random.default_rng(1)
    given = {
        "ring": rounded(normals(rng, 4, channels), precision),
        "conv": normals(rng, channels, 4) * 0.5,
        "z": np.ones((heads, dv), np.float32),
        "gates": normals(rng, 2, heads),
        "decay": np.stack([-rng.uniform(0.01, 8, heads), normals(rng, heads)]).astype(np.float32),
        "gamma": np.ones(dv, np.float32),
    }
    state = normals(rng, heads, dv, dk)
    after, u, _ = oracle.delta_step(*given.values(), state, position=6, key_heads=key_heads)
    got = check(
        Case(
            "delta_step",
            {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv, "PARTIALS": 1, "RAW": 1},
            {"position": 6},
            given | {"state_in": state, "state_out": state.shape, "o": (heads, dv)},
            precision=precision,
        ),
        isa,
    )
    # All inputs are exact and the arithmetic is float32 in both builds.
    assert np.allclose(got["state_out"], after, rtol=0, atol=1e-5)
    assert np.allclose(got["o"], u / oracle.silu(1.0), rtol=0, atol=1e-5)


@builds
@pytest.mark.parametrize("bits", [4, [4, 8]])
def test_experts_project(precision: str, isa: str, bits: Any) -> None:
    d, experts, top, f = 576, 9, 3, 70
    rng = np.random.default_rng(2)
    x, gamma = normals(rng, d), normals(rng, d)
    w = random_weight(rng, [(f, d), (f, d)], bits, experts)
    ids = rng.permutation(experts)[:top].astype(np.uint32)
    y = oracle.norm(x, gamma, EPS)
    gate, up = (m[ids].astype(np.float64) @ y for m in w.matrices)
    for gated, is_up, out in [(1, 0, oracle.silu(gate) * up), (0, 0, gate), (0, 1, up)]:
        case = Case(
            "experts_project",
            {"D": d, "TOP": top, "F": f, "GATED": gated, "ROWS": is_up, "EPS": EPS},
            {"up": is_up},
            {"x": x, "gamma": gamma, "ids": ids, "weight": w, "out": (top, f)},
            {"out": (out, True)},
            precision,
        )
        check(case, isa)


@builds
def test_gated_product(precision: str, isa: str) -> None:
    rng = np.random.default_rng(3)
    gate, up = (rounded(normals(rng, 320) * 3, precision) for _ in range(2))
    h = oracle.silu(gate.astype(np.float64)) * up
    case = Case("gated_product", {"N": 320}, {"rows": 1}, {"gate": gate, "up": up, "h": (320,)})
    case.precision, case.expected = precision, {"h": (h, True)}
    check(case, isa)


@builds
@pytest.mark.parametrize("bits", [(4, 4), (8, 16)])
def test_experts_down(precision: str, isa: str, bits: Any) -> None:
    d, experts, top, f, shared = 70, 9, 3, 576, 64
    rng = np.random.default_rng(4)
    h = rounded(normals(rng, top, f), precision)
    shared_h = rounded(normals(rng, shared), precision)
    ids = rng.permutation(experts)[:top].astype(np.uint32)
    w = random_weight(rng, [(d, f)], bits[0], experts)
    ws = random_weight(rng, [(d, shared)], bits[1])
    case = Case(
        "experts_down",
        {"D": d, "TOP": top, "F": f, "SHARED": shared, "ROWS": int(bits[0] == 8)},
        {"rows": 1},
        {
            "h": h,
            "shared": shared_h,
            "ids": ids,
            "weight": w,
            "shared_weight": ws,
            "out": (top, d),
            "shared_out": (d,),
        },
        {
            "out": (np.einsum("tdf,tf->td", *oracle.f64(w.matrix[ids], h)), True),
            "shared_out": (np.matmul(*oracle.f64(ws.matrix, shared_h)), True),
        },
        precision,
    )
    check(case, isa)


@builds
def test_combine_in_order(precision: str, isa: str) -> None:
    rows, top, d = 2, 3, 192
    rng = np.random.default_rng(5)
    x, shares = normals(rng, rows, d), rng.uniform(0, 1, (rows, top + 1)).astype(np.float32)
    out = rounded(normals(rng, rows * top, d), precision)
    shared_out = rounded(normals(rng, rows, d), precision)
    in_order = np.arange(rows * top).reshape(rows, top)
    case = Case(
        "prefill_combine",
        {"D": d, "TOP": top, "GROUPED": 0},
        {"rows": rows},
        {"out": out, "shared_out": shared_out, "shares": shares, "x": x},
        {"x": (oracle_rows.combine(x, out, shared_out, in_order, shares), False)},
        precision,
    )
    check(case, isa)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize(
    ("bits", "experts"), [([4], 3), ([8, 4, 16, 8], 1), ([4, 8], 2)], ids=["4", "mixed", "experts"]
)
def test_expand_weight(isa: str, bits: Any, experts: int) -> None:
    rng = np.random.default_rng(6)
    shapes = [(rows, 192) for rows in (70, 3, 16, 5)[: len(bits)]]
    weight = random_weight(rng, shapes, bits, experts)
    out = random_weight(rng, shapes, 16, experts)  # holds other numbers
    n = sum(rows for rows, _ in shapes)
    case = Case(
        "expand_weight",
        {"EXPERTS": experts, "N": n, "K": 192},
        {"passes": 1},
        {"weight": weight, "out": out},
    )
    check(case, isa, ("in_turn",))
    for segment, matrix in enumerate(weight.matrices):
        for expert in range(experts):
            found = out.on(isa).unpack(expert, segment)
            expected = matrix.reshape(experts, *shapes[segment])[expert]
            # A scale times a code is exact, so there are two roundings however it is done.
            assert np.array_equal(found, round_bf16(expected))


on_metal = pytest.mark.skipif(metal_missing() is not None, reason=str(metal_missing()))


# The CPU device has no simdgroups.
@on_metal
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("rows", "make"),
    [
        (1, lambda precision: decode.delta_project(precision, 576, 13, 9, 1, [16, 16, 8, 8])),
        (1, lambda precision: decode.attend_project(precision, 576, (30, 3, 2), 4)),
        (1, lambda precision: decode.project_add(precision, 2, 96, 3, True, 9, 4)),
        (2, lambda precision: decode.route_shared(precision, 192, 30, 5, [16, 16, 4, 4])),
        (2, lambda precision: decode.experts_up(precision, 576, 20, 5, 9, 4)),
        (1, lambda precision: decode.experts_down_add(precision, 33, 12, 11, 576, 64, [4, 8])),
        (1, lambda precision: decode.head(precision, 128, 70, 70, True, 1, 4)),
    ],
)
def test_one_row_at_a_time(precision: str, rows: int, make: Any) -> None:
    case = make(precision)
    case.constants["ROWS"] = rows
    decode.check(case, ["ahead"])


# The CPU device keeps the state in memory always.
@on_metal
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [1, 21])
def test_scan_in_memory(precision: str, rows: int) -> None:
    case = prefill.delta_scan(precision, rows, (1, 2, 96, 32))
    case.constants["IN_MEMORY"] = 1
    check(case, "metal")
