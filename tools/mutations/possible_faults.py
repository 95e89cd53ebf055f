"""Small faults that can be planted in a source text, such as authors make.

Left out is what no test can be expected to check: messages and logs, assertions, `__repr__`, a comparison with a clock
that is read on the spot or the time left by one, tables and indexes of the schema (their conditions repeat those of
functions).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

KINDS = ("lock", "conjunct", "comparison", "order", "guard")
"""Removes a row lock, removes an operand of an `and`, moves a boundary, swaps two reads, removes an early return."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One of `KINDS`: in `file`, the characters from `start` to `end` become `replace`."""

    file: str
    start: int
    end: int
    replace: str
    kind: str

    def plant(self, source: str) -> str:
        """Return the source with the fault in it."""
        return source[: self.start] + self.replace + source[self.end :]

    def shown(self, source: str) -> str:
        """Return its location and what it changes, on one line."""
        old, new = (" ".join(text.split()) or "nothing" for text in (source[self.start : self.end], self.replace))
        return f"{self.file}:{source.count(chr(10), 0, self.start) + 1} {self.kind}: {old} -> {new}"


def find_faults(file: str, source: str) -> list[Fault]:
    """Return all faults that this text of Python or SQL could have, in order."""
    found = _in_python(source) if file.endswith(".py") else _in_script(source)
    return sorted({Fault(file, *place) for place in found})


_Edit = tuple[int, int, str, str]
_SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}

# --- SQL --------------------------------------------------------------------------------------------------------------

_BODY = re.compile(r"\$\$.*?\$\$", re.DOTALL)
_LOCK = re.compile(r"\s*\bfor (?:no key update|update|key share|share)(?: of \w+)?(?: skip locked| nowait| \{+\w+\}+)?")
_GUARD = re.compile(
    r"^ *if\b(?:(?!\b(?:if|else|elsif)\b)[^;])*?\bthen\s+(?:(?!\b(?:if|else|elsif)\b)[^;]*;\s+){0,3}?"
    r"(?:return|raise|continue|exit)\b[^;]*;\s+end if;",
    re.MULTILINE,
)
_TOKEN = re.compile(
    r"--[^\n]*|'(?:[^']|'')*'|\{[^{}\n]*\}|%\(\w+\)\w|[a-z_]\w*|#?->>?|<@|@>|<>|<<|>>|[<>:=]=|=>|[<>(),;]",
    re.IGNORECASE,
)
_OPENS = {"where", "on", "when", "if", "elsif", "having", "or", "(", ",", ":="}
_ENDS = {
    "or",
    "then",
    "else",
    "end",
    "loop",
    "do",
    "set",
    "order",
    "group",
    "limit",
    "returning",
    "union",
    "window",
} | {*("for", "using", "join", "left", "cross", ")", ",", ";")}
_CONNECTIVE = re.compile(r"\b(?:and|or|on|where|when|then|if|having|select)\b", re.IGNORECASE)
_SQL_CLOCK = re.compile(r"\b(?:clock_timestamp|now)\(\)")
_BOUNDARY = re.compile(r'"\s+f?"')
"""The text between two adjacent string literals of Python."""


def _in_script(source: str) -> Iterator[_Edit]:
    for body in _BODY.finditer(source):
        yield from _in_sql(source, *body.span())
        for guard in _GUARD.finditer(source, *body.span()):
            yield (*guard.span(), "", "guard")


def _in_sql(source: str, start: int, end: int) -> Iterator[_Edit]:
    for lock in _LOCK.finditer(source, start, end):
        yield (*lock.span(), "", "lock")
    tokens = [(match.group().lower(), *match.span()) for match in _TOKEN.finditer(source, start, end)]
    for begin, until in pairwise([start, *(match.end() for match in _CONNECTIVE.finditer(source, start, end)), end]):
        if not _SQL_CLOCK.search(source, begin, until):
            for word, *span in tokens:
                if word in _SWAPPED and begin <= span[0] < until:
                    yield (span[0], span[1], _SWAPPED[word], "comparison")
    for operands in _conjunctions(tokens, end):
        for index, (begin, until) in enumerate(operands):
            span = [operands[index - 1][1], until] if index else [begin, operands[1][0]]
            text = source[span[0] : span[1]].rstrip('"')  # not the end of the literal
            boundaries = "".join(_BOUNDARY.findall(text))
            if text.count('"') == boundaries.count('"'):
                yield (span[0], span[0] + len(text), boundaries or " " * text.startswith(" "), "conjunct")


