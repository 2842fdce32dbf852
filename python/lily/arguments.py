"""The arguments of the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Command = Callable[[argparse.Namespace], None]

SWEEP = (256, 1024, 4096, 16_384, 32_768, 65_536, 131_072)
"""Contexts of `lily bench --sweep`."""


class UsageError(Exception):
    """The command was given wrongly."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\nhint: {self.prog} --help")


class _IntermixedParser(_Parser):
    """Takes its positional arguments wherever they stand, also one behind the options."""

    _within = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._within:  # each of the two passes comes back here
            return super().parse_known_args(args, namespace)
        self._within = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._within = False


def build_parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser; the chosen command's function is `run` of its result."""
    from lily import __version__

    parser = _Parser(
        prog="lily",
        description="Run Qwen3.6-35B-A3B, or a model of its family, on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lily {__version__}")
    added = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_IntermixedParser)

    def command(name: str, text: str, model: bool = True) -> _Parser:
        sub: _Parser = added.add_parser(
            name, help=text.lower().rstrip("."), description=text, allow_abbrev=False
        )
        sub.set_defaults(run=commands[name])
        if model:
            sub.add_argument("model", metavar="MODEL", help=_MODEL)
        return sub

    generate = command("generate", "Write text after a prompt.")
    generate.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to go on from")
    generate.add_argument("--file", metavar="F", help='read the prompt from a file, or "-"')
    generate.add_argument(
        "--chat", action="store_true", help="the prompt is a message to be answered"
    )
    generate.add_argument(
        "--special",
        action="store_true",
        help="spellings such as <|im_end|> in the prompt are those tokens",
    )
    generate.add_argument("--quiet", action="store_true", help="no statistics")
    _text_options(generate)
    _load_options(generate)

    chat = command("chat", "Talk with a model.")
    _text_options(chat)
    _load_options(chat)

    _add_serve(command("serve", "Serve a model over HTTP, as OpenAI's API, with a web page."))

    info = command("info", "Say what a checkpoint is, without loading it.")
    info.add_argument("--json", action="store_true", help="as JSON")
    _plan_options(info)

    plan = command("plan", "Say how much memory a model takes, without loading it.")
    plan.add_argument("--context", type=_count, metavar="N", help="total for so many tokens")
    plan.add_argument("--json", action="store_true", help="as JSON")
    _ablate_option(plan, "count dispatches without a technique that makes plans fast; repeatable")
    _plan_options(plan)

    bench = command("bench", "Measure speed, beside other engines if they are installed.")
    bench.add_argument(
        "--contexts",
        type=_counts,
        default=(256, 1024, 4096),
        metavar="N,N",
        help="tokens before decoding is measured (256,1024,4096)",
    )
    for name, default, text in (
        ("prefill", 512, "tokens of a further prefill measurement"),
        ("decode", 128, "tokens to decode"),
        ("rounds", 5, "rounds, in which engines take turns"),
    ):
        bench.add_argument(
            f"--{name}", type=_count, default=default, metavar="N", help=f"{text} ({default})"
        )
    bench.add_argument(
        "--sweep",
        dest="contexts",
        action="store_const",
        const=SWEEP,
        help=f"contexts {', '.join(f'{n:,}' for n in SWEEP)}",
    )
    bench.add_argument(
        "--stages", action="store_true", help="also where the time goes, one dispatch at a time"
    )
    bench.add_argument("--csv", metavar="FILE", help="write all rounds as a table")
    _ablate_option(bench, "also measure without a technique that makes plans fast; repeatable")
    bench.add_argument("--json", metavar="FILE", help='write all rounds, "-" for standard output')
    _peer_options(bench, "mlx-lm, transformers, llama-cpp-python; auto for those installed; none")
    _threads_option(bench)
    _plan_options(bench)

    _add_doctor(command("doctor", "Say in one page whether all of lily works here.", False))
    _add_quantize(command("quantize", "Write a published checkpoint in MLX's 4-bit form."))
    _add_perplexity(command("perplexity", "Say how well a model foresees a text."))
    _add_fidelity(
        command("fidelity", "Compare lily, and engines that are installed, with a reference.")
    )
    return parser


