"""Messages of one key (of one topic, without a key) come in the order in which one publisher published them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.recorded.checks.anomaly import Anomaly, Kind
from tests.recorded.checks.lives import Lives
from tests.recorded.history import Call, Group, History, Message, Outcome


def check_order(history: History, group: Group) -> list[Anomaly]:
    """A group's first deliveries, from one reset to the next: their order, and that what precedes was done by then. Of
    transactions their rows say the latter."""
    lives = Lives(history, group)
    done = _Done(history.of_group(group), lives)
    highest: dict[tuple[int, str, str], tuple[Message, Call]] = {}
    last: dict[tuple[int, str, str], tuple[Message, Call]] = {}
    seen: set[tuple[int, str]] = set()
    wrong = []
    for call in history.of_group(group):
        era = lives.era(call.stream, call.grant)
        for message in _known(history, call):
            if (era, message.id) in seen:
                continue
            seen.add((era, message.id))
            lane = era, message.origin, message.lane
            high, before = highest.get(lane), last.get(lane)
            if high and message.precedes(high[0]):
                wrong.append(_anomaly(Kind.ORDER, "came after", group, (message, call), high))
            elif before and before[0].precedes(message) and not (group.exact or done.by(era, before[0], call)):
                wrong.append(_anomaly(Kind.EARLY, "was begun before the end of", group, (message, call), before))
            if high is None or message.number > high[0].number:
                highest[lane] = message, call
            last[lane] = message, call
    return wrong


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
