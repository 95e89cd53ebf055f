"""The tool that plants faults must itself notice: survivors, mishaps, lists that do not fit the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutations.__main__ import main
from tools.mutations.entries import EQUIVALENT, LISTS, check, load, load_equivalent
from tools.mutations.trial import Copy

CODE = '''
"""Two numbers."""
LIMIT = 10


def half(number: int) -> float:
    return number / 2


def double(number: int) -> int:
    return number * 2
'''
TESTS = """
import pytest
from sublet_leader.numbers import double, half


@pytest.fixture
def four():
    assert double(2) == 4
    return 4


def test_half():
    assert half(4) == 2


def test_with_fixture(four):
    assert half(four) == 2


def test_that_is_red():
    assert half(4) == 1
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project with one module and its tests."""
    for folder in ("leader/sublet_leader", "tests", LISTS):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "leader/sublet_leader/__init__.py").touch()
    (tmp_path / "leader/sublet_leader/numbers.py").write_text(CODE)
    (tmp_path / "tests/test_numbers.py").write_text(TESTS)
    return tmp_path


def plant(tree: Path, *entries: dict[str, object], area: str = "area") -> None:
    """Write a list; each entry may differ from one that is killed."""
    usual = {
        "name": "halves are thirds",
        "ids": ["E1"],
        "file": "leader/sublet_leader/numbers.py",
        "find": "number / 2",
        "replace": "number / 3",
        "tests": ["tests/test_numbers.py::test_half"],
    }
    lines = []
    for entry in entries:
        values = {**usual, **entry}
        lines.append(f"[{values.pop('name')!r}]")
        lines += [f"{key} = {value!r}" for key, value in values.items() if value is not None]
    (tree / LISTS / f"{area}.toml").write_text("\n".join(lines))


def run(tree: Path, *arguments: str) -> int:
    return main(["--root", str(tree), *arguments])


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.long
def test_an_unnoticed_fault_survives_and_fails(tree: Path, capsys: pytest.CaptureFixture[str], jobs: str) -> None:
    """Also where one that is noticed was planted before it."""
    plant(tree, {}, {"name": "another limit", "find": "LIMIT = 10", "replace": "LIMIT = 11"})
    assert run(tree, "--jobs", jobs) == 1
    out = capsys.readouterr().out
    assert "killed" in next(line for line in out.splitlines() if "halves are thirds" in line)
    assert "survived" in next(line for line in out.splitlines() if "another limit" in line)
    assert "1 of 2 mutants killed" in out
    assert (tree / "leader/sublet_leader/numbers.py").read_text() == CODE


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"find": "def half", "replace": "def halve"}, "ImportError: cannot import name 'half'"),
        ({"find": "number / 2", "replace": "numbr / 2"}, "NameError"),
        ({"find": "number / 2", "replace": "number /"}, "SyntaxError: invalid syntax"),
        (
            {"find": "* 2", "replace": "* 3", "tests": ["tests/test_numbers.py::test_with_fixture"]},
            "outside the body of a test",
        ),
    ],
    ids=["import error", "name error", "syntax error", "fixture"],
)
@pytest.mark.long
def test_a_fault_that_breaks_the_run_proves_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], why: str
) -> None:
    plant(tree, change)
    assert run(tree) == 1
    out = capsys.readouterr().out
    assert "broken" in out
    assert why in out


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"find": "number / 7"}, "occurs 0 times in leader/sublet_leader/numbers.py"),
        ({"find": "number: int"}, "occurs 2 times in leader/sublet_leader/numbers.py"),
        ({"file": "leader/sublet_leader/nothing.py"}, "there is no file leader/sublet_leader/nothing.py"),
        ({"tests": ["tests/test_other.py"]}, "there is no test file"),
        ({"tests": ["tests/test_numbers.py::test_nothing"]}, "test_nothing is not green as it is"),
        ({"tests": ["tests/test_numbers.py::test_that_is_red"]}, "test_that_is_red is not green as it is"),
        ({"replace": "number / 2"}, "`replace` another"),
        ({"tests": []}, "`tests` must name at least one test"),
        ({"ids": "E1"}, "`ids` must be a list of strings"),
        ({"find": None}, "needs exactly"),
        ({"comment": "x"}, "needs exactly"),
    ],
    ids=lambda part: None if isinstance(part, dict) else part,
)
def test_an_entry_that_cannot_be_planted_is_an_error(
    tree: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], why: str
) -> None:
    plant(tree, change)
    assert run(tree) == 2
    assert why in capsys.readouterr().err


@pytest.mark.long
def test_only_runs_what_was_asked_for(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tree, {}, {"name": "another limit", "ids": ["E2"], "find": "LIMIT = 10", "replace": "LIMIT = 11"})
    assert run(tree, "--only", "E1") == 0
    assert "1 of 1" in capsys.readouterr().out
    assert run(tree, "--only", "E9") == 2
    assert "is for, E9" in capsys.readouterr().err


GUARDED = """
def share(number: int, parts: int) -> int:
    if parts == 1:
        return number
    if number <= 0:
        return 0
    return number // parts
