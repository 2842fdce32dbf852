"""The command `lily`.

Text goes to standard output, everything else to standard error. Errors are one line, with a hint
below where there is one. Exit codes: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C, 141
when the reader of standard output has gone.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lily.arguments import UsageError, build_parser, sampling_options, system_message
from lily.describing import show_info, show_plan
from lily.terminal import (
    Bar,
    Output,
    drop_output,
    is_terminal,
    note,
    open_output,
    prepare_streams,
    printable,
)

if TYPE_CHECKING:
    from lily.chat_reply import ReplyResult
    from lily.generation import Result
    from lily.model import Model

INTERRUPTED = 130
PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    prepare_streams()
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = PIPE_CLOSED
    try:
        sys.stdout.flush()
    except OSError as error:
        drop_output()
        if code == 0:
            closed = isinstance(error, BrokenPipeError)
            code = PIPE_CLOSED if closed else _fail(f"standard output: {error.strerror}")
    return code


def _run(argv: list[str]) -> int:
    from lily.errors import Error

    try:
        _check_arguments(argv)
        parser = build_parser(
            {
                "generate": _generate,
                "chat": _chat,
                "serve": _serve,
                "info": show_info,
                "plan": show_plan,
                "bench": _bench,
                "doctor": _doctor,
                "quantize": _quantize,
                "perplexity": _perplexity,
                "fidelity": _fidelity,
            }
        )
        args = parser.parse_args(argv)
        args.run(args)
    except SystemExit as done:  # argparse, after --help and --version
        return int(done.code or 0)
    except UsageError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        raise
    except (Error, ValueError) as error:
        return _fail(str(error))
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return _fail(where + (error.strerror or str(error)))
    except MemoryError:
        return _fail("out of memory")
    except Exception as error:
        if os.environ.get("LILY_TRACEBACK"):
            raise
        return _fail(
            f"unexpected {type(error).__name__}: {' '.join(str(error).split())}\n"
            "hint: this is a bug; LILY_TRACEBACK=1 shows where"
        )
    return 0


def _check_arguments(argv: Sequence[str]) -> None:
    for number, argument in enumerate(argv, 1):
        if any("\ud800" <= char <= "\udfff" for char in argument):
            shown = argument.encode("ascii", "backslashreplace").decode()
            raise UsageError(f"argument {number}: '{shown[:80]}', expected valid Unicode")


def _fail(message: str, code: int = 1) -> int:
    """Print an error: its message, and a hint if it has one."""
    first, *more = message.splitlines() or ["failed"]
    hints = [line for line in more if line.startswith("hint: ")][:1]
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        print("\n".join(map(printable, [f"lily: error: {first}", *hints])), file=sys.stderr)
    return code


@contextlib.contextmanager
def _loaded(args: argparse.Namespace, context: int | None, bar: Bar) -> Iterator[Model]:
    from lily.model import Model

    try:
        model = Model.load(
            args.model,
            device=args.device,
            precision=args.precision,
            kv=args.kv,
            context=context,
            threads=args.threads,
            memory_limit=args.memory_limit,
            reuse_memory=getattr(args, "reuse_memory", None),
            revision=args.revision,
            offline=args.offline,
            progress=bar if bar.enabled else None,
        )
    finally:
        bar.clear()
    with model:
        yield model


# lily generate


def _generate(args: argparse.Namespace) -> None:
    options = sampling_options(args)
    if not args.chat and (args.system is not None or args.thinking is not None):
        name = "--system" if args.system is not None else "--thinking"
        raise UsageError(f"{name} needs --chat")
    if args.chat and args.special:
        raise UsageError("--special does not go with --chat")
    text = _prompt(args)
    bar = Bar()
    with _loaded(args, args.context, bar) as model:
        prompt: str | list[int] | list[dict[str, str]] = text
        if args.chat:
            prompt = [*system_message(args), {"role": "user", "content": text}]
        elif args.special:
            prompt = model.encode(text, special=True)
        write: Callable[..., None] = _write_text
        if args.chat and is_terminal(sys.stdout):
            write = _write_reply
        write(
            args,
            model,
            bar,
            prompt,
            max_tokens=args.max_tokens,
            stop=args.stop,
            thinking=args.thinking,
            progress=bar.prompt if bar.enabled else None,
            **options,
        )


def _write_text(
    args: argparse.Namespace, model: Model, bar: Bar, prompt: Any, **options: Any
) -> None:
    """Everything that is drawn, as it is."""
    output = Output()
    with model.generate(prompt, **options) as generation:
        try:
            for piece in generation:
                bar.clear()
                output.write(piece.text)
        finally:
            bar.clear()
        output.end()
        if not args.quiet:
            note(_statistics(generation.result()))


def _write_reply(
    args: argparse.Namespace, model: Model, bar: Bar, prompt: Any, **options: Any
) -> None:
    """Thinking and answer told apart, for a reader."""
    from lily.conversation import write_reply

    output = open_output(markdown=True)
    with model.chat(prompt, **options) as reply:
        try:
            write_reply(reply, output, bar)
        finally:
            bar.clear()
        output.end()
        if not args.quiet:
            note(_statistics(reply.result()))


def _prompt(args: argparse.Namespace) -> str:
    if (args.prompt is None) == (args.file is None):
        raise UsageError("expected a PROMPT or --file, and not both\nhint: lily generate --help")
    text: str = args.prompt if args.file is None else _read_text(args.file)
    if not text:
        raise UsageError("the prompt is empty")
    return text


def _read_text(file: str) -> str:
    """A file, or standard input, as it is: no line end is changed."""
    stdin = getattr(sys.stdin, "buffer", None)
    data: bytes = stdin.read() if file == "-" and stdin else Path(file).read_bytes()
    where = "standard input" if file == "-" else file
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: byte {error.start}: expected UTF-8 text") from None


def _statistics(result: Result | ReplyResult) -> str:
    usage, timings = result.usage, result.timings
    reason: str = result.finish_reason
    if result.stop is not None:
        reason += f" at {result.stop!r}"
    counts = f"{usage.prompt} prompt tokens ({usage.reused} reused), {usage.generated} generated"
    parts = []
    if timings.first_token_s:
        parts.append(f"first token {timings.first_token_s:.2f} s")
    if timings.prefill_tok_s:
        parts.append(f"prefill {timings.prefill_tok_s:.1f} tok/s")
    if timings.decode_tok_s:
        parts.append(f"decode {timings.decode_tok_s:.1f} tok/s")
    if usage.generated:
        parts.append(f"seed {result.seed}")
    return f"{counts}, end: {reason}" + ("\n" + ", ".join(parts) if parts else "")


# lily chat

_HELP = """\
/reset  start over          /undo   take back the last question and its answer
/exit   leave (or Ctrl-D)   Ctrl-C  stop the answer"""


def _chat(args: argparse.Namespace) -> None:
    from lily.conversation import Chat
    from lily.errors import Error

    sampling_options(args)
    bar = Bar()
    with _loaded(args, args.context, bar) as model:
        chat = Chat(model, args, bar)
        talking = sys.stdin.isatty() and sys.stdout.isatty()
        if talking:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 line editing and history for input()
            note(f"{model.info.source} on {model.info.device}. /help lists the commands.")
        while (line := _read_line(talking)) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/reset":
                    chat.reset()
                case "/undo":
                    if not chat.undo():
                        note("[nothing to take back]")
                case "/help":
                    note(_HELP)
                case command if re.fullmatch(r"/[a-z]+", command):
                    note(f"[no command {command}; /help lists them]")
                case _:
                    try:
                        chat.ask(line)
                    except (Error, ValueError) as error:
                        if not talking:
                            raise
                        _fail(str(error))
                    except KeyboardInterrupt:  # the second one; the first asks politely
                        if not talking:
                            raise
                        note("[stopped; the question is forgotten]")


def _read_line(talking: bool) -> str | None:
    """The next line of the user; None at the end."""
    if not talking:
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return None


# lily serve


def _serve(args: argparse.Namespace) -> None:
    try:
        from lily.server import Settings, serve
    except ModuleNotFoundError as error:
        raise UsageError(
            f"lily serve needs {error.name}\nhint: pip install 'lily[server]'"
        ) from None

    key = args.api_key
    if key is None:
        key = os.environ.get("LILY_API_KEY") or None
    try:
        settings = Settings(
            name=args.name or _served_name(args.model),
            host=args.host,
            port=args.port,
            api_key=key,
            parallel=args.parallel,
            queue=args.queue,
            max_body=args.max_body,
            cors=tuple(args.cors),
            sampling=sampling_options(args),
        )
    except ValueError as error:
        raise UsageError(f"--{str(error).replace('_', '-', 1)}") from None
    bar = Bar()
    with _loaded(args, args.context, bar) as model:
        if not settings.loopback and settings.api_key is None:
            note("[anyone who reaches this machine may use the server: it has no --api-key]")
        serve(model, settings, ready=lambda url: note(f"{settings.name} is served at {url}"))


def _served_name(source: str) -> str:
    """What clients call a model: its id on the hub, or its folder's name."""
    path = Path(source)
    return path.resolve().name if path.is_dir() else source


