"""Metal source to C++ with real address spaces, token by token.

The text keeps its lines. What changes: attributes go, threadgroup variables become places in the
emulator's arena, vector constructors become calls, function constants become variables of the
emulating thread, and each kernel gets a wrapper that takes its arguments from the emulator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from softmetal import rules
from softmetal.declarations import Declaration, declarations
from softmetal.tokens import IDENTIFIER, SourceError, Tokens

_VECTOR = re.compile(
    r"(bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float)([234])\Z"
)
_BUILTINS = {
    "thread_position_in_grid", "threads_per_grid", "thread_position_in_threadgroup",
    "threads_per_threadgroup", "dispatch_threads_per_threadgroup",
    "threadgroup_position_in_grid", "threadgroups_per_grid", "thread_index_in_threadgroup",
    "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup",
    "threads_per_simdgroup", "thread_execution_width", "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
}  # fmt: skip
_ARRAYS = {"buffer": "buffer", "threadgroup": "shared"}  # members of softmetal_Group
_MAX_THREADS = "max_total_threads_per_threadgroup"


@dataclass
class Parameter:
    name: str
    kind: str  # "buffer", "threadgroup" or the name of a built-in value
    index: int


@dataclass
class Kernel:
    name: str
    namespaces: tuple[str, ...]
    is_template: bool
    parameters: list[Parameter]
    has_max_threads: bool
    host_name: str
    file: str
    line: int

    @property
    def max_threads_trait(self) -> str:
        return f"softmetal_max_threads_{self.name}"


@dataclass
class Constant:
    name: str
    type: str
    index: int
    namespaces: tuple[str, ...]


@dataclass
class Entry:
    """A kernel that the host can name: a plain one, or one instantiation of a template."""

    host_name: str
    expression: str
    arguments: str  # of the template, with their brackets, or empty
    kernel: Kernel
    namespaces: tuple[str, ...]


def translate(preprocessed: str, *, lambdas: bool = False) -> str:
    """The C++ text for a preprocessed Metal source. Raises SourceError."""
    tokens = Tokens.of(preprocessed)
    tokens.take_attributes()
    rules.check(tokens, lambdas=lambdas)
    found = list(declarations(tokens))
    constants = [c for d in found if (c := _function_constant(tokens, d))]
    kernels = [k for d in found if (k := _kernel(tokens, d))]
    entries = [_entry(kernel) for kernel in kernels if not kernel.is_template]
    entries += [e for d in found if (e := _instantiation(tokens, d, kernels))]
    _unique(entries)
    _constructors(tokens)
    _methods(tokens)
    _literals(tokens)
    return "".join(tokens.text) + _wrappers(entries, constants)


def _function_constant(tokens: Tokens, d: Declaration) -> Constant | None:
    attributes = tokens.attributes_in(d.begin, d.end)
    if "function_constant" not in attributes:
        return None
    said = tokens.said(d.start, d.end - 1)
    if tokens[said[0]] != "constant" or len(said) < 3:
        raise tokens.error(d.begin, "a function constant is 'constant T name [[…]];'")
    type_, name = tokens.plain(said[1], said[-1]), tokens[said[-1]]
    tokens.text[said[0]] = f"static thread_local bool softmetal_defined_{name}; static thread_local"
    for i in range(len(tokens)):
        if tokens[i] == "is_function_constant_defined":
            open_ = tokens.after(i)
            if tokens[tokens.after(open_)] == name:
                tokens.erase(i, tokens.close(open_) + 1)
                tokens.text[i] = f"softmetal_defined_{name}"
    index = int(attributes["function_constant"])
    return Constant(name, type_, index, d.namespaces)


def _kernel(tokens: Tokens, d: Declaration) -> Kernel | None:
    if not d.parameters or not d.body:
        return None
    words = tokens.said(d.start, d.parameters[0])
    attributes = tokens.attributes_in(d.begin, d.parameters[0])
    keyword = next((i for i in words if tokens[i] == "kernel"), None)
    if keyword is None and "kernel" not in attributes:
        return None
    if keyword is not None:
        tokens.text[keyword] = " "
    tokens.text[words[0]] = "SOFTMETAL_KERNEL " + tokens.text[words[0]]
    name_at = words[-1]
    name, is_template = tokens[name_at], d.start != d.begin
    _threadgroup_variables(tokens, *d.body)
    parts = rules.split(tokens, d.parameters[0] + 1, d.parameters[1])
    parameters = [_parameter(tokens, *part) for part in parts]
    limit = attributes.get(_MAX_THREADS)
    file, line = tokens.place(name_at)
    kernel = Kernel(
        name, d.namespaces, is_template, parameters, limit is not None,
        attributes.get("host_name", f'"{name}"').strip('"'), file, line,
    )  # fmt: skip
    if limit is not None:
        tokens.text[d.end - 1] += (
            f" {d.template_header(tokens)} struct {kernel.max_threads_trait}"
            f" {{ static constexpr unsigned value = {limit}; }};"
        )
    return kernel


def _parameter(tokens: Tokens, begin: int, end: int) -> Parameter:
    attributes = tokens.attributes_in(begin, end)
    said = tokens.said(begin, end)
    name = tokens[said[-1]]
    for kind in _ARRAYS:
        if kind in attributes:
            if not any(tokens[i] in {"*", "&"} for i in said):
                raise tokens.error(said[0], f"[[{kind}]] of '{name}', not a pointer or reference")
            index = attributes[kind]
            if not index.isdecimal() or int(index) >= 31:
                raise tokens.error(said[0], f"the {kind} index of '{name}' is not in [0, 31)")
            return Parameter(name, kind, int(index))
    for attribute in attributes:
        if attribute in _BUILTINS:
            return Parameter(name, attribute, 0)
    raise tokens.error(said[0], f"kernel parameter '{name}' has no attribute that is known here")


def _entry(kernel: Kernel) -> Entry:
    return Entry(kernel.host_name, kernel.name, "", kernel, kernel.namespaces)


def _instantiation(tokens: Tokens, d: Declaration, kernels: list[Kernel]) -> Entry | None:
    """`template [[host_name("n")]] [[kernel]] decltype(k<…>) k<…>;`, or with a full signature."""
    attributes = tokens.attributes_in(d.begin, d.end)
    if tokens[d.begin] != "template" or d.body or "host_name" not in attributes:
        return None
    for kernel in kernels:
        for i in tokens.said(d.begin, d.end):
            following = tokens.after(i)
            if tokens[i] == kernel.name and tokens[following] == "<":
                close = tokens.close_angle(following)
                arguments = tokens.plain(following, close + 1)
                host_name = "".join(re.findall(r'"([^"]*)"', attributes["host_name"]))
                if not IDENTIFIER.match(host_name):
                    raise tokens.error(d.begin, f"host_name '{host_name}' is not an identifier")
                tokens.erase(d.begin, d.end)
                return Entry(host_name, kernel.name + arguments, arguments, kernel, d.namespaces)
    raise tokens.error(d.begin, "an instantiation of a kernel template that is not there")


def _unique(entries: list[Entry]) -> None:
    names = [e.host_name for e in entries]
    for entry in entries:
        if names.count(entry.host_name) > 1:
            k = entry.kernel
            raise SourceError(f"{k.file}:{k.line}: error: two kernels named '{entry.host_name}'")


def _threadgroup_variables(tokens: Tokens, open_: int, close: int) -> None:
    """Replace a kernel's threadgroup arrays; they stand before everything that does something."""
    last, n, i, first_statement = open_, 0, tokens.after(open_), True
    while i < close:
        if tokens[i] == "{":
            first_statement = False
            i = tokens.after(tokens.close(i))
            continue
        end = i
        while tokens[end] != ";" and end < close:
            end = tokens.close(end) + 1 if tokens[end] in {"(", "[", "{"} else end + 1
        if tokens[i] == "threadgroup" and not _points(tokens, i, end):
            if not first_statement:
                raise tokens.error(i, "threadgroup variables stand at the top of a kernel's body")
            n = _variables(tokens, i, end, n)
            last = end
        elif tokens[i] not in {"constexpr", "using", "typedef", "static_assert"}:
            first_statement = False
        i = tokens.after(end)
    tokens.text[last] += " softmetal_arrays_done();"


