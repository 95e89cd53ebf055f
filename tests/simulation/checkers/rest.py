"""How it all must end, once nothing goes wrong any more (E7, E18, E20, E23, E29, E30)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sublet_borrower.machine.transitions import BorrowerStatus
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import MAINTENANCE, LendingStatus
from tests.simulation.checkers.lives import Life, Violation

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


def check_rest(simulation: Simulation) -> None:
    """Raise `Violation` for the first thing that is not as it must be."""
    lives = simulation.checkers.lives.live()
    if missing := set(simulation.groups.subscriptions) - {life.group.subscription for life in lives}:
        raise Violation(f"there are no groups for {missing}")
    for life in lives:
        rows = simulation.store.rows(life.group.group_id)
        _check_streams(simulation, life, rows)
        if life.group.options.atomic:
            simulation.checkers.epochs.check_rest(life, rows)
        members = _members(simulation, life)
        _check_shares(life, rows, members)
    _check_leaders(simulation, [life.group.group_id for life in lives])
    _check_nobody_else(simulation)


def _check_streams(simulation: Simulation, life: Life, rows: dict[int, LendingRow]) -> None:
    """Everything read, everything durable, closed streams finished, the others granted; none reserved for anybody."""
    group_id = life.group.group_id
    for stream_id, stream in simulation.streams.streams.items():
        if life.start(stream_id) is None:
            continue
        row = rows.get(stream_id)
        if row is None and stream.closed and simulation.checkers.deliveries.is_consumed(group_id, stream_id):
            continue
        if row is None:
            raise Violation(f"group {group_id}, stream {stream_id} has no row, only {sorted(rows)} have")
        if life.group.options.atomic and not stream.closed:
            if row.status is not LendingStatus.HELD:
                raise Violation(
                    f"group {group_id}, stream {stream_id} (head {stream.head}) is granted to nobody: {row}"
                )
            continue
        if not simulation.checkers.deliveries.is_consumed(group_id, stream_id):
            raise Violation(f"group {group_id}, stream {stream_id} (head {stream.head}) is not consumed: {row}")
        done = LendingStatus.FINISHED if stream.closed else LendingStatus.HELD
        if row.position != stream.head or row.status is not done:
            raise Violation(f"group {group_id}, stream {stream_id} (head {stream.head}) did not come to rest: {row}")


def _members(simulation: Simulation, life: Life) -> dict[str, float]:
    """The borrowers of all open subscriptions to it, each connected to this life of it, with their weights."""
    members = {}
    for agent in simulation.living():
        for wish in agent.wishes.values():
            if wish.subscription != life.group.subscription:
                continue
            borrower = agent.machine.borrowers.get(wish.handle)
            if borrower is None or borrower.status is not BorrowerStatus.CONNECTED:
                raise Violation(f"{agent.name} waits with {wish}: {borrower and borrower.status}")
            if borrower.group_id != life.group.group_id:
                raise Violation(f"{agent.name}, {wish}: a member of group {borrower.group_id}, alive is {life.group}")
            members[borrower.borrower_id] = agent.weight
    if not members:
        raise Violation(f"nobody is there for {life.group}")
    return members


def _check_shares(life: Life, rows: dict[int, LendingRow], members: dict[str, float]) -> None:
    """Who is there has its share, by weight, to the nearest whole stream; `load`, to which all streams here look alike,
    lets nobody starve or hoard."""
    held = Counter(row.borrower_id or "" for row in rows.values() if row.status is LendingStatus.HELD)
    if strangers := set(held) - set(members):
        raise Violation(f"{life.group}: {strangers} hold streams, but are gone")
    total, entire = held.total(), sum(members.values())
    for borrower_id, weight in members.items():
        share, count = total * weight / entire, held[borrower_id]
        if life.group.options.strategy == "even":
            fair = abs(count - share) < 1
        else:
            fair = (count > 0 or total < len(members)) and count <= 2 * (int(share) + 1) + 1
        if not fair:
            raise Violation(
                f"{life.group} is not balanced: {borrower_id} has {count}, its share is {share:.2f}: {held}"
            )


def _check_leaders(simulation: Simulation, groups: list[int]) -> None:
    """One node leads each group, and one runs maintenance."""
    for group_id in (MAINTENANCE, *groups):
        leaders = [n.name for n in simulation.nodes if n.alive and n.machine.election.trusted_term(group_id, n.now)]
        if len(leaders) != 1:
            raise Violation(f"group {group_id} is led by {leaders or 'nobody'}")


def _check_nobody_else(simulation: Simulation) -> None:
    """No leader of a deleted group, and of two processes of one name the older is over."""
    for node in simulation.nodes:
        dead = [g for g in node.machine.leaders if node.alive and simulation.checkers.lives.is_deleted(g)]
        if dead:
            raise Violation(f"{node.name} still leads groups that were deleted: {dead}")
    bearers = Counter(
        (agent.session, wish.subscription)
        for agent in simulation.living()
        for wish in agent.wishes.values()
        if agent.session is not None
    )
    if twice := [bearer for bearer, count in bearers.items() if count > 1]:
        raise Violation(f"two processes go by one name: {twice}")
