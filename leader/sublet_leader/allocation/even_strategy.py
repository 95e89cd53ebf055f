"""`even`: streams spread by weight, with the fewest moves.

Each borrower's share of the streams is proportional to its weight and rounded by largest remainder. Where remainders
tie (equal weights: always) the spare streams go to the borrowers that already hold one more, so an unchanged membership
moves nothing. Only what a borrower holds above its share is revoked; everything else stays where it is. Borrowers whose
share is zero are standby.

A free stream goes back to its last holder if that one is below its share: the shares are the same either way, so this
costs no move and no fairness. The rest goes to the member that is then the most under-full. So does, after the free
streams, what is being revoked.

Near-linear in streams plus borrowers; every free stream is granted if there is any member.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Mapping

from sublet_leader.allocation.quotas import compute_quotas
from sublet_leader.allocation.strategy import AllocationInput, AllocationPlan


class EvenStrategy:
    """Strategy `even`: the same number of streams per weight for each member."""

    def plan(self, allocation_input: AllocationInput) -> AllocationPlan:
        """Return what to grant and what to revoke now."""
        weights, last_holders = allocation_input.weights, allocation_input.last_holders
        if not weights:
            return AllocationPlan()
        free, holdings = sorted(set(allocation_input.free_streams)), allocation_input.streams_by_member()
        counts = {borrower: len(streams) for borrower, streams in holdings.items()}
        # Streams being revoked count into the shares: otherwise a plan made meanwhile would revoke once more.
        total = sum(counts.values()) + len(free) + len(set(allocation_input.moving_streams))
        share = compute_quotas(total, weights, counts, Counter(last_holders[s] for s in free if s in last_holders))
        revokes = _plan_revokes(holdings, share, allocation_input.revocable_streams())
        grants = _plan_grants(free, counts, share, weights, last_holders)
        moving = sorted({*allocation_input.moving_streams, *revokes})
        return AllocationPlan(grants, revokes, moves=_plan_grants(moving, counts, share, weights, {}))


def _plan_revokes(
    holdings: Mapping[str, list[int]], share: Mapping[str, int], revocable: Container[int]
) -> tuple[int, ...]:
    """Return the streams above each borrower's share, as far as they may move, the highest (newest) first."""
    revokes: list[int] = []
    for borrower, streams in holdings.items():
        surplus = len(streams) - share[borrower]
        if surplus > 0:
            revokes += heapq.nlargest(surplus, [s for s in streams if s in revocable])
    return tuple(sorted(revokes))


def _plan_grants(
    free: list[int],
    count: dict[str, int],
    share: Mapping[str, int],
    weights: Mapping[str, float],
    last_holders: Mapping[int, str],
) -> tuple[tuple[int, str], ...]:
    """Return (stream, borrower) for each free stream: its last holder if that is below its share, else the member below
    its share with the fewest streams per weight. They are added to `count`."""
    grants = []
    strays = []
    for stream_id in free:
        home = last_holders.get(stream_id, "")
        if home in share and count[home] < share[home]:
            grants.append((stream_id, home))
            count[home] += 1
        else:
            strays.append(stream_id)
    queue = [(count[b] / weights[b], b) for b in share if count[b] < share[b]]
    heapq.heapify(queue)
    for stream_id in strays:
        _, borrower = queue[0]
        grants.append((stream_id, borrower))
        count[borrower] += 1
        if count[borrower] < share[borrower]:
            heapq.heapreplace(queue, (count[borrower] / weights[borrower], borrower))
        else:
            heapq.heappop(queue)
    return tuple(sorted(grants))
