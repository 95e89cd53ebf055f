"""`python -m tools.fault_results`: writes the latest test results into docs/guarantees.md.

Each run stores its outcomes in pytest's cache (`tests/run_results.py`). The result of a row is that of the tests it
names: those of a file that are marked with one of its ids, or all of the file; day and commit are those of the oldest
of these runs. A row of which a test has not run here keeps its old result and is reported.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.conformance import marks

PAGE = Path("docs/guarantees.md")
CACHE_KEY = "sublet/results"
HEADER = "| what | meanwhile | checkers | last result |"
RESULT = re.compile(r"\d+ \w+(, \d+ \w+)*, \d{4}-\d\d-\d\d, \S+")
"""Format of the column: the number of tests by outcome, the day, the commit."""

_CHECKER = re.compile(r"`([\w/]+\.py)`(?: \(([^)]*)\))?")

Results = Mapping[str, Sequence[str]]
"""By pytest's test name: outcome, day, commit."""


def rows(page: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) of each fault."""
    lines = page.splitlines()
    for number in range(lines.index(HEADER) + 2, len(lines)):
        if not lines[number].startswith("| "):
            return
        yield number, [cell.strip() for cell in lines[number].strip("|").split("|")]


def missing_and_result(root: Path, checkers: str, results: Results) -> tuple[list[str], str]:
    """Return which tests named in the cell `checkers` have not run, and the outcome of the others."""
    marked, missing, found = marks(root), list[str](), dict[str, Sequence[str]]()
    for file, ids in _CHECKER.findall(checkers):
        path = f"tests/{file}"
        wanted = {mark.test for mark in marked if mark.test.startswith(f"{path}::") and mark.id in ids.split(", ")}
        ran = {t: r for t, r in results.items() if t.startswith(f"{path}::") and (not ids or _plain(t) in wanted)}
        missing += sorted(wanted - {_plain(test) for test in ran}) if ids else [] if ran else [path]
        found |= ran
    if not found:
        return missing, ""
    counts = Counter(outcome for outcome, _, _ in found.values())
    oldest = min(found.values(), key=lambda each: each[1])
    return missing, ", ".join([*(f"{count} {outcome}" for outcome, count in sorted(counts.items())), *oldest[1:]])


def _plain(test: str) -> str:
    return test.partition("[")[0]


def filled(root: Path, page: str, results: Results) -> tuple[str, list[str]]:
    """Return the page with the results, and the tests that have not run."""
    lines, unknown = page.splitlines(), list[str]()
    for number, cells in rows(page):
        missing, result = missing_and_result(root, cells[2], results)
        unknown += missing
        lines[number] = f"| {' | '.join([*cells[:3], cells[3] if missing else result])} |"
    return "\n".join(lines) + "\n", unknown


def read_results(root: Path) -> Results:
    """Return the outcomes that test runs of this tree have stored."""
    stored = root / ".pytest_cache" / "v" / CACHE_KEY
    return json.loads(stored.read_text()) if stored.exists() else {}


def main(root: Path = Path()) -> int:
    """Write the results; return 1 if a test has not run."""
    page, unknown = filled(root, (root / PAGE).read_text(encoding="utf-8"), read_results(root))
    (root / PAGE).write_text(page, encoding="utf-8")
    if unknown:
        print("rows keep their results, since these tests have not run here:", *sorted(set(unknown)), sep="\n  ")
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
