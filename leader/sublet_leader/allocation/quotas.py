"""Computes how many streams each member should hold, in integers.

A remainder that ties in theory but not in floating point would move a stream for nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def compute_quotas(
    total: int,
    weights: Mapping[str, float],
    counts: Mapping[str, int] | None = None,
    homing: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return how many of `total` streams each borrower should hold: largest remainder, the sum is exactly `total`.

    Equal remainders are decided by `counts` (a borrower above its rounded-down share keeps its streams), then by
    `homing` (free streams that were last held by each borrower), then by the id. Weights are finite and above 0.
    """
    if not weights:
        return {}
    current, coming = counts or {}, homing or {}
    units = _to_integers(weights)
    entire = sum(units.values())
    quota = {borrower: divmod(total * unit, entire) for borrower, unit in units.items()}
    share = {borrower: floor for borrower, (floor, _) in quota.items()}
    spare = total - sum(share.values())

    def claim(borrower: str) -> tuple[int, bool, bool, str]:
        floor, remainder = quota[borrower]
        count = current.get(borrower, 0)
        return -remainder, count <= floor, count + coming.get(borrower, 0) <= floor, borrower

    for borrower in heapq.nsmallest(spare, quota, key=claim):
        share[borrower] += 1
    return share


def _to_integers(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the weights as integers in exactly the same proportions."""
    ratios = {borrower: weight.as_integer_ratio() for borrower, weight in weights.items()}
    # The denominators of floats are powers of two: the largest is a multiple of all others.
    common = max(denominator for _, denominator in ratios.values())
    return {borrower: number * (common // denominator) for borrower, (number, denominator) in ratios.items()}
