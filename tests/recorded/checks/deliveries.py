"""A group is given all that it was promised; what it is given again, history explains; one has a stream at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.recorded.checks.anomaly import Anomaly, Kind
from tests.recorded.checks.lives import Life, Lives
from tests.recorded.history import Call, Group, History, Outcome

TOLERANCE_S = 0.5
"""What a busy machine may put between the moment in which a program is given a batch and that in which it looks at the
clock."""

AWAKE_S = 1.0
"""What has stood still may look at the clock so much later."""


def check_deliveries(history: History, group: Group) -> list[Anomaly]:
    calls = history.of_group(group)
    lives = Lives(history, group)
    wrong = [anomaly for call in calls for anomaly in _content(history, group, call, lives)]
    wrong += _crossed(group, calls) + _late(history, group, calls)
    wrong += _repeats(history, group, calls, lives)
    return wrong + _lost(history, group, calls, lives) + _from_before(history, group, calls, lives)


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


def _crossed(group: Group, calls: list[Call]) -> list[Anomaly]:
    """Under one grant one session works."""
    wrong, first = [], dict[tuple[int, int], Call]()
    for call in calls:
        before = first.setdefault((call.stream, call.grant), call)
        if before.session != call.session:
            what = f"{before.session} and {call.session} work on stream {call.stream} under grant {call.grant}"
            wrong.append(Anomaly(Kind.CROSSED, what, group.name, streams=(call.stream,), calls=(before.id, call.id)))
    return wrong


def _late(history: History, group: Group, calls: list[Call]) -> list[Anomaly]:
    """No call begins when its stream was granted to somebody else, but in a process that stood still in between."""
    granted: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for line in history.lendings.get(group.name, ()):
        if line.event == "grant":
            granted[line.stream_id].append((line.grant_id, line.at_us / 1e6))
    wrong = []
    for call in calls:
        after = [at for grant, at in granted[call.stream] if grant > call.grant]
        late_s = call.wall - min(after) if after else 0.0
        if late_s > TOLERANCE_S and not _stood_still(history, call):
            what = f"a call on stream {call.stream} began {late_s:.2f} s after that was granted to somebody else"
            wrong.append(Anomaly(Kind.LATE, what, group.name, streams=(call.stream,), calls=(call.id,)))
    return wrong


def _stood_still(history: History, call: Call) -> bool:
    return any(begin <= call.wall < end + AWAKE_S for begin, end in history.frozen.get(call.process, ()))


def _repeats(history: History, group: Group, calls: list[Call], lives: Lives) -> list[Anomaly]:
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
    wrong = []
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
                wrong.append(Anomaly(Kind.REPEATED, f"{what}, {said}", *about))
    return wrong


def _lost(history: History, group: Group, calls: list[Call], lives: Lives) -> list[Anomaly]:
    """Of each promised message the work was done, in each life in which it was to be given out. Of transactions the
    rows say so: nobody got an answer about one that was committed when its process died."""
    if group.exact:
        return []
    done: set[tuple[int, int, int]] = set()
    for call in calls:
        if call.outcome is Outcome.OK:
            done.update((call.stream, offset, lives.number(call.stream, call.grant)) for offset, _ in call.messages)
    wrong = []
    for (stream, offset), found in history.places.items():
        if not _is_promised(history, group, found):
            continue
        for number, life in enumerate(lives.of(stream)):
            if _has(life, offset) and (stream, offset, number) not in done:
                after = f", after reset {number} of the stream" if number else ""
                what = f"{found} at {(stream, offset)} was never worked on to its end{after}"
                wrong.append(Anomaly(Kind.LOST, what, group.name, (found,), (stream,)))
    return wrong


def _has(life: Life, offset: int) -> bool:
    return life.start <= offset and (life.end is None or offset < life.end)


def _is_promised(history: History, group: Group, found: str) -> bool:
    message = history.messages.get(found)
    if message is None or not group.takes(message.topic):
        return False
    return group.since is None or message.asked_at > group.since[1]


def _from_before(history: History, group: Group, calls: list[Call], lives: Lives) -> list[Anomaly]:
    """Nothing from before the group's start, nor from before where a reset let it go on."""
    wrong = []
    for call in calls:
        life = lives.of(call.stream)[lives.number(call.stream, call.grant)]
        for offset, found in call.messages:
            if offset < life.start:
                what = f"{found} at {(call.stream, offset)} was given out, and a reset let it go on from {life.start}"
                wrong.append(Anomaly(Kind.BEFORE, what, group.name, (found,), (call.stream,), (call.id,)))
            message = history.messages.get(found)
            if message and group.since and _is_older(message.reported_at, group.since[0], by_sql=message.by_sql):
                what = f"{found} was given out, and was stored before {group.since[0]:.3f}, where the group began"
                wrong.append(Anomaly(Kind.BEFORE, what, group.name, (found,), (call.stream,), (call.id,)))
    return wrong


def _is_older(reported_at: float | None, since: float, *, by_sql: bool) -> bool:
    """Whether it was stored by then: what is published by SQL comes into the log some time after it is acknowledged."""
    return reported_at is not None and not by_sql and reported_at < since