def _conjunctions(tokens: list[tuple[str, int, int]], end: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the spans of the operands of each `and` chain; a chain belongs to its depth of parentheses."""
    chains: list[list[int]] = [[]]  # at each depth the start of the chain, and the span of each `and`
    between = False
    for word, start, after in [*tokens, (";", end, end)]:
        if word == "between" or (word == "and" and between):
            between = word == "between"
        elif word == "and" and chains[-1]:
            chains[-1] += [start, after]
        elif word == "(":
            chains.append([after])
        elif word in _ENDS or word in _OPENS:
            bounds = [*chains[-1], start]
            if len(bounds) > 2:
                yield list(zip(bounds[::2], bounds[1::2], strict=True))
            chains[-1] = [after] if word in _OPENS else []
            if word == ")" and len(chains) > 1:
                chains.pop()


# --- Python -----------------------------------------------------------------------------------------------------------

_SQL = re.compile(r'f?"+\s*(?:select|with|update|insert|delete|merge|where|and|or|from|join|order|on|for)\b')
_CLOCK = re.compile(
    r"(?:\b(?:monotonic|time|perf_counter|_?now)|clock|silent_s)\(\)"
    r"|\b(?:remaining|elapsed|left|age|absent|overrun|quiet|due|idle)_s\b"
)
_READ = re.compile(r"\b_?(?:conn|connection|cursor|transaction|store|clock)\b|\.(?:monotonic|fetch\w*|refresh\w*)\(")
_CONSTRUCTS = re.compile(r"(?:\w+\.)*(?:_?[A-Z]\w*|partial)\(")
_UNSEEN = {"log", "logger", "logging"}


def _in_python(source: str) -> Iterator[_Edit]:
    python = _Python(source)
    for node in _seen(ast.parse(source)):
        match node:
            case ast.Constant() | ast.JoinedStr():
                if _SQL.match(source, *python.span(node)):
                    yield from _in_sql(source, *python.span(node))
            case ast.BoolOp(op=ast.And()):
                yield from python.conjuncts(node)
            case ast.Compare():
                yield from python.comparisons(node)
            case ast.If():
                yield from python.guards(node)
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(block, list):
                yield from python.reads(block)


class _Python:
    def __init__(self, source: str) -> None:
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = list(accumulate(map(len, self._lines), initial=0))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the start and end of the text of a node, in characters."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column_bytes: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column_bytes].decode())

    def conjuncts(self, node: ast.BoolOp) -> Iterator[_Edit]:
        """Yield each operand that can be left out, except those that bind a name for the others."""
        for value in node.values:
            if not _gives_names(value):
                rest = [other for other in node.values if other is not value]
                text = ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(ast.And(), rest))
                yield (*self.span(node), f"({text})", "conjunct")

    def comparisons(self, node: ast.Compare) -> Iterator[_Edit]:
        """Yield each comparison operator that has a boundary."""
        operands = [self.span(operand) for operand in (node.left, *node.comparators)]
        for (_, begin), (end, _) in () if _CLOCK.search(ast.unparse(node)) else pairwise(operands):
            between = self._source[begin:end]
            if (sign := between.strip("() \n")) in _SWAPPED:
                yield (begin, end, between.replace(sign, _SWAPPED[sign]), "comparison")

    def guards(self, node: ast.If) -> Iterator[_Edit]:
        """Yield each short `if` that returns, continues, breaks or raises; not an `elif` or an internal assertion."""
        last = node.body[-1]
        leaves = isinstance(last, ast.Return | ast.Continue | ast.Break | ast.Raise) and len(node.body) <= 3
        is_assertion = isinstance(last, ast.Raise) and "AssertionError" in ast.unparse(last)
        begin, end = self.span(node)
        if leaves and not (node.orelse or is_assertion or _gives_names(node.test)) and self._source[begin] == "i":
            yield (begin, end, "pass", "guard")

    def reads(self, block: Sequence[ast.stmt]) -> Iterator[_Edit]:
        """Yield a read of shared state and what reads or locks it before or after, unless one needs the other."""
        for first, second in pairwise(block):
            gives = not (isinstance(first, ast.Expr) and isinstance(second, ast.Expr))
            if gives and _is_read(first) and _is_read(second) and _are_independent(first, second):
                (begin, between), (after, end) = self.span(first), self.span(second)
                parts = self._source[after:end], self._source[between:after], self._source[begin:between]
                yield (begin, end, "".join(parts), "order")


def _seen(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below this one, without those that tests cannot be expected to check or the parts of
    f-strings."""
    yield node
    for child in () if isinstance(node, ast.JoinedStr) else ast.iter_child_nodes(node):
        match child:
            case ast.Raise() | ast.Assert() | ast.FunctionDef(name="__repr__" | "__str__"):
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in _UNSEEN:
                continue
            case ast.Expr(value=ast.Constant()):
                continue
        yield from _seen(child)


def _gives_names(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node))


def _is_read(node: ast.stmt) -> bool:
    """Return whether it is a simple statement that awaits, or calls (not only constructs) with shared state."""
    calls = (inner for inner in ast.walk(node) if isinstance(inner, ast.Call | ast.Await))
    texts = [ast.unparse(call) for call in calls]
    is_simple = isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr)
    return is_simple and any(_READ.search(text) and not _CONSTRUCTS.match(text) for text in texts)


def _are_independent(first: ast.stmt, second: ast.stmt) -> bool:
    return _names(first, ast.Store).isdisjoint(_names(second, ast.Load, ast.Store)) and _names(
        second, ast.Store
    ).isdisjoint(_names(first, ast.Load))


def _names(node: ast.stmt, *contexts: type[ast.expr_context]) -> set[str]:
    """Return the variables and attributes that a statement sets, or reads."""
    each = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name | ast.Attribute))
    return {ast.unparse(inner) for inner in each if isinstance(inner.ctx, contexts)}
