"""The arguments of the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Command = Callable[[argparse.Namespace], None]


class UsageError(Exception):
    """The command was given wrongly."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\nhint: {self.prog} --help")


def build_parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser; the chosen command's function is `run` of its result."""
    from lily import __version__

    parser = _Parser(
        prog="lily",
        description="Run Qwen3.6-35B-A3B, or a model of its family, on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lily {__version__}")
    added = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, text: str) -> _Parser:
        sub: _Parser = added.add_parser(
            name, help=text.lower().rstrip("."), description=text, allow_abbrev=False
        )
        sub.set_defaults(run=commands[name])
        sub.add_argument(
            "model", metavar="MODEL", help='a folder, or "org/name" on the Hugging Face hub'
        )
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

    info = command("info", "Say what a checkpoint is, without loading it.")
    info.add_argument("--json", action="store_true", help="as JSON")
    _plan_options(info)

    plan = command("plan", "Say how much memory a model takes, without loading it.")
    plan.add_argument("--context", type=_count, metavar="N", help="total for so many tokens")
    plan.add_argument("--json", action="store_true", help="as JSON")
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
    bench.add_argument("--json", metavar="FILE", help='write all rounds, "-" for standard output')
    bench.add_argument(
        "--peers",
        default="auto",
        metavar="P,P",
        help="mlx-lm, transformers, llama-cpp-python; auto for those installed; none",
    )
    bench.add_argument(
        "--peer-model",
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="what a peer loads instead of MODEL",
    )
    bench.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="PEER=PYTHON",
        help="the Python that a peer is installed in",
    )
    _threads_option(bench)
    _plan_options(bench)
    return parser


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
    _threads_option(group)


def _threads_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--threads", type=_count, metavar="N", help="of the CPU device; default: physical cores"
    )


def _plan_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("model")
    group.add_argument("--device", choices=("auto", "cpu", "metal"), default="auto")
    group.add_argument("--precision", choices=("fast", "float32"), default="fast")
    group.add_argument("--memory-limit", type=_size, metavar="SIZE", help="such as 24GiB or 20GB")
    group.add_argument("--revision", metavar="R", help="branch, tag or commit on the hub")
    group.add_argument("--offline", action="store_true", help="open no connection")
    return group


def _count(text: str) -> int:
    if re.fullmatch(r"[0-9_]{1,12}", text, re.ASCII) and 1 <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}, expected a number from 1")


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
        StopStrings(args.stop)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return options


def system_message(args: argparse.Namespace) -> list[dict[str, str]]:
    """The chat's first messages."""
    return [] if args.system is None else [{"role": "system", "content": args.system}]
