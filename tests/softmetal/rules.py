"""What Apple's compiler refuses and clang, as it is used here, would accept."""

from __future__ import annotations

from softmetal.declarations import Declaration, declarations
from softmetal.tokens import IDENTIFIER, Tokens

SPACES = {"device", "constant", "threadgroup", "thread"}
_POINTS = {"*", "&", "&&"}
_ABSENT = {"double", "new", "delete", "throw", "try", "catch", "virtual", "goto", "typeid",
           "dynamic_cast"}  # fmt: skip
_NO_VARIABLE = {"using", "typedef", "struct", "class", "union", "enum", "static_assert"}
_STATEMENT_WORDS = {"return", "case", "delete", "new", "goto", "else", "do", "sizeof", "throw"}


def check(tokens: Tokens, *, lambdas: bool = False) -> None:
    """Raise SourceError at the first thing that is not Metal. Attributes are taken out before."""
    _words(tokens)
    if not lambdas:
        _lambdas(tokens)
    for declaration in declarations(tokens):
        _declared_pointers(tokens, declaration)
        _global(tokens, declaration)
        if declaration.parameters:
            _parameter_pointers(tokens, *declaration.parameters)
        if declaration.body:
            _local_pointers(tokens, *declaration.body)


def _words(tokens: Tokens) -> None:
    for i in tokens.said(0, len(tokens)):
        token = tokens[i]
        if token in _ABSENT:
            raise tokens.error(i, f"'{token}' is not in Metal")
        if token == "std" and tokens[tokens.after(i)] == "::":
            raise tokens.error(i, "'std::' is not in Metal")


def _lambdas(tokens: Tokens) -> None:
    for i in tokens.said(0, len(tokens)):
        if tokens[i] == "[":
            previous = tokens[tokens.before(i)]
            extent = IDENTIFIER.match(previous) or previous in {"]", ")", ">"} or '"' in previous
            if not extent or previous in _STATEMENT_WORDS:
                raise tokens.error(i, "a lambda expression is not in Metal before 4.0")


def _points(tokens: Tokens, begin: int, end: int) -> int | None:
    """The first `*` or `&` of a declarator in a range, outside brackets and template arguments."""
    i = begin
    while i < end:
        token = tokens[i]
        if token in {"=", ":"}:
            return None
        if token == "[" or (token == "(" and tokens[tokens.before(i)] == "decltype"):
            i = tokens.close(i)
        elif token == "<" and IDENTIFIER.match(tokens[tokens.before(i)]):
            i = max(i, tokens.close_angle(i))
        elif token in _POINTS and tokens[tokens.before(i)] != "operator":
            return i
        i += 1
    return None


def _require_space(tokens: Tokens, begin: int, end: int) -> None:
    at = _points(tokens, begin, end)
    if at is not None and not SPACES & {tokens[i] for i in tokens.said(begin, end)}:
        raise tokens.error(at, "pointer or reference without an address space qualifier")


def _declared_pointers(tokens: Tokens, declaration: Declaration) -> None:
    if tokens[declaration.start] in {"using", "template", "friend", "static_assert"}:
        return
    end = declaration.parameters[0] if declaration.parameters else declaration.end
    for i in range(declaration.start, end):
        if tokens[i] == "{":
            end = i
            break
    _require_space(tokens, declaration.start, end)


def _global(tokens: Tokens, declaration: Declaration) -> None:
    """Variables at program scope are in the constant space."""
    words = [tokens[i] for i in tokens.said(declaration.start, declaration.end)]
    is_function = declaration.parameters or words[0] == "template"
    if declaration.is_member or is_function or words[0] in _NO_VARIABLE or "constant" in words:
        return
    raise tokens.error(declaration.start, "a program scope variable is in the constant space")


def _parameter_pointers(tokens: Tokens, open_: int, close: int) -> None:
    for begin, end in split(tokens, open_ + 1, close):
        _require_space(tokens, begin, end)


def _local_pointers(tokens: Tokens, open_: int, close: int) -> None:
    starts = {";", "{", "}"}
    for i in tokens.said(open_ + 1, close):
        previous = tokens.before(i)
        at_start = tokens[previous] in starts or (
            tokens[previous] == "(" and tokens[tokens.before(previous)] == "for"
        )
        if at_start and IDENTIFIER.match(tokens[i]) and tokens[i] not in _STATEMENT_WORDS:
            _local_pointer(tokens, i, close)


def _local_pointer(tokens: Tokens, begin: int, close: int) -> None:
    """`Type * name =` at the start of a statement: a product would be of no use there."""
    i = begin
    while i < close and (IDENTIFIER.match(tokens[i]) or tokens[i] == "::"):
        if tokens[i] in SPACES:
            return
        i = tokens.after(i)
        if tokens[i] == "<":
            i = tokens.close_angle(i)
            if i < 0:
                return
            i = tokens.after(i)
    star = i
    while tokens[i] in _POINTS or tokens[i] == "const":
        i = tokens.after(i)
    if i == star or not IDENTIFIER.match(tokens[i]) or tokens[i] in SPACES:
        return
    if tokens[tokens.after(i)] in {"=", ";", ",", ":", "["}:
        raise tokens.error(star, "pointer or reference without an address space qualifier")


def split(tokens: Tokens, begin: int, end: int) -> list[tuple[int, int]]:
    """The parts of a list between commas, outside brackets and template arguments."""
    parts, start, i = [], begin, begin
    while i < end:
        token = tokens[i]
        if token in {"(", "[", "{"}:
            i = tokens.close(i)
        elif token == "<":
            i = max(i, tokens.close_angle(i))
        elif token == ",":
            parts.append((start, i))
            start = i + 1
        i += 1
    if tokens.said(start, end):
        parts.append((start, end))
    return parts
