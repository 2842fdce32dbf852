"""From a folder or a hub id to a checked table of tensors.

`resolve` finds the files, `open_checkpoint` reads config.json, the index and every
safetensors header and checks the whole table against the architecture. No tensor data is
read here: the core checks the table again and reads the bytes.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lily.config import Config, parse_config
from lily.errors import CheckpointError
from lily.files import TensorEntry, is_int, read_header, read_json, show
from lily.tensor_table import (
    Form,
    Format,
    TensorTable,
    check_tensors,
    parse_quantization,
)

Progress = Callable[[str, int, int], None]
"""Called with ("download", bytes so far, bytes in all); from other threads too."""

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
GENERATION_CONFIG: Final = "generation_config.json"
CHAT_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")

_MAX_FILES: Final = 4096
_MAX_TENSORS: Final = 500_000
_MAX_STOP_IDS: Final = 256


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files agree with each other and with the architecture.

    Attributes:
        folder: where the files are.
        files: safetensors files; `TensorEntry.file` indexes them.
        config: the text model's configuration.
        form: "mlx" or "published"; the latter has zero-centred norms, the convolution as
            [C, 1, 4] and fused experts (`layers.N.mlp.experts.gate_up_proj`).
        tensors: the text model's tensors under canonical names.
        formats: storage of each linear module. A module's matrix is `<module>.weight`,
            except for fused experts, where the tensor is named as the module.
        stop_ids: sorted ids that end a text, from all places that name any.
        generation_config: generation_config.json as it is; empty if there is none.
        tokenizer: path of tokenizer.json, or None.
        chat_template: path of the file that holds the chat template: a .jinja file, or a
            JSON file with the key "chat_template"; None if there is none.
    """

    folder: Path
    files: tuple[Path, ...]
    config: Config
    form: Form
    tensors: dict[str, TensorEntry]
    formats: dict[str, Format]
    stop_ids: tuple[int, ...]
    generation_config: dict[str, Any]
    tokenizer: Path | None
    chat_template: Path | None

    @property
    def weights_bytes(self) -> int:
        """Bytes of the text model's tensors as stored."""
        return sum(entry.nbytes for entry in self.tensors.values())


# Files of a folder -------------------------------------------------------------------------


def _check_file_name(name: object, where: str) -> str:
    """A shard's name must be that of a file directly in the folder, and nothing cleverer."""
    if (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and name.isprintable()  # so it can be encoded, too
        and len(name.encode()) <= 255
        and not set(name) & set('/\\:*?[]"<>|')
    ):
        return name
    raise CheckpointError(f"{where}: file {show(name)}, expected the name of a .safetensors file")


def _read_index(path: Path) -> dict[str, str]:
    """The index: tensor name → file name."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map: {show(weight_map)}, expected a filled object")
    checked = {
        name: _check_file_name(file, f"{path}: {show(name)}") for name, file in weight_map.items()
    }
    if len(set(checked.values())) > _MAX_FILES:
        raise CheckpointError(f"{path}: more than {_MAX_FILES} files")
    return checked


def _weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files to use in a folder that has no index, sorted."""
    try:
        names = sorted(
            entry.name
            for entry in os.scandir(folder)
            if entry.name.endswith(".safetensors") and not entry.name.startswith(".")
        )
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from None
    # Adapters and other extras may lie beside a model's own files.
    chosen = [name for name in names if name.startswith("model")] or names
    if not chosen:
        raise CheckpointError(f"{folder}: no .safetensors file, expected one or more")
    if len(chosen) > _MAX_FILES:
        raise CheckpointError(f"{folder}: more than {_MAX_FILES} .safetensors files")
    return [_check_file_name(name, str(folder)) for name in chosen]


def _absent_files(folder: Path, names: Sequence[str]) -> list[str]:
    """Which of these files, or of the shards that their numbers imply, are not there."""
    absent = [name for name in names if not os.path.exists(folder / name)]
    present = set(names)
    for name in names:
        # "model-00002-of-00004.safetensors"
        match = re.fullmatch(r"(.*-)(\d{1,5})-of-(\d{1,5})(\.safetensors)", name, re.ASCII)
        if match and int(match[3]) <= _MAX_FILES:
            width = len(match[2])
            for n in range(1, int(match[3]) + 1):
                sibling = f"{match[1]}{n:0{width}d}-of-{match[3]}{match[4]}"
                if sibling not in present:
                    absent.append(sibling)
                    present.add(sibling)
    return absent


