"""Cost of a node with many borrowers and lendings: bytes, processor time, statements.

`python -m bench node --borrowers 10000 --lendings 100000`. Bytes and processor time are those of the node's machine on
the in-memory twin of the database, at the full size and at a tenth of it; commits and renewals are on Postgres.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from bench import _postgres as postgres
from bench import _report as report
from bench._footprint import footprint
from bench._report import Beside
from bench._statements import Statements
from bench._twin import Size, Twin
from sublet_leader.node.events import AgentMessageReceived
from sublet_protocol.messages.borrower_leader import LeaderWanted
from sublet_protocol.messages.borrower_leader_codec import decode_to_leader, encode_to_leader

UPDATES = 1000
TARGET_GROWTH = 2.0
"""Bound at ten times the size: an update costs no more with more others, but for the processor's caches."""
STATEMENT_ROUNDS = 5
"""Rounds of statements for each round of the machine."""
PROSE = """A node that leads {groups} groups with {borrowers:,} borrowers and {lendings:,} lendings in all. *Bytes* and
*processor time* are of the node's machine on the **in-memory twin** of the database: without network, without Postgres,
and without the twin's own time. Bytes are those of all objects that only the node keeps, by the differences between
three sizes, beside the row of the lending as it is loaded and the message with which a borrower asks for its leader.
Processor time is that of {updates:,} progress updates, each taken in, put into a commit, and answered once it is
durable, beside parsing the same messages from their bytes; and beside a node of a tenth of the size. Commits and
renewals are on **Postgres**, {entries} progress entries over {groups} groups, beside a bare UPDATE of as many rows of
a table that has nothing but progress. Medians over {rounds} rounds (of statements {statements})."""


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    parser = argparse.ArgumentParser(prog="bench node", description=__doc__)
    parser.add_argument("--borrowers", type=int, default=10_000)
    parser.add_argument("--lendings", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--leaderships", type=int, default=1000, help="renewed in one statement")
    parser.add_argument("--entries", type=int, nargs="+", default=[1000, 10_000], help="of progress in one commit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    options = parser.parse_args(arguments)
    full = Size(options.groups, options.borrowers, options.lendings)
    figures = [*_machine(full, options.rounds), *_statements(options)]
    names = ("borrowers", "lendings", "groups", "leaderships", "entries", "rounds")
    settings = {name: getattr(options, name) for name in names}
    report.save("node", settings, {"figures": [figure.judged() for figure in figures]}, options.json)
    section = report.table(figures)
    prose = PROSE.format(
        groups=options.groups,
        borrowers=options.borrowers,
        lendings=options.lendings,
        updates=UPDATES,
        entries=" and ".join(f"{count:,}" for count in options.entries),
        rounds=options.rounds,
        statements=options.rounds * STATEMENT_ROUNDS,
    )
    report.page(options.page, "node", prose, section)
    print(section)


def _statements(options: argparse.Namespace) -> list[Beside]:
    streams = max(*options.entries, options.groups) // options.groups
    with postgres.server() as server:
        statements = Statements(postgres.database(server, 1), options.groups, streams, options.leaderships)
        try:
            return statements.figures(tuple(options.entries), options.rounds * STATEMENT_ROUNDS)
        finally:
            statements.close()


# --- the machine on the twin ----------------------------------------------------------------------------------------


def _machine(full: Size, rounds: int) -> list[Beside]:
    tenth = Size(full.groups, full.borrowers // 10, full.lendings // 10)
    wide = Size(full.groups, full.borrowers, full.lendings // 10)
    small, large = _filled(tenth), _filled(full)
    words = [_ReportTimes(small), _ReportTimes(large)]
    # Otherwise the collector would scan both nodes now and then, and the running one would pay for it.
    gc.collect()
    gc.freeze()
    for number in range(rounds + 1):
        for each in words:
            each.run(number)
    gc.unfreeze()
    return [*_bytes(small, _filled(wide), large), *_times(*words)]


def _filled(size: Size) -> Twin:
    twin = Twin(size)
    twin.fill()
    return twin


class _ReportTimes:
    """Messages of borrowers to one node, and seconds of processor time per update in each round but the first."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self.together = max(min(twin.size.lendings // twin.size.borrowers, 10), 1)
        self._took: dict[str, list[float]] = {}

    def run(self, number: int) -> None:
        """Run one round."""
        said = {
            "single": self._twin.progress(UPDATES, 1, 2 * number + 1),
            "many": self._twin.progress(UPDATES, self.together, 2 * number + 2),
            "pings": self._twin.pings(UPDATES),
        }
        for name, words in said.items():
            taken, parsed = self._twin.give(words.events).node, _parsing(words.events)
            if number:
                self._took.setdefault(name, []).append(taken / words.count)
                self._took.setdefault(f"parse {name}", []).append(parsed / words.count)

    def ms(self, name: str) -> float:
        """Return the median in milliseconds for `UPDATES` updates."""
        return 1000 * UPDATES * statistics.median(self._took[name])


def _parsing(events: Sequence[AgentMessageReceived]) -> float:
    """Return the time in which a node parses these messages, the lower limit of handling them."""
    sent = [encode_to_leader(event.message) for event in events]
    kind, texts = type(sent[0]), [one.SerializeToString() for one in sent]
    started = time.process_time()
    for text in texts:
        decode_to_leader(kind.FromString(text))
    return time.process_time() - started


def _times(small: _ReportTimes, large: _ReportTimes) -> list[Beside]:
    names = {
        "single": f"{UPDATES:,} progress updates, a message each",
        "many": f"{UPDATES:,} progress updates, {large.together} in a message",
        "pings": f"{UPDATES:,} pings, an agent's in a message",
    }
    parsing = [
        Beside(what, large.ms(name), "ms", "parsing them", large.ms(f"parse {name}")) for name, what in names.items()
    ]
    growth = [
        Beside(what, large.ms(name), "ms", "a node of a tenth", small.ms(name), TARGET_GROWTH)
        for name, what in names.items()
    ]
    return [*parsing, *growth]


def _bytes(small: Twin, wide: Twin, large: Twin) -> list[Beside]:
    """Return bytes per borrower and per lending: `wide` has more borrowers than `small`, `large` more lendings than
    `wide`."""
    row = footprint(large.rows()) / large.size.lendings
    asked = [LeaderWanted(f"agent-{n}/0", "$share/g0/#", starting_position="earliest") for n in range(1000)]
    held = [_reconnecting(twin) for twin in (small, wide, large)]
    borrower = (held[1] - held[0]) / (wide.size.borrowers - small.size.borrowers)
    lending = (held[2] - held[1]) / (large.size.lendings - wide.size.lendings)
    return [
        Beside("a lending", lending, "bytes", "its row as loaded", row),
        Beside("a borrower", borrower, "bytes", "its leader_wanted", footprint(asked) / len(asked)),
    ]


def _reconnecting(twin: Twin) -> int:
    twin.forget_store()
    return footprint(twin.node)


if __name__ == "__main__":
    main()
