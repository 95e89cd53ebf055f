"""What must be true of a history, whatever was killed: the promises of docs/guarantees.md, and nothing of how they are
kept."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from sublet_storage.groups.model.records import HistoryRecord
from tests.recorded.history import Call, Effect, Group, History, Message, Outcome, StreamOffset

_WAS_AT = re.compile(r"was at (\d+)")
TOLERANCE_S = 0.5
"""What a busy machine may put between the moment in which a program is given a batch and that in which it looks at the
clock."""
AWAKE_S = 1.0
"""What has stood still may look at the clock so much later."""


class Kind(StrEnum):
    LOST = "lost"  # acknowledged and not stored, or stored and never consumed by a group that was promised it
    TWICE = "stored twice"
    PHANTOM = "phantom"  # stored, given out or effective, though nobody asked for it, or at another place
    RESURRECTED = "resurrected"  # stored or effective, though the answer to whoever asked for it was that it is not
    TORN = "torn"  # a transaction that is there in part
    ORDER = "out of order"
    EARLY = "begun too early"  # a call, before what precedes its messages was done
    LATE = "begun too late"  # a call, when its stream was somebody else's
    CROSSED = "two holders"
    REPEATED = "unexplained repeat"
    BEFORE = "from before the start"  # of the group, or where a reset let it go on
    BACK = "progress that went back"  # or a grant id, or a term
    DOUBLE = "double effect"
    MISSING = "missing effect"
    FORKED = "forked effects"  # a transaction did not see the one before it


@dataclass(frozen=True, slots=True)
class Anomaly:
    """`group`: whose; empty: the log's. `messages`, `calls` and `streams` are those that its story is about."""

    kind: Kind
    what: str
    group: str = ""
    messages: tuple[str, ...] = ()
    streams: tuple[int, ...] = ()
    calls: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}{f' in {self.group}' if self.group else ''}: {self.what}"


@dataclass(frozen=True, slots=True)
class Life:
    """What of a stream was to be given out between two resets: [start, end). `end` None: all that there is."""

    start: int
    end: int | None


class Lives:
    """Of one group. Grant ids only grow: those above a reset's came after it."""

    def __init__(self, history: History, group: Group) -> None:
        self._resets: dict[int, list[HistoryRecord]] = defaultdict(list)
        for line in history.resets(group):
            self._resets[line.stream_id].append(line)
        self._times = sorted({line.at_us for line in history.resets(group)})
        self._granted = {
            (line.stream_id, line.grant_id): line.at_us
            for line in history.lendings.get(group.name, ())
            if line.event == "grant"
        }

    def number(self, stream: int, grant: int) -> int:
        """Of the stream's own lives, in which a grant was."""
        return bisect_left([line.grant_id for line in self._resets[stream]], grant)

    def of(self, stream: int) -> list[Life]:
        resets = self._resets[stream]
        starts = [0, *(line.position for line in resets)]
        ends = [int(found[1]) if (found := _WAS_AT.search(line.reason)) else 0 for line in resets]
        return [Life(start, end) for start, end in zip(starts, [*ends, None], strict=True)]

    def era(self, stream: int, grant: int) -> int:
        """How many resets of the group there had been when the stream was granted."""
        return bisect_right(self._times, self._granted.get((stream, grant), 0))

    def is_known(self, stream: int, grant: int) -> bool:
        return (stream, grant) in self._granted


def check_log(history: History) -> Iterator[Anomaly]:
    """Acknowledged messages are stored once, at their places; others whole or not at all; nothing else is there."""
    places: dict[str, list[StreamOffset]] = defaultdict(list)
    offsets: dict[int, list[int]] = defaultdict(list)
    for stream, offset, found in history.log:
        places[found].append((stream, offset))
        offsets[stream].append(offset)
    for stream, there in offsets.items():
        if sorted(there) != list(range(max(there) + 1)):
            what = f"stream {stream} has {len(there)} messages below offset {max(there) + 1}"
            yield Anomaly(Kind.LOST, what, streams=(stream,))
    for found, at in places.items():
        streams = tuple(sorted({stream for stream, _ in at}))
        for kind, what in _stored(history.messages.get(found), at):
            yield Anomaly(kind, f"{found} is at {at}{what}", messages=(found,), streams=streams)
    for message in history.messages.values():
        if message.outcome is Outcome.OK and message.id not in places:
            what = f"{message.id} was acknowledged (at {message.place}), and is not in the log"
            yield Anomaly(Kind.LOST, what, messages=(message.id,))
    yield from _torn(history, places)


