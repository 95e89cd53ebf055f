"""Who held which stream from when to when: the history of lendings, told as one line per grant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from storage.groups.model import HistoryRecord

_PROCESS = re.compile(r":(\d+):")


def process_of(agent: str) -> int | None:
    """The process id that an agent's id contains."""
    found = _PROCESS.search(agent)
    return int(found[1]) if found else None


def holdings(history: Sequence[HistoryRecord]) -> list[dict[str, Any]]:
    """By stream and time; seconds since the first grant. `moved_from`: the holder before, where there was one."""
    began = min((record.at_us for record in history), default=0)
    lines: list[dict[str, Any]] = []
    current: dict[int, dict[str, Any]] = {}
    for record in history:
        if record.event == "grant":
            before = current.get(record.stream_id)
            line = _begun(record, began, before["holder"] if before else None)
            lines.append(line)
            current[record.stream_id] = line
        elif record.event != "reclaim" and record.stream_id in current:
            current[record.stream_id] |= _ended(record, began)
    return sorted(lines, key=lambda line: (line["stream"], line["from_s"]))


def _begun(record: HistoryRecord, began: int, moved_from: str | None) -> dict[str, Any]:
    process = process_of(record.agent or "")
    return {
        "stream": record.stream_id,
        "holder": f"worker {process}" if process else str(record.agent),
        "moved_from": moved_from,
        "grant": record.grant_id,
        "from_s": _seconds(record, began),
        "until_s": None,
        "from_offset": record.position,
        "to_offset": record.position,
        "ended": "holds it still",
        "forced": False,
    }


def _ended(record: HistoryRecord, began: int) -> dict[str, Any]:
    return {
        "until_s": _seconds(record, began),
        "to_offset": record.position,
        "ended": record.reason,
        "forced": record.forced,
    }


def _seconds(record: HistoryRecord, began: int) -> float:
    return round((record.at_us - began) / 1e6, 1)
