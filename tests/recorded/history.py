"""One run as all its processes recorded it: plain values, written to files and read from them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from sublet_storage.groups.model.records import HistoryRecord

StreamOffset = tuple[int, int]
"""(stream, offset)."""


class Record:
    """Appends to one file, from any thread. `at` is a time of the monotonic clock, which all processes of a machine
    share, `wall` one of the wall clock, which Postgres uses too."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._lock = threading.Lock()

    def write(self, what: str, **facts: Any) -> None:
        """Write one line; when this returns it is in the kernel."""
        line = json.dumps({"what": what, "at": time.monotonic(), "wall": time.time(), **facts}, separators=(",", ":"))
        with self._lock:
            os.write(self._file, line.encode() + b"\n")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines: the last one of a killed process may be incomplete."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


class Outcome(StrEnum):
    """What the caller of an operation learned."""

    OK = "ok"  # it is done, and durable
    FAILED = "failed"  # it is not done, and will not be
    UNKNOWN = "unknown"  # it may be done, now or later; or the process died before it got a reply


@dataclass(frozen=True, slots=True)
class Message:
    """One message given to a publisher.

    Within one `origin` numbers grow in the order of the calls: of a publisher, of all processes of a named one, or of a
    publisher by SQL, in transactions one after the other. `together`: the number of its transaction, which is stored as
    a whole or not at all. `place`: its reported offset. Times are of the wall clock.
    """

    id: str
    origin: str
    number: int
    topic: str
    lane: str
    asked_at: float
    outcome: Outcome = Outcome.UNKNOWN
    reported_at: float | None = None
    place: StreamOffset | None = None
    together: int | None = None

    @property
    def by_sql(self) -> bool:
        """Return whether it was published through the outbox, and so stored some time after it was acknowledged."""
        return self.together is not None

    def precedes(self, other: Message) -> bool:
        """Return whether it must be before the other wherever messages of their lane are in order.

        Transactions of SQL are in order if one began after the other had committed.
        """
        if self.origin != other.origin or self.lane != other.lane or self.number >= other.number:
            return False
        return not self.by_sql or self.together == other.together or self.outcome is Outcome.OK


@dataclass(frozen=True, slots=True)
class Call:
    """A batch that was given to a user's program. OK: the work is done (of a transaction: committed).

    `begun` and `ended` are of the monotonic clock, `wall` is its start by the wall clock. `ended` is None if the
    process died during the call.
    """

    id: str
    group: str
    process: str
    session: str
    stream: int
    grant: int
    messages: tuple[tuple[int, str], ...]
    """(offset, id)."""
    begun: float
    wall: float
    outcome: Outcome = Outcome.UNKNOWN
    ended: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Effect:
    """A row that a transaction of a call left in the user's table. `number` grows in the order of the inserts; `before`
    is the number of the newest row of its lane that the transaction saw."""

    number: int
    group: str
    call: str
    stream: int
    offset: int
    message: str
    lane: str
    before: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """What a group is guaranteed: all messages under `roots` (all, if there are none), stored at or after `since`,
    which lies between two times of the wall clock; None: from the beginning. `exact`: its calls are transactions."""

    name: str
    roots: tuple[str, ...] = ()
    since: tuple[float, float] | None = None
    exact: bool = False

    def takes(self, topic: str) -> bool:
        return not self.roots or topic.split("/", 1)[0] in self.roots


@dataclass
class History:
    """A run. `log`: (stream, offset, message id) of all that is stored. `lendings`: {group: its history records, in
    order}. `frozen`: [from, to) of the wall clock in which a process was stopped."""

    messages: dict[str, Message] = field(default_factory=dict)
    log: list[tuple[int, int, str]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    lendings: dict[str, list[HistoryRecord]] = field(default_factory=dict)
    frozen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def of_group(self, group: Group) -> list[Call]:
        """Return its calls, in the order in which they began."""
        return sorted((call for call in self.calls if call.group == group.name), key=lambda call: call.begun)

    @cached_property
    def places(self) -> dict[StreamOffset, str]:
        """Return {place: message id}; computed once."""
        return {(stream, offset): found for stream, offset, found in self.log}

    def resets(self, group: Group) -> list[HistoryRecord]:
        """Return the history records of an operator's resets of a group, in order."""
        return [line for line in self.lendings.get(group.name, ()) if line.event == "reset"]


# --- files ------------------------------------------------------------------------------------------------------------


def read(directory: Path) -> History:
    """Return what all processes of a run wrote into a directory."""
    return _Reader(directory).read()


@dataclass(slots=True)
class _Reader:
    directory: Path
    history: History = field(default_factory=History)
    _calls: dict[str, Call] = field(default_factory=dict)

    def read(self) -> History:
        for file in sorted(self.directory.glob("*.jsonl")):
            for line in lines(file):
                self._take(file.stem, line)
        self.history.calls = list(self._calls.values())
        return self.history

    def _take(self, name: str, line: dict[str, Any]) -> None:
        match line["what"]:
            case "publish":
                self._publish(line)
            case "published":
                self._published(line)
            case "begin":
                self._begin(name, line)
            case "end":
                self._end(line)
            case "group":
                since = (line["since"][0], line["since"][1]) if line["since"] else None
                group = Group(line["name"], tuple(line["roots"]), since, line["exact"])
                self.history.groups = [g for g in self.history.groups if g.name != group.name] + [group]
            case "frozen":
                self.history.frozen.setdefault(line["process"], []).append((line["from"], line["to"]))
            case "stored":
                self.history.log.extend((line["stream"], offset, found) for offset, found in line["messages"])
            case "effect":
                self.history.effects.append(Effect(*line["row"]))
            case "lending":
                self.history.lendings.setdefault(line["group"], []).append(HistoryRecord(**line["line"]))

    def _publish(self, line: dict[str, Any]) -> None:
        for number, topic, key in line["messages"]:
            found = f"{line['origin']}:{number}"
            self.history.messages[found] = Message(
                found, line["origin"], number, topic, key or topic, line["wall"], together=line["together"]
            )

    def _published(self, line: dict[str, Any]) -> None:
        for number, outcome, place in line["messages"]:
            asked = self.history.messages[f"{line['origin']}:{number}"]
            where = (place[0], place[1]) if place else None
            self.history.messages[asked.id] = replace(
                asked, outcome=Outcome(outcome), reported_at=line["wall"], place=where
            )

    def _begin(self, name: str, line: dict[str, Any]) -> None:
        messages, where = tuple(map(tuple, line["messages"])), (line["session"], line["stream"], line["grant"])
        call = Call(line["call"], line["group"], name, *where, messages, line["at"], line["wall"])
        self._calls[call.id] = call

    def _end(self, line: dict[str, Any]) -> None:
        begun = self._calls[line["call"]]
        self._calls[begun.id] = replace(begun, outcome=Outcome(line["outcome"]), ended=line["at"], why=line["why"])
