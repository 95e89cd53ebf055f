"""The twin is a twin: both group stores are driven by one machine and must answer alike, statement by statement.

The rules that need no second opinion are checked on the side: grant ids and positions only grow, terms only grow, and a
finished stream stays finished.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from protocol.errors import LostLeadership, SubletError
from protocol.words import Subscription
from storage.groups.memory import MemoryGroups
from storage.groups.model import (
    Advance,
    Entry,
    Grant,
    GroupWrites,
    LendingStatus,
    NodeRef,
    Reclaim,
    Release,
    Seize,
    Start,
)
from storage.groups.store import GroupStore
from tests.contract.group_world import PostgresWorld

NODES = [NodeRef(name, f"incarnation of {name}", f"{name}:1") for name in ("one", "two")]
SUBSCRIPTIONS = [Subscription.parse(text) for text in ("$share/g/#", "$share/h/orders/#", "$queue/q/users/+")]
AGENTS = ["a1", "a2"]
WORDS = ["grant", "advance", "advance", "release", "seize", "reclaim"]
small = st.integers(0, 63)


class Twins(RuleBasedStateMachine):
    """Small worlds: few names, so that everything meets everything."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.world = PostgresWorld(self.url)
        self.twin = MemoryGroups(self.world.streams, self.world.clock)
        self.terms: dict[int, int] = {}
        self.seen: dict[tuple[int, int], tuple[int, int, bool]] = {}
        self.locks = ExitStack()
        self.world.add_space(shards=2)

    def teardown(self) -> None:
        self.locks.close()
        self.world.close()

    def ask(self, question: Callable[[GroupStore], Any]) -> Any:
        """Both answers, which are equal; errors are answers."""
        answers = []
        for store in (self.world.store, self.twin):
            try:
                answers.append(question(store))
            except SubletError as error:
                answers.append((type(error), str(error)))
        assert answers[0] == answers[1]
        return answers[0]

    # --- the world ----------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.000_001, 0.5, 3.0, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule(which=small, count=st.integers(1, 3))
    def append(self, which: int, count: int) -> None:
        streams = [s.stream_id for s in self.world.streams.streams.values() if not s.closed]
        self.world.append(streams[which % len(streams)], count)

    @precondition(lambda self: len(self.world.streams.streams) < 14)
    @rule(which=small, shards=st.integers(1, 3))
    def roll_over(self, which: int, shards: int) -> None:
        spaces = self.world.streams.live_spaces()
        self.world.rollover(spaces[which % len(spaces)].space_id, shards)

    @precondition(lambda self: len(self.world.streams.spaces) < 3)
    @rule(filter=st.sampled_from(["orders/#", "users/+"]))
    def create_space(self, filter: str) -> None:
        spaces = self.world.streams.live_spaces()
        if all(space.filter.text != filter for space in spaces):
            self.world.add_space(f"space {len(self.world.streams.spaces)}", filter, rolls=(1,))

    @rule(which=small)
    def drop_space(self, which: int) -> None:
        special = [space.space_id for space in self.world.streams.live_spaces() if space.space_id != 1]
        if special:
            self.world.drop_space(special[which % len(special)], rolls=(1,))

    @precondition(lambda self: len(self.world.streams.streams) < 14)
    @rule(which=small, filter=st.sampled_from(["orders/#", "orders/eu", "users/+"]))
    def alter_space(self, which: int, filter: str) -> None:
        spaces = self.world.streams.live_spaces()
        special = [space.space_id for space in spaces if space.space_id != 1]
        if special and all(space.filter.text != filter for space in spaces):
            self.world.alter_space(special[which % len(special)], filter, rolls=(1,))

    @rule(which=small)
    def retention(self, which: int) -> None:
        ended = [g.generation_id for g in self.world.streams.generations.values() if g.closed]
        if ended:
            self.world.retire(ended[which % len(ended)])

    # --- groups and leaders -------------------------------------------------------------------------------------

    @rule(subscription=st.sampled_from(SUBSCRIPTIONS), start=st.sampled_from(Start))
    def open_group(self, subscription: Subscription, start: Start) -> None:
        self.ask(lambda store: store.open_group(subscription, start))

    @rule(subscription=st.sampled_from(SUBSCRIPTIONS), start=st.sampled_from(Start))
    def declare_group(self, subscription: Subscription, start: Start) -> None:
        self.ask(lambda store: store.declare_group(subscription, start))

    @precondition(lambda self: not self.twin.locked)
    @rule(subscription=st.sampled_from(SUBSCRIPTIONS))
    def delete_group(self, subscription: Subscription) -> None:
        deleted = self.ask(lambda store: store.delete_group(subscription))
        self.seen = {key: facts for key, facts in self.seen.items() if key[0] != deleted}

    @rule(group=st.integers(1, 4), node=st.sampled_from(NODES))
    def claim(self, group: int, node: NodeRef) -> None:
        term = self.ask(lambda store: store.claim(group, node, 10.0)).term
        assert term >= self.terms.get(group, 0)
        self.terms[group] = term

    @rule(node=st.sampled_from(NODES))
    def renew_leases(self, node: NodeRef) -> None:
        self.ask(lambda store: store.renew(node, self.terms, 10.0))

    @rule(node=st.sampled_from(NODES), off=st.sampled_from([0, 0, 1]))
    def release(self, node: NodeRef, off: int) -> None:
        self.ask(lambda store: store.release(node, {group: term - off for group, term in self.terms.items()}))

    # --- writes -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.terms)
    @rule(
        words=st.lists(st.tuples(st.sampled_from(WORDS), small, st.sampled_from([0, 0, 0, 0, 1])), max_size=4),
        shift=st.integers(-2, 3),
        renew=st.booleans(),
        stale=st.sampled_from([0, 0, 0, 1]),
        agent=st.sampled_from(AGENTS),
    )
    def commit(self, words: list[tuple[str, int, int]], shift: int, renew: bool, stale: int, agent: str) -> None:
        batch = []
        for group, term in self.terms.items():
            entries = [self.entry(group, *word, shift=shift, agent=agent) for word in words]
            unique = {entry.stream_id: entry for entry in entries}
            batch.append(GroupWrites(group, term - stale, tuple(unique.values()), renew))
        self.ask(lambda store: store.commit(batch))

    def entry(self, group: int, word: str, which: int, off: int, *, shift: int, agent: str) -> Entry:
        """A word that is meant for the row as it is, give or take."""
        life = self.twin._lives.get(group)
        rows = life.rows if life else {}
        stream = sorted(rows)[which % len(rows)] if rows else 1 + which % 3
        grant_id = rows[stream].grant_id - off if rows else off
        position = max(0, rows[stream].position + shift) if rows else 0
        match word:
            case "grant":
                return Grant(stream, f"b{which % 3}", agent, None, "share")
            case "advance":
                return Advance(stream, grant_id, position)
            case "release":
                return Release(stream, grant_id, position, "leave")
            case "seize":
                return Seize(stream, grant_id, "silent")
            case _:
                return Reclaim(stream, grant_id, position, f"b{which % 3}", agent)

    @precondition(lambda self: not self.twin.locked)
    @rule(which=small)
    def users_transaction_begins(self, which: int) -> None:
        keys = [(group, stream) for group, life in self.twin._lives.items() for stream in life.rows]
        if keys:
            key = keys[which % len(keys)]
            self.twin.locked.add(key)
            self.locks.enter_context(self.world.locked(*key))

    @precondition(lambda self: self.twin.locked)
    @rule()
    def users_transaction_ends(self) -> None:
        self.locks.close()
        self.twin.locked.clear()

    # --- what must be true --------------------------------------------------------------------------------------

    @invariant()
    def they_hold_the_same(self) -> None:
        self.ask(lambda store: store.look(range(6)))
        for group in range(1, 5):
            self.ask(partial(self.all_about, group))

    def all_about(self, group: int, store: GroupStore) -> tuple[object, ...]:
        found, history = store.find_group(group), store.history(group)
        try:
            return found, history, store.load(group, self.terms.get(group, 1))
        except LostLeadership as error:
            return found, history, str(error)

    @invariant()
    def only_forward(self) -> None:
        for group, life in self.twin._lives.items():
            for row in life.rows.values():
                position, grant_id, finished = self.seen.get((group, row.stream_id), (0, 0, False))
                assert row.position >= position
                assert row.grant_id >= grant_id
                assert not finished or row.status is LendingStatus.FINISHED
                self.seen[group, row.stream_id] = (row.position, row.grant_id, row.status is LendingStatus.FINISHED)


@pytest.mark.conforms("E13", "E17", "E21")
@pytest.mark.timeout(300)
def test_the_twins_answer_alike(database: str) -> None:
    class Here(Twins):
        url = database

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=25, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=checks
        ),
    )
