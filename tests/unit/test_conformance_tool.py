"""The conformance page says what the markers say, and the tool refuses what would hide a hole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.conformance import PAGE, REQUIREMENTS, main, marks, page, requirements
from tools.mutations.entries import LISTS

LIST = """# Requirements

## E. First part
- E1  Something holds.
- E2  Retired with <= and a | in it.

## X. Other part
- X1  Nothing leaks.
"""
TESTS = """
import pytest


@pytest.mark.conforms("E1", "E2")
def test_two_at_once():
    pass


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.conforms("E1"))])
def test_param(n):
    pass


@pytest.mark.conforms("E1")
class TestGroup:
    pytestmark = [pytest.mark.conforms("E2")]

    async def test_inside(self):
        pass

    def helper(self):
        pass


def test_without():
    pass
"""
MUTANT = """
["m"]
ids = ["E1"]
file = "a.py"
find = "a"
replace = "b"
tests = ["tests/unit/test_a.py"]
"""


ODD = Path("tests/unit/test_b.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project of three requirements, one of them without a test."""
    for folder in ("docs", "tests/unit", LISTS):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / REQUIREMENTS).write_text(LIST)
    (tmp_path / "tests/unit/test_a.py").write_text(TESTS)
    (tmp_path / LISTS / "area.toml").write_text(MUTANT)
    return tmp_path


def run(tree: Path, *arguments: str) -> int:
    return main(["--root", str(tree), *arguments])


def test_markers_are_found_wherever_pytest_takes_them(tree: Path) -> None:
    prefix = "tests/unit/test_a.py::"
    assert [(mark.id, mark.test.removeprefix(prefix)) for mark in marks(tree)] == [
        ("E1", "test_two_at_once"),
        ("E2", "test_two_at_once"),
        ("E1", "test_param"),
        ("E1", "TestGroup::test_inside"),
        ("E2", "TestGroup::test_inside"),
    ]


def test_a_modules_mark_is_borne_by_all_its_tests(tree: Path) -> None:
    (tree / "tests/unit/test_a.py").write_text(
        'import pytest\npytestmark = pytest.mark.conforms("X1")\n'
        "def test_x(): pass\nclass TestY:\n    def test_y(self): pass\n"
    )
    assert [mark.test.rpartition("::")[2] for mark in marks(tree) if mark.id == "X1"] == ["test_x", "test_y"]


def test_the_page_shows_tests_mutants_and_holes(tree: Path) -> None:
    text = page(tree)
    assert "2 of 3 requirements have a test, 1 have a planted fault as well." in text
    assert "Holes (no test): X1." in text
    assert "| X1 | Nothing leaks. | **hole** | no |" in text
    assert "| E2 | Retired with &lt;= and a \\| in it. | `tests/unit/test_a.py::test_two_at_once`<br>" in text
    assert next(line for line in text.splitlines() if line.startswith("| E1 ")).endswith("| 1 |")


@pytest.mark.parametrize(
    ("selector", "counts"),
    [
        ("tests/unit", True),
        ("tests/unit/test_a.py", True),
        ("tests/unit/test_a.py::TestGroup", True),
        ("tests/unit/test_a.py::test_param[2]", True),
        ("tests/unit/test_a.py::test_without", False),
        ("tests/unit/test_b.py", False),
    ],
)
def test_a_mutant_counts_if_it_runs_a_test_of_it(tree: Path, selector: str, counts: bool) -> None:
    (tree / LISTS / "area.toml").write_text(MUTANT.replace("tests/unit/test_a.py", selector))
    line = next(line for line in page(tree).splitlines() if line.startswith("| E1 "))
    assert line.endswith("| 1 |" if counts else "| no |")


def test_check_fails_while_the_page_is_stale(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tree, "--check") == 1
    assert not (tree / PAGE).exists()
    assert run(tree) == 0
    assert run(tree, "--check") == 0
    (tree / "tests/unit/test_a.py").write_text(TESTS.replace("def test_param", "def test_params"))
    assert run(tree, "--check") == 1
    assert "is stale" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "text", "why"),
    [
        (ODD, '@pytest.mark.conforms("E9")\ndef test_x(): pass', "'E9', which is not in"),
        (ODD, "@pytest.mark.conforms(NAME)\ndef test_x(): pass", "written out as strings"),
        (ODD, "@pytest.mark.conforms()\ndef test_x(): pass", "at least one"),
        (ODD, '@pytest.mark.conforms("E1")\ndef check_x(): pass', "pytest does not run it"),
        (ODD, '@pytest.mark.conforms("E1"\ndef test_x(): pass', "never closed"),
        (LISTS / "area.toml", MUTANT.replace("E1", "E77"), "mutant 'm' bears 'E77'"),
        (REQUIREMENTS, LIST + "- E1  Again.\n", "E1 stands there twice"),
    ],
    ids=["unknown", "a name", "none", "no test", "no Python", "mutant", "twice"],
)
def test_what_cannot_be_meant_is_an_error(
    tree: Path, capsys: pytest.CaptureFixture[str], path: Path, text: str, why: str
) -> None:
    (tree / path).write_text(text + "\n")
    assert run(tree) == 1
    assert why in capsys.readouterr().err


def test_this_projects_own_list_is_read_entirely() -> None:
    root = Path(__file__).parents[2]
    lines = (root / REQUIREMENTS).read_text(encoding="utf-8").splitlines()
    assert len(requirements(root)) == sum(line.startswith("- ") for line in lines) > 90
