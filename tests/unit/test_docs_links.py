"""The pages hold together: links lead somewhere, each page says what it answers, and promises name their checkers."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import sublet
from sublet.cli.app import app
from tools import cli_doc, limits_doc, metrics_doc, protocol_doc, settings_doc
from tools.conformance import marks
from tools.docs_hooks import PAGES as PAGES_OF_SITE
from tools.docs_hooks import rewritten

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted(page for folder in ("docs", "tests", "tools") for page in (ROOT / folder).rglob("*.md"))
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CHECKER = re.compile(r"`([a-z_/]+\.py)`(?: \(([A-Z0-9, ]+)\))?")


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(path, anchor) of each link to something in the tree."""
    for target in _LINK.findall(_FENCED.sub("", page.read_text())):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(page: Path) -> set[str]:
    """What headings are called in links."""
    titles = _HEADING.findall(_FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            found = [(page.parent / path).resolve() for path, _ in links(page)]
            waiting.extend(target for target in found if target.suffix == ".md" and target.exists())
    assert set(PAGES) <= reached


def sections() -> dict[str, dict[str, tuple[str, str]]]:
    """{section of the index: {path of a page in docs/: (title, question)}}."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for part in (ROOT / "docs" / "index.md").read_text().split("\n## ")[1:]:
        rows = re.findall(r"^\| \[(.+)\]\((.+)\) \| (.+) \|$", part, re.MULTILINE)
        found[part.partition("\n")[0]] = {path: (title, question) for title, path, question in rows}
    return found


def test_every_page_is_in_the_index_once() -> None:
    listed = [(path, question) for rows in sections().values() for path, (_, question) in rows.items()]
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(path for path, _ in listed) == sorted(
        there | {"../README.md", "../examples/README.md", "decisions/index.md"}
    )
    for path, question in listed:
        first = (ROOT / "docs" / path).read_text().split("\n\n")[1]
        assert path == "../README.md" or first == f"*{question}*", path
        assert question.endswith("?"), path


def test_the_site_has_the_sections_of_the_index() -> None:
    nav = yaml.safe_load(re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text()))["nav"]
    site = {title: items for entry in nav for title, items in entry.items() if title not in ("All pages", "Project")}
    inside = {path: PAGES_OF_SITE[str(path)[3:]] for path in ("../README.md", "../examples/README.md")}
    assert list(site) == list(sections()) == ["Quickstart", "How-to", "Concepts", "Reference"]
    for title, rows in sections().items():
        items = [item for each in site[title] for item in each.items()]
        pages = [(name, below if isinstance(below, str) else below[0]) for name, below in items]
        assert pages == [(name, inside.get(path, path)) for path, (name, _) in rows.items()]


@cache
def ids_by_file() -> set[tuple[str, str]]:
    """(test file, id) of every marker."""
    return {(mark.test.partition("::")[0], mark.id) for mark in marks(ROOT)}


def promises() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each line of the tables of guarantees, and the (file, ids) it names as its checkers."""
    for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith(("| promise ", "| what ", "| --- ")):
            _, *cells, _ = line.split("|")
            yield cells[0].strip(), _CHECKER.findall(" ".join(cells[1:]))


@pytest.mark.parametrize(("promise", "checkers"), list(promises()))
def test_every_promise_names_a_checker(promise: str, checkers: list[tuple[str, str]]) -> None:
    assert checkers, f"nothing checks: {promise}"
    borne = ids_by_file()
    for path, ids in checkers:
        assert (ROOT / "tests" / path).is_file(), path
        for id_ in filter(None, ids.split(", ")):
            assert (f"tests/{path}", id_) in borne, f"no test in {path} bears {id_}"


def test_the_generated_pages_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    for tool in (settings_doc, cli_doc, limits_doc, metrics_doc):
        assert tool.main(["--check"]) == 0, capsys.readouterr().out
    page = protocol_doc.PAGE.read_text()
    assert protocol_doc.render(page) == page


@pytest.mark.parametrize(
    ("text", "page", "on_the_site"),
    [
        ("[a](docs/groups.md#watching)", "quick-start.md", "[a](groups.md#watching)"),
        ("[a](../README.md#in-spark)", "from-kafka.md", "[a](quick-start.md#in-spark)"),
        ("[a](../../docs/epochs.md)", "examples/hourly_closing.md", "[a](../epochs.md)"),
        ("[a](../bench.md), [b](index.md)", "decisions/0002-x.md", None),
        ("![p](pictures/a.svg)", "tutorial.md", None),
        ("see [`x.py`](../protocol/x.py).", "pubsub.md", "see `x.py`."),
        ("[a](https://example.org/x), [a](#b)", "pubsub.md", None),
        ("```\n[a](../README.md)\n```", "pubsub.md", None),
    ],
)
def test_links_on_the_site_lead_to_its_pages(text: str, page: str, on_the_site: str | None) -> None:
    """What the site has not keeps its text."""
    assert rewritten(text, page) == (on_the_site or text)


def test_programs_of_pages_use_names_that_exist() -> None:
    """What they import from us, and what they take from modules of ours."""
    found = 0
    for page in PAGES:
        names: dict[str, object] = {"sublet": sublet}
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            nodes = list(ast.walk(ast.parse(f"async def block():\n{textwrap.indent(block, ' ')}")))
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sublet"):
                    module = importlib.import_module(node.module or "")
                    names |= {each.asname or each.name: getattr(module, each.name) for each in node.names}
                    found += len(node.names)
            for node in nodes:
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    owner = names.get(node.value.id)
                    if inspect.ismodule(owner) and owner.__name__.startswith("sublet"):
                        assert hasattr(owner, node.attr), f"{page.name}: {node.value.id}.{node.attr}"
                        found += 1
    assert found > 30


_FOLDERS = ("bench", "borrower", "deploy", "docs", "examples", "leader", "migrations", "protocol", "storage", "sublet",
            "tests", "tools")  # fmt: skip
_FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)(?:::\w+)?`|(?<![\w./-])((?:tests|tools|bench)/[\w./-]+\.py)\b")
_MODULE = re.compile(r"`(sublet_(?:protocol|storage|leader|borrower)(?:\.\w+)+)`")
_PLACEHOLDER = re.compile(r"[A-Z]{4}")


def test_files_and_modules_on_pages_exist() -> None:
    """By the end of a path: `cli/app.py` is `sublet/cli/app.py`. `NAME` in a path stands for any."""
    files = [path.relative_to(ROOT).as_posix() for folder in _FOLDERS for path in (ROOT / folder).rglob("*.*")]
    ends = {file.split("/", count)[-1] for file in files for count in range(file.count("/"))} | set(files)
    faults: list[str] = []
    count = 0
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            named = ["".join(each) for each in _FILE.findall(page.read_text())]
            faults += [f"{page.name}: {each}" for each in named if not _PLACEHOLDER.search(each) and each not in ends]
            count += len(named)
            faults += [f"{page.name}: {each}" for each in _MODULE.findall(page.read_text()) if not _exists(each)]
    assert (faults, count > 300) == ([], True)


def _exists(name: str) -> bool:
    """Whether it is a module, or something in one."""
    module, _, last = name.rpartition(".")
    return importlib.util.find_spec(module) is not None and (
        hasattr(importlib.import_module(module), last) or importlib.util.find_spec(name) is not None
    )


_SPOKEN = ("sublet import", "sublet direct listener")
_COMMAND = re.compile(r"(?<![\w./-])sublet +[a-z][^\s`|&;#)<>]*(?: +[^\s`|&;#)<>]+)*")


