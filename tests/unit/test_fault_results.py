"""Each fault of docs/guarantees.md has the last result of its tests, written from their runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import fault_results
from tools.fault_results import HEADER, RESULT, Results, filled, rows

ROOT = Path(__file__).parents[2]

FILE = """
import pytest

@pytest.mark.conforms("E1")
def test_a(): ...

@pytest.mark.conforms("E2")
def test_b(): ...
"""

TESTS = """
import pytest

def test_a(): pass

def test_b(): assert False

@pytest.mark.skip
def test_c(): pass

@pytest.fixture
def late():
    yield
    assert False

def test_d(late): pass
"""


def page(last: str, checkers: str = "`unit/test_x.py` (E1)") -> str:
    return f"before\n\n{HEADER}\n| --- | --- | --- | --- |\n| it is away | waits | {checkers} | {last} |\n\nafter\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "test_x.py").write_text(FILE)
    return tmp_path


A, B = "tests/unit/test_x.py::test_a", "tests/unit/test_x.py::test_b"


PASSED, FAILED = ("passed", "2026-02-03", "c2"), ("failed", "2026-02-01", "c1")


@pytest.mark.parametrize(
    ("checkers", "results", "expected"),
    [
        ("`unit/test_x.py` (E1)", {A: PASSED, B: FAILED}, "1 passed, 2026-02-03, c2"),
        ("`unit/test_x.py`", {A: PASSED, B: FAILED}, "1 failed, 1 passed, 2026-02-01, c1"),
        ("`unit/test_x.py` (E1)", {f"{A}[1]": PASSED, f"{A}[2]": FAILED}, "1 failed, 1 passed, 2026-02-01, c1"),
    ],
)
def test_a_row_has_what_became_of_its_tests(tree: Path, checkers: str, results: Results, expected: str) -> None:
    assert filled(tree, page("", checkers), results) == (page(expected, checkers), [])


@pytest.mark.parametrize("checkers", ["`unit/test_x.py` (E1, E2)", "`unit/test_x.py` (E2)"])
def test_a_row_whose_test_has_not_run_stays(tree: Path, checkers: str) -> None:
    before = page("2 passed, 2026-01-01, c0", checkers)
    assert filled(tree, before, {A: ("failed", "2026-02-03", "c2")}) == (before, [B])


def test_each_fault_has_its_last_result() -> None:
    for _, (fault, _, _, last) in rows((ROOT / fault_results.PAGE).read_text()):
        assert RESULT.fullmatch(last), f"{fault}: {last}. Run its tests, then `python -m tools.fault_results`."
        assert "failed" not in last, f"{fault}: {last}"


def test_a_run_stores_its_results_beside_others(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.run_results import RunResults\n"
        "def pytest_configure(config): config.pluginmanager.register(RunResults(config))"
    )
    (tmp_path / "test_x.py").write_text(TESTS)
    for selected in ("test_a", "not test_a"):
        command = [sys.executable, "-m", "pytest", "--rootdir=.", "-k", selected]
        subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    stored = fault_results.read_results(tmp_path)
    outcomes = {test.partition("::")[2]: outcome for test, (outcome, _, _) in stored.items()}
    assert outcomes == {"test_a": "passed", "test_b": "failed", "test_c": "skipped", "test_d": "failed"}
