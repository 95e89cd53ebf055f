"""Durable progress never goes back but by a reset, grant ids only grow, and who is deposed writes nothing more."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from sublet_storage.groups.model.records import HistoryRecord
from tests.recorded.checks.anomaly import Anomaly, Kind
from tests.recorded.history import Group, History


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
