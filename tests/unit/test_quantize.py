"""Conversion to MLX's form and back: numbers, layout, refusals, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

import lily
import random_checkpoint
from golden.digests import digests, file_digest
from lily import affine, cli, convert
from lily.affine import Groups, from_bf16, to_bf16
from lily.checkpoint import Checkpoint
from lily.config import parse_config
from lily.files import DTYPE_BYTES, TensorEntry, read_header
from lily.layouts import to_mlx
from lily.tensor_files import TensorWriter, split
from lily.tensor_table import expected_tensors, weight_name
from reference.weights import load_dequantised, unpack_affine, unpack_codes

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/quantized.json").read_text("utf-8"))

# --- Numbers ------------------------------------------------------------------------------------

FINITE = st.integers(0, 0xFFFF).filter(lambda u: u & 0x7F80 != 0x7F80)


def rows_of(elements: st.SearchStrategy[int]) -> st.SearchStrategy[NDArray[np.uint16]]:
    shapes = st.tuples(st.integers(1, 3), st.sampled_from([64, 128]))
    return shapes.flatmap(lambda shape: arrays(np.uint16, shape, elements=elements))


# Any bits; neighbours in size, so that codes are used; subnormals and zeros of both signs.
ROWS = st.one_of(
    rows_of(FINITE),
    rows_of(st.integers(0x3C00, 0x4100) | st.integers(0xBC00, 0xC100)),
    rows_of(st.integers(0, 0x7F) | st.integers(0x8000, 0x807F)),
)
BITS = st.sampled_from([4, 8])


def spans_float32(weights: NDArray[np.uint16]) -> bool:
    w = from_bf16(weights).astype(np.float64).reshape(-1, 64)
    return bool((w.max(1) - w.min(1) > np.finfo(np.float32).max).any())


def one_group(w: NDArray[np.float32], bits: int) -> tuple[list[int], np.float32, np.float32]:
    """The rule, one value at a time."""
    most = np.float32(2**bits - 1)
    low, high = min(w), max(w)
    from_low = abs(low) > abs(high)
    step = max((high - low) / most, np.float32(1e-7))
    step = step if from_low else -step
    edge = low if from_low else high
    bias = np.float32(0)
    zero = np.rint(edge / step)
    if zero != 0:
        step, bias = edge / zero, edge
    codes = [0 if step == 0 else int(min(max(np.rint((x - bias) / step), 0), most)) for x in w]
    return codes, step, bias


@given(ROWS, BITS)
def test_codes_scales_and_biases_follow_the_rule(weights: NDArray[np.uint16], bits: int) -> None:
    if spans_float32(weights):
        return
    found = affine.quantize(weights, bits)
    codes = unpack_codes(found.codes.view("<u4"), bits).reshape(-1, 64)
    scales, biases = found.scales.ravel(), found.biases.ravel()
    with np.errstate(over="ignore"):
        groups = [one_group(g, bits) for g in from_bf16(weights).reshape(-1, 64)]
    for i, (want, step, bias) in enumerate(groups):
        assert codes[i].tolist() == want
        assert scales[i] == to_bf16(np.array([step]))[0]
        assert biases[i] == to_bf16(np.array([bias]))[0]


@given(ROWS, BITS)
def test_what_is_lost(weights: NDArray[np.uint16], bits: int) -> None:
    if spans_float32(weights):
        return
    found = affine.quantize(weights, bits)
    w = from_bf16(weights).astype(np.float64).reshape(-1, 64)
    codes = unpack_codes(found.codes.view("<u4"), bits).reshape(-1, 64)
    scale = np.abs(from_bf16(found.scales).astype(np.float64)).reshape(-1, 1)
    bias = from_bf16(found.biases).astype(np.float64).reshape(-1, 1)
    error = np.abs(w - (from_bf16(found.scales).astype(np.float64).reshape(-1, 1) * codes + bias))
    most = 2**bits - 1
    # Half a step; the scale's rounding to bf16, once for each unit of the code; and float32's.
    rounding = codes * scale * 2.0**-8 + np.abs(bias) * 2.0**-22
    inner = codes < most
    assert (error <= scale / 2 * (1 + 2.0**-8) + rounding)[inner].all()
    # The far end may lie up to a step beyond the last code, since zero was made a code.
    assert (error <= scale * (1 + 2.0**-7) + rounding).all()
    # The extreme of larger magnitude is exact, unless it is as good as zero.
    at = np.where(-w.min(1) > w.max(1), w.argmin(1), w.argmax(1))[:, None]
    kept = np.take_along_axis(error, at, 1)[np.abs(np.take_along_axis(w, at, 1)) > 1e-7]
    assert (kept == 0).all()


@given(st.data(), BITS)
def test_unpacking_is_exact(data: st.DataObject, bits: int) -> None:
    codes = data.draw(arrays(np.uint8, (2, 128 * bits // 8)))
    scales, biases = (
        data.draw(arrays(np.uint16, (2, 2), elements=st.integers(0x3000, 0x4800))) for _ in range(2)
    )
    scales ^= np.uint16(0x8000)  # negative ones are as common
    want = unpack_affine(codes.view("<u4"), from_bf16(scales), from_bf16(biases), bits)
    assert np.array_equal(affine.dequantize(Groups(codes, scales, biases), bits), want)


def group(*values: float) -> NDArray[np.uint16]:
    """One group: the values, then the last of them again."""
    filled = [*values, *[values[-1]] * (64 - len(values))]
    return to_bf16(np.array([filled], np.float32))


@pytest.mark.parametrize(
    ("values", "codes", "scale", "bias"),
    [
        ((0.0,), [0], -1e-7, 0.0),
        ((-0.0, 0.0), [0, 0], -1e-7, 0.0),
        ((3.0,), [0], -1e-7, 3.0),
        ((-3.0,), [0], -1e-7, -3.0),
        ((1e36,), [0], 0.0, 1e36),
        ((15.0, 7.0, 0.0), [0, 8, 15], -1.0, 15.0),
        ((-15.0, -7.0, 0.0), [0, 8, 15], 1.0, -15.0),
        ((1.0, 0.0, -1.0), [0, 7, 14], -1 / 7, 1.0),
        # 7.7 steps down to zero become 8, so the other end, 15.6 steps away, is out of reach.
        ((1.0, 0.0, -0.95), [0, 8, 15], -0.125, 1.0),
        ((1e-40, -1e-40), [0, 0], -1e-7, 0.0),
    ],
)
def test_groups_worked_by_hand(
    values: tuple[float, ...], codes: list[int], scale: float, bias: float
) -> None:
    found = affine.quantize(group(*values), 4)
    assert unpack_codes(found.codes.view("<u4"), 4)[0, : len(codes)].tolist() == codes
    for word, want in ((found.scales, scale), (found.biases, bias)):
        assert from_bf16(word)[0, 0] == from_bf16(to_bf16(np.array([want], np.float32)))[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rest", [0.0, 1.0, np.inf])
def test_what_is_not_finite_is_not_quantised(bad: float, rest: float) -> None:
    weights = np.concatenate([group(1.0), group(rest, bad, rest)])
    with pytest.raises(affine.NotFiniteError):
        affine.quantize(weights, 4)


def test_bf16_rounds_to_nearest_even() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    numbers = every[(every & 0x7F80) != 0x7F80]
    assert np.array_equal(to_bf16(from_bf16(numbers)), numbers)
    middle = (np.array([0x3F80, 0x3F81], np.uint32) << 16 | 0x8000).view(np.float32)
    assert to_bf16(middle).tolist() == [0x3F80, 0x3F82]


# --- Layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_equals_mlx_lm(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = GOLDEN["cases"][name]
    source = random_checkpoint.write(tmp_path / "in", **want["options"], form="published")
    assert file_digest(source / "config.json") == want["source_config"], (
        "the example writes another config: run tests/golden/generate_quantized.py"
    )
    if want["limit"]:
        monkeypatch.setattr(convert, "SHARD_BYTES", want["limit"])
    found = digests(lily.quantize(source, tmp_path / "out", threads=2))
    assert found == {key: want[key] for key in found}


def real_checkpoint() -> tuple[Checkpoint, dict[str, Any]]:
    """The released model's table in the published form, without files."""
    raw = random_checkpoint.config(random_checkpoint.PRESETS["real"], "published", False, True)
    config = parse_config(raw)
    expected = expected_tensors(config, "published")
    shapes = {weight_name(m): ("BF16", shape) for m, shape in expected.linears.items()}
    shapes |= {n: (dtypes[-1], shape) for n, (shape, dtypes) in expected.others.items()}
    tensors = {
        name: TensorEntry(name, 0, 0, int(np.prod(shape)) * DTYPE_BYTES[dtype], dtype, shape)
        for name, (dtype, shape) in shapes.items()
    }
    files = (Path("model.safetensors"),)
    return Checkpoint(Path(), files, config, "published", tensors, {}, (), {}, None, None), raw


