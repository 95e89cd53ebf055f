"""The twin is a twin: both group stores are driven by one machine and must answer alike, statement by statement.

The rules that need no second opinion are checked on the side: grant ids and positions only grow, terms only grow, and a
finished stream stays finished.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from msgspec import Struct, structs

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier, lower_frontier_from_json
from sublet_protocol.domain.errors import Conflict, NotFound, StaleTerm, SubletError
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.coordinator.store import GroupStore
from sublet_storage.groups.model import records
from sublet_storage.groups.model.desired_state import GroupCommand, OverrideSessionWeight, PauseGroup, ResumeGroup
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from tests.contract.group_world import PostgresWorld, Ticker
from tests.support.memory_store.groups import MemoryGroupStore

NODES = [NodeIncarnation(name, f"incarnation of {name}", f"{name}:1") for name in ("one", "two")]
SUBSCRIPTIONS = [Subscription.parse(text) for text in ("$share/g/#", "$share/h/orders/#", "$queue/q/users/+")]
AGENTS = ["a1", "a2"]
WORDS = ["grant"] * 3 + ["advance"] * 2 + ["plan"] * 2 + ["consume"] * 2
WORDS += ["release", "force_release", "reclaim", "mark", "unreserve"]
BEGUN_US = Ticker().now_us
ORDERS: list[GroupCommand] = [PauseGroup("why"), PauseGroup(), ResumeGroup(), ResumeGroup()]
ORDERS += OverrideSessionWeight("s", 2.0), OverrideSessionWeight("s", None)
small = st.integers(0, 63)
starts = st.one_of(
    st.sampled_from([records.StartingPosition.LATEST, records.StartingPosition.EARLIEST]),
    st.integers(0, 4).map(records.StartingPosition.at_offset),
    st.sampled_from([0, 1, 500_000, 3_000_000, 9_000_000, 20_000_000]).map(
        lambda us: records.StartingPosition.at_time(BEGUN_US + us)
    ),
)
targets = st.one_of(
    st.sampled_from([ResetTarget.earliest(), ResetTarget.latest(), ResetTarget.current()]),
    st.integers(0, 4).map(ResetTarget.offset),
    st.integers(-3, 3).map(ResetTarget.shift),
    st.sampled_from([0, 500_000, 3_000_000, 9_000_000]).map(lambda us: ResetTarget("time", BEGUN_US + us)),
)
options = st.builds(
    lambda atomic, on_data_loss, **others: records.GroupOptions(
        atomic=atomic, on_data_loss=records.OnDataLoss.FAIL if atomic else on_data_loss, **others
    ),
    atomic=st.booleans(),
    starting_position=starts,
    on_data_loss=st.sampled_from(records.OnDataLoss),
    strategy=st.sampled_from(["even", "even", "load"]),
    session_expiry_s=st.sampled_from([0, 0, 7.5]),
)
EPOCHS = 4
"""So many of a space are published in ahead of what is completed there."""


def _without_grant_keys(answer: Any) -> Any:
    """Return what is to be equal: all but the keys of grants, which each store draws at random."""
    match answer:
        case records.Lending():
            return structs.replace(answer, grant_key=None)
        case Struct():
            return type(answer), _without_grant_keys(list(structs.asdict(answer).values()))
        case list() | tuple():
            return [_without_grant_keys(each) for each in answer]
        case _:
            return answer


@dataclass(frozen=True)
class CommitPlan:
    """What one commit is to be of. `led`: whoever has lost a group leads it again first."""

    words: list[tuple[str, int, int]]
    shift: int
    renew: bool
    stale: int
    agent: str
    reserve_s: float
    led: bool


wanted = st.builds(
    CommitPlan,
    words=st.lists(
        st.tuples(st.sampled_from(WORDS), st.integers(0, 5), st.sampled_from([0, 0, 0, 0, 1])), min_size=1, max_size=5
    ),
    shift=st.integers(-2, 3),
    renew=st.booleans(),
    stale=st.sampled_from([0, 0, 0, 1]),
    agent=st.sampled_from(AGENTS),
    reserve_s=st.sampled_from([0.0, 4.5]),
    led=st.sampled_from([True, True, False]),
)


class Twins(stateful.RuleBasedStateMachine):
    """Small worlds: few names, so that everything meets everything."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.world = PostgresWorld(self.url)
        self.twin = MemoryGroupStore(self.world.streams, self.world.clock)
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
        assert _without_grant_keys(answers[0]) == _without_grant_keys(answers[1])
        return answers[0]

    # --- the world ----------------------------------------------------------------------------------------------

    @stateful.rule(seconds=st.sampled_from([0.000_001, 0.5, 3.0, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @stateful.rule(which=small, count=st.integers(1, 3), epochs=st.lists(st.integers(0, EPOCHS - 1), max_size=2))
    def append(self, which: int, count: int, epochs: list[int]) -> None:
        """Messages of epochs, too, none of which is completed."""
        streams = [s for s in self.world.streams.streams.values() if not s.closed]
        stream = streams[which % len(streams)]
        first = self.first_epoch(stream.generation.space_id)
        self.world.append(stream.stream_id, count, *(first + epoch for epoch in epochs if first is not None))

    @stateful.rule(which=small, count=st.integers(1, EPOCHS))
    def complete_epochs(self, which: int, count: int) -> None:
        spaces = self.world.streams.live_spaces()
        space_id = spaces[which % len(spaces)].space_id
        self.world.complete((self.first_epoch(space_id) or 0) + count, space_id)

    def first_epoch(self, space_id: int) -> int | None:
        """Return the first epoch of a space that is not completed; None before it has epochs."""
        lower = self.world.streams.lowers.get(space_id)
        return None if lower is None else lower.least[0][0]

    @stateful.precondition(lambda self: len(self.world.streams.streams) < 14)
    @stateful.rule(which=small, shards=st.integers(1, 3))
    def roll_over(self, which: int, shards: int) -> None:
        spaces = self.world.streams.live_spaces()
        self.world.rollover(spaces[which % len(spaces)].space_id, shards)

    @stateful.precondition(lambda self: len(self.world.streams.spaces) < 3)
    @stateful.rule(filter=st.sampled_from(["orders/#", "users/+"]))
    def create_space(self, filter: str) -> None:
        spaces = self.world.streams.live_spaces()
        if all(space.filter.text != filter for space in spaces):
            self.world.add_space(f"space {len(self.world.streams.spaces)}", filter, rolls=(1,))

    @stateful.rule(which=small)
    def drop_space(self, which: int) -> None:
        special = [space.space_id for space in self.world.streams.live_spaces() if space.space_id != 1]
        if special:
            self.world.drop_space(special[which % len(special)], rolls=(1,))

    @stateful.precondition(lambda self: len(self.world.streams.streams) < 14)
    @stateful.rule(which=small, filter=st.sampled_from(["orders/#", "orders/eu", "users/+"]))
    def alter_space(self, which: int, filter: str) -> None:
        spaces = self.world.streams.live_spaces()
        special = [space.space_id for space in spaces if space.space_id != 1]
        if special and all(space.filter.text != filter for space in spaces):
            self.world.alter_space(special[which % len(special)], filter, rolls=(1,))

    @stateful.rule(which=small)
    def retention(self, which: int) -> None:
        ended = [g.generation_id for g in self.world.streams.generations.values() if g.closed]
        if ended:
            self.world.retire(ended[which % len(ended)])

    @stateful.precondition(lambda self: not self.twin.locked)
    @stateful.rule(which=small, is_seen=st.booleans())
    def rows_of_the_past_go(self, which: int, is_seen: bool) -> None:
        """Of what retention has taken, mostly once all leaders have seen it. Those of the twin go first: where streams
        are, both look into one catalogue."""
        self.retention(which)
        live = [group for group, life in self.twin._lives.items() if is_seen and not life.deleted]
        for group in live:
            self.claim(group, NODES[0])
        if live:
            self.ask(
                lambda store: store.commit([records.GroupWrites(group, self.terms[group], (), True) for group in live])
            )
        deleted = self.twin.delete_all_past()
        assert deleted == EmptyGenerationCleaner(step=1000)(self.world.connection)
        stored = dict(self.world.connection.execute("select stream_id, parents from stream").fetchall())
        there = [stream for stream in self.world.streams.streams.values() if not stream.generation.deleted]
        assert stored == {stream.stream_id: list(stream.parents) for stream in there}

    @stateful.initialize(options=options, begun=st.lists(st.lists(st.integers(0, EPOCHS - 1), max_size=2), max_size=3))
    def a_group_is_led(self, options: records.GroupOptions, begun: list[list[int]]) -> None:
        """One that is atomic, or skips what is gone, on half of all worlds; whatever else there is comes later.

        Epochs have begun before an atomic one.
        """
        if options.atomic:
            self.complete_epochs(0, 1)
        for which, epochs in enumerate(begun):
            self.append(which, 2, epochs)
        self.declare_group(SUBSCRIPTIONS[0], options)
        self.claim(1, NODES[0])

    @stateful.precondition(lambda self: len(self.world.streams.streams) < 14)
    @stateful.rule(which=small, count=st.integers(1, 3))
    def retention_overtakes(self, which: int, count: int) -> None:
        """All at once what would seldom meet: messages, the end of their generation, and retention."""
        self.append(which, count, [which % EPOCHS])
        self.roll_over(which, 1)
        self.retention(which)

    @stateful.rule(which=st.sampled_from(SUBSCRIPTIONS), order=st.sampled_from(ORDERS))
    def order(self, which: Subscription, order: GroupCommand) -> None:
        self.ask(lambda store: store.apply_command(which, order))

    @stateful.precondition(lambda self: not self.twin.locked)
    @stateful.rule(group=st.integers(1, 4), to=targets, which=small, force=st.booleans(), all_streams=st.booleans())
    def reset(self, group: int, to: ResetTarget, which: int, force: bool, all_streams: bool) -> None:
        """A group, or one of its streams, is set to other positions; an atomic one by a target that it may have."""
        found = self.world.store.find_group(group)
        if found is None or self.twin._lives[group].deleted:
            return
        rows = sorted(self.twin._lives[group].rows)
        if found.options.atomic and to.kind in ("current", "shift"):
            to = ResetTarget.earliest()
        streams = (rows[which % len(rows)],) if rows and not all_streams and not found.options.atomic else ()
        how: dict[str, Any] = {"force": force, "now_us": self.world.clock()}
        resets: list[Callable[[], Any]] = [
            lambda: {s: after for s, (_, after) in self.world.reset(found, to, *streams, **how).items()},
            lambda: self.twin.reset(group, to, streams, reason=f"to {to}", force=force),
        ]
        moves: list[Any] = []
        for reset in resets:
            try:
                moves.append(reset())
            except (Conflict, NotFound) as error:
                moves.append(type(error))
        assert moves[0] == moves[1]
        self.seen = {key: facts for key, facts in self.seen.items() if key[0] != group}

    # --- groups and leaders -------------------------------------------------------------------------------------

    @stateful.rule(subscription=st.sampled_from(SUBSCRIPTIONS), start=starts)
    def open_group(self, subscription: Subscription, start: records.StartingPosition) -> None:
        self.ask(lambda store: store.open_group(subscription, start))

    @stateful.rule(subscription=st.sampled_from(SUBSCRIPTIONS), options=options)
    def declare_group(self, subscription: Subscription, options: records.GroupOptions) -> None:
        self.ask(lambda store: store.declare_group(subscription, options))

    @stateful.precondition(lambda self: not self.twin.locked)
    @stateful.rule(subscription=st.sampled_from(SUBSCRIPTIONS))
    def delete_group(self, subscription: Subscription) -> None:
        deleted = self.ask(lambda store: store.delete_group(subscription))
        self.seen = {key: facts for key, facts in self.seen.items() if key[0] != deleted}

    @stateful.rule(group=st.integers(1, 4), node=st.sampled_from(NODES))
    def claim(self, group: int, node: NodeIncarnation) -> None:
        term = self.ask(lambda store: store.claim(group, node, 10.0)).term
        assert term >= self.terms.get(group, 0)
        self.terms[group] = term

    @stateful.rule(
        group=st.integers(1, 4), node=st.sampled_from(NODES), rival=st.sampled_from(NODES), declares=st.booleans()
    )
    def claim_by_lock(self, group: int, node: NodeIncarnation, rival: NodeIncarnation, declares: bool) -> None:
        """Claim by a lock that no leader holds."""
        own, other = records.LeaderLivenessLock.of(node.incarnation), records.LeaderLivenessLock.of(rival.incarnation)
        claimed = self.ask(lambda store: store.claim(group, node, 10.0, own.key if declares else None, other))
        self.terms[group] = claimed.term

    @stateful.rule(node=st.sampled_from(NODES), declares=st.booleans())
    def renew_leases(self, node: NodeIncarnation, declares: bool) -> None:
        key = records.LeaderLivenessLock.of(node.incarnation).key if declares else None
        self.ask(lambda store: store.renew(node, self.terms, 10.0, key))

    @stateful.rule(node=st.sampled_from(NODES), off=st.sampled_from([0, 0, 1]))
    def release(self, node: NodeIncarnation, off: int) -> None:
        self.ask(lambda store: store.release(node, {group: term - off for group, term in self.terms.items()}))

    # --- writes -------------------------------------------------------------------------------------------------

    @stateful.precondition(lambda self: self.terms)
    @stateful.rule(wanted=wanted)
    def commit(self, wanted: CommitPlan) -> None:
        for group in list(self.terms) if wanted.led else ():
            self.claim(group, NODES[0])
        batch = []
        for group, term in self.terms.items():
            entries = [self.entry(group, *word, wanted) for word in wanted.words]
            unique = {entry.stream_id: entry for entry in entries}
            batch.append(records.GroupWrites(group, term - wanted.stale, tuple(unique.values()), wanted.renew))
        self.ask(lambda store: store.commit(batch))

    @stateful.precondition(lambda self: self.terms)
    @stateful.rule(one=wanted, other=wanted)
    def commit_twice(self, one: CommitPlan, other: CommitPlan) -> None:
        """Commit two, so that commits, the main subject, are most frequent."""
        self.commit(one)
        self.commit(other)

    def entry(self, group: int, word: str, which: int, off: int, wanted: CommitPlan) -> records.LendingChange:
        """A word that is meant for the row as it is, give or take; seldom for one that nothing can happen to."""
        life = self.twin._lives.get(group)
        rows = life.rows if life else {}
        lendable = (records.LendingStatus.FREE, records.LendingStatus.HELD, records.LendingStatus.RESERVED)
        alive = [stream for stream, row in rows.items() if row.status in lendable]
        choice = sorted(alive if alive and which else rows) or [1, 2, 3]
        stream = choice[which % len(choice)]
        grant_id = rows[stream].grant_id - off if rows else off
        position, agent, reserve_s = self.position(rows.get(stream), wanted.shift), wanted.agent, wanted.reserve_s
        match word:
            case "grant":
                session = (None, "etl")[which % 2]
                return records.GrantStream(stream, f"b{which % 3}", agent, session, "share", which if session else None)
            case "advance":
                return records.AdvancePosition(stream, grant_id, position)
            case "plan":
                doubt = InDoubtRange(grant_id, position, position + which % 3, (0.0, 4.5, 4.5)[which % 3])
                return records.AdvancePosition(stream, grant_id, position, in_doubt=doubt)
            case "unreserve":
                return records.FreeReservedStream(stream, grant_id, "not back", is_forced=which % 2 == 0)
            case "consume":
                return records.AdvancePosition(stream, grant_id, position, self.consumed(stream, which))
            case "release":
                final = records.ReleaseStream(stream, grant_id, position, "leave", reserve_s, position + which % 3)
                successor = records.GrantStream(stream, f"next {which % 3}", agent, None, "share")
                return structs.replace(final, successor=successor) if which % 2 else final
            case "force_release":
                return records.ForceRelease(stream, grant_id, "silent", reserve_s)
            case "mark":
                return records.RecordHistory(stream, grant_id, "revoke", "rebalance")
            case _:
                return records.ReclaimStream(
                    stream, grant_id, position, f"b{which % 3}", agent, (None, which)[which % 2]
                )

    def consumed(self, stream_id: int, which: int) -> ConsumedFrontier | None:
        """Return a frontier, mostly of all that is completed in the stream."""
        if (stream := self.world.streams.streams.get(stream_id)) is None:
            return None
        first = self.first_epoch(stream.generation.space_id)
        lower = None if first is None else LowerFrontier(((first + (0, 0, 0, 0, -1, 1)[which],),))
        return ConsumedFrontier(stream.head, lower)

    def position(self, row: LendingRow | None, shift: int) -> int:
        """Near the row's; beyond the head only with the largest shift."""
        near = max(0, (row.position if row else 0) + shift)
        return near if row is None or shift == 3 else min(near, self.world.streams.streams[row.stream_id].head)

    @stateful.precondition(lambda self: not self.twin.locked)
    @stateful.rule(which=small)
    def users_transaction_begins(self, which: int) -> None:
        keys = [(group, stream) for group, life in self.twin._lives.items() for stream in life.rows]
        if keys:
            key = keys[which % len(keys)]
            self.twin.locked.add(key)
            self.locks.enter_context(self.world.locked(*key))

    @stateful.precondition(lambda self: self.twin.locked)
    @stateful.rule()
    def users_transaction_ends(self) -> None:
        self.locks.close()
        self.twin.locked.clear()

    # --- what must be true --------------------------------------------------------------------------------------

    @stateful.invariant()
    def they_hold_the_same(self) -> None:
        self.ask(lambda store: store.read_leaderships(range(6)))
        for group in range(1, 5):
            self.ask(partial(self.all_about, group))

    def all_about(self, group: int, store: GroupStore) -> tuple[object, ...]:
        found, history = store.find_group(group), store.history(group)
        try:
            return found, history, store.load(group, self.terms.get(group, 1))
        except StaleTerm as error:
            return found, history, str(error)

    def stored(self, query: str) -> list[Any]:
        return self.world.connection.execute(query.encode()).fetchall()

    @stateful.invariant()
    def they_store_alike_what_leaders_do_not_read(self) -> None:
        """Finished rows, what was lost, reservation times to the microsecond, and entire epochs; the frontiers, also of
        spaces without a leader so far."""
        lives = sorted(self.twin._lives.items())
        rows = [row for _, life in lives for _, row in sorted(life.rows.items())]
        found = self.stored(
            "select group_id, stream_id, status, lost_message_count,"
            " (extract(epoch from held_until) * 1000000)::bigint, consumed from lending order by group_id, stream_id"
        )
        in_postgres = [
            (*fields, each and (each["upto"], lower_frontier_from_json(each["least"]))) for *fields, each in found
        ]
        assert in_postgres == [
            (row.group_id, row.stream_id, row.status.value, row.lost_message_count, row.held_until_us,
             row.consumed and (row.consumed.upto, row.consumed.lower)) for row in rows
        ]  # fmt: skip
        found = self.stored(
            "select group_id, space_id, has_streams, least from consumed_frontier order by group_id, space_id"
        )
        assert [(*fields, lower_frontier_from_json(least)) for *fields, least in found] == [
            (group, space, space in life.spaces, lower)
            for group, life in lives
            if not life.deleted
            for space, lower in sorted(life.frontiers.items())
        ]

    @stateful.invariant()
    def only_forward(self) -> None:
        for group, life in self.twin._lives.items():
            for row in life.rows.values():
                position, grant_id, finished = self.seen.get((group, row.stream_id), (0, 0, False))
                assert row.position >= position
                assert row.grant_id >= grant_id
                assert not finished or row.status is records.LendingStatus.FINISHED
                is_reservation = row.held_until_us is not None and row.session is not None
                assert not is_reservation or row.status in (records.LendingStatus.FREE, records.LendingStatus.RESERVED)
                self.seen[group, row.stream_id] = (
                    row.position,
                    row.grant_id,
                    row.status is records.LendingStatus.FINISHED,
                )


@pytest.mark.conforms("E13", "E17", "E21")
@pytest.mark.timeout(900)  # with the time that it takes to make a failing example small
@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_twins_answer_alike(database: str, fresh: bool) -> None:
    """In the same examples each time, or in fresh ones: a failing one is printed with what repeats it."""

    class Here(Twins):
        url = database

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    chosen = settings(
        max_examples=60 if fresh else 35,
        stateful_step_count=40,
        derandomize=not fresh,
        print_blob=True,
        suppress_health_check=checks,
    )
    stateful.run_state_machine_as_test(Here, settings=chosen)
