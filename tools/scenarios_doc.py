"""Writes `docs/protocol-scenarios.md` and its drawings from the scenarios in `tests/scenarios`.

    python -m tools.scenarios_doc [--check]

The drawings show the messages that the tests check, and the comments beside them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.scenarios import scenario as scenario_files
from tools import drawing
from tools.generated import write_or_check

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "tests" / "scenarios"
PAGE = ROOT / "docs" / "protocol-scenarios.md"
PICTURES = ROOT / "docs" / "pictures"

HEAD = """# The protocol in scenarios

*What happens, message by message, when a process dies, freezes, leaves or is late?*

This page shows [the protocol](protocol.md) under faults: each scenario is played by a test with the product's own
nodes and agents, on a clock of its own, and drawn here from the file that the test reads. Time runs downwards. `a` and
`b` are agents, each in a process that consumes; `n1` and `n2` are nodes. A dot is what an agent sends its session; a
dashed lifeline is a process that is dead, stopped or frozen; a red arrow is a message that is lost. `a/1` is the
agent's first borrower, `a/2` the one that succeeded it. Pings are left out where they are beside the point.
"""


def pages() -> Iterator[tuple[Path, str]]:
    """Yield (file, text) of the page and its drawings."""
    parts = [HEAD]
    for path in sorted(FILES.glob("*.toml")):
        reported = scenario_files.load(path)
        title = path.stem.replace("-", " ").capitalize()
        picture = PICTURES / f"scenario-{path.stem}.svg"
        requirements = ", ".join(f"[{name}](requirements.md)" for name in reported.conforms)
        parts += [
            f"## {title}\n",
            f"{reported.about} ({requirements}; [the scenario](../tests/scenarios/{path.name}))\n",
            f"![{title}](pictures/{picture.name})\n",
        ]
        yield picture, drawing.scenario(reported.about, _parties(reported), _scenes(reported, _comments(path)))
    yield PAGE, "\n".join(parts)


def _scenes(reported: scenario_files.Scenario, comments: list[str]) -> Iterator[drawing.Scene]:
    """Yield the steps that have a message or an explanation."""
    for step, comment in zip(reported.steps, comments, strict=True):
        if step.do or step.then or comment:
            yield drawing.Scene(step.at, comment, step.do, step.then)


def _comments(path: Path) -> list[str]:
    """Return the comment before each step."""
    before = scenario_files.read(path).split("[[step]]")[:-1]
    explained = (re.findall(r"^# ?(.*)$", part.rsplit("\n\n", 1)[-1], re.MULTILINE) for part in before)
    return [" ".join(lines).replace("`", "") for lines in explained]


def _parties(reported: scenario_files.Scenario) -> list[str]:
    """Return the agents and nodes that send or receive: the first agent, the nodes, the other agents."""
    spoken = (re.match(r"(\w+) -> (\w+):", line) for step in reported.steps for line in step.then)
    named = {name for found in spoken if found for name in found.groups()}
    agents = sorted(named - set(reported.nodes))
    return [*agents[:1], *(name for name in reported.nodes if name in named), *agents[1:]]


def main() -> int:
    """Write the pages, or with `--check` only report whether they are current."""
    former: dict[Path, str | None] = dict.fromkeys(PICTURES.glob("scenario-*.svg"))
    return write_or_check(__doc__, former | dict(pages()), "scenarios_doc")


if __name__ == "__main__":
    sys.exit(main())