def _points(tokens: Tokens, begin: int, end: int) -> bool:
    """Whether a threadgroup declaration is of a pointer or reference."""
    i = begin
    while i < end:
        if tokens[i] in {"*", "&", "="}:
            return True
        if tokens[i] == "[":
            i = tokens.close(i)
        i += 1
    return False


def _variables(tokens: Tokens, begin: int, end: int, n: int) -> int:
    """Rewrite `threadgroup T a[N], b;` and return the next free number."""
    parts = rules.split(tokens, begin, end)
    words = tokens.said(*parts[0])
    i = 1  # the first name is what an extent, a comma or the end follows
    while i < len(words) - 1 and tokens[words[i + 1]] != "[":
        i += 1
    type_ = tokens.plain(words[1], words[i])
    places = [(words[i], parts[0][1]), *parts[1:]]
    out = ""
    for name_at, stop in places:
        name_at = name_at if not tokens.blank(name_at) else tokens.after(name_at)
        name, extents = tokens[name_at], tokens.plain(name_at + 1, stop)
        out += (
            f"threadgroup {type_} (&{name}){extents} = softmetal::threadgroup_variable"
            f'<{type_}{extents}>({n}, "{name}"); '
        )
        n += 1
    tokens.erase(begin, end + 1)
    tokens.text[begin] = out
    return n


def _constructors(tokens: Tokens) -> None:
    """`float4(…)`, `vec<T, N>(…)` and `float4 v(…);` become calls of softmetal::make."""
    for i in tokens.said(0, len(tokens)):
        vector = _VECTOR.match(tokens[i])
        following = tokens.after(i)
        if vector and tokens[following] == "(":
            _make(tokens, i, f"softmetal::make<{vector[1]}, {vector[2]}>")
        elif vector and IDENTIFIER.match(tokens[following]):
            open_ = tokens.after(following)
            starts = tokens[tokens.before(i)] in {";", "{", "}", "const"}
            if starts and tokens[open_] == "(" and tokens[tokens.after(tokens.close(open_))] == ";":
                tokens.text[open_] = f" = softmetal::make<{vector[1]}, {vector[2]}>("
        elif tokens[i] == "vec" and tokens[following] == "<":
            close = tokens.close_angle(following)
            if close > 0 and tokens[tokens.after(close)] == "(":
                _make(tokens, i, "softmetal::make")