def test_the_released_model_becomes_four_files() -> None:
    checkpoint, raw = real_checkpoint()
    tensors = [tensor for work in to_mlx(checkpoint, raw) for tensor in work.tensors]
    assert len(tensors) == 1757
    assert sum(t.nbytes for t in tensors) == 19_508_789_376
    assert len(split(tensors, convert.SHARD_BYTES)) == 4


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "tiny"
    return random_checkpoint.write(folder, "tiny", form="published", shard_bytes=2_000_000)


@pytest.fixture(scope="module")
def quantized(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lily.quantize(published, tmp_path_factory.mktemp("quantized") / "tiny")


def table(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        name: (entry.dtype, entry.shape)
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in read_header(path).items()
    }


def test_text_files_are_copied(published: Path, tmp_path: Path) -> None:
    source = shutil.copytree(published, tmp_path / "in")
    (source / "README.md").write_text("About it.\n")
    (source / "notes.txt").write_text("Not part of it.\n")
    out = lily.quantize(source, tmp_path / "out")
    copied = {"README.md", "chat_template.jinja", "generation_config.json", "tokenizer.json"}
    copied |= {"tokenizer_config.json"}
    for name in copied:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    written = {"config.json", "model.safetensors", "model.safetensors.index.json"}
    assert {path.name for path in out.iterdir()} == copied | written


def test_more_threads_write_the_same(published: Path, quantized: Path, tmp_path: Path) -> None:
    out = lily.quantize(published, tmp_path / "out", threads=3)
    for path in quantized.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_memory_stays_small(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("heads", form="published")
    tracemalloc.start()
    try:
        lily.quantize(source, tmp_path / "out", threads=2)
        lily.unpack(tmp_path / "out", tmp_path / "back", threads=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16_000_000  # of 38 MB that are read


@pytest.mark.parametrize(
    ("source", "dtype"),
    [("quantized", "float32"), ("quantized", "bfloat16"), ("mlx", "float32"), ("tied", "float32")],
)
def test_unpacked_weights_are_those_that_codes_stand_for(
    source: str, dtype: Any, quantized: Path, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folders = {
        "quantized": lambda: quantized,
        "mlx": lambda: checkpoint("tiny", form="mlx"),
        "tied": lambda: checkpoint("heads", form="mlx", tied=True, nested=False),
    }
    folder = folders[source]()
    out = lily.unpack(folder, tmp_path / "out", dtype=dtype)
    found, want = load_dequantised(out), load_dequantised(folder)
    assert found.keys() == want.keys()
    for name, value in want.items():
        if dtype == "bfloat16" and name.rpartition(".")[2] != "A_log":
            value = from_bf16(to_bf16(value))
        assert np.array_equal(found[name], value), name


def test_unpacking_gives_the_published_layout(
    published: Path, quantized: Path, tmp_path: Path
) -> None:
    out = lily.unpack(quantized, tmp_path / "out")
    want = {k: v for k, v in table(published).items() if not k.startswith(("model.visual", "mtp"))}
    assert table(out) == want
    before, after = (json.loads((f / "config.json").read_text()) for f in (published, out))
    assert after["text_config"] == before["text_config"]
    assert not [key for key in after if key.startswith("quantization")]
    in_float32 = lily.unpack(quantized, tmp_path / "float32", dtype="float32")
    assert {dtype for dtype, _ in table(in_float32).values()} == {"F32"}
    config = json.loads((in_float32 / "config.json").read_text())
    assert config["text_config"]["dtype"] == "float32"


def test_a_second_round_loses_no_norm(published: Path, quantized: Path, tmp_path: Path) -> None:
    again = lily.quantize(lily.unpack(quantized, tmp_path / "out"), tmp_path / "again")
    first, second = load_dequantised(quantized), load_dequantised(again)
    for name in first:
        if name.endswith(("norm", "conv1d", "A_log", "dt_bias")):
            assert np.array_equal(first[name], second[name]), name


def test_progress_counts_the_source(published: Path, tmp_path: Path) -> None:
    for what, run in (("quantize", lily.quantize), ("unpack", lily.unpack)):
        calls: list[tuple[str, int, int]] = []
        source = published if what == "quantize" else tmp_path / "quantize"
        run(source, tmp_path / what, progress=lambda *call, to=calls: to.append(call))
        assert {(name, total) for name, _, total in calls} == {(what, calls[-1][2])}
        done = [n for _, n, _ in calls]
        assert done == sorted(done)
        assert done[-1] == calls[-1][2]


# --- Refusals -----------------------------------------------------------------------------------


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    for key, value in changes.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config), encoding="utf-8")


def put(folder: Path, name: str, index: int, bits: int) -> None:
    """Overwrite one bf16 value of a tensor."""
    for path in folder.glob("*.safetensors"):
        entry = read_header(path).get(name)
        if entry is not None:
            with path.open("r+b") as file:
                file.seek(entry.offset + 2 * index)
                file.write(bits.to_bytes(2, "little"))
            return
    raise AssertionError(name)


def drop(folder: Path, name: str) -> None:
    """Rename a tensor, so that the one expected is missing."""
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        path.write_bytes(data.replace(f'"{name}"'.encode(), f'"{name[:-1]}x"'.encode()))
    (folder / "model.safetensors.index.json").unlink()


AT = "model.language_model.layers.0."
NAN, INF, HUGE = 0x7FC0, 0xFF80, 0x7F7F

# What is wrong with a published checkpoint → what the message must say.
REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    "not of the family": (
        lambda f: change_config(f, model_type="llama"),
        "model_type: 'llama', expected qwen3_5_moe",
    ),
    "quantised already": (
        lambda f: change_config(f, quantization={"group_size": 64, "bits": 4}),
        "quantization: found, expected an unquantised checkpoint\nhint: lily quantize --unpack",
    ),
    "of another method": (
        lambda f: change_config(f, quantization_config={"quant_method": "fp8"}),
        "quant_method: 'fp8', expected none",
    ),
    "lacks a tensor": (
        lambda f: drop(f, AT + "mlp.experts.down_proj"),
        "layers.0.mlp.experts.down_proj: missing, expected BF16 [8, 128, 64]",
    ),
    "inputs that make no groups": (
        lambda f: change_config(f, text_config={"moe_intermediate_size": 96}),
        "moe_intermediate_size: 96, expected a multiple of 64",
    ),
    "shapes of another config": (
        lambda f: change_config(f, text_config={"moe_intermediate_size": 128}),
        "layers.0.mlp.experts.gate_up_proj: shape [8, 128, 128], expected [8, 256, 128]",
    ),
    "NaN in a matrix": (
        lambda f: put(f, AT + "mlp.experts.gate_up_proj", 128 * 130 + 5, NAN),
        "layers.0.mlp.experts.gate_up_proj: nan at [1, 2, 5], expected finite values",
    ),
    "infinity in the embedding": (
        lambda f: put(f, "model.language_model.embed_tokens.weight", 128 * 511, INF),
        "embed_tokens.weight: -inf at [511, 0], expected finite values",
    ),
    "infinity in a norm": (
        lambda f: put(f, "model.language_model.norm.weight", 3, INF),
        "norm.weight: -inf at [3], expected finite values",
    ),
    "a group wider than float32": (
        lambda f: [put(f, "lm_head.weight", i, HUGE | i << 15) for i in (0, 1)] and None,
        "lm_head.weight: a group in rows 0 to",
    ),
}


@pytest.mark.parametrize("story", REFUSALS)
def test_refused(story: str, published: Path, tmp_path: Path) -> None:
    spoil, message = REFUSALS[story]
    source = shutil.copytree(published, tmp_path / "in")
    spoil(source)
    with pytest.raises(lily.CheckpointError) as caught:
        lily.quantize(source, tmp_path / "out")
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == ["in"]


def test_each_direction_refuses_what_the_other_takes(
    published: Path, quantized: Path, tmp_path: Path
) -> None:
    with pytest.raises(lily.CheckpointError, match="quantization: found"):
        lily.quantize(quantized, tmp_path / "out")
    with pytest.raises(lily.CheckpointError, match="in the published form already"):
        lily.unpack(published, tmp_path / "out")
    plain = shutil.copytree(quantized, tmp_path / "in")
    config = json.loads((plain / "config.json").read_text("utf-8"))
    del config["quantization"], config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(lily.CheckpointError, match="has no quantization"):
        lily.quantize(plain, tmp_path / "out")


@pytest.mark.parametrize("run", [lily.quantize, lily.unpack])
@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_exists_is_not_overwritten(
    run: Callable[..., Path], kind: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    {
        "folder": out.mkdir,
        "file": out.touch,
        "dangling link": lambda: out.symlink_to("nowhere"),
    }[kind]()
    # Before any work: the source is not even looked for.
    with pytest.raises(lily.Error, match="out: exists, expected the name of a new folder"):
        run("/no/such/source", out)


def test_bad_arguments(published: Path, tmp_path: Path) -> None:
    with pytest.raises(lily.Error, match="nowhere: no such folder"):
        lily.quantize(published, tmp_path / "nowhere" / "out")
    with pytest.raises(ValueError, match="threads: 0, expected 1 or more"):
        lily.quantize(published, tmp_path / "out", threads=0)
    with pytest.raises(ValueError, match="dtype: 'float16'"):
        lily.unpack(published, tmp_path / "out", dtype="float16")  # type: ignore[arg-type]


def test_too_little_room(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10_000_000)
    )
    with pytest.raises(lily.Error, match=r"0\.01 GB free on the disk, expected 0\.07 GB"):
        lily.quantize(published, tmp_path / "out")
    assert os.listdir(tmp_path) == []


# --- Nothing is left behind ---------------------------------------------------------------------


class Trouble(Exception):
    pass


@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_caller_that_gives_up(
    error: type[BaseException], share: float, published: Path, tmp_path: Path
) -> None:
    def stop(_: str, done: int, total: int) -> None:
        if done >= share * total:
            assert any(path.name.startswith(".lily-") for path in tmp_path.iterdir())
            raise error

    with pytest.raises(error):
        lily.quantize(published, tmp_path / "out", progress=stop)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [0, 1, 40])
