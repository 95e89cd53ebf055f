"""Checker of recorded deliveries for lost offsets, and repeats without a forced move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sublet_storage.groups.model.records import HistoryRecord
from tests.kit_nodes import Delivered


@dataclass(slots=True)
class DeliveryVerdict:
    """(stream, offset) pairs."""

    lost: list[tuple[int, int]] = field(default_factory=list)
    unexplained: list[tuple[int, int]] = field(default_factory=list)
    explained: list[tuple[int, int]] = field(default_factory=list)
    crossed: list[tuple[int, int]] = field(default_factory=list)
    """(stream, grant id) pairs under which two consumers worked."""


def judge(
    published: Mapping[int, int], delivered: Iterable[Delivered], history: Iterable[HistoryRecord]
) -> DeliveryVerdict:
    """Return which offsets were lost or repeated; `published` is {stream: head}. A repeat is explained only within
    [position, redelivery_end) of a forced move that ended the grant under which the offset was delivered before."""
    windows = {
        (h.stream_id, h.grant_id): range(h.position, h.redelivery_end) for h in history if h.redelivery_end is not None
    }
    verdict, seen = DeliveryVerdict(), defaultdict[tuple[int, int], list[int]](list)
    holders: dict[tuple[int, int], str] = {}
    for batch in delivered:
        holder = holders.setdefault((batch.stream, batch.grant), batch.consumer)
        if holder != batch.consumer:
            verdict.crossed.append((batch.stream, batch.grant))
        for offset in batch.offsets:
            seen[batch.stream, offset].append(batch.grant)
    for (stream, offset), grants in sorted(seen.items()):
        if len(grants) > 1:
            covered = all(offset in windows.get((stream, grant), ()) for grant in sorted(grants)[:-1])
            (verdict.explained if covered else verdict.unexplained).append((stream, offset))
    for stream, head in published.items():
        verdict.lost.extend((stream, offset) for offset in range(head) if (stream, offset) not in seen)
    return verdict


def check(
    published: Mapping[int, int], delivered: Iterable[Delivered], history: Iterable[HistoryRecord]
) -> DeliveryVerdict:
    """Return the verdict of `judge`; fail if anything is lost, unexplained or crossed."""
    verdict = judge(published, delivered, history)
    assert verdict.lost == []
    assert verdict.unexplained == []
    assert verdict.crossed == []
    return verdict
