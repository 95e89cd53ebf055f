"""One run as all its processes recorded it: plain values, from files that can be kept and read again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from sublet_storage.groups.model.records import HistoryRecord
from tests.recorded.record import lines

Place = tuple[int, int]
"""(stream, offset)."""


class Outcome(StrEnum):
    """What whoever asked for something was told."""

    OK = "ok"  # it is done, and durable
    FAILED = "failed"  # it is not done, and will not be
    UNKNOWN = "unknown"  # it may be done, or be done yet; or the process died before it was told


@dataclass(frozen=True, slots=True)
class Message:
    """One message that a publisher was asked to publish.

    Of one `origin` numbers grow in the order of the calls: a publisher's, those of all lives of a named one, or of
    whoever publishes by SQL, in transactions one after the other. `together`: the number of its transaction, which is
    stored whole or not at all. `place`: where it was said to lie. Times are of the wall clock.
    """

    id: str
    origin: str
    number: int
    topic: str
    lane: str
    asked_at: float
    outcome: Outcome = Outcome.UNKNOWN
    reported_at: float | None = None
    place: Place | None = None
    together: int | None = None

    @property
    def by_sql(self) -> bool:
        """Whether it came into the log by the outbox, some time after it was acknowledged."""
        return self.together is not None

    def precedes(self, other: Message) -> bool:
        """Whether it must be before the other wherever messages of their lane are in order.

        Transactions of SQL are in order where one began after the other had committed.
        """
        if self.origin != other.origin or self.lane != other.lane or self.number >= other.number:
            return False
        return not self.by_sql or self.together == other.together or self.outcome is Outcome.OK


@dataclass(frozen=True, slots=True)
class Call:
    """A batch that was given to a user's program. OK: the work is done (of a transaction: committed).

    `begun` and `ended` are of the monotonic clock, `wall` is when it began by the other. `ended` is None where the
    process died in it."""

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
    """What a group was promised: all messages under `roots` (all, if there are none), stored at or after `since`, which
    lies between two times of the wall clock; None: from the beginning. `exact`: its calls are transactions."""

    name: str
    roots: tuple[str, ...] = ()
    since: tuple[float, float] | None = None
    exact: bool = False

    def takes(self, topic: str) -> bool:
        """Whether its filter matches."""
        return not self.roots or topic.split("/", 1)[0] in self.roots


@dataclass
class History:
    """A run. `log`: (stream, offset, message id) of all that is stored. `lendings`: {group: its lines of history, in
    order}. `frozen`: [from, to) of the wall clock in which a process stood still."""

    messages: dict[str, Message] = field(default_factory=dict)
    log: list[tuple[int, int, str]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    lendings: dict[str, list[HistoryRecord]] = field(default_factory=dict)
    frozen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def of_group(self, group: Group) -> list[Call]:
        """Its calls, as they began."""
        return sorted((call for call in self.calls if call.group == group.name), key=lambda call: call.begun)

    @cached_property
    def places(self) -> dict[Place, str]:
        """{place: message id}; once all is read."""
        return {(stream, offset): found for stream, offset, found in self.log}

    def resets(self, group: Group) -> list[HistoryRecord]:
        """The streams of a group that an operator has set elsewhere, in order."""
        return [line for line in self.lendings.get(group.name, ()) if line.event == "reset"]


# --- files ------------------------------------------------------------------------------------------------------------


def read(directory: Path) -> History:
    """What all processes of a run wrote into a directory."""
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
        self._calls[line["call"]] = Call(
            line["call"],
            line["group"],
            name,
            line["session"],
            line["stream"],
            line["grant"],
            tuple((offset, found) for offset, found in line["messages"]),
            line["at"],
            line["wall"],
        )

    def _end(self, line: dict[str, Any]) -> None:
        begun = self._calls[line["call"]]
        self._calls[begun.id] = replace(begun, outcome=Outcome(line["outcome"]), ended=line["at"], why=line["why"])