"""


@pytest.mark.long
def test_drawn_faults_are_tried_and_counted(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "leader/sublet_leader/numbers.py").write_text(GUARDED)
    (tree / "tests/unit").mkdir()
    (tree / "tests/unit/test_share.py").write_text(
        "from sublet_leader.numbers import share\n\n\ndef test_share():\n    assert share(-4, 2) == 0\n"
    )
    assert run(tree, "--sample", "5", "--seed", "7") == 1
    out = capsys.readouterr().out
    assert "1 of 3 drawn faults killed, by seed 7; 0 more broken" in out
    assert "survived: leader/sublet_leader/numbers.py:3 guard: if parts == 1: return number -> pass" in out
    assert "survived: leader/sublet_leader/numbers.py:5 comparison: <= -> <" in out
    assert "[tests/unit/test_share.py::test_share]" in out
    assert (tree / "leader/sublet_leader/numbers.py").read_text() == GUARDED


@pytest.mark.long
def test_what_is_red_anyway_proves_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "leader/sublet_leader/numbers.py").write_text(GUARDED)
    (tree / "tests/unit").mkdir()
    (tree / "tests/unit/test_share.py").write_text(
        "from sublet_leader.numbers import share\n\n\ndef test_share():\n    assert share(4, 2) == 1\n"
    )
    assert run(tree, "--sample", "1") == 0
    assert "is not red each time with the fault, and green without" in capsys.readouterr().out


def test_list_shows_all_lists_and_runs_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tree, {})
    plant(tree, {"name": "in another area", "find": "gone", "replace": "away"}, area="other")
    assert run(tree, "--list") == 0
    out = capsys.readouterr().out
    assert "halves are thirds" in out
    assert "in another area" in out
    assert "2 mutants" in out


def test_a_name_used_twice_is_an_error(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tree, {})
    plant(tree, {}, area="other")
    assert run(tree) == 2
    assert "is listed twice" in capsys.readouterr().err


def test_the_copy_wins_over_any_other_tree(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    (other / "sublet_leader").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(other))
    with Copy(tree) as copy:
        assert copy.foreign_packages() == []
        assert copy.root.is_dir()
    assert not copy.root.exists()


def test_the_copy_leaves_out_what_is_not_source(tree: Path) -> None:
    for folder in (".venv", ".git", "leader/sublet_leader/__pycache__", ".mypy_cache"):
        (tree / folder).mkdir()
    with Copy(tree) as copy:
        assert sorted(path.name for path in copy.root.iterdir()) == ["leader", "tests", "tools"]
        assert sorted(path.name for path in (copy.root / "leader/sublet_leader").iterdir()) == [
            "__init__.py",
            "numbers.py",
        ]


def test_a_package_from_elsewhere_is_an_error(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copy, "foreign_packages", lambda self: ["sublet_leader"])
    plant(tree, {})
    assert run(tree) == 2
    assert "sublet_leader would not be imported from the copy" in capsys.readouterr().err


def test_our_own_lists_fit_the_code() -> None:
    root = Path(__file__).resolve().parents[2]
    mutants = load(root)
    check(mutants, root)
    assert load_equivalent(root)
    assert len(mutants) <= 150, "a new one takes the place of one that is worth less (tools/mutations/README.md)"


def test_a_broken_list_is_an_error(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / LISTS / "bad.toml").write_text("[[mutant]\n")
    assert run(tree) == 2
    assert "bad.toml is not TOML" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            "comparison: number < 7",
            "'comparison: number < 7' fits 0 faults of leader/sublet_leader/numbers.py, its text 0",
        ),
        ("guard: number", "'guard: number' fits 0 faults of leader/sublet_leader/numbers.py, its text 5"),
    ],
)
def test_an_invalid_reason_is_an_error(tree: Path, capsys: pytest.CaptureFixture[str], change: str, why: str) -> None:
    (tree / EQUIVALENT).write_text(f'["leader/sublet_leader/numbers.py"]\n"{change}" = "none"\n')
    assert run(tree, "--sample", "1") == 2
    assert why in capsys.readouterr().err
