#!/usr/bin/env python3
"""Write docs/reference/: api.md from lily's docstrings, contracts.md from metal/*.h.

    python docs/make_reference.py            # write both
    python docs/make_reference.py --check    # exit 1 if a committed page is stale

lily must be installed. A member without a docstring is not part of the API and is left out.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lily

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "reference"
GENERATED = "<!-- Written by docs/make_reference.py; do not edit. -->\n"

# --- api.md -------------------------------------------------------------------------------------

GROUPS = {
    "Loading": ("Model", "ModelInfo", "plan", "MemoryPlan"),
    "Converting": ("quantize", "unpack"),
    "Generating": (
        "Generation",
        "Stream",
        "Piece",
        "TokenLogprob",
        "Result",
        "Usage",
        "Timings",
        "Sampling",
        "Constraint",
        "Regex",
        "Grammar",
    ),
    "Chat": (
        "Reply",
        "ReplyPiece",
        "ReplyResult",
        "Tool",
        "ToolCall",
        "ToolCallPiece",
        "ToolRun",
    ),
    "Sessions": ("Session", "Logits", "Snapshot", "ReuseStats"),
    "Measuring": ("perplexity", "Perplexity", "Score", "Ranked", "techniques"),
    "Errors": (
        "Error",
        "CheckpointError",
        "SessionFileError",
        "DeviceError",
        "ContextError",
        "Cancelled",
        "InternalError",
    ),
}
# Names of types that signatures use, and the modules that define them.
ALIASES = {
    "Precision": "loading",
    "Kv": "loading",
    "Dtype": "layouts",
    "Tokens": "token_ids",
    "Reuse": "reuse",
    "Progress": "session",
    "Observer": "session",
    "Message": "chat",
    "FinishReason": "stream",
    "Format": "grammar",
    "ReplyEnd": "chat_reply",
    "ThinkingEnd": "chat_reply",
}
SECTION = re.compile(r"(Args|Attributes|Returns|Raises):")
ITEM = re.compile(r"([\w., ]+): (.*)")


def api() -> str:
    named = {name for names in GROUPS.values() for name in names}
    public = {name for name in lily.__all__ if not name.startswith("__")}
    if named != public:
        raise SystemExit(f"GROUPS and lily.__all__ differ: {sorted(named ^ public)}")
    lines = [GENERATED, "# Python API", "", "Everything below is a name of the package `lily`."]
    for group, names in GROUPS.items():
        lines += ["", f"## {group}"]
        for name in names:
            lines += ["", *entry(name, getattr(lily, name))]
    lines += ["", "## Types in the signatures", "", "```python", *aliases(), "```"]
    return "\n".join(lines) + "\n"


def entry(name: str, value: Any) -> Iterator[str]:
    """A class with its members, or a function."""
    yield f"### lily.{name}"
    if inspect.isclass(value) and issubclass(value, Exception):
        yield from ["", f"`class {name}({value.__bases__[0].__name__})`"]
    elif made_by_caller(value):
        yield from ["", *signature(name, value)]
    yield from ["", *docstring(value)]
    if inspect.isclass(value) and not issubclass(value, Exception):
        for member, raw in vars(value).items():
            own = isinstance(raw, property | classmethod) or inspect.isfunction(raw)
            if own and not member.startswith("_") and inspect.getdoc(raw):
                yield from ["", *member_entry(name, member, raw)]


def aliases() -> Iterator[str]:
    folder = Path(lily.__file__).parent
    for name, module in ALIASES.items():
        text = (folder / f"{module}.py").read_text(encoding="utf-8")
        found = re.search(rf"^{name} = .*$", text, re.M)
        if found is None:
            raise SystemExit(f"{module}.py has no type {name}")
        yield found[0]


def made_by_caller(value: Any) -> bool:
    """Whether to show how it is called: functions, and dataclasses of options."""
    return inspect.isfunction(value) or value is lily.Sampling


def member_entry(owner: str, name: str, raw: Any) -> Iterator[str]:
    yield f"#### {owner}.{name}"
    yield ""
    if isinstance(raw, property):
        returned = inspect.signature(raw.fget).return_annotation if raw.fget else "Any"
        yield from ["```python", f"{name}: {returned}", "```"]
    elif isinstance(raw, classmethod):
        yield from signature(f"{owner}.{name}", raw.__func__)
    else:
        yield from signature(name, raw)
    yield from ["", *docstring(raw)]


def signature(name: str, function: Any) -> Iterator[str]:
    """How to call it, one argument a line where one line is too short."""
    found = inspect.signature(function)
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    parts = []
    for i, p in enumerate(parameters):
        if p.kind is p.KEYWORD_ONLY and (i == 0 or parameters[i - 1].kind is not p.KEYWORD_ONLY):
            parts.append("*")
        parts.append(parameter(p))
    returned = found.return_annotation
    end = f") -> {returned}" if isinstance(returned, str) and not inspect.isclass(function) else ")"
    line = f"{name}({', '.join(parts)}{end}"
    yield "```python"
    if len(line) <= 96:
        yield line
    else:
        yield f"{name}("
        yield from (f"    {part}," for part in parts)
        yield end
    yield "```"


def parameter(p: inspect.Parameter) -> str:
    stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
    default = "{}" if str(p.default) == "<factory>" else repr(p.default).replace("'", '"')
    return f"{stars}{p.name}: {p.annotation}" + ("" if p.default is p.empty else f" = {default}")


def docstring(value: Any) -> Iterator[str]:
    """A docstring as Markdown: its sections become lists."""
    paragraphs = (inspect.getdoc(value) or "").split("\n\n")
    for i, paragraph in enumerate(paragraphs):
        if i:
            yield ""
        head, _, body = paragraph.partition("\n")
        section = SECTION.fullmatch(head)
        if not section:
            yield paragraph
            continue
        yield from [f"**{section[1]}**", ""]
        yield from section_items(textwrap.dedent(body))


def section_items(body: str) -> Iterator[str]:
    for line in body.split("\n"):
        item = ITEM.fullmatch(line)
        if item:
            names = ", ".join(f"`{n.strip()}`" for n in item[1].split(","))
            yield f"- {names}: {item[2]}"
        else:
            yield line


# --- contracts.md -------------------------------------------------------------------------------

INTRO = """\
# Contracts

