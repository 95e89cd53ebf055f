"""Who may publish which epochs, changed from several sides at once."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from sublet_protocol.domain.epoch_frontiers import LowerFrontier
from sublet_protocol.domain.errors import EpochAlreadyCompleted, EpochCapabilityExpired, ProducerFenced
from sublet_storage.log import epoch_leases
from sublet_storage.log.append import (
    AppendOutcome,
    BlockAppend,
    ProducerIdentity,
    ProducerStamp,
    append,
    register_producer,
)
from sublet_storage.spaces import space_changes
from sublet_storage.spaces.space_queries import find_space
from tests.integration.log_kit import in_epochs, stream_of
from tests.interleavings.harness import Connection, Interleavings, Run

LONG_S = 600.0
NAME = "meter"


class Stage:
    """Space `eu`, where the first life of a named producer holds epoch 1, in which it has published. It is overdue."""

    def __init__(self, conn: Connection) -> None:
        self.space, self.stream = find_space(conn, "eu").space_id, stream_of(conn, "eu")
        self.former = ProducerIdentity(NAME, register_producer(conn, NAME))
        epoch_leases.hold(conn, self.space, self.former, [(1,)], lease_s=0)
        append(conn, [self.block(1)])

    def block(self, number: int) -> BlockAppend:
        """Return the producer's block of that number, in the epoch of the same number."""
        return BlockAppend(self.stream, in_epochs((number,)), ProducerStamp(NAME, self.former.incarnation, number))

    def advance(self, conn: Connection) -> epoch_leases.EpochAdvanceResult:
        """Publish in epoch 2, and go on to 5."""
        return epoch_leases.append_and_advance(conn, [self.block(2)], self.space, self.former, [(5,)], LONG_S)

    def go_on(self, conn: Connection) -> LowerFrontier:
        """Advance to epoch 4."""
        return epoch_leases.hold(conn, self.space, self.former, [(4,)], LONG_S)

    def advance_only(self, conn: Connection) -> epoch_leases.EpochAdvanceResult:
        """Go on to epoch 5."""
        return epoch_leases.append_and_advance(conn, [], self.space, self.former, [(5,)], LONG_S)

    def renew(self, conn: Connection) -> frozenset[int]:
        return epoch_leases.renew(conn, self.former, LONG_S)

    def release(self, conn: Connection) -> None:
        epoch_leases.release(conn, self.space, self.former)

    def expire(self, conn: Connection) -> bool:
        return epoch_leases.expire_one(conn, self.space, NAME)

    def publish(self, conn: Connection) -> Any:
        return append(conn, [self.block(2)])

    def take(self, conn: Connection) -> epoch_leases.EpochAdvanceResult:
        """Another producer begins at epoch 1, in a transaction as that of an advance."""
        return epoch_leases.append_and_advance(conn, [], self.space, ProducerIdentity("other", 1), [(1,)], LONG_S)

    def live_anew(self, conn: Connection) -> LowerFrontier:
        """Start its next incarnation, which continues with the former one's capability."""
        newer = ProducerIdentity(NAME, register_producer(conn, NAME))
        return epoch_leases.hold(conn, self.space, newer, [(1,)], LONG_S)

    def alter(self, conn: Connection) -> None:
        space_changes.alter_space(conn, "eu", retention_s=200)

    def drop(self, conn: Connection) -> None:
        space_changes.drop_space(conn, "eu")


@pytest.fixture
def stage(conn: Connection) -> Stage:
    return Stage(conn)


def check_frontier(run: Run) -> None:
    """What may still come is at or after what somebody holds; without anybody all that has begun is completed; and
    nothing was stored in an epoch that was completed by then."""
    ((least, held, behind),) = run.conn.execute(
        "select lower_frontier, (select least_epochs(jsonb_agg(e.epoch))"
        "   from capability c, jsonb_array_elements(c.least) as e(epoch)"
        "  where c.space_id = p.space_id and c.expired_at is null), exists ("
        "   select from block b, jsonb_array_elements(b.epoch_bounds -> 'least') as e(epoch)"
        "    where not frontier_admits(b.lower_frontier, e.epoch)) from space p where name = 'eu'"
    ).fetchall()
    assert not behind
    if held is not None:
        assert least == held
    begun = run.conn.execute("select upper_frontier from stream where upper_frontier is not null").fetchall()
    assert held is not None or least[0][0] > max(epoch[0] for (upper,) in begun for epoch in upper)


