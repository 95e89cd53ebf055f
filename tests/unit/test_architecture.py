"""docs/architecture.md is true: its map has every folder, and the files and names of its walks and recipes exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.test_tree import PACKAGES, ROOT, folders

PAGE = (ROOT / "docs" / "architecture.md").read_text()
_PATH = re.compile(r"`([\w.]+(?:/[\w.]*)+)`")
_ITEM = re.compile(r"^\d+\. (.+?)(?=^\d+\. |\n\n)", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"`([A-Za-z]\w*(?:\.\w+)?)`")
WIRE = {"leader_wanted", "leader_connect_response", "grant", "update_progress", "progress_saved", "final"}
"""Messages of the protocol, and a field of one."""


def section(title: str) -> str:
    """The text below a heading of the second level."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def file_of(path: str) -> Path:
    """Where a path of the page is: below its package, else below the repository."""
    package, _, rest = path.partition("/")
    return PACKAGES[package] / rest if package in PACKAGES else ROOT / path


def walks() -> Iterator[str]:
    """The steps of the two walks, each with the files and names that it mentions."""
    for title in ("The life of a message", "The life of a grant"):
        steps = _ITEM.findall(section(title))
        assert len(steps) == 10
        yield from steps


@cache
def defined(path: Path) -> frozenset[str]:
    """Classes, functions and constants of a module, and `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return frozenset(found)


def test_the_map_has_every_folder() -> None:
    rows = {
        path.removesuffix("/"): text
        for path, text in re.findall(r"^\| `(.+?)` \| (.+) \|$", section("The map of folders"), re.M)
    }
    there = {}
    for name, folder in folders().items():
        summary = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").partition("\n\n")[0]
        there[name.replace(".", "/")] = " ".join(summary.split())
    assert rows == there


@pytest.mark.parametrize("path", sorted({path for path in _PATH.findall(PAGE) if "NNNN" not in path}))
def test_every_path_exists(path: str) -> None:
    assert file_of(path).exists()


@pytest.mark.parametrize("step", list(walks()), ids=lambda step: step[:40])
def test_the_names_of_a_step_are_in_its_files(step: str) -> None:
    files = [file_of(path) for path in _PATH.findall(step) if path.endswith(".py")]
    assert files
    names = {name for name in _NAME.findall(step) if name not in WIRE}
    assert names <= frozenset[str]().union(*map(defined, files))


def test_the_names_of_a_recipe_are_in_its_files() -> None:
    recipes = section("Where to change what")
    files = [file_of(path) for path in _PATH.findall(recipes) if path.endswith(".py") and "NNNN" not in path]
    named = {name for name in _NAME.findall(recipes) if name.isupper() or name[0] == "_"} - {"SUBLET_"}
    assert named <= frozenset[str]().union(*map(defined, files)) | {"FILE"}
