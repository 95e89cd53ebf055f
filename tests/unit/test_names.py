"""Names are words of the field: none of those that a reader of Kafka, etcd or Postgres could not guess is one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("protocol", "storage", "leader", "borrower", "sublet", "migrations", "tests", "tools", "bench", "examples")
PRIVATE = set(re.findall(
    r"\w+", "tell told hear ears teller voices lookout newsroom lent ways obedience farewell whole kept"
))  # fmt: skip
OPTIONS = {"whole_epochs", "wholeEpochs"}
"""Of a session and of Spark's source: what is given is whole epochs."""
FOREIGN = {
    "storage/sublet_storage/log/block.py: tell",  # of a file
    "tools/import_contracts.py: kept",  # of a contract of import-linter
}


def names(tree: ast.AST) -> Iterator[str]:
    """Every identifier of a module, but for those of tests, which are sentences."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(name) | ast.Attribute(attr=name) | ast.arg(name) | ast.keyword(str(name)):
                yield name
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                if not name.startswith("test_"):
                    yield name


def words(name: str) -> set[str]:
    """The words that a name in any spelling is made of."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def test_no_name_is_of_a_private_language() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        for name in names(ast.parse(file.read_text()))
        if words(name) & PRIVATE and name.strip("_") not in OPTIONS
    }
    assert found <= FOREIGN


def test_what_is_looked_for_is_found() -> None:
    assert [words(name) & PRIVATE for name in ("_is_told", "WholeLent", "TO_BE_LENT", "foretold")] == [
        {"told"}, {"whole", "lent"}, {"lent"}, set(),
    ]  # fmt: skip
