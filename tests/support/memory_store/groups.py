"""The twin of the group tables: the same answers without Postgres, deterministic and cheap, for the simulator.

Its clock is a parameter (microseconds), its faults are switches: rows in `locked` answer BUSY, as rows do that a
user's transaction holds, and `meanwhile` is what publishers do between two statements of a renewal. But for that every
public method is atomic, because nothing in here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier, LowerFrontier, UpperFrontier
from sublet_protocol.domain.errors import Conflict
from sublet_protocol.domain.grant_keys import TIMELINE_US, GrantSecret
from sublet_protocol.domain.limits import MAX_GROUPS_PER_MINUTE, MAX_SESSION_NAMES_OF_PRINCIPAL
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.liveness_lock import compute_lock_key
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.model.desired_state import GroupCommand
from sublet_storage.groups.model.group_errors import (
    anothers_session_error,
    check_batch,
    check_same_group,
    check_same_options,
    stale_term_error,
    too_many_groups_error,
    too_many_session_names_error,
    undeclared_queue_error,
)
from sublet_storage.groups.model.history_record_builder import (
    command_record,
    consumption_record,
    deletion_records,
    to_history_record,
)
from sublet_storage.groups.model.lending_reset import apply_reset
from sublet_storage.groups.model.lending_row import (
    MICROSECONDS,
    LendingRow,
    LendingTransitionResult,
    StreamFacts,
    compute_next_id,
    is_consumed,
    to_lending,
)
from sublet_storage.groups.model.lending_rules import apply_change, close_out
from sublet_storage.groups.model.options import DEFAULTS
from sublet_storage.groups.model.progress_rules import initial_frontier, merge_consumed_frontier
from sublet_storage.groups.model.records import (
    AT_REST,
    HOLDING,
    MAINTENANCE,
    TAKEOVER,
    AdvancePosition,
    Group,
    GroupDesiredState,
    GroupOptions,
    GroupWriteResult,
    GroupWrites,
    HistoryRecord,
    LeaderLivenessLock,
    Leadership,
    Lending,
    LendingChange,
    LendingChangeResult,
    LendingOutcome,
    LendingStatus,
    OnDataLoss,
    StartingPosition,
)
from sublet_storage.node_directory import NodeIncarnation
from tests.support.memory_store.catalogue import MemoryCatalogue, MemoryStream, greatest_epochs, plan_reset

NOBODY = NodeIncarnation("nobody", "", "")
GRANTED = (LendingStatus.HELD, LendingStatus.RESERVED)


@dataclass(slots=True)
class _Leadership:
    node: NodeIncarnation
    term: int
    expires_us: int
    lock_key: int | None = None
    previous_leader_until_us: int = 0

    def end(self) -> None:
        self.previous_leader_until_us, self.expires_us = max(self.previous_leader_until_us, self.expires_us), 0


@dataclass(slots=True)
class _Life:
    """A group with its rows; `after_generation` as in the table consumer_group."""

    group: Group
    after_generation: int
    rows: dict[int, LendingRow] = field(default_factory=dict)
    frontiers: dict[int, LowerFrontier | None] = field(default_factory=dict)
    spaces: set[int] = field(default_factory=set)
    """Those of which it has had streams: of others it has a frontier, and nobody is notified."""
    deleted: bool = False

    def copied(self) -> _Life:
        """Return a copy with its rows, none of which changes in place."""
        return replace(self, rows=dict(self.rows), frontiers=dict(self.frontiers), spaces=set(self.spaces))


class MemoryGroupStore:
    """`GroupStore` over dictionaries."""

    def __init__(self, streams: MemoryCatalogue, clock: Callable[[], int]) -> None:
        self.streams = streams
        self.locked: set[tuple[int, int]] = set()
        self.locks: set[int] = set()  # keys of the advisory locks that somebody holds
        self.meanwhile: Callable[[], None] = lambda: None
        self.timeline = 0
        self._clock = clock
        self._lives: dict[int, _Life] = {}
        self._leaderships: dict[int, _Leadership] = {}
        self._history: list[HistoryRecord] = []
        self._only_moved: set[tuple[int, int]] = set()
        self._epochs: dict[tuple[Subscription, str], int] = {}
        self._owners: dict[tuple[Subscription, str], str] = {}
        self._created: dict[str, list[int]] = {}

    # --- groups -------------------------------------------------------------------------------------------------

    def open_group(
        self,
        subscription: Subscription,
        start: StartingPosition = StartingPosition.LATEST,
        principal: str | None = None,
    ) -> Group:
        life = self._live(subscription)
        if life is not None:
            return life.group
        if subscription.kind == "queue":
            raise undeclared_queue_error(subscription)
        return self._create(subscription, GroupOptions(start), principal)

    def declare_group(
        self, subscription: Subscription, options: GroupOptions = DEFAULTS, principal: str | None = None
    ) -> Group:
        life = self._live(subscription)
        if life is None:
            return self._create(subscription, options, principal)
        return check_same_options(life.group, options)

    def find_group(self, group_id: int) -> Group | None:
        life = self._lives.get(group_id)
        return life.group if life and not life.deleted else None

    def find_live_group(self, subscription: Subscription) -> Group | None:
        life = self._live(subscription)
        return life.group if life else None

    def delete_group(self, subscription: Subscription, user: str = "", group_id: int | None = None) -> int | None:
        life, now = self._live(subscription), self._clock()
        if life is None:
            return None
        check_same_group(life.group, group_id)
        leadership = self._leaderships.get(life.group.group_id)
        if leadership:
            self._history += deletion_records(life.rows.values(), leadership.term, now, user)
            leadership.end()
        life.deleted = True
        life.rows.clear()
        return life.group.group_id

    def apply_command(self, subscription: Subscription, order: GroupCommand, user: str = "") -> Group | None:
        life = self._live(subscription)
        if life is None:
            return None
        before = life.group
        after = before.desired_state.apply(order)
        if after != before.desired_state:
            life.group = structs.replace(before, desired_state=after, revision=before.revision + 1)
            leadership = self._leaderships.get(before.group_id)
            term = leadership.term if leadership is not None else 0
            self._history.append(command_record(before.group_id, order, term, self._clock(), user))
        return life.group

    def next_session_epoch(self, subscription: Subscription, session: str) -> int:
        self._epochs[subscription, session] = drawn = max(self._epochs.values(), default=0) + 1
        return drawn

    def read_last_session_epoch(self, subscription: Subscription, session: str) -> int:
        return self._epochs.get((subscription, session), 0)

    def bind_session(self, subscription: Subscription, session: str, principal: str) -> None:
        name = subscription, session
        if name not in self._epochs or self._owners.get(name) == principal:
            return
        if name in self._owners:
            raise anothers_session_error(subscription, session)
        if list(self._owners.values()).count(principal) >= MAX_SESSION_NAMES_OF_PRINCIPAL:
            raise too_many_session_names_error(session, principal)
        self._owners[name] = principal

    def history(self, group_id: int) -> tuple[HistoryRecord, ...]:
        return tuple(line for line in self._history if line.group_id == group_id)

    # --- leadership ---------------------------------------------------------------------------------------------

    def read_leaderships(self, leadership_ids: Sequence[int]) -> dict[int, Leadership]:
        now = self._clock()
        return {i: self._claim(i, now) for i in sorted(set(leadership_ids)) if i in self._leaderships}

    def claim(
        self,
        leadership_id: int,
        node: NodeIncarnation,
        lease_s: float,
        lock_key: int | None = None,
        rival: LeaderLivenessLock | None = None,
    ) -> Leadership:
        now = self._clock()
        held = self._leaderships.get(leadership_id)
        if held is None or held.expires_us <= now or self._is_gone(held, rival):
            term = compute_next_id(held.term if held else 0, now + self.timeline * TIMELINE_US)
            until = held.previous_leader_until_us if held else 0
            if held is not None and held.expires_us > now:
                until = max(until, held.expires_us)
            expires = now + round(lease_s * MICROSECONDS)
            self._leaderships[leadership_id] = _Leadership(node, term, expires, lock_key, until)
            if leadership_id != MAINTENANCE and (held is None or held.node.incarnation != node.incarnation):
                why = f"node {node.name} leads; {f'before: {held.node.name}' if held else 'first leader'}"
                record = HistoryRecord(now, leadership_id, 0, TAKEOVER, why, 0, None, None, 0, term, is_forced=False)
                self._history.append(record)
        return self._claim(leadership_id, now)

    def _is_gone(self, held: _Leadership, rival: LeaderLivenessLock | None) -> bool:
        declared = None if held.lock_key is None else LeaderLivenessLock(held.node.incarnation, held.lock_key)
        return rival is not None and declared == rival and rival.key not in self.locks

    def renew(
        self, node: NodeIncarnation, terms: Mapping[int, int], lease_s: float, lock_key: int | None = None
    ) -> frozenset[int]:
        now = self._clock()
        retained = [i for i in self._own(node, terms) if self._leaderships[i].expires_us > now]
        for leadership_id in retained:
            self._leaderships[leadership_id].expires_us = now + round(lease_s * MICROSECONDS)
            self._leaderships[leadership_id].lock_key = lock_key
        return frozenset(retained)

    def release(self, node: NodeIncarnation, terms: Mapping[int, int]) -> frozenset[int]:
        own = self._own(node, terms)
        for leadership_id in own:
            self._leaderships[leadership_id].expires_us = 0
        return frozenset(own)

    # --- a leader's reads and writes ----------------------------------------------------------------------------

    def load(self, group_id: int, term: int) -> tuple[Lending, ...]:
        now = self._clock()
        if self._has_stale_term(group_id, term, now):
            raise stale_term_error(group_id, term)
        life = self._lives.get(group_id)
        rows = sorted(life.rows.values(), key=lambda row: row.stream_id) if life else []
        return tuple(self._lending(row, now) for row in rows if row.status is not LendingStatus.FINISHED)

    def commit(self, batch: Sequence[GroupWrites]) -> tuple[GroupWriteResult, ...]:
        check_batch(batch)
        now = self._clock()
        self._only_moved.clear()
        results = [self._write(writes, now) for writes in batch]
        self.written(batch, results)
        return tuple(map(self._without_moved_rows, results))

    def written(self, batch: Sequence[GroupWrites], results: Sequence[GroupWriteResult]) -> None:
        """Look at what was written, with all rows."""

    def _without_moved_rows(self, result: GroupWriteResult) -> GroupWriteResult:
        answers = (
            structs.replace(each, lending=None)
            if (result.group_id, each.change.stream_id) in self._only_moved
            else each
            for each in result.results
        )
        return structs.replace(result, results=tuple(answers))

    def _write(self, writes: GroupWrites, now: int) -> GroupWriteResult:
        if self._has_stale_term(writes.group_id, writes.term, now):
            return GroupWriteResult(writes.group_id, has_stale_term=True)
        life = self._lives.get(writes.group_id)
        before, reported = dict(life.rows) if life else {}, len(self._history)
        on_data_loss = life.group.options.on_data_loss if life else OnDataLoss.FAIL
        results = tuple(self._apply(entry, writes, before, on_data_loss, now) for entry in writes.changes)
        renewed: tuple[Lending, ...] = ()
        epochs: tuple[GroupFrontier, ...] = ()
        orders: GroupDesiredState | None = None
        if writes.needs_stream_sync and life and not life.deleted:
            renewed, epochs = self._renew(life, writes.term, now)
            orders = life.group.desired_state
        return GroupWriteResult(
            writes.group_id, False, results, renewed, tuple(self._history[reported:]), epochs, orders
        )

    def _apply(
        self,
        entry: LendingChange,
        writes: GroupWrites,
        before: Mapping[int, LendingRow],
        on_data_loss: OnDataLoss,
        now: int,
    ) -> LendingChangeResult:
        """Judge one entry against the rows as they were before the batch."""
        row = before.get(entry.stream_id)
        if row is None:
            return LendingChangeResult(entry, LendingOutcome.REFUSED, None)
        if (writes.group_id, entry.stream_id) in self.locked:
            return LendingChangeResult(entry, LendingOutcome.BUSY, None)
        facts = self._facts(entry.stream_id)
        parents = () if isinstance(entry, HOLDING) else self._ancestors(entry.stream_id, before)
        transition = self._change(entry, row, writes.term, now, on_data_loss, held_back=bool(parents))
        if isinstance(entry, AdvancePosition) and _only_moves(entry, row, transition, facts):
            self._only_moved.add((writes.group_id, entry.stream_id))
        return LendingChangeResult(
            entry, transition.outcome, to_lending(transition.row, facts, now, parents), transition.problem
        )

    def _renew(self, life: _Life, term: int, now: int) -> tuple[tuple[Lending, ...], tuple[GroupFrontier, ...]]:
        """In the order of the statements on Postgres: what is completed first, then rows and heads."""
        lowers = dict(self.streams.lowers)
        self.meanwhile()
        renewed = self._renew_streams(life, term, now)
        held_back = self._held_back(life)
        self.meanwhile()
        return renewed, self._move_frontiers(life, lowers, held_back, term, now)

    def _renew_streams(self, life: _Life, term: int, now: int) -> tuple[Lending, ...]:
        new = self._add_rows(life)
        touched = {row.stream_id for row in new if row.status is LendingStatus.FREE}
        for row in sorted(life.rows.values(), key=lambda row: row.stream_id):
            if (row.group_id, row.stream_id) in self.locked:
                continue
            transition = close_out(row, self._facts(row.stream_id), now, life.group.options.on_data_loss)
            if transition:
                self._keep(transition, term, now)
                touched.add(row.stream_id)
        report = [row for row in life.rows.values() if row.stream_id in touched or self._ending(row)]
        return tuple(self._lending(row, now) for row in sorted(report, key=lambda row: row.stream_id))

    def _held_back(self, life: _Life) -> dict[int, list[LowerFrontier | None]]:
        """By space, what is consumed of those streams of an atomic group that are not read to their heads."""
        held_back: dict[int, list[LowerFrontier | None]] = {}
        for row in life.rows.values():
            stream = self.streams.streams[row.stream_id]
            if row.consumed and row.status is not LendingStatus.FINISHED and row.position != stream.head:
                held_back.setdefault(stream.generation.space_id, []).append(row.consumed.lower)
        return held_back

    def _move_frontiers(
        self,
        life: _Life,
        lowers: Mapping[int, LowerFrontier],
        held_back: Mapping[int, Sequence[LowerFrontier | None]],
        term: int,
        now_us: int,
    ) -> tuple[GroupFrontier, ...]:
        found = []
        for space_id in sorted(life.spaces & life.frontiers.keys()):
            before, lower = life.frontiers[space_id], lowers.get(space_id)
            now = life.frontiers[space_id] = merge_consumed_frontier(before, lower, held_back.get(space_id, ()))
            if now is None or lower is None:
                continue
            name = self.streams.spaces[space_id].name
            found.append(GroupFrontier(name, space_id, now, lower))
            if now != before:
                self._history.append(consumption_record(life.group.group_id, name, now, term, now_us))
        return tuple(sorted(found, key=lambda one: (one.space, one.space_id)))

    def _add_rows(self, life: _Life) -> list[LendingRow]:
        """Rows for the streams that have none. An open one in a more specific space's shadow is nothing to read."""
        wanted = self.streams.generation_filters().matching(life.group.subscription.filter)
        added: dict[int, LendingRow] = {}
        for stream in self.streams.streams.values():
            generation = stream.generation
            known = stream.stream_id in life.rows or generation.generation_id <= life.after_generation
            if known or generation.deleted or generation.filter not in wanted:
                continue
            useful = stream.closed or wanted[generation.filter]
            status = LendingStatus.FREE if useful else LendingStatus.FINISHED
            row = LendingRow(life.group.group_id, stream.stream_id, status, 0)
            if life.group.options.atomic:
                row = replace(row, consumed=ConsumedFrontier(0, life.frontiers.get(generation.space_id)))
                if useful:
                    life.frontiers.setdefault(generation.space_id, None)
                    life.spaces.add(generation.space_id)
            added[stream.stream_id] = row
        added = self._set_revoked_at(life, added)
        life.rows |= added
        life.after_generation = max(life.after_generation, *self.streams.generations)
        return list(added.values())

    def reset(
        self, group_id: int, target: ResetTarget, streams: Collection[int] = (), *, reason: str, force: bool = False
    ) -> dict[int, int]:
        """Reset a group as `sublet_storage.groups.admin.reset_transaction.execute_reset` does, and return {stream: new
        position}. Raise `Conflict` for a stream that is granted, unless with `force`."""
        life, now = self._lives[group_id].copied(), self._clock()
        leader = self._leaderships.get(group_id) or _Leadership(NOBODY, now, 0)
        wanted = self.streams.generation_filters().matching(life.group.subscription.filter)
        moves = plan_reset(self.streams, wanted, life.rows, life.after_generation, target, streams)
        nothing = ConsumedFrontier(0, None) if life.group.options.atomic else None
        new = {s: LendingRow(group_id, s, LendingStatus.FREE, 0, consumed=nothing) for s in moves if s not in life.rows}
        life.rows |= self._set_revoked_at(life, new)
        self._add_rows(life)  # those that others descend from, too
        reasons = {s: reason if s in new else f"{reason}; was at {life.rows[s].position}" for s in moves}
        transitions = {s: apply_reset(life.rows[s], self._facts(s), moves[s], reasons[s], now) for s in sorted(moves)}
        after = life.rows | {stream_id: transition.row for stream_id, transition in transitions.items()}
        for row in sorted((row for row in after.values() if row.status in GRANTED), key=lambda row: row.stream_id):
            if above := self._ancestors(row.stream_id, after):
                waits = f"waits for {', '.join(map(str, above))}, which come before it; was at {row.position}"
                why = f"{reason}; {waits}"
                transitions[row.stream_id] = apply_reset(row, self._facts(row.stream_id), row.position, why, now)
        if not force and any(life.rows[stream_id].status in GRANTED for stream_id in transitions):
            raise Conflict("some of its streams are granted")
        self._lives[group_id], self._leaderships[group_id] = life, leader
        for transition in transitions.values():
            self._keep(transition, leader.term, now)
        if life.group.options.atomic:
            life.frontiers.clear()
            self._begin_epochs(life, target.epoch_start)
        leader.end()
        return moves

    # --- small parts --------------------------------------------------------------------------------------------

    def _create(self, subscription: Subscription, options: GroupOptions, principal: str | None = None) -> Group:
        if principal is not None:
            recent = [at for at in self._created.get(principal, []) if at > self._clock() - 60 * MICROSECONDS]
            if len(recent) >= MAX_GROUPS_PER_MINUTE:
                raise too_many_groups_error(principal)
            self._created[principal] = [*recent, self._clock()]
        group = Group(len(self._lives) + 1, subscription, options)
        life = _Life(group, max(self.streams.generations, default=0))
        for stream in self._first_streams(subscription, options.starting_position):
            position = stream.position_of(options.starting_position)
            if options.starting_position.policy == "time" and stream.closed and position == stream.head:
                continue
            life.rows[stream.stream_id] = LendingRow(group.group_id, stream.stream_id, LendingStatus.FREE, position)
        life.rows = self._set_revoked_at(life, life.rows)
        if options.atomic:
            self._begin_epochs(life, options.starting_position)
        self._lives[group.group_id] = life
        self.opened(group)
        return group

    def opened(self, group: Group) -> None:
        """Look at a group that begins."""

    def _set_revoked_at(self, life: _Life, new: Mapping[int, LendingRow]) -> dict[int, LendingRow]:
        """New rows say when they were taken from members of former groups of that name, who may be unaware of it."""
        subscription, since_us = life.group.subscription, self._clock() - 3600 * MICROSECONDS
        former = {i for i, other in self._lives.items() if other.deleted and other.group.subscription == subscription}
        heeding = dict(new)
        for line in self._history if former else ():
            is_unnoticed = line.event == "delete" or (line.event in ("reset", "block") and line.is_forced)
            if line.group_id in former and line.at_us > since_us and is_unnoticed and line.stream_id in new:
                heeding[line.stream_id] = replace(new[line.stream_id], held_until_us=line.at_us)
        return heeding

    def _begin_epochs(self, life: _Life, start: StartingPosition) -> None:
        """Which epochs it is given, by what had begun before its start positions."""
        streams, filter = self.streams.streams, life.group.subscription.filter
        life.spaces = self._spaces_of_rows(life)
        matched = self.streams.spaces_that_matched(filter)
        wanted = self.streams.generation_filters().matching(filter)
        for space_id in sorted({streams[stream_id].generation.space_id for stream_id in life.rows} | matched):
            begun = list(self.streams.lost_uppers.get(space_id, UpperFrontier()).greatest)
            for stream in streams.values():
                if stream.generation.space_id == space_id and not stream.generation.deleted:
                    row = life.rows.get(stream.stream_id)
                    is_other = not stream.closed or stream.generation.filter not in wanted  # has nothing for it
                    before = stream.head if row is None else row.position
                    if start.policy == "latest" or row is not None or not is_other:
                        begun += greatest_epochs(stream, before)
            lower = self.streams.lowers.get(space_id)
            life.frontiers[space_id] = initial_frontier(start, lower, UpperFrontier.from_epochs(begun))
        for stream_id, row in life.rows.items():
            first = life.frontiers[streams[stream_id].generation.space_id]
            life.rows[stream_id] = replace(row, consumed=ConsumedFrontier(row.position, first))

    def _spaces_of_rows(self, life: _Life) -> set[int]:
        """Those of which the group has streams that are not in a shadow."""
        found = [(row, self.streams.streams[stream_id]) for stream_id, row in life.rows.items()]
        return {
            stream.generation.space_id
            for row, stream in found
            if stream.closed or row.status is not LendingStatus.FINISHED
        }

    def _first_streams(self, subscription: Subscription, start: StartingPosition) -> list[MemoryStream]:
        """The open streams with messages for it; closed ones are consumed, unless the group goes back in time."""
        wanted = self.streams.generation_filters().matching(subscription.filter)
        closed = wanted if start.policy in ("earliest", "time") else {}
        now = {filter for filter, matching in wanted.items() if matching}
        return [
            stream
            for stream in self.streams.streams.values()
            if not stream.generation.gone and stream.generation.filter in (closed if stream.closed else now)
        ]

    def _live(self, subscription: Subscription) -> _Life | None:
        lives = (life for life in self._lives.values() if life.group.subscription == subscription)
        return next((life for life in lives if not life.deleted), None)

    def _claim(self, leadership_id: int, now: int) -> Leadership:
        held = self._leaderships[leadership_id]
        previous_leader_s = max(held.previous_leader_until_us - now, 0) / MICROSECONDS
        remaining_s = (held.expires_us - now) / MICROSECONDS
        return Leadership(leadership_id, held.node, held.term, remaining_s, held.lock_key, previous_leader_s)

    def _own(self, node: NodeIncarnation, terms: Mapping[int, int]) -> list[int]:
        rows = {i: self._leaderships[i] for i in terms if i in self._leaderships}
        return [i for i, row in rows.items() if row.node.incarnation == node.incarnation and row.term == terms[i]]

    def _has_stale_term(self, leadership_id: int, term: int, now: int) -> bool:
        held = self._leaderships.get(leadership_id)
        return held is None or held.term != term or held.expires_us <= now

    def _change(
        self,
        change: LendingChange,
        row: LendingRow,
        term: int,
        now: int,
        on_data_loss: OnDataLoss = OnDataLoss.FAIL,
        *,
        held_back: bool = False,
    ) -> LendingTransitionResult:
        how: dict[str, Any] = {"held_back": held_back, "term": term, "now_us": now, "on_data_loss": on_data_loss}
        how["has_unread_unset"] = row.consumed is not None and any(
            each.end > max(row.position, row.consumed.upto) and (each.epochs is None or each.epochs.has_unset)
            for each in self.streams.streams[row.stream_id].block_summaries
        )
        transitions = apply_change(change, row, self._facts(row.stream_id), draw_key=GrantSecret.draw, **how)
        for transition in transitions:
            self._keep(transition, term, now)
        return transitions[-1]

    def _keep(self, transition: LendingTransitionResult, term: int, now: int) -> None:
        row, rows = transition.row, self._lives[transition.row.group_id].rows
        before = rows.get(row.stream_id)
        has_new_holder = before is None or before.borrower_id != row.borrower_id
        if has_new_holder and row.agent is not None and compute_lock_key(row.agent) not in self.locks:
            row = replace(row, lock_valid_s=0.0)
        rows[row.stream_id] = row
        if transition.event:
            self._history.append(to_history_record(row, transition.event, term, now))

    def _ending(self, row: LendingRow) -> bool:
        return row.status is not LendingStatus.FINISHED and self.streams.streams[row.stream_id].closed

    def _facts(self, stream_id: int) -> StreamFacts:
        found = self.streams.facts(stream_id)
        assert found is not None, "a row's stream is there"
        return found

    def _lending(self, row: LendingRow, now: int) -> Lending:
        parents = self._ancestors(row.stream_id, self._lives[row.group_id].rows) if row.status in AT_REST else ()
        return to_lending(row, self._facts(row.stream_id), now, parents)

    def _ancestors(self, stream_id: int, rows: Mapping[int, LendingRow]) -> tuple[int, ...]:
        """The nearest that are unfinished by these rows, upwards through those that are finished or not among them."""
        seen, waiting = set(self.streams.streams[stream_id].parents), list(self.streams.streams[stream_id].parents)
        found = []
        while waiting:
            above = waiting.pop()
            if above in rows and rows[above].status is not LendingStatus.FINISHED:
                found.append(above)
                continue
            further = set(self.streams.streams[above].parents) - seen
            seen |= further
            waiting += further
        return tuple(sorted(found))

    def holds_back(self, generation_id: int) -> bool:
        """Whether retention waits for a group that has not consumed a closed generation, as
        `sublet_storage.spaces.retention`."""
        generation = self.streams.generations[generation_id]
        return any(
            self._is_unread(life, self.streams.streams[stream_id])
            for life in self._lives.values()
            if not life.deleted and life.group.subscription.kind == "queue"
            if life.group.subscription.filter.intersects(generation.filter)
            for stream_id in generation.stream_ids
        )

    def delete_past(self, generation_id: int) -> bool:
        """Delete the rows of a generation without messages, once every group is past it, as
        `sublet_storage.spaces.empty_generation_cleanup`; False while one is not."""
        generation = self.streams.generations[generation_id]
        streams = [self.streams.streams[stream_id] for stream_id in generation.stream_ids]
        lives = [life for life in self._lives.values() if not life.deleted]
        for life in lives if any(stream.head for stream in streams) else ():
            is_behind = life.after_generation < generation_id
            if is_behind and life.group.subscription.filter.intersects(generation.filter):
                return False
        rows = [row for life in lives for stream in streams if (row := life.rows.get(stream.stream_id)) is not None]
        if any((row.group_id, row.stream_id) in self.locked or not self._is_over(row) for row in rows):
            return False
        for row in rows:
            del self._lives[row.group_id].rows[row.stream_id]
        self.streams.delete_generation(generation_id)
        return True

    def delete_all_past(self) -> list[int]:
        """The same for all that retention has taken; the generations."""
        gone = [each.generation_id for each in self.streams.generations.values() if each.gone and not each.deleted]
        return [generation_id for generation_id in gone if self.delete_past(generation_id)]

    def _is_over(self, row: LendingRow) -> bool:
        at_the_end = row.status is LendingStatus.FREE and row.position == self.streams.streams[row.stream_id].head
        return row.status is LendingStatus.FINISHED or at_the_end

    @staticmethod
    def _is_unread(life: _Life, stream: MemoryStream) -> bool:
        """One without a row that is younger than the group was not noticed yet: all of it is wanted."""
        row = life.rows.get(stream.stream_id)
        if row is None:
            return stream.head > 0 and stream.generation.generation_id > life.after_generation
        return row.status is LendingStatus.BLOCKED or (
            row.status is not LendingStatus.FINISHED and row.position != stream.head
        )

    def rows(self, group_id: int) -> dict[int, LendingRow]:
        """The group's rows as they are, by stream: for tests to look at."""
        life = self._lives.get(group_id)
        return dict(life.rows) if life else {}


def _only_moves(
    change: AdvancePosition, row: LendingRow, transition: LendingTransitionResult, stream: StreamFacts
) -> bool:
    """Whether the store on Postgres writes it without reading the row."""
    plain = (change.consumed, change.in_doubt) == (None, None) and not is_consumed(change.position, stream)
    return plain and transition.outcome is LendingOutcome.APPLIED and row.position < change.position