def _open_files(folder: Path) -> tuple[list[Path], list[dict[str, TensorEntry]]]:
    index_path = folder / INDEX
    if os.path.lexists(index_path):
        index = _read_index(index_path)
        names = sorted(set(index.values()))
        where = str(index_path)
    else:
        index = {}
        names = _weight_files(folder)
        where = str(folder)
    absent = _absent_files(folder, names)
    if absent:
        raise CheckpointError(f"{where}: {absent[0]} is missing from the folder")
    files = [folder / name for name in names]
    headers: list[dict[str, TensorEntry]] = []
    for i, path in enumerate(files):
        headers.append(read_header(path, i))
        if sum(map(len, headers)) > _MAX_TENSORS:
            raise CheckpointError(f"{where}: more than {_MAX_TENSORS} tensors")
    by_name = dict(zip(names, headers, strict=True))
    for tensor, name in index.items():
        if tensor not in by_name[name]:
            raise CheckpointError(
                f"{name}: {show(tensor)[1:-1]}: missing from the file, expected by {INDEX}"
            )
    return files, headers


# Text side ---------------------------------------------------------------------------------


def _ids(value: object, where: str, vocab_size: int) -> list[int]:
    """Token ids given as one integer, a list, or null."""
    values: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if len(values) > _MAX_STOP_IDS:
        raise CheckpointError(f"{where}: {len(values)} ids, expected at most {_MAX_STOP_IDS}")
    for item in values:
        if not is_int(item) or not 0 <= item < vocab_size:
            raise CheckpointError(f"{where}: {show(item)}, expected an id in 0..{vocab_size - 1}")
    return values


def _end_token_id(folder: Path, tokenizer_config: Mapping[str, Any], vocab_size: int) -> list[int]:
    """The id of the tokenizer's own end token, by its text."""
    where = f"{folder / TOKENIZER_CONFIG}: eos_token"
    token = tokenizer_config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return []
    if not isinstance(token, str):
        raise CheckpointError(f"{where}: {show(token)}, expected a text")
    tokenizer = read_json(folder / TOKENIZER)
    added = tokenizer.get("added_tokens")
    for item in added if isinstance(added, list) else []:
        if isinstance(item, dict) and item.get("content") == token:
            return _ids([item.get("id")], f"{folder / TOKENIZER}: {show(token)}", vocab_size)
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict) and token in vocab:
        return _ids([vocab[token]], f"{folder / TOKENIZER}: {show(token)}", vocab_size)
    raise CheckpointError(f"{where}: {show(token)}, expected a token of {TOKENIZER}")


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if os.path.lexists(path) else {}


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> Path | None:
    for name in CHAT_TEMPLATES:
        if os.path.isfile(folder / name):
            return folder / name
    return folder / TOKENIZER_CONFIG if tokenizer_config.get("chat_template") else None


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read and check everything about a checkpoint but its tensor data.

    With an index, the files it lists are the checkpoint; without one, `model*.safetensors`
    (or, if there are none, all `.safetensors` files). Tensors of the vision tower and the
    draft head are skipped, as are saved rotary frequencies and the copy of a tied head;
    any other tensor that the architecture does not have is refused.

    Args:
        folder: a folder with config.json and safetensors files.

    Raises:
        CheckpointError: naming file, tensor or field, what was expected and found.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder")
    config_path = folder / CONFIG
    raw = read_json(config_path)
    config = parse_config(raw, str(config_path))
    settings = parse_quantization(raw, str(config_path))
    files, headers = _open_files(folder)
    table = TensorTable(files, headers)
    form, formats = check_tensors(table, config, settings)

    generation = _optional_json(folder / GENERATION_CONFIG)
    tokenizer_config = _optional_json(folder / TOKENIZER_CONFIG)
    has_tokenizer = os.path.isfile(folder / TOKENIZER)
    places = [(config_path, raw), (folder / GENERATION_CONFIG, generation)]
    if isinstance(raw.get("text_config"), dict):
        places.append((config_path, raw["text_config"]))
    stop_ids = {
        token
        for path, obj in places
        for token in _ids(obj.get("eos_token_id"), f"{path}: eos_token_id", config.vocab_size)
    }
    if has_tokenizer:
        stop_ids.update(_end_token_id(folder, tokenizer_config, config.vocab_size))
    return Checkpoint(
        folder=folder,
        files=tuple(files),
        config=config,
        form=form,
        tensors=table.taken,
        formats=formats,
        stop_ids=tuple(sorted(stop_ids)),
        generation_config=generation,
        tokenizer=folder / TOKENIZER if has_tokenizer else None,
        chat_template=_chat_template(folder, tokenizer_config),
    )


