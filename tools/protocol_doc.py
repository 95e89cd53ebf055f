"""Writes the status tables and drawings of `docs/protocol.md` from the machines' transition tables.

    python -m tools.protocol_doc [--check]

Only the text between the markers of a section is replaced; the rest is written by hand.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from sublet_borrower.machine import transitions as borrower_table
from sublet_leader.election import transitions as election_table
from sublet_leader.group import grant_transitions as assignment_table
from tools import drawing
from tools.generated import write_or_check

PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"
_MEMBER = re.compile(r'^\s+(\w+) = ".*"\s*#\s*(.*)$', re.MULTILINE)


def statuses(kind: type[Enum]) -> Iterator[str]:
    """Yield a table row for each status, with its meaning from the comment beside the member."""
    said = dict(_MEMBER.findall(inspect.getsource(kind)))
    yield from ("| status | what is true |", "| --- | --- |")
    for member in kind:
        yield f"| `{member.value}` | {said[member.name]} |"


def steps(table: dict[Any, dict[Any, tuple[Any, Any]]]) -> Iterator[str]:
    """Yield a table row for each (status, event) that changes the status or has an action."""
    yield from ("| in | on | goes to | and does |", "| --- | --- | --- | --- |")
    for status, row in table.items():
        for kind, (following, action) in row.items():
            if action.name != "IGNORE" or following is not status:
                yield f"| `{status.value}` | {kind.value} | `{following.value}` | {_words(action)} |"


def answers(table: dict[Any, dict[Any, Any]]) -> Iterator[str]:
    """Yield a table row for each status: how it answers which event."""
    yield from ("| in | on | does |", "| --- | --- | --- |")
    for status, row in table.items():
        for kind, action in row.items():
            if action.name != "IGNORE":
                yield f"| `{status.value}` | {kind.value} | {_words(action)} |"


def labels(table: dict[Any, dict[Any, tuple[Any, Any]]]) -> drawing.Labels:
    """Return {status: {next status: the events that cause the transition}}."""
    moves: dict[str, dict[str, list[str]]] = {status.value: {} for status in table}
    for status, row in table.items():
        for kind, (following, _) in row.items():
            if following is not status:
                moves[status.value].setdefault(following.value, []).append(kind.value)
    return moves


def unlabelled(moves: dict[Any, Any]) -> drawing.Labels:
    """Return the same for a table that does not name the events."""
    return {status.value: {other.value: () for other in following} for status, following in moves.items()}


def _words(action: Enum) -> str:
    return action.name.lower().replace("_", " ")


def pictures() -> dict[str, str]:
    """Return {machine: its drawing}."""
    return {
        "borrower": drawing.states("The statuses of a borrower", unlabelled(borrower_table.ALLOWED_TRANSITIONS)),
        "assignment": drawing.states("The statuses of an assignment", labels(assignment_table.TRANSITIONS)),
        "election": drawing.states("The statuses of a leadership", labels(election_table.TRANSITIONS)),
    }


def shown(machine: str) -> list[str]:
    """Return the lines that embed the machine's drawing."""
    return [f"![the statuses and their moves](pictures/{_picture(machine).name})"]


def _picture(machine: str) -> Path:
    return PAGE.parent / "pictures" / f"protocol-{machine}.svg"


def sections() -> dict[str, list[str]]:
    """Return {marker: lines}."""
    a, b, e = assignment_table, borrower_table, election_table
    return {
        "borrower": [*shown("borrower"), "", *statuses(b.BorrowerStatus), "", *answers(b.ACTIONS)],
        "borrower streams": [*statuses(b.BorrowedStreamStatus)],
        "assignment": [*shown("assignment"), "", *statuses(a.GrantStatus), "", *steps(a.TRANSITIONS)],
        "election": [*shown("election"), "", *statuses(e.ElectionStatus), "", *steps(e.TRANSITIONS)],
    }


def render(page: str) -> str:
    """Return the page with every section's lines put between its markers."""
    for name, lines in sections().items():
        found = re.search(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", page, re.DOTALL)
        if found is None:
            raise SystemExit(f"{PAGE}: the markers of section {name!r} are missing: put them back.")
        page = "\n".join([page[: found.start(1)].rstrip("\n"), *lines, page[found.end(1) :]])
    return page


def main() -> int:
    """Write the page and its drawings, or with `--check` only report whether they are current."""
    texts = {PAGE: render(PAGE.read_text()), **{_picture(name): text for name, text in pictures().items()}}
    return write_or_check(__doc__, texts, "protocol_doc")


if __name__ == "__main__":
    sys.exit(main())
