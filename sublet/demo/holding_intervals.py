"""Which agent held which stream from when to when, computed from the history of grants."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sublet_storage.groups.coordinator.history_queries import has_owner
from sublet_storage.groups.model.records import HistoryRecord

_PROCESS = re.compile(r":(\d+):")


def parse_process(agent: str) -> int | None:
    """Return the process id that an agent's id contains."""
    match = _PROCESS.search(agent)
    return int(match[1]) if match else None


def format_worker(agent: str) -> str:
    """Return the demo's name of an agent's process."""
    process = parse_process(agent)
    return f"worker {process}" if process else agent or "nobody"


def holding_intervals(history: Sequence[HistoryRecord], began_us: int) -> list[dict[str, Any]]:
    """Return the holdings by stream and time, in seconds since `began_us`. `moved_from`: the previous holder, if
    any."""
    holdings: list[dict[str, Any]] = []
    current: dict[int, dict[str, Any]] = {}
    for record in history:
        if record.event == "grant":
            previous = current.get(record.stream_id)
            holding = _begin_interval(record, began_us, previous["holder"] if previous else None)
            holdings.append(holding)
            current[record.stream_id] = holding
        elif not has_owner(record) and record.stream_id in current:
            current[record.stream_id] |= _end_interval(record, began_us)
    return sorted(holdings, key=lambda holding: (holding["stream_id"], holding["from_s"]))


def _begin_interval(record: HistoryRecord, began_us: int, moved_from: str | None) -> dict[str, Any]:
    return {
        "stream_id": record.stream_id,
        "holder": format_worker(record.agent or ""),
        "moved_from": moved_from,
        "grant_id": record.grant_id,
        "from_s": _to_seconds(record, began_us),
        "until_s": None,
        "from_offset": record.position,
        "to_offset": record.position,
        "ended": "holds it still",
        "forced": False,
    }


def _end_interval(record: HistoryRecord, began_us: int) -> dict[str, Any]:
    return {
        "until_s": _to_seconds(record, began_us),
        "to_offset": record.position,
        "ended": _describe_end(record),
        "forced": record.is_forced,
    }


def _describe_end(record: HistoryRecord) -> str:
    """Return how a holding ended."""
    if record.is_forced:
        return f"taken away: {record.reason}"
    if record.event == "finish":
        return "finished"
    return "handed over for balance" if record.reason == "rebalance" else "handed over when it left"


def _to_seconds(record: HistoryRecord, began_us: int) -> float:
    return round((record.at_us - began_us) / 1e6, 1)
