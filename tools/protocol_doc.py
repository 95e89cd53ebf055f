"""Writes the status tables of `docs/protocol.md` from the machines' own tables, so that they cannot disagree.

    python -m tools.protocol_doc [--check]

What stands between the markers of a section is replaced; the prose around it is written by hand.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from borrower.machine import table as borrower_table
from leader.election import table as election_table
from leader.group import table as assignment_table

PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"
_MEMBER = re.compile(r'^\s+(\w+) = ".*"\s*#\s*(.*)$', re.MULTILINE)


def statuses(kind: type[Enum]) -> Iterator[str]:
    """A line per status with what is true in it, read from the comment beside the member."""
    said = dict(_MEMBER.findall(inspect.getsource(kind)))
    yield from ("| status | what is true |", "| --- | --- |")
    for member in kind:
        yield f"| `{member.value}` | {said.get(member.name, '')} |"


def steps(table: dict[Any, dict[Any, tuple[Any, Any]]]) -> Iterator[str]:
    """A line per (status, event) that changes or says something."""
    yield from ("| in | on | goes to | and does |", "| --- | --- | --- | --- |")
    for status, row in table.items():
        for kind, (following, action) in row.items():
            if action.name != "IGNORE" or following is not status:
                yield f"| `{status.value}` | {kind.value} | `{following.value}` | {_words(action)} |"


def answers(table: dict[Any, dict[Any, Any]]) -> Iterator[str]:
    """A line per status: which event is answered how."""
    yield from ("| in | on | does |", "| --- | --- | --- |")
    for status, row in table.items():
        for kind, action in row.items():
            if action.name != "IGNORE":
                yield f"| `{status.value}` | {kind.value} | {_words(action)} |"


def diagram(moves: dict[Any, Any]) -> Iterator[str]:
    """A mermaid state diagram."""
    yield from ("```mermaid", "stateDiagram-v2")
    for status, following in moves.items():
        for other in sorted(following, key=list(moves).index):
            yield f"    {status.value} --> {other.value}"
    yield "```"


def _words(action: Enum) -> str:
    return action.name.lower().replace("_", " ")


def _moves(table: dict[Any, dict[Any, tuple[Any, Any]]]) -> dict[Any, set[Any]]:
    return {status: {after for after, _ in row.values() if after is not status} for status, row in table.items()}


def sections() -> dict[str, list[str]]:
    """Marker -> lines."""
    a, b, e = assignment_table, borrower_table, election_table
    return {
        "borrower": [*diagram(b.MOVES), "", *statuses(b.Status), "", *answers(b.TABLE)],
        "borrower streams": [*statuses(b.StreamStatus)],
        "assignment": [*diagram(_moves(a.TABLE)), "", *statuses(a.Status), "", *steps(a.TABLE)],
        "election": [*diagram(_moves(e.TABLE)), "", *statuses(e.Status), "", *steps(e.TABLE)],
    }


def render(page: str) -> str:
    """The page with every section's lines put between its markers."""
    for name, lines in sections().items():
        found = re.search(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", page, re.DOTALL)
        if found is None:
            raise SystemExit(f"{PAGE}: the markers of section {name!r} are missing: put them back.")
        page = "\n".join([page[: found.start(1)].rstrip("\n"), *lines, page[found.end(1) :]])
    return page


def main() -> int:
    """Write the page, or with `--check` only say whether it is current."""
    current = PAGE.read_text()
    wanted = render(current)
    if "--check" in sys.argv[1:]:
        if current != wanted:
            print(f"{PAGE} does not show the machines' tables: run `python -m tools.protocol_doc`.", file=sys.stderr)
        return int(current != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
