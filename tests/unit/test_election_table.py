"""The election's table is whole: every pair answered, every status reached and left, every action a method."""

from __future__ import annotations

import pytest

from leader.election import TABLE, Action, Election, Kind, Status

PAIRS = [(status, kind) for status in Status for kind in Kind]


@pytest.mark.parametrize(("status", "kind"), PAIRS, ids=lambda part: part.name.lower())
def test_every_pair_has_an_answer(status: Status, kind: Kind) -> None:
    assert kind in TABLE[status]


def reachable(start: Status) -> set[Status]:
    """All statuses that some sequence of kinds leads to."""
    found, edge = {start}, [start]
    while edge:
        new = {after for after, _ in TABLE[edge.pop()].values()} - found
        found |= new
        edge += new
    return found


def test_every_status_is_reached_from_absent_and_returns_there() -> None:
    assert reachable(Status.ABSENT) == set(Status)
    for status in Status:
        assert Status.ABSENT in reachable(status)


def test_every_action_is_used_and_is_a_method() -> None:
    used = {action for row in TABLE.values() for _, action in row.values()}
    assert used == set(Action)
    for action in Action:
        assert callable(getattr(Election, action.value))


def test_leading_begins_only_with_a_claim_in_time() -> None:
    begins = {(s, k) for s in Status for k in Kind if s is not Status.LED and TABLE[s][k][0] is Status.LED}
    assert begins == {(Status.CLAIMING, Kind.WON)}


@pytest.mark.conforms("E13")
def test_whatever_ends_leading_releases_the_term_before_the_next_claim() -> None:
    for kind, (after, action) in TABLE[Status.LED].items():
        assert after in (Status.LED, Status.RELEASING, Status.RETURNING), kind
        assert after is Status.LED or action in (Action.RELEASE, Action.LOSE), kind
    for status in (Status.RELEASING, Status.RETURNING):
        for kind, (after, _) in TABLE[status].items():
            assert kind is Kind.RELEASED or after in (Status.RELEASING, Status.RETURNING), (status, kind)