def _stored(message: Message | None, at: list[StreamOffset]) -> Iterator[tuple[Kind, str]]:
    if message is None:
        yield Kind.PHANTOM, ", and nobody published it"
        return
    if len(at) > 1:
        yield Kind.TWICE, ""
    if message.outcome is Outcome.FAILED:
        yield Kind.RESURRECTED, ", and its publisher got the answer that it is not published"
    if message.place is not None and message.place not in at:
        yield Kind.PHANTOM, f", and was acknowledged at {message.place}"


def _torn(history: History, places: dict[str, list[StreamOffset]]) -> Iterator[Anomaly]:
    """Messages of one transaction are all there, or none."""
    together: dict[tuple[str, int], list[str]] = defaultdict(list)
    for message in history.messages.values():
        if message.together is not None:
            together[message.origin, message.together].append(message.id)
    for (origin, number), asked in together.items():
        there = [one for one in asked if one in places]
        if there and len(there) < len(asked):
            what = f"of transaction {number} of {origin} {there} are in the log, and of {asked} the others are not"
            yield Anomaly(Kind.TORN, what, messages=tuple(asked))


def check_deliveries(history: History, group: Group) -> Iterator[Anomaly]:
    """A group is given all that it was promised; what it is given again, history explains; one has a stream at a
    time."""
    calls, lives = history.of_group(group), Lives(history, group)
    for call in calls:
        yield from _content(history, group, call, lives)
    yield from _crossed(group, calls)
    yield from _late(history, group, calls)
    for check in (_repeats, _lost, _from_before):
        yield from check(history, group, calls, lives)


def _content(history: History, group: Group, call: Call, lives: Lives) -> Iterator[Anomaly]:
    """What is given out is what is stored there, under a grant."""
    if not lives.is_known(call.stream, call.grant):
        what = f"stream {call.stream} was given out under grant {call.grant}, of which history knows nothing"
        yield Anomaly(Kind.PHANTOM, what, group.name, streams=(call.stream,), calls=(call.id,))
    for offset, found in call.messages:
        there = history.places.get((call.stream, offset))
        if there != found:
            what = f"{found} was given out at {(call.stream, offset)}, where the log has {there}"
            yield Anomaly(Kind.PHANTOM, what, group.name, (found,), (call.stream,), (call.id,))


def _crossed(group: Group, calls: list[Call]) -> Iterator[Anomaly]:
    """Under one grant one session works."""
    first = dict[tuple[int, int], Call]()
    for call in calls:
        before = first.setdefault((call.stream, call.grant), call)
        if before.session != call.session:
            what = f"{before.session} and {call.session} work on stream {call.stream} under grant {call.grant}"
            yield Anomaly(Kind.CROSSED, what, group.name, streams=(call.stream,), calls=(before.id, call.id))


def _late(history: History, group: Group, calls: list[Call]) -> Iterator[Anomaly]:
    """No call begins when its stream was granted to somebody else, but in a process that stood still in between."""
    granted: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for line in history.lendings.get(group.name, ()):
        if line.event == "grant":
            granted[line.stream_id].append((line.grant_id, line.at_us / 1e6))
    for call in calls:
        after = [at for grant, at in granted[call.stream] if grant > call.grant]
        late_s = call.wall - min(after) if after else 0.0
        frozen = history.frozen.get(call.process, ())
        stood_still = any(begin <= call.wall < end + AWAKE_S for begin, end in frozen)
        if late_s > TOLERANCE_S and not stood_still:
            what = f"a call on stream {call.stream} began {late_s:.2f} s after that was granted to somebody else"
            yield Anomaly(Kind.LATE, what, group.name, streams=(call.stream,), calls=(call.id,))


def _repeats(history: History, group: Group, calls: list[Call], lives: Lives) -> Iterator[Anomaly]:
    """Between two resets a message is given out again only where its work had failed, or where a forced move says so;
    never if its progress was committed with the work."""
    windows = {
        (line.stream_id, line.grant_id): range(line.position, line.redelivery_end)
        for line in history.lendings.get(group.name, ())
        if line.redelivery_end is not None
    }
    given: dict[tuple[int, int, int], list[Call]] = defaultdict(list)
    for call in calls:
        for offset, _ in call.messages:
            given[call.stream, offset, lives.number(call.stream, call.grant)].append(call)
    for (stream, offset, _), found in given.items():
        found.sort(key=lambda call: (call.grant, call.begun))
        for before, call in pairwise(found):
            is_committed = group.exact and before.outcome is Outcome.OK
            is_announced = offset in windows.get((stream, before.grant), ()) and before.grant != call.grant
            if is_committed or not (is_announced or before.outcome is Outcome.FAILED):
                said = "after its progress was committed" if is_committed else "and no window of history has it"
                what = f"{(stream, offset)} was given out under grant {before.grant} and again under {call.grant}"
                messages = (history.places.get((stream, offset), ""),)
                about = group.name, messages, (stream,), (before.id, call.id)
                yield Anomaly(Kind.REPEATED, f"{what}, {said}", *about)