def refused(answer: object) -> bool:
    """By name."""
    if isinstance(answer, epoch_leases.EpochAdvanceResult):
        return isinstance(answer.error, ProducerFenced) or any(refused([each]) for each in answer.results)
    if isinstance(answer, list):
        return [each.outcome for each in answer] == [AppendOutcome.FENCED]
    return isinstance(answer, ProducerFenced)


@pytest.mark.conforms("S12")
@pytest.mark.parametrize("act", ["advance", "advance_only", "renew", "release", "publish"])
def test_a_fenced_publisher_completes_nothing(orders: Interleavings, stage: Stage, act: str) -> None:
    """Nor does it hold anything back."""

    def judge(run: Run) -> None:
        former, newer = run.answers["former"], run.answers["newer"]
        if run.places("former")[0] > run.places("newer")[0]:  # the next life has begun
            assert refused(former)
        check_frontier(run)
        goes_on = refused(former) or act in ("renew", "publish")
        assert isinstance(newer, LowerFrontier if goes_on else EpochAlreadyCompleted)
        asked = "select incarnation > %s, least from capability"
        lives = run.conn.execute(asked, (stage.former.incarnation,)).fetchall()
        assert lives == ([(True, [[1]])] if goes_on else [] if act == "release" else [(False, [[5]])])
        assert "DeadlockDetected" not in run.errors

    orders.explore({"former": getattr(stage, act), "newer": stage.live_anew}, judge)


@pytest.mark.conforms("S12")
def test_an_advance_and_its_retry_both_end(orders: Interleavings, stage: Stage) -> None:
    def judge(run: Run) -> None:
        assert run.errors == []
        check_frontier(run)

    orders.explore({"first": stage.advance, "retry": stage.advance}, judge)


ACTS = ("advance", "go_on", "renew", "expire", "release", "take", "live_anew", "alter")


def goes_on(answer: object) -> bool:
    """Return whether it continues with its capability, for another lease."""
    return bool(answer.change if isinstance(answer, epoch_leases.EpochAdvanceResult) else answer) and not isinstance(
        answer, Exception
    )


@pytest.mark.timeout(600)
@pytest.mark.conforms("S9", "S12")
def test_the_frontier_is_what_is_held(orders: Interleavings, stage: Stage) -> None:
    """Whatever changes capabilities at once."""

    def judge(run: Run) -> None:
        refusals = (EpochAlreadyCompleted, EpochCapabilityExpired, ProducerFenced)
        assert all(isinstance(error, refusals) for error in run.errors)
        check_frontier(run)
        others = (act for act in ("advance", "go_on", "renew", "live_anew") if act in run.answers)
        assert not (run.answers.get("expire") and any(goes_on(run.answers[act]) for act in others))

    for acts in (*combinations(ACTS, 2), ("renew", "expire", "take")):
        orders.explore({act: getattr(stage, act) for act in acts}, judge)


@pytest.mark.conforms("S9")
@pytest.mark.parametrize("act", ["expire", "release", "go_on", "advance", "take", "publish"])
def test_a_dropped_space_stays_completed(orders: Interleavings, stage: Stage, conn: Connection, act: str) -> None:
    """Though another producer, which is alive, holds epochs of it."""
    epoch_leases.hold(conn, stage.space, ProducerIdentity("alive", 1), [(1,)], LONG_S)
    asked = (
        "select dropped_at is not null and lower_frontier = complete_epochs(lower_frontier, s.upper_frontier)"
        "  from space join stream s using (space_id) where space_id = %s"
    )

    def judge(run: Run) -> None:
        assert run.conn.execute(asked, (stage.space,)).fetchall() == [(True,)]

    orders.explore({act: getattr(stage, act), "drop": stage.drop}, judge)
