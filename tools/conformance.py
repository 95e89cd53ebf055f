"""`python -m tools.conformance`: writes docs/conformance.md from the requirements, markers and mutants.

A requirement in docs/requirements.md is covered by the tests marked with its id: `@pytest.mark.conforms("E7")` on a
function or a class, `pytestmark` in a module or a class, or marks of a parameter. They are found by parsing the
sources; nothing is imported. A planted fault (`tools/mutations`) that lists the id and runs such a test proves that the
test would notice. `--check` writes nothing and fails if the page is out of date. A marker with an unknown id is an
error, since it is most likely a typo.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mutations.entries import InvalidList, load

REQUIREMENTS = Path("docs/requirements.md")
PAGE = Path("docs/conformance.md")

_SECTION = re.compile(r"## (.+)")
_REQUIREMENT = re.compile(r"- ([A-Z]+[0-9]+) +(\S.*)")


class InvalidMarker(Exception):
    """Error in a marker or in the list of requirements; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement, and the section it is in."""

    id: str
    text: str
    section: str


@dataclass(frozen=True, slots=True)
class MarkedTest:
    """A test marked with an id; `test` is `path::name`, or `path::Class::name`."""

    id: str
    test: str


def requirements(root: Path) -> list[Requirement]:
    """Return the requirements in the order of the list. Raise `InvalidMarker` if an id occurs twice."""
    found: dict[str, Requirement] = {}
    section = ""
    for line in (root / REQUIREMENTS).read_text(encoding="utf-8").splitlines():
        if heading := _SECTION.fullmatch(line):
            section = heading[1]
        elif entry := _REQUIREMENT.fullmatch(line):
            if entry[1] in found:
                raise InvalidMarker(f"{REQUIREMENTS}: {entry[1]} stands there twice; ids are never reused.")
            found[entry[1]] = Requirement(entry[1], entry[2], section)
    return list(found.values())


# --- markers --------------------------------------------------------------------------------------------------------


def marks(root: Path) -> list[MarkedTest]:
    """Return every (id, test) under tests/, ordered by path and line. Raise `InvalidMarker` if a marker cannot be
    read."""
    return [mark for path in sorted((root / "tests").rglob("*.py")) for mark in _marks_in_file(root, path)]


def _marks_in_file(root: Path, path: Path) -> Iterator[MarkedTest]:
    name = path.relative_to(root).as_posix()
    source = path.read_text(encoding="utf-8")
    if "conforms" in source:
        yield from _marks_in_body(ast.parse(source, filename=name).body, name, ())


def _marks_in_body(body: Sequence[ast.stmt], prefix: str, outer: tuple[str, ...]) -> Iterator[MarkedTest]:
    """Yield the marks in a module or class; `outer` are the ids that apply to all its tests."""
    inherited = outer + tuple(_pytestmark(body, prefix))
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        test = f"{prefix}::{node.name}"
        own = tuple(id_ for decorator in node.decorator_list for id_ in _ids(decorator, test))
        if isinstance(node, ast.ClassDef):
            yield from _marks_in_body(node.body, test, inherited + own)
        elif node.name.startswith("test"):
            yield from (MarkedTest(id_, test) for id_ in dict.fromkeys(inherited + own))
        elif own:
            raise InvalidMarker(
                f"{test} bears {', '.join(own)}, but pytest does not run it: its name must begin with test."
            )


def _pytestmark(body: Sequence[ast.stmt], where: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets):
            yield from _ids(node.value, where)


def _ids(expression: ast.expr, where: str) -> Iterator[str]:
    """Yield the arguments of every `conforms(...)` within an expression."""
    for node in ast.walk(expression):
        if not (isinstance(node, ast.Call) and _last_name(node.func) == "conforms"):
            continue
        if node.keywords or not node.args:
            raise InvalidMarker(f"{where}: conforms takes ids, at least one, and nothing else.")
        for argument in node.args:
            if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                raise InvalidMarker(f"{where}: conforms({ast.unparse(argument)}): ids must be written out as strings.")
            yield argument.value


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# --- the page -------------------------------------------------------------------------------------------------------


def page(root: Path) -> str:
    """Return the text of docs/conformance.md. Raise `InvalidMarker` or `tools.mutations.entries.InvalidList`."""
    wanted = requirements(root)
    known = {requirement.id for requirement in wanted}
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for mark in marks(root):
        _refuse_unknown(mark.id, known, mark.test)
        tests[mark.id].append(mark.test)
    mutants: defaultdict[str, int] = defaultdict(int)
    for mutant in load(root):
        for id_ in mutant.ids:
            _refuse_unknown(id_, known, f"mutant {mutant.name!r}")
            mutants[id_] += any(_runs(selector, test) for selector in mutant.tests for test in tests[id_])
    proven = {id_: count for id_, count in mutants.items() if count}
    return "\n".join([*_head(wanted, tests, proven), *_sections(wanted, tests, proven)]) + "\n"


def _runs(selector: str, test: str) -> bool:
    """Return whether this pytest selector (a folder, file, class, test or one case of it) runs that test."""
    plain = selector.partition("[")[0].rstrip("/")
    return test == plain or test.startswith((f"{plain}::", f"{plain}/"))


def _refuse_unknown(id_: str, known: set[str], where: str) -> None:
    if id_ not in known:
        raise InvalidMarker(f"{where} bears {id_!r}, which is not in {REQUIREMENTS}.")


def _head(
    wanted: Sequence[Requirement], tests: Mapping[str, Sequence[str]], mutants: Mapping[str, int]
) -> Iterator[str]:
    tested = [r.id for r in wanted if tests.get(r.id)]
    proven = [id_ for id_ in tested if id_ in mutants]
    holes = [r.id for r in wanted if not tests.get(r.id)]
    yield from (
        "# Conformance",
        "",
        "*Which tests hold which requirement?*",
        "",
        "Written by `python -m tools.conformance`; do not edit. The ids are those of",
        "[requirements.md](requirements.md). *mutants* counts the planted faults (`make mutations`) for an id that a",
        "test of that id has to notice.",
        "",
        f"{len(tested)} of {len(wanted)} requirements have a test, {len(proven)} have a planted fault as well.",
        "",
        f"Holes (no test): {', '.join(holes) if holes else 'none'}.",
    )


def _sections(
    wanted: Sequence[Requirement], tests: Mapping[str, Sequence[str]], mutants: Mapping[str, int]
) -> Iterator[str]:
    section = None
    for requirement in wanted:
        if requirement.section != section:
            section = requirement.section
            yield from ("", f"## {section}", "", "| id | requirement | tests | mutants |", "| --- | --- | --- | --- |")
        found = "<br>".join(f"`{test}`" for test in tests.get(requirement.id, ())) or "**hole**"
        text = requirement.text.replace("|", "\\|").replace("<", "&lt;")
        yield f"| {requirement.id} | {text} | {found} | {mutants.get(requirement.id) or 'no'} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; return 1 if it is out of date or a marker or list is invalid."""
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description="Write docs/conformance.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the tree (default: the current directory)")
    options = parser.parse_args(arguments)
    try:
        text = page(options.root)
    except (InvalidMarker, InvalidList, OSError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    target = options.root / PAGE
    if options.check:
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            print(f"{PAGE} is stale: run `python -m tools.conformance` and commit the page.", file=sys.stderr)
            return 1
        return 0
    target.write_text(text, encoding="utf-8")
    print(next(line for line in text.splitlines() if "requirements have a test" in line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