def _lost(history: History, group: Group, calls: list[Call], lives: Lives) -> Iterator[Anomaly]:
    """Of each promised message the work was done, in each life in which it was to be given out. Of transactions the
    rows say so: nobody got an answer about one that was committed when its process died."""
    if group.exact:
        return
    done: set[tuple[int, int, int]] = set()
    for call in calls:
        if call.outcome is Outcome.OK:
            done.update((call.stream, offset, lives.number(call.stream, call.grant)) for offset, _ in call.messages)
    for (stream, offset), found in history.places.items():
        if not _is_promised(history, group, found):
            continue
        for number, life in enumerate(lives.of(stream)):
            is_in_it = life.start <= offset and (life.end is None or offset < life.end)
            if is_in_it and (stream, offset, number) not in done:
                after = f", after reset {number} of the stream" if number else ""
                what = f"{found} at {(stream, offset)} was never worked on to its end{after}"
                yield Anomaly(Kind.LOST, what, group.name, (found,), (stream,))


def _is_promised(history: History, group: Group, found: str) -> bool:
    message = history.messages.get(found)
    if message is None or not group.takes(message.topic):
        return False
    return group.since is None or message.asked_at > group.since[1]


def _from_before(history: History, group: Group, calls: list[Call], lives: Lives) -> Iterator[Anomaly]:
    """Nothing from before the group's start, nor from before where a reset let it go on."""
    for call in calls:
        life = lives.of(call.stream)[lives.number(call.stream, call.grant)]
        for offset, found in call.messages:
            if offset < life.start:
                what = f"{found} at {(call.stream, offset)} was given out, and a reset let it go on from {life.start}"
                yield Anomaly(Kind.BEFORE, what, group.name, (found,), (call.stream,), (call.id,))
            message = history.messages.get(found)
            # What is published by SQL comes into the log some time after it is acknowledged.
            at = message.reported_at if message and not message.by_sql else None
            if group.since and at is not None and at < group.since[0]:
                what = f"{found} was given out, and was stored before {group.since[0]:.3f}, where the group began"
                yield Anomaly(Kind.BEFORE, what, group.name, (found,), (call.stream,), (call.id,))


def check_order(history: History, group: Group) -> Iterator[Anomaly]:
    """A group's first deliveries, from one reset to the next: their order, and that what precedes was done by then. Of
    transactions their rows say the latter."""
    lives = Lives(history, group)
    done = _Done(history.of_group(group), lives)
    highest: dict[tuple[int, str, str], tuple[Message, Call]] = {}
    last: dict[tuple[int, str, str], tuple[Message, Call]] = {}
    seen: set[tuple[int, str]] = set()
    for call in history.of_group(group):
        era = lives.era(call.stream, call.grant)
        for message in _known(history, call):
            if (era, message.id) in seen:
                continue
            seen.add((era, message.id))
            lane = era, message.origin, message.lane
            high, before = highest.get(lane), last.get(lane)
            if high and message.precedes(high[0]):
                yield _anomaly(Kind.ORDER, "came after", group, (message, call), high)
            elif before and before[0].precedes(message) and not (group.exact or done.by(era, before[0], call)):
                yield _anomaly(Kind.EARLY, "was begun before the end of", group, (message, call), before)
            if high is None or message.number > high[0].number:
                highest[lane] = message, call
            last[lane] = message, call


def _known(history: History, call: Call) -> Iterator[Message]:
    for _, found in call.messages:
        if message := history.messages.get(found):
            yield message


def _anomaly(kind: Kind, how: str, group: Group, one: tuple[Message, Call], other: tuple[Message, Call]) -> Anomaly:
    (message, call), (before, early) = one, other
    what = f"{message.id} of {message.lane}, in stream {call.stream}, {how} {before.id}, in stream {early.stream}"
    streams = tuple(sorted({call.stream, early.stream}))
    return Anomaly(kind, what, group.name, (message.id, before.id), streams, (early.id, call.id))


