"""Acknowledged messages are stored once, at their places; others whole or not at all; nothing else is there."""

from __future__ import annotations

from collections import defaultdict

from tests.recorded.checks.anomaly import Anomaly, Kind
from tests.recorded.history import History, Message, Outcome, StreamOffset


def check_log(history: History) -> list[Anomaly]:
    places: dict[str, list[StreamOffset]] = defaultdict(list)
    for stream, offset, found in history.log:
        places[found].append((stream, offset))
    wrong = _holes(history)
    for found, at in places.items():
        wrong += _stored(history.messages.get(found), found, at)
    for message in history.messages.values():
        if message.outcome is Outcome.OK and message.id not in places:
            what = f"{message.id} was acknowledged (at {message.place}), and is not in the log"
            wrong.append(Anomaly(Kind.LOST, what, messages=(message.id,)))
    return wrong + _torn(history, places)


def _stored(message: Message | None, found: str, at: list[StreamOffset]) -> list[Anomaly]:
    streams = tuple(sorted({stream for stream, _ in at}))

    def wrong(kind: Kind, what: str) -> Anomaly:
        return Anomaly(kind, f"{found} {what}", messages=(found,), streams=streams)

    if message is None:
        return [wrong(Kind.PHANTOM, f"is at {at}, and nobody published it")]
    reported = []
    if len(at) > 1:
        reported.append(wrong(Kind.TWICE, f"is at {at}"))
    if message.outcome is Outcome.FAILED:
        reported.append(
            wrong(Kind.RESURRECTED, f"is at {at}, and its publisher got the answer that it is not published")
        )
    if message.place is not None and message.place not in at:
        reported.append(wrong(Kind.PHANTOM, f"was acknowledged at {message.place}, and is at {at}"))
    return reported


def _holes(history: History) -> list[Anomaly]:
    """Offsets of a stream are contiguous."""
    offsets: dict[int, list[int]] = defaultdict(list)
    for stream, offset, _ in history.log:
        offsets[stream].append(offset)
    return [
        Anomaly(
            Kind.LOST, f"stream {stream} has {len(found)} messages below offset {max(found) + 1}", streams=(stream,)
        )
        for stream, found in offsets.items()
        if sorted(found) != list(range(max(found) + 1))
    ]


def _torn(history: History, places: dict[str, list[StreamOffset]]) -> list[Anomaly]:
    """Messages of one transaction are all there, or none."""
    together: dict[tuple[str, int], list[str]] = defaultdict(list)
    for message in history.messages.values():
        if message.together is not None:
            together[message.origin, message.together].append(message.id)
    wrong = []
    for (origin, number), asked in together.items():
        there = [one for one in asked if one in places]
        if there and len(there) < len(asked):
            what = f"of transaction {number} of {origin} {there} are in the log, and of {asked} the others are not"
            wrong.append(Anomaly(Kind.TORN, what, messages=tuple(asked)))
    return wrong