def _make(tokens: Tokens, at: int, name: str) -> None:
    scope = tokens.before(at)
    if tokens[scope] == "::":
        tokens.erase(tokens.before(scope), at)
    tokens.text[at] = name


def _methods(tokens: Tokens) -> None:
    """Drop the `thread` after a method's parameters: methods are of thread objects here."""
    for i in tokens.said(0, len(tokens)):
        behind = tokens[i] == "thread" and tokens[tokens.before(i)] in {")", "const"}
        if behind and tokens[tokens.after(i)] in {"{", ":", ";", "="}:
            tokens.text[i] = ""


def _literals(tokens: Tokens) -> None:
    for i, token in enumerate(tokens.text):
        if not token[:1].isdigit() and not token.startswith("."):
            continue
        for suffix, type_ in (("bf", "bfloat"), ("h", "half")):
            if re.fullmatch(rf"[\d.]+(e[+-]?\d+)?{suffix}", token):
                tokens.text[i] = f"{type_}({token.removesuffix(suffix)}f)"


def _wrappers(entries: list[Entry], constants: list[Constant]) -> str:
    """Code and tables for the emulator. Marked as a system header: it warns of nothing."""
    lines = ['\n# 1 "softmetal wrappers" 3\n']
    lines += [_inside(e.namespaces, _wrapper(n, e)) for n, e in enumerate(entries)]
    lines += [_inside(c.namespaces, _setter(n, c)) for n, c in enumerate(constants)]
    lines.append(_pointers("softmetal_Kernel", "softmetal_kernel", len(entries)))
    lines.append(_pointers("softmetal_Constant", "softmetal_constant", len(constants)))
    lines.append(
        'extern "C" __attribute__((visibility("default"))) '
        f"const softmetal_Library softmetal_library = {{softmetal_abi, SOFTMETAL_DETECTING, "
        f"softmetal_kernels, {len(entries)}, softmetal_constants, {len(constants)}, "
        f"&softmetal_runtime}};\n"
    )
    return "".join(lines)


def _inside(namespaces: tuple[str, ...], text: str) -> str:
    return "".join(f"namespace {n} {{ " for n in namespaces) + text + "}" * len(namespaces) + "\n"


def _wrapper(n: int, entry: Entry) -> str:
    """The function that the emulator calls for one lane, its arguments, and its table row."""
    kernel, values, rows = entry.kernel, [], []
    for i, p in enumerate(kernel.parameters):
        type_ = f"softmetal_parameters_{n}::At<{i}>"
        if p.kind in _ARRAYS:
            memory = f"softmetal::Memory<{type_}>"
            values.append(f"{memory}::at(lane->group->{_ARRAYS[p.kind]}[{p.index}])")
            size = f"{memory}::bytes, {memory}::writable"
            rows.append(f'{{"{p.name}", softmetal_{p.kind}, {p.index}, {size}}}')
        else:
            values.append(f"softmetal::{p.kind}<{type_}>(lane)")
            rows.append(f'{{"{p.name}", softmetal_builtin, 0, 0, 0}}')
    limit = f"{kernel.max_threads_trait}{entry.arguments}::value" if kernel.has_max_threads else "0"
    return (
        f"typedef softmetal::Parameters<decltype({entry.expression})> softmetal_parameters_{n};\n"
        f"SOFTMETAL_ENTRY void softmetal_entry_{n}(const softmetal_Lane* lane) "
        f"{{ {entry.expression}({', '.join(values)}); }}\n"
        f"static const softmetal_Argument softmetal_arguments_{n}[] = "
        f"{{{', '.join(rows) or '{}'}}};\n"
        f'extern "C" const softmetal_Kernel softmetal_kernel_{n} = {{"{entry.host_name}", '
        f"softmetal_entry_{n}, softmetal_arguments_{n}, {len(rows)}, {limit}, "
        f'"{kernel.file}", {kernel.line}}};'
    )


def _setter(n: int, c: Constant) -> str:
    return (
        f"static void softmetal_set_{n}(const void* value) "
        f"{{ softmetal::set_constant({c.name}, softmetal_defined_{c.name}, value); }} "
        f'extern "C" const softmetal_Constant softmetal_constant_{n} = {{"{c.name}", "{c.type}", '
        f"{c.index}, sizeof({c.type}), softmetal_set_{n}}};"
    )


def _pointers(type_: str, name: str, n: int) -> str:
    declared = "".join(f'extern "C" const {type_} {name}_{i}; ' for i in range(n))
    pointers = ", ".join(f"&{name}_{i}" for i in range(n)) or "nullptr"
    return f"{declared}static const {type_}* const {name}s[] = {{{pointers}}};\n"