def test_a_disk_that_fails(
    number: int, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, calls = os.pwrite, iter(range(10**9))

    def fail(file: int, data: bytes, offset: int) -> int:
        if next(calls) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(lily.Error, match="out: cannot be written: No space left on device"):
        lily.quantize(published, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_writes_less_than_it_was_given(
    published: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:1000], at))
    out = lily.quantize(published, tmp_path / "out")
    assert digests(out) == digests(quantized)


def test_a_source_that_shrinks(published: Path, tmp_path: Path) -> None:
    source = shutil.copytree(published, tmp_path / "in")
    path = sorted(source.glob("*.safetensors"))[-1]

    def shrink(_: str, done: int, total: int) -> None:
        os.truncate(path, 100_000)

    with pytest.raises(lily.CheckpointError, match="ends at byte"):
        lily.quantize(source, tmp_path / "out", threads=1, progress=shrink)
    assert os.listdir(tmp_path) == ["in"]


def test_someone_else_takes_the_name(published: Path, tmp_path: Path) -> None:
    def take(_: str, done: int, total: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)

    with pytest.raises(lily.Error, match="out: exists"):
        lily.quantize(published, tmp_path / "out", progress=take)
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == []


def test_a_byte_left_out_is_noticed(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = TensorWriter.write

    def forgetful(self: TensorWriter, name: str, offset: int, data: NDArray[Any]) -> None:
        if not name.endswith("norm.weight"):
            write(self, name, offset, data)

    monkeypatch.setattr(TensorWriter, "write", forgetful)
    with pytest.raises(lily.InternalError, match="bytes were not written"):
        lily.quantize(published, tmp_path / "out")
    assert os.listdir(tmp_path) == []


# --- The command --------------------------------------------------------------------------------


def test_the_command(
    published: Path, quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    assert cli.main(["quantize", str(published), out, "--threads", "1"]) == 0
    assert digests(Path(out)) == digests(quantized)
    assert cli.main(["quantize", out, back, "--unpack", "--dtype", "float32"]) == 0
    assert {dtype for dtype, _ in table(Path(back)).values()} == {"F32"}
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith(f"{out}: 0.00175 GB in ")


def test_the_command_fails(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv, code, message in (
        (["--dtype", "float32"], 2, "--dtype needs --unpack"),
        (["--unpack"], 1, "in the published form already"),
    ):
        assert cli.main(["quantize", str(published), str(tmp_path / "out"), *argv]) == code
        assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
