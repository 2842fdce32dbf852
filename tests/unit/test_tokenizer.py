"""Ids and text, against the `tokenizers` package itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lily.errors import CheckpointError
from lily.tokenizer import StreamDecoder, Tokenizer
from tokenizers_fixture import CONTROLS, TAGS, reference_tokenizer, write_tokenizer

# Text with spellings of added tokens, whole, broken and overlapping.
texts = st.lists(
    st.sampled_from([*CONTROLS, *TAGS, "<|im_", "end|>", "<", "|>", " ", "\n", "the cat", "日本語"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("a tokenizer, 日本"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    return reference_tokenizer()


@given(text=texts)
def test_with_special_tokens_equals_the_package(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text, special=True) == reference.encode(text).ids


@given(text=texts)
def test_by_default_no_text_becomes_an_added_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.added_tokens.values())
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


@given(data=st.data())
def test_decode_equals_the_package(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_tokens - 1)))
    for skip in (False, True):
        expected = reference.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special=skip) == expected


@given(data=st.data())
def test_joined_pieces_equal_the_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_tokens - 1)))
    for skip in (False, True):
        stream = StreamDecoder(tokenizer, skip_special=skip)
        pieces = [stream.push(id) for id in ids]
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids, skip_special=skip)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_stream_never_splits_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(id) for id in tokenizer.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert stream.finish() == ""


@pytest.mark.parametrize("text", ["👩‍👩‍👧", "日本語", "e\u0301x\u0308", "Ελλάδα, Россия, हिन्दी"])
def test_scripts_survive_byte_by_byte(tokenizer: Tokenizer, text: str) -> None:
    byte_ids = {tokenizer.token_bytes(id): id for id in range(256)}
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(byte_ids[bytes([byte])]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) == len(text)


def test_invalid_bytes_give_one_mark(tokenizer: Tokenizer) -> None:
    byte_ids = {tokenizer.token_bytes(id): id for id in range(256)}
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(byte_ids[bytes([byte])]) for byte in b"a\xff\xe6\x97b\xe6"]
    assert [*pieces, stream.finish()] == ["a", "\ufffd", "", "", "\ufffdb", "", "\ufffd"]


def test_controls_are_hidden_and_tags_are_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>a</think><tool_call><|im_end|>", special=True)
    hidden, shown = StreamDecoder(tokenizer), StreamDecoder(tokenizer, skip_special=False)
    assert "".join(map(hidden.push, ids)) == "<think>a</think><tool_call>"
    assert "".join(map(shown.push, ids)) == "<think>a</think><tool_call><|im_end|>"
    assert tokenizer.special_ids == {tokenizer.added_tokens[text] for text in CONTROLS}


def test_package_switch_would_not_do(reference: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    # Why the tokenizer keeps one that knows no added token: the switch leaves tags as they are.
    reference = tokenizers.Tokenizer.from_str(reference.to_str())
    reference.encode_special_tokens = True
    assert tokenizer.added_tokens["<think>"] in reference.encode("<think>").ids
    assert tokenizer.added_tokens["<think>"] not in tokenizer.encode("<think>")


def test_split_added(tokenizer: Tokenizer) -> None:
    end = tokenizer.added_tokens["<|im_end|>"]
    assert tokenizer.split_added("a<|im_end|><|im_end|>b") == ["a", end, end, "b"]
    assert tokenizer.split_added("") == []


def test_stop_ids(folder: Path, tokenizer: Tokenizer) -> None:
    end, text_end = tokenizer.added_tokens["<|im_end|>"], tokenizer.added_tokens["<|endoftext|>"]
    assert tokenizer.stop_ids == {end}
    assert Tokenizer(folder / "tokenizer.json", stop_ids=[text_end]).stop_ids == {end, text_end}
    with pytest.raises(ValueError, match="100000"):
        Tokenizer(folder, stop_ids=[100_000])


@pytest.mark.parametrize("id", [-1, 100_000])
def test_id_out_of_range(tokenizer: Tokenizer, id: int) -> None:
    calls: list[Callable[[], object]] = [
        lambda: tokenizer.token_bytes(id),
        lambda: tokenizer.decode([id]),
        lambda: StreamDecoder(tokenizer).push(id),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"token id {id}"):
            call()


def test_half_a_surrogate_pair_is_named(tokenizer: Tokenizer) -> None:
    for special in (False, True):
        with pytest.raises(ValueError, match=r"U\+D83D.* at character 2"):
            tokenizer.encode("ab\ud83d", special=special)


def test_empty_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == tokenizer.encode("", special=True) == []
    assert tokenizer.decode([]) == ""


def test_threads_do_not_disturb_each_other(tokenizer: Tokenizer) -> None:
    text = "the cat<|im_end|><think> 日本語 " * 50

    def both(_: int) -> tuple[list[int], list[int]]:
        return tokenizer.encode(text), tokenizer.encode(text, special=True)

    expected = both(0)
    with ThreadPoolExecutor(8) as pool:
        assert all(result == expected for result in pool.map(both, range(64)))


def test_refuses_what_it_does_not_understand(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        Tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer.json: cannot be read"):
        Tokenizer(tmp_path)

    whole = json.loads(reference_tokenizer().to_str())
    whole["added_tokens"][0]["lstrip"] = True
    file.write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match="added token '<|endoftext|>'"):
        Tokenizer(tmp_path)

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁the": 0}))
    words.save(str(file))
    with pytest.raises(CheckpointError, match="token 0: '▁the'"):
        Tokenizer(tmp_path)


def test_added_tokens_that_the_package_would_renumber(tmp_path: Path) -> None:
    whole = json.loads(reference_tokenizer().to_str())
    whole["added_tokens"][-1]["id"] += 5
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match="added token '</think>': id 375"):
        Tokenizer(tmp_path)


def test_importing_stays_light() -> None:
    code = "import sys, lily.tokenizer, lily.chat; print({'tokenizers', 'jinja2'} & {*sys.modules})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, check=True)
    assert done.stdout.strip() == b"set()"
