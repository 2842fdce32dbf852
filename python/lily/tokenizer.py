"""Text to token ids and back, for the byte-level BPE tokenizer of a checkpoint.

Two kinds of token stand beside the ordinary vocabulary as *added tokens*. Control tokens such as
`<|im_end|>` (flag `special` in `tokenizer.json`) steer the model and are not text. Tags such as
`<think>` and `<tool_call>` are single tokens too, but belong to the text that the model writes.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lily.errors import CheckpointError
from lily.files import read_json

if TYPE_CHECKING:
    import tokenizers

CONFIG_FILE = "tokenizer_config.json"


class Tokenizer:
    """The tokenizer of one checkpoint. It never changes, so any number of threads may use it.

    Args:
        path: the checkpoint's folder, or its `tokenizer.json`.
        stop_ids: ids that end a text, as the checkpoint's configs name them. The tokenizer's own
            end token, if `tokenizer_config.json` names one, is always added.

    Attributes:
        n_tokens: ids are in [0, n_tokens). The model's vocabulary may be padded beyond that.
        added_tokens: spelling -> id of all added tokens, control tokens and tags.
        added_pattern: finds their spellings in text, leftmost first, the longest of equals.
        special_ids: the ids of the control tokens.
        stop_ids: the ids that end a text.

    Raises:
        CheckpointError: the file is missing, damaged, or not a byte-level BPE tokenizer.
        ValueError: a stop id is out of range.
    """

    n_tokens: int
    added_tokens: Mapping[str, int]
    added_pattern: re.Pattern[str]
    special_ids: frozenset[int]
    stop_ids: frozenset[int]

    def __init__(self, path: str | os.PathLike[str], *, stop_ids: Iterable[int] = ()) -> None:
        file = Path(path)
        if file.is_dir():
            file /= "tokenizer.json"
        whole = _load(file)
        added = whole.get_added_tokens_decoder()
        _check_ids(added, file)
        for token in added.values():
            if token.lstrip or token.rstrip or token.single_word:
                raise CheckpointError(
                    f"{file.name}: added token {token.content!r}: strips its surroundings or needs "
                    "a word boundary, expected neither"
                )
        self.added_tokens = {token.content: id for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._bytes = _vocabulary(whole, self.added_tokens, file)
        self.n_tokens = len(self._bytes)
        self._plain = _without_added_tokens(whole)
        longest_first = sorted(self.added_tokens, key=len, reverse=True)
        self.added_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

        stops = {*stop_ids, *self._own_end(file.with_name(CONFIG_FILE))}
        for id in stops:
            self.token_bytes(id)
        self.stop_ids = frozenset(stops)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`; nothing is added at its start or end.

        Args:
            text: what to encode.
            special: whether spellings of added tokens (`<|im_end|>`, `<think>`) become those
                tokens. By default they are ordinary characters, as text from outside should be.

        Returns:
            ids in [0, n_tokens).

        Raises:
            ValueError: `text` holds half a surrogate pair.
        """
        check_text(text, "text")
        if not special:
            return self._encode_plain(text)
        ids: list[int] = []
        for part in self.split_added(text):
            ids.extend([part] if isinstance(part, int) else self._encode_plain(part))
        return ids

    def split_added(self, text: str) -> list[str | int]:
        """Cut `text` at added tokens: the ids of those, and the ordinary text between them."""
        parts: list[str | int] = []
        start = 0
        for match in self.added_pattern.finditer(text):
            parts += [text[start : match.start()], self.added_tokens[match[0]]]
            start = match.end()
        parts.append(text[start:])
        return [part for part in parts if part != ""]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become replacement marks (U+FFFD).

        Args:
            ids: token ids in [0, n_tokens).
            skip_special: leave control tokens out; tags stay.

        Raises:
            ValueError: an id is out of range.
        """
        shown = (id for id in ids if not (skip_special and id in self.special_ids))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for, often less than a character.

        Raises:
            ValueError: `id` is not in [0, n_tokens).
        """
        if not 0 <= id < self.n_tokens:
            raise ValueError(f"token id {id}, expected one in [0, {self.n_tokens})")
        return self._bytes[id]

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def _own_end(self, config: Path) -> list[int]:
        if not config.is_file():
            return []
        end = special_tokens(read_json(config)).get("eos_token", "")
        return [self.added_tokens[end]] if end in self.added_tokens else []


class StreamDecoder:
    """Turns ids into text one by one: the joined pieces are what `decode` makes of all ids.

    A character that spans several tokens is held back until it is whole, so no piece ends in the
    middle of one.

    Args:
        tokenizer: whose ids they are.
        skip_special: leave control tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that `id` completes; may be empty.

        Raises:
            ValueError: `id` is out of range; the stream is unchanged.
        """
        return "" if id in self._hidden else self._utf8.decode(self._tokenizer.token_bytes(id))

    def finish(self) -> str:
        """What is still held back: a replacement mark if the ids ended within a character."""
        return self._utf8.decode(b"", final=True)


def check_text(text: str, where: str) -> None:
    """Refuse text that no encoding can carry.

    Raises:
        ValueError: `text` holds half a surrogate pair; the message says where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(
            f"{where}: half a surrogate pair (U+{code:04X}) at character {error.start}, "
            "expected valid Unicode"
        ) from None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens (`eos_token`, `pad_token`, …) of a `tokenizer_config.json`."""
    named = {}
    for name, value in config.items():
        spelling = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(spelling, str):
            named[name] = spelling
    return named


def _load(file: Path) -> tokenizers.Tokenizer:
    import tokenizers

    if not file.is_file():
        raise CheckpointError(f"{file}: no such file, expected the checkpoint's tokenizer")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception
        raise CheckpointError(f"{file.name}: cannot be read: {error}") from error


def _check_ids(added: Mapping[int, tokenizers.AddedToken], file: Path) -> None:
    # The package numbers added tokens itself, without gaps, whatever the file says.
    entries = read_json(file).get("added_tokens") or []
    for entry in entries:
        token = added.get(entry["id"])
        if token is None or token.content != entry["content"]:
            raise CheckpointError(
                f"{file.name}: added token {entry['content']!r}: id {entry['id']}, expected ids to "
                "follow the vocabulary without a gap"
            )


def _without_added_tokens(whole: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    # The package's switch `encode_special_tokens` spares control tokens only, not tags, and is
    # shared state. A tokenizer on the same vocabulary that knows no added token does both jobs.
    import tokenizers

    plain = tokenizers.Tokenizer(whole.model)
    if whole.normalizer is not None:
        plain.normalizer = whole.normalizer
    if whole.pre_tokenizer is not None:
        plain.pre_tokenizer = whole.pre_tokenizer
    return plain


def _vocabulary(whole: tokenizers.Tokenizer, added: Mapping[str, int], file: Path) -> list[bytes]:
    """Bytes of each id; empty for an id that the file leaves out."""
    ids = whole.get_vocab(with_added_tokens=True)
    if not ids:
        raise CheckpointError(f"{file.name}: no tokens")
    table: list[bytes] = [b""] * (max(ids.values()) + 1)
    to_byte = _byte_of_char()
    for piece, id in ids.items():
        text = piece if piece in added else piece.translate(to_byte)
        try:
            table[id] = text.encode("utf-8" if piece in added else "latin-1")
        except UnicodeEncodeError:
            raise CheckpointError(
                f"{file.name}: token {id}: {piece!r}, expected the byte-level alphabet"
            ) from None
    return table


def _byte_of_char() -> dict[int, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others, in order, for
    the characters from U+0100 on. Source: GPT-2, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {b: b for b in printable} | {0x100 + i: b for i, b in enumerate(others)}
