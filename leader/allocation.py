"""Who should hold how many streams, and the fewest moves that get there.

Each borrower's share of the streams is proportional to its weight and rounded by largest remainder. Where
remainders tie (equal weights: always) the spare streams go to the borrowers that already hold one more, so an
unchanged membership moves nothing. Only what a borrower holds above its share is revoked; everything else stays
where it is. Borrowers whose share is zero are standby.

Pure and deterministic: the same arguments, in whatever order, give the same plan. Shares are computed in integers,
because a remainder that ties in theory but not in floating point would move a stream for nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from protocol.errors import UsageError


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. `grants`: (stream, borrower) by stream; `revokes`: streams to take back, ascending."""

    grants: tuple[tuple[int, str], ...] = ()
    revokes: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """True where there is anything to do."""
        return bool(self.grants or self.revokes)


def allocate(
    held: Mapping[int, str],
    free: Collection[int],
    weights: Mapping[str, float],
    movable: Collection[int] | None = None,
    moving: Collection[int] = (),
) -> Plan:
    """The next grants and revokes for one group.

    `held`: stream -> its borrower; streams of borrowers without a weight (leaving, not yet back) are left out of
    account. `free`: streams that may be granted now. `weights`: the members, each above 0. `movable`: what may be
    revoked now (None: everything held); a surplus that may not move yet stays, and is revoked by a later call.
    `moving`: streams already being revoked: no longer their holder's, not free yet, but counted into the shares, so
    that a call made while revokes are under way does not revoke again. They may still be listed in `held`.

    Every free stream is granted if there is any member. Near-linear in streams plus borrowers.
    Raises `UsageError`.
    """
    unclaimed, leaving = set(free), set(moving)
    _refuse_contradictions(held, unclaimed, leaving)
    if not weights:
        return Plan()
    holdings = _holdings(held, weights, leaving)
    counts = {borrower: len(streams) for borrower, streams in holdings.items()}
    share = shares(sum(counts.values()) + len(unclaimed) + len(leaving), weights, counts)
    return Plan(
        grants=_grants(sorted(unclaimed), counts, share, weights),
        revokes=_revokes(holdings, share, None if movable is None else _as_set(movable)),
    )


def shares(total: int, weights: Mapping[str, float], counts: Mapping[str, int] | None = None) -> dict[str, int]:
    """How many of `total` streams each borrower should hold: largest remainder, the sum is exactly `total`.

    Equal remainders are decided by `counts` (who holds more than its rounded-down share keeps it), then by the id.
    """
    if not weights:
        return {}
    current = counts or {}
    units = _integers(weights)
    whole = sum(units.values())
    quota = {borrower: divmod(total * unit, whole) for borrower, unit in units.items()}
    share = {borrower: floor for borrower, (floor, _) in quota.items()}
    spare = total - sum(share.values())

    def claim(borrower: str) -> tuple[int, bool, str]:
        floor, remainder = quota[borrower]
        return -remainder, current.get(borrower, 0) <= floor, borrower

    for borrower in heapq.nsmallest(spare, quota, key=claim):
        share[borrower] += 1
    return share


def _integers(weights: Mapping[str, float]) -> dict[str, int]:
    """The weights as integers in the same proportions, exactly."""
    ratios = {}
    for borrower, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise UsageError(
                f"borrower {borrower!r} has weight {weight}: a weight is a finite number above 0. "
                "Leave out borrowers that should hold nothing."
            )
        ratios[borrower] = weight.as_integer_ratio()
    # The denominators of floats are powers of two: the largest is a multiple of all others.
    common = max(denominator for _, denominator in ratios.values())
    return {borrower: number * (common // denominator) for borrower, (number, denominator) in ratios.items()}


def _refuse_contradictions(held: Mapping[int, str], free: set[int], moving: set[int]) -> None:
    if twice := free & held.keys():
        raise UsageError(f"stream {min(twice)} is both held by {held[min(twice)]!r} and free; it is one of the two.")
    if twice := free & moving:
        raise UsageError(f"stream {min(twice)} is both free and being revoked; it is free once that has ended.")


def _holdings(held: Mapping[int, str], weights: Mapping[str, float], moving: set[int]) -> dict[str, list[int]]:
    """What each member holds and is not already losing."""
    holdings: dict[str, list[int]] = {borrower: [] for borrower in weights}
    for stream_id, borrower in held.items():
        if borrower in holdings and stream_id not in moving:
            holdings[borrower].append(stream_id)
    return holdings


def _revokes(
    holdings: Mapping[str, list[int]], share: Mapping[str, int], movable: Collection[int] | None
) -> tuple[int, ...]:
    """The surplus above each share, as far as it may move: the highest (newest) streams first."""
    revokes: list[int] = []
    for borrower, streams in holdings.items():
        surplus = len(streams) - share[borrower]
        if surplus > 0:
            candidates = streams if movable is None else [s for s in streams if s in movable]
            revokes += heapq.nlargest(surplus, candidates)
    return tuple(sorted(revokes))


def _grants(
    free: list[int], counts: Mapping[str, int], share: Mapping[str, int], weights: Mapping[str, float]
) -> tuple[tuple[int, str], ...]:
    """Each free stream to the borrower that is then the most under-full: below its share, fewest per weight."""
    if not free:
        return ()
    queue = [(counts[b] / weights[b], b, counts[b]) for b in share if counts[b] < share[b]]
    heapq.heapify(queue)
    grants = []
    for stream_id in free:
        _, borrower, count = queue[0]
        grants.append((stream_id, borrower))
        count += 1
        if count < share[borrower]:
            heapq.heapreplace(queue, (count / weights[borrower], borrower, count))
        else:
            heapq.heappop(queue)
    return tuple(grants)


def _as_set(streams: Collection[int]) -> Collection[int]:
    return streams if isinstance(streams, (set, frozenset, dict)) else frozenset(streams)
