"""The pages hold together: every link leads somewhere, and every promise names checkers that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools import cli_doc, protocol_doc, settings_doc
from tools.conformance import marks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


@cache
def ids_by_file() -> set[tuple[str, str]]:
    """(test file, id) of every marker."""
    return {(mark.test.partition("::")[0], mark.id) for mark in marks(ROOT)}


def promises() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each line of the tables of guarantees, and the (file, ids) it names as its checkers."""
    for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith(("| promise ", "| what ", "| --- ")):
            _, *cells, _ = line.split("|")
            yield cells[0].strip(), _CHECKER.findall(cells[-1])


@pytest.mark.parametrize(("promise", "checkers"), list(promises()))
def test_every_promise_names_a_checker_that_exists(promise: str, checkers: list[tuple[str, str]]) -> None:
    assert checkers, f"nothing checks: {promise}"
    borne = ids_by_file()
    for path, ids in checkers:
        assert (ROOT / "tests" / path).is_file(), path
        for id_ in filter(None, ids.split(", ")):
            assert (f"tests/{path}", id_) in borne, f"no test in {path} bears {id_}"


def test_the_generated_pages_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings_doc.main(["--check"]) == 0, capsys.readouterr().out
    assert cli_doc.main(["--check"]) == 0, capsys.readouterr().out
    page = protocol_doc.PAGE.read_text()
    assert protocol_doc.render(page) == page
