"""Plays every scenario beside this file, step by step, with the product's machines, and compares its lines exactly."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.scenarios.lines import BadLine
from tests.scenarios.scenario import InvalidScenario, Scenario, Step, happen, load
from tests.scenarios.stage import Stage
from tools.conformance import requirements

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.toml"))


class Differs(Exception):
    """A step that came out otherwise."""


def play(path: Path) -> None:
    """From the first step to the last. Raises `InvalidScenario` or `Differs`, which name the file and the step."""
    scenario = load(path)
    stage = Stage(scenario.nodes, scenario.streams, scenario.messages)
    borrowers: tuple[str, ...] = ()
    lendings: tuple[str, ...] = ()
    for number, step in enumerate(scenario.steps, start=1):
        where = f"{path.name}, step {number} (at {step.at:g}: {step.do or 'time passes'})"
        perform(stage, step, where)
        borrowers = borrowers if step.borrowers is None else step.borrowers
        lendings = lendings if step.lendings is None else step.lendings
        _compare(f"{where}: then", step.then, stage.take_said(pings=scenario.pings))
        _compare(f"{where}: borrowers", borrowers, stage.borrowers())
        _compare(f"{where}: lendings", lendings, stage.lendings())
        _compare(f"{where}: forced", step.forced, stage.take_forced())


def perform(stage: Stage, step: Step, where: str) -> None:
    """Let the time pass and the thing happen."""
    try:
        stage.pass_time(step.at)
        if step.do:
            happen(stage, step.do)
    except (InvalidScenario, BadLine) as problem:
        raise InvalidScenario(f"{where}: {problem}") from None


def _compare(where: str, expected: Iterable[str], found: list[str]) -> None:
    wanted = list(expected)
    if wanted != found:
        lines = [line for line in difflib.ndiff(wanted, found) if line[:1] != "?"]
        raise Differs(f"{where}\n(- expected, + found)\n" + "\n".join(lines))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    problem = ""
    try:
        play(path)
    except (InvalidScenario, Differs) as error:
        problem = str(error)
    if problem:
        pytest.fail(problem, pytrace=False)


def test_scenarios_bear_ids_that_exist() -> None:
    known = {requirement.id for requirement in requirements(HERE.parent.parent)}
    scenarios: dict[str, Scenario] = {path.name: load(path) for path in FILES}
    assert scenarios
    assert {name: set(scenario.conforms) - known for name, scenario in scenarios.items()} == {
        name: set() for name in scenarios
    }
    assert all(scenario.conforms for scenario in scenarios.values())


# --- the driver notices ---------------------------------------------------------------------------------------------

HEAD = 'about = "x"\nconforms = ["E1"]\n'
PLAYED = '[[step]]\nat = 1\ndo = "n1 dies"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEAD, "without a"),
        (HEAD + "step = []", "without a"),
        (HEAD + "stream = 2\n" + PLAYED, "unknown: stream"),
        (HEAD + PLAYED + 'than = ["x"]', "step 1: unknown: than"),
        (HEAD + "streams = true\n" + PLAYED, "streams is True"),
        (HEAD + PLAYED + 'then = "x"', "then is 'x'"),
        ('about = "x"\n' + PLAYED, "conforms is missing"),
        (HEAD + PLAYED + '[[step]]\nat = 0.5\ndo = "n1 dies"', "step 2: at 0.5 is before"),
        (HEAD + "[[step]]\nat = 0", "nothing happens"),
        (HEAD + '[[step]]\ndo = "n1 sings"', "step 1 (at 0: n1 sings): 'n1 sings' is nothing"),
        (HEAD + '[[step]]\ndo = "n9 dies"', "nobody is called 'n9'"),
        (HEAD + '[[step]]\ndo = "n1 -> n1: revoke a/1 term 7 stream 1 grant 1"', "term 7 has not been seen"),
        (HEAD + "[[step", "x.toml: "),
        (HEAD + 'opening = "none"\n' + PLAYED, "no opening 'none'"),
    ],
)
def test_what_is_no_scenario_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidScenario) as refused:
        play(path)
    assert problem in str(refused.value)
    assert str(refused.value).startswith("x.toml")


@pytest.mark.parametrize("expectation", ["then", "borrowers", "lendings", "forced"])
def test_a_step_that_comes_out_otherwise_is_shown(tmp_path: Path, expectation: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(HEAD + PLAYED + f'{expectation} = ["a wrong line"]', encoding="utf-8")
    with pytest.raises(Differs) as differs:
        play(path)
    assert str(differs.value).startswith(f"x.toml, step 1 (at 1: n1 dies): {expectation}")
    assert "- a wrong line" in str(differs.value)


def test_a_conversation_without_end_is_ended() -> None:
    stage = Stage(("n1",), 1, 0)

    def again() -> None:
        stage.queue.append(again)

    again()
    with pytest.raises(BadLine, match="talk without end"):
        stage.settle()