_MODEL = 'a folder, or "org/name" on the Hugging Face hub'

_DOCTOR = """\
Compiles every kernel of the Metal device for the dimensions of Qwen3.6-35B-A3B, and compares each
with the CPU device's, given the same inputs: in a small random model, or with the first layers of
MODEL, whose weights are then loaded twice. Exit code 1 if something is wrong."""

_WINDOWS = """\
The text is cut into windows that do not overlap. Each starts from nothing, and every token of it
but the first is scored, given those before it in its window. The softmax includes padding rows
of the vocabulary, as other engines do. Special tokens spelled in the text are ordinary text."""

_REFERENCE = """\
The reference is transformers in float32 on the CPU if it is installed, else mlx-lm likewise, else
lily in float32. Its logits are kept in a file in TMPDIR, 4 bytes for each position and entry of the
vocabulary; transformers also needs room there for a copy of the weights in float32."""


_QUANTIZE = """\
Weights become codes of 4 bits in groups of 64; those of the router and of the shared expert's gate
get 8 bits. OUT appears when it is complete: an error or Ctrl-C leaves nothing."""


_SERVE = """\
Needs fastapi and uvicorn: pip install 'lily[server]'. Without --host, only this machine can reach
the server. Ctrl-C cancels what runs and ends it."""


def _add_serve(parser: _Parser) -> None:
    parser.epilog = _SERVE
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="H", help="address (127.0.0.1)")
    group.add_argument("--port", type=int, default=8080, metavar="N", help="0 is a free one (8080)")
    group.add_argument("--name", metavar="NAME", help="what clients call the model")
    group.add_argument(
        "--api-key", metavar="KEY", help="what clients must send; better in LILY_API_KEY"
    )
    group.add_argument(
        "--parallel", type=_count, default=4, metavar="N", help="replies that run at once (4)"
    )
    group.add_argument(
        "--queue", type=int, default=64, metavar="N", help="requests that may wait (64)"
    )
    group.add_argument(
        "--max-body", type=_size, default="16MiB", metavar="SIZE", help="of a request (16MiB)"
    )
    group.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help='whose pages may call the server, or "*"; repeatable',
    )
    _sampling_options(parser)
    _load_options(parser)


def _add_doctor(parser: _Parser) -> None:
    parser.epilog = _DOCTOR
    parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{_MODEL}, to check with")
    parser.add_argument("--device", choices=("auto", "cpu", "metal"), default="auto")
    parser.add_argument("--json", metavar="FILE", help='write all of it, "-" for standard output')
    _threads_option(parser)
    _hub_options(parser)


def _add_quantize(parser: _Parser) -> None:
    parser.epilog = _QUANTIZE
    parser.add_argument("out", metavar="OUT", help="name of the new folder")
    parser.add_argument(
        "--unpack", action="store_true", help="the other way: from MLX's form to the published one"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of weights that are unpacked; float32 loses nothing (bfloat16)",
    )
    parser.add_argument(
        "--threads", type=_count, metavar="N", help="default: one for each core there is"
    )
    _hub_options(parser)


def _add_perplexity(parser: _Parser) -> None:
    parser.epilog = _WINDOWS
    _scored_text(parser, "score no more than N tokens")
    parser.add_argument("--json", action="store_true", help="as JSON")
    _threads_option(_plan_options(parser))


def _add_fidelity(parser: _Parser) -> None:
    parser.epilog = f"{_WINDOWS} {_REFERENCE}"
    _scored_text(parser, "compare no more than N positions (10,000)", positions=10_000)
    parser.add_argument(
        "--reference", choices=("transformers", "mlx-lm", "lily"), help="lily is in float32"
    )
    parser.add_argument("--json", metavar="FILE", help='write all figures, "-" for standard output')
    _peer_options(parser, "mlx-lm, transformers; auto for those installed; none")
    _threads_option(_plan_options(parser, precision=False))