def fault_of(command: str) -> str | None:
    """What the command line would not take: a name of a command, or an option."""
    found: Any = typer.main.get_command(app)
    words = command.split()[1:]
    while words and words[0].isascii() and words[0][0].isalpha() and hasattr(found, "commands"):
        if words[0] not in found.commands:
            return f"{command}: no {words[0]}"
        found = found.commands[words.pop(0)]
    known = {name for option in found.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
    unknown = {word.split("=")[0] for word in words if re.match("--[a-z]", word)} - known
    return f"{command}: no {unknown}" if unknown else None


def test_commands_on_pages_exist() -> None:
    """With the options that they are shown with; in the first column of a table also `sublet GROUP A`, `B`, `C`."""
    faults: list[str] = []
    count = 0
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for code in re.findall(r"^```.*?^```|`[^`\n]+`", text, re.DOTALL | re.MULTILINE):
            commands = [each for each in _COMMAND.findall(code) if not each.startswith(_SPOKEN)]
            count += len(commands)
            faults += filter(None, map(fault_of, commands))
        for group, more in re.findall(r"^\| `sublet (\w+) [\w-]+`,([^|]+)\|", text, re.MULTILINE):
            faults += filter(None, (fault_of(f"sublet {group} {name}") for name in re.findall(r"`([\w-]+)`", more)))
    assert (faults, count > 300) == ([], True)


def test_every_runtime_dependency_is_on_its_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    brought = [extras[name] for name in extras if name not in ("demo", "bench", "docs", "dev")]
    needed = {each for found in (project["dependencies"], *brought) for each in found}
    page = (ROOT / "docs" / "dependencies.md").read_text()
    shown = {"".join(row) for row in re.findall(r"^\|(?: `\w+` \|)? `([\w\[\]-]+)` \| ([<>=.,\d]+) \|", page, re.M)}
    assert shown == needed
