"""Which blocks are merged, and what is left of the times at which they were appended."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sublet_storage.spaces.small_block_compaction import BlockToMerge, compute_append_times, find_runs

EARLY, LATE = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(("count", "size", "merged"), [(4, 50, 2), (5, 50, 0), (4, 51, 0)])
def test_two_halves_of_a_block_are_merged(count: int, size: int, merged: int) -> None:
    """Whether by messages or by bytes."""
    rows = [BlockToMerge(end, count, size, b"") for end in (count, 2 * count)]
    assert sum(map(len, find_runs(rows, block_messages=8, block_bytes=100))) == merged


def test_only_what_is_appended_later_has_a_time() -> None:
    """Of its own in the merged block."""
    blocks = [(3, at, None, None) for at in (EARLY, EARLY, LATE, EARLY, LATE)]
    assert compute_append_times(blocks) == ([0, 6], [EARLY, LATE])


@pytest.mark.parametrize(
    ("rows", "ends"),
    [
        ([(1, 1, b""), (2, 1, b""), (4, 1, b""), (5, 1, b"")], [[1, 2], [4, 5]]),
        ([(1, 1, b""), (2, 1, b"other"), (3, 1, b"other")], [[2, 3]]),
        ([(4, 4, b""), (8, 4, b""), (9, 1, b"")], [[4, 8]]),
        ([(1, 1, b""), (6, 5, b""), (7, 1, b""), (8, 1, b"")], [[7, 8]]),
        ([(1, 1, b"")], []),
    ],
    ids=["a gap", "other epochs", "full", "a large one between", "alone"],
)
def test_a_run_ends_where_no_neighbour_fits(rows: list[tuple[int, int, bytes]], ends: list[list[int]]) -> None:
    given = [BlockToMerge(end, count, 1, frontiers) for end, count, frontiers in rows]
    found = find_runs(given, block_messages=8, block_bytes=100)
    assert [[each.end_offset for each in run] for run in found] == ends


def test_a_run_has_the_bytes_of_a_block_at_most() -> None:
    given = [BlockToMerge(end, 1, 50, b"") for end in range(1, 6)]
    assert [len(run) for run in find_runs(given, block_messages=8, block_bytes=100)] == [2, 2]
