"""A group store with streams to grant and a clock to turn: the same world over both implementations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from msgspec.structs import asdict, replace

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier, UpperFrontier
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.db.liveness_lock import acquire_lock
from sublet_storage.groups.admin import reset_transaction
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.consumer_progress import next_session_epoch
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.coordinator.store import GroupStore
from sublet_storage.groups.model import records
from sublet_storage.groups.model.records import (
    Group,
    GroupOptions,
    GroupWrites,
    Lending,
    LendingChangeResult,
    StartingPosition,
)
from sublet_storage.log.block_encoder import BlockEpochRange
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from sublet_storage.spaces.routing import Space
from tests.support.memory_store.catalogue import MemoryCatalogue
from tests.support.memory_store.groups import MemoryGroupStore

SHARE = Subscription.parse("$share/billing/orders/#")
ONE = NodeIncarnation("one", "incarnation-1", "127.0.0.1:1")
TWO = NodeIncarnation("two", "incarnation-2", "127.0.0.1:2")
LEASE_S = 10.0
TABLES = (
    "space, generation, stream, block, consumer_group, leadership, lending, lending_history, consumed_frontier, "
    "session_epoch"
)


class Ticker:
    """A clock in microseconds that moves only when the test sets it."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * 1_000_000)


class World:
    """Streams live in memory; `publish_catalogue` brings them to where the store looks for them."""

    store: GroupStore

    def __init__(self) -> None:
        self.clock = Ticker()
        self.streams = MemoryCatalogue()

    def publish_catalogue(self) -> None:
        """The in-memory store sees the streams as they are."""

    def locked(self, group_id: int, stream_id: int) -> AbstractContextManager[object]:
        """Somebody's transaction holds the lending row meanwhile."""
        raise NotImplementedError

    def leader_lock(self, key: int) -> AbstractContextManager[object]:
        """Hold the leader's lock meanwhile."""
        raise NotImplementedError

    def next_session_epoch(self, session: str) -> int:
        """Draw the next epoch of that name in the group SHARE."""
        raise NotImplementedError

    def add_space(self, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        return self._published(self.streams.add_space(*args, **kwargs))

    def drop_space(self, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        return self._published(self.streams.drop_space(*args, **kwargs))

    def alter_space(self, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        return self._published(self.streams.alter_space(*args, **kwargs))

    def rollover(self, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        return self._published(self.streams.rollover(*args, **kwargs))

    def append(self, stream_id: int, count: int = 1, *epochs: int) -> None:
        """Append a block with that number of messages, in these epochs."""
        found = {(epoch,) for epoch in epochs}
        bounds = (
            BlockEpochRange(LowerFrontier.from_epochs(found).least, UpperFrontier.from_epochs(found).greatest)
            if found
            else None
        )
        self.streams.append(stream_id, count, self.clock(), bounds)
        self.publish_catalogue()

    def lower_head(self, stream_id: int, head: int) -> None:
        self.streams.lower_head(stream_id, head)
        self.publish_catalogue()

    def complete(self, epoch: int, space_id: int = 1) -> None:
        """Complete all epochs of the space before this one."""
        self.streams.lowers[space_id] = LowerFrontier(((epoch,),))
        self.publish_catalogue()

    def retire(self, generation_id: int) -> None:
        self.streams.expire_generation(generation_id)
        self.publish_catalogue()

    def delete_past(self) -> list[int]:
        """Maintenance deletes the rows of what is gone and every group is past; the generations."""
        raise NotImplementedError

    def _published(self, stream_ids: tuple[int, ...]) -> tuple[int, ...]:
        self.publish_catalogue()
        return stream_ids

    # --- what most tests begin with -----------------------------------------------------------------------------

    def group(self, subscription: Subscription = SHARE, start: StartingPosition = StartingPosition.LATEST) -> Group:
        return self.store.open_group(subscription, start)

    def declare(self, subscription: Subscription = SHARE, **options: Any) -> Group:
        """Create the group with these options."""
        return self.store.declare_group(subscription, GroupOptions(**options))

    def lead(self, group: Group, node: NodeIncarnation = ONE, streams: tuple[int, ...] = ()) -> Led:
        """Claim the group."""
        claim = self.store.claim(group.group_id, node, LEASE_S)
        assert claim.node == node
        return Led(self, group, claim.term, streams)

    def led(self, shards: int = 1, completed: int | None = None, **options: Any) -> Led:
        """Return the group SHARE, declared with these options and led by ONE, with streams of a new space. `completed`:
        all epochs of the space before this one, before the group is declared."""
        streams = self.add_space(shards=shards)
        if completed is not None:
            self.complete(completed)
        return self.lead(self.declare(**options), streams=streams)

    def several(self, count: int) -> list[Led]:
        """Return so many groups, led by ONE, of a new space with one stream."""
        streams = self.add_space()
        groups = [self.group(Subscription.parse(f"$share/g{number}/#")) for number in range(count)]
        return [self.lead(group, streams=streams) for group in groups]

    def granted(self, messages: int = 0, **options: Any) -> Held:
        """Return the one stream of such a group, which a borrower holds from its beginning; then come so many
        messages."""
        held = self.led(**options).grant()
        if messages:
            self.append(held.stream, messages)
        return held


@dataclass
class Led:
    """A group under a term of its leader. A stream that is not given is the first of `streams`."""

    world: World
    group: Group
    term: int
    streams: tuple[int, ...] = ()

    @property
    def group_id(self) -> int:
        return self.group.group_id

    @property
    def stream(self) -> int:
        return self.streams[0]

    def succeed(self, node: NodeIncarnation = TWO) -> Led:
        """Return the group once the lease is over, and another node leads it."""
        self.world.clock.advance(LEASE_S)
        return Led(self.world, self.group, self.world.lead(self.group, node).term, self.streams)

    def writes(self, *entries: records.LendingChange, sync: bool = False) -> GroupWrites:
        return GroupWrites(self.group_id, self.term, entries, sync)

    def write(self, *entries: records.LendingChange, sync: bool = False) -> records.GroupWriteResult:
        return self.world.store.commit([self.writes(*entries, sync=sync)])[0]

    def sync(self) -> dict[int, Lending]:
        """Return the rows that a sync reports, by their streams."""
        return {row.stream_id: row for row in self.write(sync=True).synced}

    def apply(self, entry: records.LendingChange) -> LendingChangeResult:
        """Write one entry under a term that is alive."""
        result = self.write(entry)
        assert not result.has_stale_term
        (answer,) = result.results
        if answer.outcome == "applied" and answer.lending is None:  # only its position has moved
            return replace(answer, lending=self.row(entry.stream_id))
        return answer

    def applied(self, entry: records.LendingChange) -> Lending:
        """Write one entry, which is applied; the row as it then is."""
        return row_of(self.apply(entry))

    def ask(self, stream: int | None = None, borrower: str = "b1", agent: str = "a1") -> LendingChangeResult:
        """Grant a stream, if that is possible."""
        return self.apply(grant(self.stream if stream is None else stream, borrower, agent))

    def grant(
        self,
        stream: int | None = None,
        borrower: str = "b1",
        agent: str = "a1",
        session: str | None = "session",
        epoch: int | None = None,
        **fields: Any,
    ) -> Held:
        """Grant a stream."""
        stream = self.stream if stream is None else stream
        entry = records.GrantStream(stream, borrower, agent, session, "share", epoch, **fields)
        return Held(self, stream, self.applied(entry))

    def is_granted(self, stream: int | None = None) -> bool:
        """Grant a stream; return whether that was possible."""
        return self.ask(stream).outcome == "applied"

    def consume(self, stream: int | None = None) -> None:
        """Have a closed stream consumed up to its head, which finishes it, and with it what is empty behind it."""
        held = self.grant(stream)
        assert row_of(held.advance(held.row.head)).status == "finished"

    def rows(self) -> dict[int, Lending]:
        """Return the rows that a leader reads, by their streams."""
        return {row.stream_id: row for row in self.world.store.load(self.group_id, self.term)}

    def row(self, stream: int | None = None) -> Lending:
        return self.rows()[self.stream if stream is None else stream]

    def history(self, *events: str) -> list[records.HistoryRecord]:
        """Return the group's history, all of it or with these events."""
        return [line for line in self.world.store.history(self.group_id) if not events or line.event in events]

    def events(self) -> list[tuple[str, int, bool]]:
        """Return the group's history of its streams."""
        return [
            (line.event, line.position, line.is_forced) for line in self.history() if line.event != records.TAKEOVER
        ]


@dataclass
class Held:
    """A grant. `row`: as it was when it was made."""

    led: Led
    stream: int
    row: Lending

    @property
    def grant_id(self) -> int:
        return self.row.grant_id

    @property
    def key(self) -> GrantSecret:
        assert self.row.grant_key is not None
        return self.row.grant_key

    @property
    def uses(self) -> tuple[int, int, int, GrantSecret]:
        """Return what the holder needs to use the grant."""
        return self.led.group_id, self.stream, self.grant_id, self.key

    def now(self) -> Lending:
        """Return the row as it is now."""
        return self.led.row(self.stream)

    def of(self, grant_id: int) -> Held:
        """Return it under another id."""
        return Held(self.led, self.stream, replace(self.row, grant_id=grant_id))

    def under(self, led: Led) -> Held:
        """Return it under another term."""
        return Held(led, self.stream, self.row)

    def doubt(
        self, start: int, end: int, hold_s: float = 60.0, consumed: ConsumedFrontier | None = None
    ) -> InDoubtRange:
        return InDoubtRange(self.grant_id, start, end, hold_s, consumed)

    def advance(self, position: int, *more: Any, **fields: Any) -> LendingChangeResult:
        return self.led.apply(records.AdvancePosition(self.stream, self.grant_id, position, *more, **fields))

    def reclaim(self, position: int, borrower: str = "b1", agent: str = "a1", **fields: Any) -> LendingChangeResult:
        return self.led.apply(records.ReclaimStream(self.stream, self.grant_id, position, borrower, agent, **fields))

    def release(self, position: int, reason: str = "leave", *more: Any, **fields: Any) -> LendingChangeResult:
        return self.led.apply(records.ReleaseStream(self.stream, self.grant_id, position, reason, *more, **fields))

    def force_release(self, reason: str = "silent", *more: Any) -> LendingChangeResult:
        return self.led.apply(records.ForceRelease(self.stream, self.grant_id, reason, *more))

    def record(self, event: str = "revoke", reason: str = "rebalance") -> LendingChangeResult:
        return self.led.apply(records.RecordHistory(self.stream, self.grant_id, event, reason))


class MemoryWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self.store: MemoryGroupStore = MemoryGroupStore(self.streams, self.clock)

    def next_session_epoch(self, session: str) -> int:
        return self.store.next_session_epoch(SHARE, session)

    def delete_past(self) -> list[int]:
        return self.store.delete_all_past()

    @contextmanager
    def locked(self, group_id: int, stream_id: int) -> Iterator[None]:
        self.store.locked.add((group_id, stream_id))
        yield
        self.store.locked.discard((group_id, stream_id))

    @contextmanager
    def leader_lock(self, key: int) -> Iterator[None]:
        self.store.locks.add(key)
        yield
        self.store.locks.discard(key)


class PostgresWorld(World):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.store: PostgresGroupStore = PostgresGroupStore(url, self.clock)
        self.other_stores: list[PostgresGroupStore] = []
        self.connection = connect(url)
        self.connection.execute("drop table if exists block_1")  # generations have no partitions of their own here
        self.connection.execute("create table if not exists block_of_any partition of block default")
        self.connection.execute(f"truncate {TABLES} restart identity cascade")

    def close(self) -> None:
        for store in (self.store, *self.other_stores):
            store.close()
        self.connection.close()

    def another_store(self, clock: Callable[[], int] | None = None, **limits: float) -> PostgresGroupStore:
        """Return another store, by the database's clock or this one, which is closed with the world."""
        store = PostgresGroupStore(self.url, clock, **limits)
        self.other_stores.append(store)
        return store

    def next_session_epoch(self, session: str) -> int:
        return next_session_epoch(self.connection, SHARE, session)

    def delete_past(self) -> list[int]:
        deleted = EmptyGenerationCleaner(step=1000)(self.connection)
        for generation_id in deleted:
            self.streams.delete_generation(generation_id)
        return deleted

    @contextmanager
    def locked(self, group_id: int, stream_id: int) -> Iterator[psycopg.Connection[Any]]:
        with connect(self.url) as user, user.transaction():
            user.execute("select from lending where group_id = %s and stream_id = %s for update", (group_id, stream_id))
            yield user

    @contextmanager
    def leader_lock(self, key: int) -> Iterator[None]:
        with connect(self.url) as holder:
            assert acquire_lock(holder, key)
            yield
            holder.execute("select pg_advisory_unlock_all()")  # the server notices a closed connection only later

    def reset(
        self,
        group: Group | Led,
        target: ResetTarget,
        *streams: int,
        force: bool = False,
        reason: str | None = None,
        now_us: int | None = None,
    ) -> Mapping[int, tuple[int | None, int]]:
        """Reset the group, or these streams of it, by the database's clock: {stream: (before, after)}."""
        group = group if isinstance(group, Group) else group.group
        with self.connection.transaction():
            moves = reset_transaction.execute_reset(
                self.connection, group, target, streams, reason=reason or f"to {target}", force=force, now_us=now_us
            )
        return {move.stream_id: (move.before, move.after) for move in moves}

    def publish_catalogue(self) -> None:
        """Write the tables that the streams in memory describe; ids are theirs."""
        streams = self.streams
        generations = [generation for generation in streams.generations.values() if not generation.deleted]
        there = [stream for stream in streams.streams.values() if not stream.generation.deleted]
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.executemany(_SPACE, [_space(s, streams.filters[s.space_id]) for s in streams.spaces.values()])
            lowers = [(json.dumps(lower.least), space_id) for space_id, lower in streams.lowers.items()]
            if lowers:
                cursor.executemany("update space set lower_frontier = %s where space_id = %s", lowers)
            cursor.execute(
                "update space set dropped_at = now() where space_id = any(%s) and dropped_at is null",
                (list(streams.dropped),),
            )
            states = [("gone" if g.gone else "closed" if g.closed else "open", g) for g in generations]
            cursor.executemany(
                _GENERATION, [(g.generation_id, g.space_id, g.ordinal, g.filter.text, state) for state, g in states]
            )
            cursor.executemany(_STREAM, [_stream(s) for s in there])
            blocks = [block for s in there for block in _blocks(s)]
            cursor.executemany(_BLOCK, blocks)


def grant(stream_id: int, borrower: str = "b1", agent: str = "a1") -> records.GrantStream:
    return records.GrantStream(stream_id, borrower, agent, "session", "share")


def row_of(result: LendingChangeResult) -> Lending:
    """Return the row as a change has made it."""
    assert result.outcome == "applied", result
    assert result.lending is not None
    return result.lending


def outcome(result: LendingChangeResult) -> str:
    """Return such as "applied, held at 4"."""
    assert result.lending is not None
    return f"{result.outcome}, {result.lending.status} at {result.lending.position}"


def _space(space: Space, filters: set[TopicFilter]) -> Sequence[object]:
    former = sorted(one.text for one in filters - {space.filter})
    return space.space_id, space.name, space.filter.text, space.shards, former


def _stream(stream: Any) -> Sequence[object]:
    generation = stream.generation
    state = "closed" if stream.closed else "open"
    return (
        stream.stream_id, generation.space_id, generation.generation_id, stream.hash_from, stream.hash_to, state,
        stream.head, list(stream.parents), _json(_upper(stream)),
    )  # fmt: skip


def _blocks(stream: Any) -> list[Sequence[object]]:
    """Return blocks that have an address and a time, but no messages to read."""
    return [
        (stream.generation.generation_id, stream.stream_id, end, end - mark.first, at_us, _epochs(mark))
        for mark, (end, at_us) in zip(stream.block_summaries, stream.blocks, strict=True)
    ]


def _upper(stream: Any) -> list[Any]:
    greatest = [epoch for mark in stream.block_summaries if mark.epochs for epoch in mark.epochs.greatest]
    return list(UpperFrontier.from_epochs(greatest).greatest)


def _epochs(mark: Any) -> str | None:
    return None if mark.epochs is None else json.dumps(asdict(mark.epochs))


def _json(found: list[Any]) -> str | None:
    return json.dumps(found) if found else None


_SPACE = """
insert into space (space_id, name, filter, shards, former_filters) overriding system value values (%s, %s, %s, %s, %s)
    on conflict (space_id) do update set filter = excluded.filter, former_filters = excluded.former_filters
    where space.filter <> excluded.filter"""
_GENERATION = """
insert into generation (generation_id, space_id, ordinal, filter, state)
overriding system value values (%s, %s, %s, %s, %s)
    on conflict (generation_id) do update set state = excluded.state where generation.state <> excluded.state"""
_STREAM = """
insert into stream (stream_id, space_id, generation_id, hash_from, hash_to, state, head, parents, upper_frontier)
overriding system value values (%s, %s, %s, %s, %s, %s, %s, %s::bigint[], %s)
    on conflict (stream_id) do update
   set state = excluded.state, head = excluded.head, upper_frontier = excluded.upper_frontier
 where (stream.state, stream.head) <> (excluded.state, excluded.head)"""
_BLOCK = """
insert into block (generation_id, stream_id, end_offset, count, first_timestamp, last_timestamp, appended_at,
                   epoch_bounds, codec, uri, uri_bytes)
select %s, %s, %s, %s, now(), now(), timestamptz 'epoch' + %s * interval '1 microsecond', %s, 0, 'nowhere', 1
    on conflict do nothing"""
