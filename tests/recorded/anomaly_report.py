"""What led to an anomaly: what the records say of its messages, calls and streams, by time."""

from __future__ import annotations

from collections.abc import Iterator

from tests.recorded.checks import Anomaly
from tests.recorded.history import History

BEFORE_S, AFTER_S = 10.0, 3.0
"""Lines of a stream's lendings that are nearer than that to a line about the anomaly are reported, too."""

MAX_LINES = 60


def report_lines(history: History, anomaly: Anomaly) -> list[str]:
    """Lines with the time of the wall clock, at most `MAX_LINES` of them."""
    about = [*_of_messages(history, anomaly), *_of_calls(history, anomaly)]
    times = [at for at, _ in about]
    reported = about + [
        (at, line)
        for at, line in _of_streams(history, anomaly)
        if not times or any(near - BEFORE_S <= at <= near + AFTER_S for near in times)
    ]
    reported.sort()
    lines = [f"    {at:.3f}  {line}" for at, line in reported]
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES // 2], "    ...", *lines[-MAX_LINES // 2 :]]


def _of_messages(history: History, anomaly: Anomaly) -> Iterator[tuple[float, str]]:
    for name in anomaly.messages:
        at = [place for place, found in history.places.items() if found == name]
        message = history.messages.get(name)
        if message is None:
            yield 0.0, f"{name}: published by nobody, in the log at {at}"
            continue
        yield message.asked_at, f"{name} is published to {message.topic} (order of {message.lane})"
        if message.reported_at is not None:
            yield (
                message.reported_at,
                f"{name}: its publisher was answered {message.outcome} {message.place}; in the log at {at}",
            )


def _of_calls(history: History, anomaly: Anomaly) -> Iterator[tuple[float, str]]:
    for call in history.calls:
        reported = {found for _, found in call.messages} & set(anomaly.messages)
        if call.id not in anomaly.calls and not (reported and call.group == anomaly.group):
            continue
        offsets = [offset for offset, _ in call.messages]
        where = f"stream {call.stream}, offsets {offsets[0]} to {offsets[-1]}, grant {call.grant}"
        which = "".join(f", {found} at {offset}" for offset, found in call.messages if found in reported)
        yield call.wall, f"{call.id} begins: {where}{which}"
        if call.ended is not None:
            yield call.wall + call.ended - call.begun, f"{call.id} ends: {call.outcome} {call.why}"


def _of_streams(history: History, anomaly: Anomaly) -> Iterator[tuple[float, str]]:
    for line in history.lendings.get(anomaly.group, ()):
        if line.stream_id in anomaly.streams or line.stream_id == 0:
            until = "" if line.redelivery_end is None else f" until {line.redelivery_end}"
            who = f" {line.session or line.agent}" if line.agent else ""
            yield (
                line.at_us / 1e6,
                f"[history] stream {line.stream_id} {line.event} grant {line.grant_id} at {line.position}{until}{who}: "
                f"{line.reason}",
            )
