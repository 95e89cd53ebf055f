"""What is written in a call's transaction is there exactly once, in order, and each transaction saw the one before."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from tests.recorded.checks.anomaly import Anomaly, Kind
from tests.recorded.history import Effect, Group, History, Message, Outcome


def check_effects(history: History, group: Group) -> list[Anomaly]:
    rows = sorted((row for row in history.effects if row.group == group.name), key=lambda row: row.number)
    return _counted(history, group, rows) + _of_calls(history, group, rows) + _chained(history, group, rows)


def _counted(history: History, group: Group, rows: list[Effect]) -> list[Anomaly]:
    """One row for each message."""
    found: dict[str, list[Effect]] = defaultdict(list)
    for row in rows:
        found[row.message].append(row)
    wrong = []
    for place, message in history.places.items():
        there = found.pop(message, [])
        if not group.takes(history.messages[message].topic if message in history.messages else ""):
            continue
        if not there:
            what = f"{message} at {place} has left no row"
            wrong.append(Anomaly(Kind.MISSING, what, group.name, (message,), (place[0],)))
        if len(there) > 1:
            what = f"{message} at {place} has left {len(there)} rows"
            calls = tuple(row.call for row in there)
            wrong.append(Anomaly(Kind.DOUBLE, what, group.name, (message,), (place[0],), calls))
    for message, there in found.items():
        what = f"{message} has left {len(there)} rows, and is not in the log"
        wrong.append(Anomaly(Kind.PHANTOM, what, group.name, (message,), calls=tuple(row.call for row in there)))
    return wrong


def _of_calls(history: History, group: Group, rows: list[Effect]) -> list[Anomaly]:
    """A call whose transaction was said to be rolled back has left nothing; one that was committed, all."""
    left: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        left[row.call].add(row.message)
    wrong = []
    for call in history.of_group(group):
        if call.outcome is Outcome.FAILED and call.id in left:
            what = (
                f"a call on stream {call.stream} was answered that nothing is written, but left {sorted(left[call.id])}"
            )
            kind = Kind.RESURRECTED
        elif call.outcome is Outcome.OK and (missing := {found for _, found in call.messages} - left[call.id]):
            what = f"a call on stream {call.stream} was answered that all is committed, but has no {sorted(missing)}"
            kind = Kind.MISSING
        else:
            continue
        messages = tuple(found for _, found in call.messages)
        wrong.append(Anomaly(kind, what, group.name, messages, (call.stream,), (call.id,)))
    return wrong


def _chained(history: History, group: Group, rows: list[Effect]) -> list[Anomaly]:
    """The rows of a lane are a list: each transaction appended to what all before it had left, in the order of its
    publishers."""
    lanes: dict[str, list[Effect]] = defaultdict(list)
    for row in rows:
        lanes[row.lane].append(row)
    wrong = []
    for lane, found in lanes.items():
        for before, row in pairwise(found):
            if row.before != before.number:
                what = f"{row.message} of {lane} was appended to row {row.before}, and row {before.number} was there"
                wrong.append(_between(Kind.FORKED, what, group, before, row))
        highest: dict[str, tuple[Message, Effect]] = {}
        for row in found:
            message = history.messages.get(row.message)
            if message is None:
                continue
            high = highest.get(message.origin)
            if high and message.precedes(high[0]):
                what = f"{message.id} of {lane} was written after {high[0].id}"
                wrong.append(_between(Kind.ORDER, what, group, high[1], row))
            if high is None or message.number > high[0].number:
                highest[message.origin] = message, row
    return wrong


def _between(kind: Kind, what: str, group: Group, before: Effect, row: Effect) -> Anomaly:
    streams = tuple(sorted({before.stream, row.stream}))
    return Anomaly(kind, what, group.name, (before.message, row.message), streams, (before.call, row.call))