# Hub ---------------------------------------------------------------------------------------

_METADATA: Final = (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    TOKENIZER,
    TOKENIZER_CONFIG,
    *CHAT_TEMPLATES,
)


def resolve(
    source: str | os.PathLike[str],
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> tuple[Path, str | None]:
    """Find a checkpoint's folder, downloading what is not cached.

    An existing local folder wins; otherwise `source` is a hub id, "org/name". If the
    revision is completely in huggingface_hub's cache, no connection is opened, so a branch
    stays at the commit that was cached first: name another revision to move on. Otherwise
    configuration and tokenizer come first, and a model that lily cannot run is refused
    before its weights are downloaded.

    Args:
        source: a folder, or "org/name".
        revision: branch, tag or full commit hash; hub ids only.
        offline: never open a connection. HF_HUB_OFFLINE=1 does the same.
        progress: called with ("download", bytes so far, bytes in all) while downloading;
            without it nothing is printed.

    Returns:
        The folder, and the commit hash of a hub checkpoint or None.

    Raises:
        CheckpointError: no such folder or id, no access, or not cached while offline.
        ValueError: `revision` is malformed, or `source` is a local folder that has none.
    """
    text = os.fspath(source)
    local = Path(os.path.expanduser(text))
    if text and os.path.isdir(local):
        if revision is not None:
            raise ValueError(f"revision: {show(revision)}, but {local} is a local folder")
        return local, None
    if os.path.isfile(local):
        raise CheckpointError(f"{local}: a file, expected the folder that holds it")
    if not isinstance(source, str) or not _is_repo_id(source):
        raise CheckpointError(
            f"{show(text)[1:-1]}: no such folder, expected a folder or a hub id org/name"
        )
    if revision is not None and not _is_revision(revision):
        raise ValueError(f"revision: {show(revision)}, expected a branch, tag or commit hash")
    return _from_hub(source, revision, offline, progress)


def _is_repo_id(text: str) -> bool:
    parts = text.split("/")
    return (
        len(parts) == 2
        and len(text) <= 96
        and all(re.fullmatch(r"\w(?:[\w.-]*\w)?", part, re.ASCII) for part in parts)
        and "--" not in text
        and ".." not in text
    )


def _is_revision(text: object) -> bool:
    # It becomes part of a path in the cache.
    return (
        isinstance(text, str)
        and len(text) <= 200
        and re.fullmatch(r"\w[\w./+-]*", text, re.ASCII) is not None
        and ".." not in text
    )


def _from_hub(
    repo: str, revision: str | None, offline: bool, progress: Progress | None
) -> tuple[Path, str]:
    try:
        from huggingface_hub import constants, try_to_load_from_cache
    except ImportError:
        raise CheckpointError(
            f"{repo}: no such folder, and huggingface_hub is not installed",
            hint="pip install huggingface_hub",
        ) from None

    named = repo if revision is None else f"{repo} at {revision}"
    cached = try_to_load_from_cache(repo, CONFIG, revision=revision)
    missing: list[str] = []
    if isinstance(cached, str):
        folder = Path(cached).parent
        missing = _missing_files(folder)
        if not missing:
            # None: neither cached nor known to be absent from the hub.
            tokenizer = try_to_load_from_cache(repo, TOKENIZER, revision=folder.name)
            if offline or _env_offline(constants) or tokenizer is not None:
                return folder, folder.name
    if offline or _env_offline(constants):
        lack = f"{missing[0]} is not cached" if missing else "it is not cached"
        raise CheckpointError(
            f"{named}: {lack}, and connections are off",
            hint="load it once with a connection, or pass a folder",
        )
    return _download(repo, revision, named, progress)


def _env_offline(constants: Any) -> bool:
    """The hub library reads its variables once, at import; look at them now as well."""
    values = [os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")]
    return bool(constants.HF_HUB_OFFLINE) or any(
        value.upper() in ("1", "ON", "YES", "TRUE") for value in values
    )


def _missing_files(folder: Path) -> list[str]:
    """What a cached folder lacks to be loaded; broken links count as missing."""
    if os.path.exists(folder / INDEX):
        names = sorted(set(_read_index(folder / INDEX).values()))
    else:
        try:
            names = _weight_files(folder)
        except CheckpointError:
            return ["any .safetensors file"]
    return _absent_files(folder, names)


def _download(
    repo: str, revision: str | None, named: str, progress: Progress | None
) -> tuple[Path, str]:
    from huggingface_hub import errors, snapshot_download

    reporter = _Reporter(progress)

    def fetch(commit: str | None, patterns: Sequence[str]) -> Path:
        hint: str | None
        try:
            return Path(
                snapshot_download(
                    repo,
                    revision=commit,
                    allow_patterns=list(patterns),
                    ignore_patterns=["*/*"],
                    tqdm_class=reporter.bar_class(),
                )
            )
        except errors.GatedRepoError:
            message = "access must be granted by its authors"
            hint = "accept the terms on its page, then log in with: hf auth login"
        except errors.RepositoryNotFoundError:
            message = "no such folder, and no such model on the hub"
            hint = "a private model needs: hf auth login"
        except errors.RevisionNotFoundError:
            message, hint = "no such revision on the hub", None
        except errors.LocalEntryNotFoundError as error:
            message = "the hub cannot be reached, and it is not cached"
            hint = _first_line(error.__cause__ or error)
        except Exception as error:
            # The client's HTTP and transfer libraries raise their own kinds, which change
            # between its versions; the caller's callback may have failed as well.
            if reporter.failure is not None:
                raise reporter.failure from None
            raise CheckpointError(
                f"{named}: download failed: {type(error).__name__}: {_first_line(error)}"
            ) from error
        raise CheckpointError(f"{named}: {message}", hint=hint)

    folder = fetch(revision, _METADATA)
    commit = folder.name
    # Before gigabytes are fetched: can this model be loaded at all?
    raw = read_json(folder / CONFIG)
    parse_config(raw, f"{repo}: {CONFIG}")
    parse_quantization(raw, f"{repo}: {CONFIG}")
    if os.path.exists(folder / INDEX):
        fetch(commit, sorted(set(_read_index(folder / INDEX).values())))
    else:
        fetch(commit, ["model*.safetensors"])
        if not any(folder.glob("*.safetensors")):
            fetch(commit, ["*.safetensors"])
    missing = _missing_files(folder)
    if missing:
        raise CheckpointError(f"{named}: {missing[0]} is missing after the download")
    return folder, commit


def _first_line(error: BaseException) -> str:
    return show((str(error).strip().splitlines() or [type(error).__name__])[0], 160)[1:-1]


class _Reporter:
    """Turns the hub library's progress bars into calls of one callback; prints nothing."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.failure: Exception | None = None
        self.lock = threading.Lock()
        self.bars: list[Any] = []
        self.base = 0

    def bar_class(self) -> Any:
        """A new class of bars for one download; earlier downloads stay counted."""
        tqdm: Any = importlib.import_module("tqdm.std").tqdm  # the hub library requires it
        reporter = self
        self.base += max((bar.n for bar in self.bars), default=0)
        self.bars = []

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                counts_bytes = kwargs.get("unit") == "B"
                super().__init__(*args, **(kwargs | {"disable": True}))
                if counts_bytes:
                    reporter.bars.append(self)

            def update(self, n: float | None = 1) -> None:
                reporter.advance(self, int(n or 0))

        return Bar

    def advance(self, bar: Any, n: int) -> None:
        # The library may show one transfer in two bars, received and written: the larger counts.
        with self.lock:
            if self.progress is None or self.failure is not None or bar not in self.bars:
                return
            bar.n += n
            done = self.base + max(b.n for b in self.bars)
            # Either total may be unknown, and that of bytes received is stretched as they come.
            total = self.base + min((b.total for b in self.bars if b.total), default=0)
            try:
                self.progress("download", done, max(done, total))
            except Exception as error:
                self.failure = error
                raise
