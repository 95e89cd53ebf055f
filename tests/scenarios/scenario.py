"""A scenario's file: its steps, checked for what no scenario may contain; and what each thing that can happen does."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tests.scenarios.lines import BadLine
from tests.scenarios.stage import Stage


class InvalidScenario(Exception):
    """A file that is no scenario: says where, and what is wrong."""


@dataclass(frozen=True, slots=True)
class Step:
    """`at` that time `do` happens; `then` is all that is said. What does not change is not mentioned again."""

    at: float = 0.0
    do: str = ""
    then: tuple[str, ...] = ()
    borrowers: tuple[str, ...] | None = None
    lendings: tuple[str, ...] | None = None
    forced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scenario:
    """Who is there at the beginning, and what happens."""

    about: str
    conforms: tuple[str, ...]
    steps: tuple[Step, ...]
    nodes: tuple[str, ...] = ("n1",)
    streams: int = 1
    messages: int = 100
    pings: bool = False


def read(path: Path) -> str:
    """Return the text of a scenario's file, its steps preceded by those of the `opening` that it names."""
    text = path.read_text(encoding="utf-8")
    if named := re.search(r'^opening = "([\w-]+)"\n', text, re.MULTILINE):
        opening = path.parent / "openings" / f"{named[1]}.toml"
        if not opening.exists():
            raise InvalidScenario(f"{path.name}: there is no opening {named[1]!r}")
        head, _, steps = text.replace(named[0], "", 1).partition("\n\n")
        text = f"{head}\n\n{opening.read_text(encoding='utf-8')}\n{steps}"
    return text


def load(path: Path) -> Scenario:
    """The scenario in the file. Raises `InvalidScenario`."""
    try:
        found = tomllib.loads(read(path))
    except tomllib.TOMLDecodeError as problem:
        raise InvalidScenario(f"{path.name}: {problem}") from None
    steps = found.pop("step", None)
    if not isinstance(steps, list) or not steps:
        raise InvalidScenario(f"{path.name}: a scenario without a [[step]] checks nothing")
    head = _checked(found, Scenario, path.name)
    if missing := {"about", "conforms"} - head.keys():
        raise InvalidScenario(f"{path.name}: {', '.join(sorted(missing))} is missing")
    return Scenario(**head, steps=tuple(_steps(steps, path.name)))  # type: ignore[arg-type]


def _steps(found: list[dict[str, object]], name: str) -> list[Step]:
    steps: list[Step] = []
    for number, values in enumerate(found, start=1):
        where = f"{name}, step {number}"
        now = steps[-1].at if steps else 0.0
        step = Step(**{"at": now, **_checked(values, Step, where)})  # type: ignore[arg-type]
        if step.at < now:
            raise InvalidScenario(f"{where}: at {step.at} is before the step before it, at {now}")
        if not step.do and step.at == now:
            raise InvalidScenario(f"{where}: nothing happens and no time passes")
        steps.append(step)
    return steps


def _checked(values: Mapping[str, object], kind: type[Scenario] | type[Step], where: str) -> dict[str, object]:
    """The values with lists as tuples, if all keys are known and of their type."""
    known = {field.name: str(field.type) for field in fields(kind) if field.name != "steps"}
    if unknown := values.keys() - known.keys():
        raise InvalidScenario(f"{where}: unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    for key, value in values.items():
        if not _fits(value, known[key]):
            raise InvalidScenario(f"{where}: {key} is {value!r}, which is no {known[key]}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _fits(value: object, wanted: str) -> bool:
    if wanted.startswith("tuple"):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if wanted in ("int", "float"):
        return isinstance(value, int | float if wanted == "float" else int) and not isinstance(value, bool)
    return type(value).__name__ == wanted


# --- what can happen --------------------------------------------------------------------------------------------------

Happening = Callable[[Stage, re.Match[str]], object]


def happen(stage: Stage, text: str) -> None:
    """Let it happen. Raises `InvalidScenario` where nobody knows what that is."""
    for pattern, happening in HAPPENINGS.items():
        if found := re.fullmatch(pattern, text):
            try:
                happening(stage, found)
            except BadLine as problem:
                raise InvalidScenario(f"{text!r}: {problem}") from None
            stage.settle()
            return
    raise InvalidScenario(f"{text!r} is nothing that can happen; see README.md beside the scenarios")


def _subscribe(stage: Stage, found: re.Match[str]) -> None:
    agent = stage.agent(found["who"])
    agent.soon(agent.subscribe)


def _unsubscribe(stage: Stage, found: re.Match[str]) -> None:
    stage.agent(found["who"]).unsubscribe(int(found["number"] or 1))


def _consume(stage: Stage, found: re.Match[str]) -> None:
    final = "is done" in found[0]
    stage.agent(found["who"]).consume(int(found["stream"]), int(found["position"]), final=final)


def _speak(stage: Stage, found: re.Match[str]) -> None:
    stage.deliver(found["who"], found["whom"], stage.lines.parse(found["message"]))


def _set_fate(stage: Stage, found: re.Match[str]) -> None:
    stage.fates[found["name"]] = found["fate"]


def _freeze(stage: Stage, found: re.Match[str]) -> None:
    stage.find(found["who"]).frozen = True


HAPPENINGS: dict[str, Happening] = {
    r"(?P<who>\w+) subscribes": _subscribe,
    r"(?P<who>\w+) unsubscribes(?: (?P<number>\d+))?": _unsubscribe,
    r"(?P<who>\w+) (?:has consumed|is done with) stream (?P<stream>\d+) (?:to|at) (?P<position>\d+)": _consume,
    r"(?P<who>\w+) -> (?P<whom>\w+): (?P<message>.+)": _speak,
    r"the next (?P<name>\w+) is (?P<fate>lost|late|twice)": _set_fate,
    r"what was late arrives": lambda stage, _: stage.deliver_late(),
    r"(?P<who>\w+) freezes": _freeze,
    r"(?P<who>\w+) thaws": lambda stage, found: stage.find(found["who"]).thaw(),
    r"(?P<who>\w+) dies": lambda stage, found: stage.end(stage.find(found["who"])),
    r"(?P<who>\w+) shuts down": lambda stage, found: stage.shut_down(found["who"]),
    r"(?P<who>\w+) starts": lambda stage, found: stage.start_node(found["who"]),
    r"an operator takes stream (?P<stream>\d+)": lambda stage, found: stage.operator_takes(int(found["stream"])),
    r"an operator deletes the group": lambda stage, _: stage.delete_group(),
    r"the streams are closed, (?P<count>\d+) follow": lambda stage, f: stage.streams.rollover(1, int(f["count"])),
    r"the database hangs for (?P<who>\w+)": lambda stage, found: stage.hang_database(found["who"]),
    r"the database answers (?P<who>\w+) again": lambda stage, found: stage.wake_database(found["who"]),
}
