"""What both group stores say that a commit has written into history: just that, in its order, and to nobody else."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.model.records import AdvancePosition, ForceRelease, GroupWrites, RecordHistory, ReleaseStream
from tests.contract.group_world import LEASE_S, TWO, World, grant, granted

OTHER = Subscription.parse("$share/other/#")


@pytest.mark.conforms("A7")
def test_a_commit_answers_with_the_history_it_wrote(world: World) -> None:
    first, second, third = world.add_space(shards=3)
    group, other = world.group(), world.group(OTHER)
    term, other_term = world.lead(group), world.lead(other)
    held = {stream: granted(world, group, term, stream).grant_id for stream in (first, second)}
    world.append(first, 9)
    world.clock.advance(1.5)
    before = world.store.history(group.group_id), world.store.history(other.group_id)
    entries = (
        ForceRelease(first, held[first], "gone"),
        RecordHistory(second, held[second], "revoke", "balance"),
        grant(third, "b2", "a2"),
    )
    batch = [
        GroupWrites(group.group_id, term, entries),
        GroupWrites(other.group_id, other_term, (grant(first, "b3"), AdvancePosition(second, 17, 1))),
    ]
    ours, theirs = world.store.commit(batch)
    assert [(line.event, line.stream_id) for line in ours.history] == [
        ("force_release", first),
        ("revoke", second),
        ("grant", third),
    ]
    assert [(line.event, line.group_id) for line in theirs.history] == [("grant", other.group_id)]
    assert (ours.history[0].position, ours.history[0].redelivery_end, ours.history[0].is_forced) == (0, 9, True)
    assert world.store.history(group.group_id) == before[0] + ours.history
    assert world.store.history(other.group_id) == before[1] + theirs.history


def test_progress_and_past_terms_write_no_history(world: World) -> None:
    group, term, stream, held = world.lent(5)
    assert world.write(group, term, AdvancePosition(stream, held.grant_id, 3), renew=True).history == ()
    assert world.write(group, term, ReleaseStream(stream, held.grant_id - 1, 3, "late")).history == ()
    world.clock.advance(LEASE_S)
    world.lead(group, TWO)
    deposed = world.write(group, term, ReleaseStream(stream, held.grant_id, 5, "left"))
    assert (deposed.has_stale_term, deposed.history) == (True, ())


def test_a_renewal_tells_last_what_it_ended(world: World) -> None:
    group, term, (first, second) = world.led(2)
    held = granted(world, group, term, first)
    for stream in (first, second):
        world.append(stream, 4)
    world.rollover(1)
    world.retire(1)
    reported = world.write(group, term, RecordHistory(first, held.grant_id, "revoke", "balance"), renew=True).history
    assert [(line.event, line.stream_id) for line in reported] == [
        ("revoke", first),
        ("block", first),
        ("block", second),
    ]
    assert reported == world.store.history(group.group_id)[-3:]