One contract a kernel, read from the headers in `metal/`. `metal/contract.h` says how they are
written. A tag such as G2 is the place of a kernel in the chain that makes one token: G1–G3 are a
Gated DeltaNet layer, A1–A4 an attention layer, E1–E3 the experts after either, H1 and H2 the end
of the pass. `ACT` is bf16 in the fast build and float32 in the float32 build; `packed` is a weight
in the device's own form. T is the number of rows of a pass, V the vocabulary.
"""


def contracts() -> str:
    metal = ROOT / "metal"
    order = re.findall(r"&(\w+)::contract", (metal / "contracts.h").read_text())
    found = {}
    for path in metal.glob("*.h"):
        text = path.read_text()
        if name := re.search(r"^LILY_CONTRACT\((\w+), \"(\w+)\"\)", text, re.M):
            found[name[1]] = (path.name, name[2], text)
    if set(order) != set(found):
        raise SystemExit(f"contracts.h and metal/*.h differ: {sorted(set(order) ^ set(found))}")
    lines = [GENERATED, INTRO]
    for title, prefill in (("Decode", False), ("Prefill", True)):
        lines += [f"## {title}", ""]
        for op in order:
            if op.startswith("Prefill") == prefill:
                lines += [*contract(op, *found[op]), ""]
    return "\n".join(lines)


def contract(op: str, file: str, kernel: str, text: str) -> Iterator[str]:
    yield f"### {kernel}"
    yield ""
    yield f"`metal/{file}`, in C++ `{op}`."
    comment = text.partition("#pragma once")[0]
    yield from ["", "```text"]
    yield from (re.sub(r" {3,}(?=\([A-Z])", "  ", c[3:]) for c in comment.splitlines())
    yield from ["```", ""]
    constants = re.findall(r"\bC\((\w+), (\w+)\)", text)
    yield "- Constants: " + (", ".join(f"`{t} {n}`" for t, n in constants) or "none")
    params = re.search(r"struct \w+_Params \{(.*?)\};", text, re.S)
    assert params is not None, file
    fields = re.findall(r"(\w+) (\w+);", params[1])
    yield "- Params: " + ", ".join(f"`{t} {n}`" for t, n in fields if n != "unused")
    yield from ["", "| slot | access | type | name | shape, meaning |", "|---|---|---|---|---|"]
    slots = r"\b(READ|WRITE|UPDATE)\s*\((\d+),\s*(\w+),\s*(\w+),\s*\"([^\"]*)\"\)"
    for access, number, name, kind, shape in re.findall(slots, text):
        meaning = shape.replace("|", "\\|")
        yield f"| {number} | {access.lower()} | {kind} | `{name}` | {meaning} |"


# ------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/reference/.")
    parser.add_argument("--check", action="store_true", help="only say whether pages are stale")
    check = parser.parse_args().check
    stale = []
    for name, text in (("api.md", api()), ("contracts.md", contracts())):
        path = OUT / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"stale: {', '.join(stale)}; run python docs/make_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