class _Done:
    """When the work on a message was done for the first time, and under which grants it was given out."""

    def __init__(self, calls: list[Call], lives: Lives) -> None:
        self._ended: dict[tuple[int, str], float] = {}
        self._under: set[tuple[int, int, str]] = set()
        for call in calls:
            era = lives.era(call.stream, call.grant)
            for _, found in call.messages:
                self._under.add((call.stream, call.grant, found))
                if call.outcome is Outcome.OK and call.ended is not None:
                    key = era, found
                    self._ended[key] = min(call.ended, self._ended.get(key, call.ended))

    def by(self, era: int, message: Message, call: Call) -> bool:
        """Whether it was done when the call began; to one that has both under one grant they come in order."""
        if (call.stream, call.grant, message.id) in self._under:
            return True
        return self._ended.get((era, message.id), float("inf")) <= call.begun


def check_effects(history: History, group: Group) -> Iterator[Anomaly]:
    """What is written in a call's transaction is there exactly once, in order, and each transaction saw the one
    before."""
    rows = sorted((row for row in history.effects if row.group == group.name), key=lambda row: row.number)
    for check in (_counted, _of_calls, _chained):
        yield from check(history, group, rows)


def _counted(history: History, group: Group, rows: list[Effect]) -> Iterator[Anomaly]:
    """One row for each message."""
    found: dict[str, list[Effect]] = defaultdict(list)
    for row in rows:
        found[row.message].append(row)
    for place, message in history.places.items():
        there = found.pop(message, [])
        if not group.takes(history.messages[message].topic if message in history.messages else ""):
            continue
        if not there:
            what = f"{message} at {place} has left no row"
            yield Anomaly(Kind.MISSING, what, group.name, (message,), (place[0],))
        if len(there) > 1:
            what = f"{message} at {place} has left {len(there)} rows"
            calls = tuple(row.call for row in there)
            yield Anomaly(Kind.DOUBLE, what, group.name, (message,), (place[0],), calls)
    for message, there in found.items():
        what = f"{message} has left {len(there)} rows, and is not in the log"
        yield Anomaly(Kind.PHANTOM, what, group.name, (message,), calls=tuple(row.call for row in there))


def _of_calls(history: History, group: Group, rows: list[Effect]) -> Iterator[Anomaly]:
    """A call whose transaction was said to be rolled back has left nothing; one that was committed, all."""
    left: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        left[row.call].add(row.message)
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
        yield Anomaly(kind, what, group.name, messages, (call.stream,), (call.id,))


def _chained(history: History, group: Group, rows: list[Effect]) -> Iterator[Anomaly]:
    """The rows of a lane are a list: each transaction appended to what all before it had left, in the order of its
    publishers."""
    lanes: dict[str, list[Effect]] = defaultdict(list)
    for row in rows:
        lanes[row.lane].append(row)
    for lane, found in lanes.items():
        for before, row in pairwise(found):
            if row.before != before.number:
                what = f"{row.message} of {lane} was appended to row {row.before}, and row {before.number} was there"
                yield _between(Kind.FORKED, what, group, before, row)
        highest: dict[str, tuple[Message, Effect]] = {}
        for row in found:
            message = history.messages.get(row.message)
            if message is None:
                continue
            high = highest.get(message.origin)
            if high and message.precedes(high[0]):
                what = f"{message.id} of {lane} was written after {high[0].id}"
                yield _between(Kind.ORDER, what, group, high[1], row)
            if high is None or message.number > high[0].number:
                highest[message.origin] = message, row


def _between(kind: Kind, what: str, group: Group, before: Effect, row: Effect) -> Anomaly:
    streams = tuple(sorted({before.stream, row.stream}))
    return Anomaly(kind, what, group.name, (before.message, row.message), streams, (before.call, row.call))


def check_lendings(history: History, group: Group) -> list[Anomaly]:
    by_stream: dict[int, list[HistoryRecord]] = defaultdict(list)
    for line in history.lendings.get(group.name, ()):
        if line.stream_id:
            by_stream[line.stream_id].append(line)
    return [
        Anomaly(Kind.BACK, f"stream {stream}: {what}", group.name, streams=(stream,))
        for stream, lines in by_stream.items()
        for before, line in pairwise(lines)
        if (what := _what(before, line))
    ]


def _what(before: HistoryRecord, line: HistoryRecord) -> str:
    if line.position < before.position and line.event != "reset":
        return f"{line.event} at {line.position} after {before.event} at {before.position}"
    if line.grant_id < before.grant_id or (line.event == "grant" and line.grant_id == before.grant_id):
        return f"{line.event} under grant {line.grant_id} after {before.event} under {before.grant_id}"
    if line.term < before.term:
        return f"{line.event} in term {line.term} after {before.event} in term {before.term}"
    return ""


def check(history: History) -> list[Anomaly]:
    found = list(check_log(history))
    for group in history.groups:
        for each in (check_deliveries, check_order, check_lendings, *([check_effects] if group.exact else [])):
            found += each(history, group)
    return found
