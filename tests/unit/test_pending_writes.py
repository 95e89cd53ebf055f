"""What a node writes in one transaction, where much waits."""

from __future__ import annotations

from sublet_leader.node.pending_writes import MAX_CHANGES_PER_COMMIT, PendingWrites, take_batch
from sublet_storage.groups.model.records import AdvancePosition, GroupWrites


def advances(count: int) -> tuple[AdvancePosition, ...]:
    return tuple(AdvancePosition(stream_id, 1, 1) for stream_id in range(1, count + 1))


def test_a_large_group_comes_behind_the_others() -> None:
    pending = {1: PendingWrites(7), 2: PendingWrites(8), 3: PendingWrites(9)}
    pending[1].add(advances(MAX_CHANGES_PER_COMMIT + 2), needs_sync=False)
    pending[2].add(advances(1), needs_sync=False)
    pending[3].add((), needs_sync=True)
    first, second = take_batch(pending), take_batch(pending)
    assert first == (GroupWrites(1, 7, advances(MAX_CHANGES_PER_COMMIT)), GroupWrites(3, 9, (), needs_stream_sync=True))
    assert second == (GroupWrites(2, 8, advances(1)), GroupWrites(1, 7, advances(MAX_CHANGES_PER_COMMIT + 2)[-2:]))
    assert not pending


def test_a_sync_waits_for_the_changes_before_it() -> None:
    pending = {1: PendingWrites(7)}
    pending[1].add(advances(MAX_CHANGES_PER_COMMIT + 1), needs_sync=True)
    pending[1].add(advances(MAX_CHANGES_PER_COMMIT), needs_sync=True)
    parts = take_batch(pending) + take_batch(pending) + take_batch(pending)
    assert [(len(part.changes), part.needs_stream_sync) for part in parts] == [
        (MAX_CHANGES_PER_COMMIT, False),
        (MAX_CHANGES_PER_COMMIT, True),
        (1, False),
    ]