# lily bench


def _bench(args: argparse.Namespace) -> None:
    from lily import bench, stages

    options = bench.Options(args.contexts, args.prefill, args.decode, args.rounds)
    wanted = _wanted(args.peers, bench.PEERS)
    models = _by_peer("--peer-model", args.peer_model, bench.PEERS)
    pythons = _by_peer("--peer-python", args.peer_python, bench.PEERS)
    bar = Bar()
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(_loaded(args, options.context, bar))
        stack.callback(bar.clear)
        engines: list[bench.Engine] = [bench.LilyEngine(model, options.context)]
        for name in args.ablate:
            variant = stack.enter_context(model.without(name))
            engines.append(bench.LilyEngine(variant, options.context, f"without {name}"))
        peers, absent = bench.peers(
            wanted,
            str(model.info.folder),
            models,
            pythons,
            threads=args.threads or bench.physical_cores(),
            cpu=args.device == "cpu" or "metal" not in model.info.device.lower(),
        )
        for peer in peers:
            bar.status(f"loading: {peer.name}")
            try:
                worker = bench.Worker(peer, options.context)
            except bench.PeerError as error:
                absent[peer.name] = str(error)
                continue
            stack.callback(worker.close)
            engines.append(worker)
        report = bench.run(engines, options, status=bar.status, absent=absent)
        if args.stages:
            bar.status("stages")
            report.stages = stages.measure(model, options.prefill, max(options.contexts))
    if args.csv:
        Path(args.csv).write_text(report.csv(), encoding="utf-8")
    tables = [report.table(), *(one.table() for one in report.stages)]
    _tell("\n\n".join(tables), report.to_json(), args.json)