def _scored_text(parser: _Parser, text: str, positions: int | None = None) -> None:
    parser.add_argument("file", metavar="FILE", help='a text in UTF-8, or "-" for standard input')
    parser.add_argument(
        "--window", type=_count, metavar="N", help="tokens of a window (2,048, or the context)"
    )
    parser.add_argument("--positions", type=_count, default=positions, metavar="N", help=text)


def _peer_options(parser: _Parser, names: str) -> None:
    parser.add_argument("--peers", default="auto", metavar="P,P", help=names)
    for option, value, text in (
        ("--peer-model", "PATH", "what a peer loads instead of MODEL"),
        ("--peer-python", "PYTHON", "the Python that a peer is installed in"),
    ):
        parser.add_argument(option, action="append", default=[], metavar=f"PEER={value}", help=text)


def _text_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text")
    group.add_argument("--max-tokens", type=_count, metavar="N", help="most tokens to draw")
    group.add_argument("--stop", action="append", default=[], metavar="S", help="end before S")
    group.add_argument("--system", metavar="TEXT", help="system message of the chat")
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether to think before answering in a chat",
    )
    _sampling_options(parser)


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling", "What is not given is as the checkpoint recommends."
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the best token")
    group.add_argument("--top-k", type=int, metavar="K", help="the K best tokens; 0 is all")
    group.add_argument("--top-p", type=float, metavar="P", help="the best that sum up to P")
    group.add_argument("--min-p", type=float, metavar="P", help="those P times as likely as best")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed, the same text")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="1 has no effect")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="0 has no effect")


def _load_options(parser: argparse.ArgumentParser) -> None:
    group = _plan_options(parser)
    group.add_argument("--context", type=_count, metavar="N", help="most tokens of a session")
    group.add_argument(
        "--reuse-memory",
        type=lambda text: 0 if text == "0" else _size(text),
        metavar="SIZE",
        help="for states of earlier prompts; 0 keeps none",
    )
    _threads_option(group)


def _ablate_option(parser: argparse._ActionsContainer, text: str) -> None:
    parser.add_argument("--ablate", action="append", default=[], metavar="NAME", help=text)


def _threads_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--threads", type=_count, metavar="N", help="of the CPU device; default: physical cores"
    )


def _plan_options(
    parser: argparse.ArgumentParser, *, precision: bool = True
) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("model")
    group.add_argument("--device", choices=("auto", "cpu", "metal"), default="auto")
    if precision:
        group.add_argument("--precision", choices=("fast", "float32"), default="fast")
        group.add_argument(
            "--kv",
            choices=("bf16", "float32", "int8"),
            help="element type of the KV cache; default: as the precision's",
        )
    group.add_argument("--memory-limit", type=_size, metavar="SIZE", help="such as 24GiB or 20GB")
    _hub_options(group)
    return group


def _hub_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit on the hub")
    parser.add_argument("--offline", action="store_true", help="open no connection")


def _count(text: str) -> int:
    if re.fullmatch(r"[0-9_]{1,12}", text, re.ASCII) and 1 <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}, expected a number from 1 to {2**31 - 1}")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{i}B": (1024 if i else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for i in ("", "I")
}


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text, re.ASCII)
    if match and match[2].upper() in _UNITS and len(match[1]) < 20:
        n_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
        if 1 <= n_bytes < 2**63:
            return n_bytes
    raise argparse.ArgumentTypeError(f"{text!r}, expected a size such as 24GiB or 20GB")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options given; wrong ones are refused before anything is loaded."""
    from lily.sampling import Sampling
    from lily.stops import StopStrings

    names = (
        "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty",
    )  # fmt: skip
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    try:
        Sampling().merged(options)
        StopStrings(getattr(args, "stop", ()))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return options


def system_message(args: argparse.Namespace) -> list[dict[str, str]]:
    """The chat's first messages."""
    return [] if args.system is None else [{"role": "system", "content": args.system}]