def _tell(page: str, found: object, file: str | None) -> None:
    """Print a page and write what it shows as JSON, or print only that."""
    text = json.dumps(found, indent=1)
    print(text if file == "-" else page)
    if file and file != "-":
        Path(file).write_text(text + "\n", encoding="utf-8")


# lily doctor


def _doctor(args: argparse.Namespace) -> None:
    from lily import doctor

    bar = Bar()
    try:
        report = doctor.examine(
            args.device,
            args.model,
            threads=args.threads,
            revision=args.revision,
            offline=args.offline,
            progress=bar if bar.enabled else None,
            status=bar.status,
        )
    finally:
        bar.clear()
    _tell(report.page(), report.to_json(), args.json)
    if report.wrong:
        raise SystemExit(1)


def _wanted(given: str, peers: Sequence[str]) -> list[str]:
    """The names in --peers."""
    wanted = [] if given == "none" else given.split(",")
    if unknown := set(wanted) - {*peers, "auto"}:
        raise UsageError(
            f"--peers: {min(unknown)!r}, expected auto, none or some of {', '.join(peers)}"
        )
    return wanted


def _by_peer(option: str, given: Sequence[str], peers: Sequence[str]) -> dict[str, str]:
    """PEER=VALUE options as a mapping."""
    found = {}
    for text in given:
        peer, _, value = text.partition("=")
        if peer not in peers or not value:
            raise UsageError(f"{option}: {text!r}, expected PEER=PATH, PEER of {', '.join(peers)}")
        found[peer] = value
    return found


# lily perplexity, lily fidelity


def _scored_text(args: argparse.Namespace) -> str:
    text = _read_text(args.file)
    if not text:
        raise UsageError(
            f"{'standard input' if args.file == '-' else args.file}: the text is empty"
        )
    return text


def _perplexity(args: argparse.Namespace) -> None:
    from lily.perplexity import finite, perplexity

    text = _scored_text(args)
    bar = Bar()
    with _loaded(args, args.window, bar) as model:
        try:
            found = perplexity(
                model,
                text,
                window=args.window,
                positions=args.positions,
                progress=(lambda done, total: bar("score", done, total)) if bar.enabled else None,
            )
        finally:
            bar.clear()
        if not args.json:
            print(found)
            return
        about = {
            "model": args.model,
            "revision": model.info.revision,
            "device": model.info.device,
            "precision": model.info.precision,
            "kv": model.info.kv,
            "file": args.file,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        figures = {name: finite(value) for name, value in asdict(found).items()}
        print(json.dumps(about | figures | {"tok_s": finite(found.tok_s)}, indent=2))


def _fidelity(args: argparse.Namespace) -> None:
    from lily import fidelity

    wanted = _wanted(args.peers, fidelity.PEERS)
    models = _by_peer("--peer-model", args.peer_model, fidelity.PEERS)
    pythons = _by_peer("--peer-python", args.peer_python, fidelity.PEERS)
    text = _scored_text(args)
    bar = Bar()
    try:
        report = fidelity.measure(
            args.model,
            text,
            window=args.window,
            positions=args.positions,
            reference=fidelity.FLOAT32 if args.reference == "lily" else args.reference,
            wanted=wanted,
            models=models,
            pythons=pythons,
            device=args.device,
            threads=args.threads,
            memory_limit=args.memory_limit,
            revision=args.revision,
            offline=args.offline,
            progress=bar if bar.enabled else None,
            status=bar.status,
        )
    finally:
        bar.clear()
    report.text = {"file": args.file, **report.text}
    _tell(report.table(), report.to_json(), args.json)


# lily quantize


def _quantize(args: argparse.Namespace) -> None:
    from time import perf_counter

    from lily.convert import quantize, unpack

    if args.dtype and not args.unpack:
        raise UsageError("--dtype needs --unpack")
    bar = Bar()
    options = {
        "threads": args.threads,
        "revision": args.revision,
        "offline": args.offline,
        "progress": bar if bar.enabled else None,
    }
    start = perf_counter()
    try:
        if args.unpack:
            out = unpack(args.model, args.out, dtype=args.dtype or "bfloat16", **options)
        else:
            out = quantize(args.model, args.out, **options)
    finally:
        bar.clear()
    n_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    note(f"{out}: {n_bytes / 1e9:.3g} GB in {perf_counter() - start:.1f} s")
