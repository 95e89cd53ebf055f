"""Users that write output and progress in one transaction, on an unreliable database.

The code under test is the product's own: `sublet_borrower.consumer.session.Session.transaction`,
`sublet_borrower.consumer.transaction.ProgressTransactions`, `sublet_borrower.streams.batch.Batch` and
`sublet_borrower.streams.granted_stream.GrantedStream`. The connection is simulated: it does to the twin's rows what the
database's functions do, and a commit may be rejected, lost, or executed without a reply. Then the user retries with the
same batches, with more, with fewer or with others.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import psycopg
import pyarrow as pa
from msgspec.structs import replace
from psycopg.pq import TransactionStatus

import sublet_borrower.consumer.session
from sublet_borrower.consumer.transaction import ProgressTransactions
from sublet_borrower.machine.events import AssignmentUpdate, RevokeStarted, StreamGranted, StreamRemoved
from sublet_borrower.streams.batch import Batch
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_protocol.domain.errors import DatabaseUnreachable, GrantLost, UnknownOutcome, UsageError
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import Grant, GrantEndOutcome
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import LendingStatus
from tests.simulation.sessions import Session, Work
from tests.simulation.world import Happenings

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedAgent
    from tests.simulation.simulation import Simulation


class _Refused(psycopg.DatabaseError):
    sqlstate = "SB001"


@dataclass(slots=True)
class _Answer:
    row: tuple[Any, ...] | None

    def fetchone(self) -> tuple[Any, ...] | None:
        return self.row

    def fetchall(self) -> list[tuple[Any, ...]]:
        return [] if self.row is None else [self.row]


@dataclass(slots=True)
class _Transaction:
    number: int
    mark: str = field(default="", repr=False)  # drawn by the product: different each time
    advances: list[tuple[int, int, int, int]] = field(default_factory=list)
    stored: list[tuple[int, int, range]] = field(default_factory=list)


class UsersDatabase(Happenings):
    """The database as users' transactions see it. `stored`: (group, stream, offset) in their output; `committed`:
    numbers of transactions."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the transactions")
        self.runs = self._random.random() < 0.35
        self._away_until = 0.0
        self._numbers = 0
        self.committed: set[str] = set()
        self.tries = self.unknown = 0

    def is_used_by(self, agent: SimulatedAgent) -> bool:
        """Return whether the sessions of that process write in transactions."""
        return self.runs and Random(f"{self._simulation.seed} {agent.name} writes").random() < 0.6

    @property
    def timeline(self) -> str:
        return f"{self._simulation.store.timeline + 1:08X}"

    def has_no_leader_here(self, group_id: int) -> bool:
        """Return whether the group has no leader on this timeline, as the database's function `advance` checks."""
        return self._simulation.store.is_older(group_id)

    def connect(self, *_: object, **__: object) -> _Connection:
        if self._world.now < self._away_until:
            raise DatabaseUnreachable("the database cannot be reached")
        return _Connection(self)

    def begin(self) -> _Transaction:
        self._numbers += 1
        return _Transaction(self._numbers)

    def fails(self) -> bool:
        return not self._world.calm and self._random.random() < 0.04

    def advance(self, key: bytes, group_id: int, stream_id: int, grant_id: int, position: int) -> bool:
        """Do what the database's function of that name does."""
        row = self._held(group_id, stream_id, grant_id, key)
        return row is not None and row.position < position <= self._head(stream_id)

    def progress(self, group_id: int, stream_id: int, grant_id: int, key: bytes) -> int | None:
        """Do what the database's function `read_progress` does."""
        row = self._held(group_id, stream_id, grant_id, key)
        if row is not None:
            return row.position
        asked = (group_id, stream_id, grant_id, GrantSecret(key).digest())
        for line in reversed(self._simulation.store.lines):
            if (line.group_id, line.stream_id, line.grant_id, line.key_digest) == asked:
                before = re.search("; was at ([0-9]+)$", line.reason) if line.event == "reset" else None
                return line.position if before is None else int(before[1])
        return None

    def _held(self, group_id: int, stream_id: int, grant_id: int, key: bytes) -> LendingRow | None:
        row = self._simulation.store.rows(group_id).get(stream_id)
        if row is None or row.status is not LendingStatus.HELD:
            return None
        return row if (row.grant_id, row.grant_key) == (grant_id, GrantSecret(key)) else None

    def commit(self, transaction: _Transaction) -> bool:
        """Return whether the client gets the reply, as it mostly does; otherwise the commit may have happened or
        not."""
        self.tries += 1
        silent = not self._world.calm and self._random.random() < 0.15
        if not silent or self._random.random() < 0.7:
            self.committed.add(str(transaction.number))
            for advance in transaction.advances:
                self._simulation.store.advance(*advance)
                self._simulation.checkers.authority.written(*advance)
            self._simulation.checkers.transactions.committed(transaction.advances, transaction.stored)
        if silent:
            self.unknown += 1
            self._world.say("database", f"does not answer the commit of {transaction}")
            self._away_until = self._world.now + self._random.choice((0.0, self._random.uniform(0.0, 3.0)))
        return not silent

    def _head(self, stream_id: int) -> int:
        return self._simulation.streams.streams[stream_id].head


class _Connection:
    """What the product calls of a psycopg connection in such a transaction."""

    row_factory = cursor_factory = server_cursor_factory = prepare_threshold = prepared_max = None

    def __init__(self, database: UsersDatabase) -> None:
        self._database = database
        self._transaction: _Transaction | None = None
        self._timeline = database.timeline
        self.closed = False

    @property
    def info(self) -> Any:
        within = self._transaction is not None
        return SimpleNamespace(transaction_status=TransactionStatus.INTRANS if within else TransactionStatus.IDLE)

    def close(self) -> None:
        self.closed, self._transaction = True, None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self._transaction = self._database.begin()
        try:
            yield
            transaction, self._transaction = self._transaction, None
        except BaseException:
            self._transaction = None
            raise
        if not self._database.commit(transaction):
            self._break()

    def store(self, group_id: int, stream_id: int, offsets: range) -> None:
        assert self._transaction is not None
        self._transaction.stored.append((group_id, stream_id, offsets))

    def execute(self, query: Any, parameters: Any = ()) -> _Answer:
        text = query if isinstance(query, str) else query.as_string(None)
        if self.closed or self._timeline != self._database.timeline or self._database.fails():
            self._break()
        transaction = self._transaction
        if "set_config('sublet.transaction'" in text:
            assert transaction is not None
            transaction.mark = parameters[0]
            return _Answer((transaction.mark, "read committed"))
        if "current_setting('sublet.transaction'" in text:
            return _Answer((transaction.mark if transaction is not None else None, "read committed"))
        if "pg_xact_status" in text:
            if parameters["timeline"] != self._timeline:
                return _Answer((None,))
            return _Answer(("committed" if parameters["number"] in self._database.committed else "aborted",))
        if "advance(" in text:
            assert transaction is not None
            facts = [value for value in parameters if isinstance(value, int)]
            if self._database.has_no_leader_here(facts[0]):
                raise _Refused("the database has gone over to another timeline")
            (key,) = [value for value in parameters if isinstance(value, bytes)]
            if not self._database.advance(key, *facts):
                raise _Refused("the transaction must not commit")
            transaction.advances.append((facts[0], facts[1], facts[2], facts[3]))
            return _Answer((str(transaction.number), self._timeline, None, None))
        if "read_progress" in text:
            return _Answer((self._database.progress(*parameters),))
        raise AssertionError(f"not a statement that it knows: {text}")

    def _break(self) -> None:
        self.close()
        raise psycopg.OperationalError("the connection is lost")


class _Shell(sublet_borrower.consumer.session.Session):
    """The part of a session that transactions use."""

    def __init__(self, group_id: int, acknowledged: Callable[[GrantedStream, int], None]) -> None:
        self.group_id, self.subscription = group_id, "its subscription"
        self._member, self._poll_monitor = mock.Mock(), mock.Mock()
        self._assignment = mock.Mock(mark_acknowledged=acknowledged)
        self._transactions = ProgressTransactions("", lambda: group_id, 60.0)

    def __del__(self) -> None:
        """Do nothing: there is nothing to close."""

    def install(self, grant: Grant) -> GrantedStream:
        """Return the stream as the session has it."""
        facts = (grant.stream_id, grant.grant_id, grant.generation_id, TopicFilter.parse(grant.filter), grant.position)
        return GrantedStream(*facts, grant_key=grant.grant_key, assignment=self._assignment)


@dataclass(slots=True)
class GrantedWork(Work):
    """A stream installed in such a session."""

    granted: GrantedStream


class WritingSession(Session):
    """Writes some batches of one or several streams in one transaction, again and again."""

    def __init__(self, agent: SimulatedAgent, handle: int) -> None:
        super().__init__(agent, handle)
        self._granted: dict[int, GrantedWork] = {}
        self._shell: _Shell | None = None
        self._in_hand: list[tuple[Batch, GrantedStream]] = []
        self._closed = False
        self._soon(self._turn)

    def reported(self, notify: AssignmentUpdate, group_id: int | None) -> None:
        match notify:
            case StreamGranted(grant) if grant.consumed is None:
                assert group_id is not None
                self._take(group_id, grant)
            case RevokeStarted() if notify.stream_id in self._granted:
                work = self._granted[notify.stream_id]
                work.granted.is_stopping = True
                self._say(work)
            case StreamRemoved(reason=reason) if notify.stream_id in self._granted:
                work = self._granted.pop(notify.stream_id)
                work.over = work.granted.is_ended = True
                work.granted.is_lost = reason is GrantEndOutcome.LOST
                self._simulation.checkers.removed(work, work.granted.is_lost)
            case _:
                super().reported(notify, group_id)

    def is_idle(self, stream_id: int) -> bool:
        work = self._granted.get(stream_id)
        return not work.granted.outstanding if work is not None else super().is_idle(stream_id)

    def close(self) -> None:
        super().close()
        self._closed = True

    def _take(self, group_id: int, grant: Grant) -> None:
        if self._shell is None:
            self._shell = _Shell(group_id, self._acknowledged)
        assert self._shell.group_id == group_id, "a subscription is to one life of a group"
        granted = self._shell.install(grant)
        self._granted[grant.stream_id] = GrantedWork(group_id, grant.stream_id, grant.grant_id, grant.position, granted)
        self._simulation.checkers.names.installed(self._granted[grant.stream_id])

    # --- transaction by transaction -----------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Drop lost batches, and try to commit the others, perhaps with more."""
        self._in_hand = [
            (batch, granted)
            for batch, granted in self._in_hand
            if not granted.is_ended and batch.ticket in granted.outstanding
        ]
        if not self._in_hand or self._whims.random() < 0.4:
            for work in list(self._granted.values()):
                if self._whims.random() < 0.6 and not work.granted.is_stopping:
                    self._take_batch(work)
        if self._in_hand:
            self._try(self._some())
        self._soon(self._turn)

    def _some(self) -> list[Batch]:
        """Return all batches, or only the first ones."""
        some = [batch for batch, _ in self._in_hand]
        if len(some) > 1 and self._whims.random() < 0.3:
            del some[self._whims.randrange(1, len(some)) :]
        self._whims.shuffle(some)
        return some

    def _take_batch(self, work: GrantedWork) -> None:
        agent, granted = self._agent, work.granted
        head = self._simulation.streams.streams[work.stream_id].head
        may_start = agent.machine.may_start_call(self._handle, granted.stream_id, granted.grant_id, agent.now)
        if head <= granted.next_read_offset or not may_start or not agent.may_read(granted.grant_id):
            return
        first, end = granted.next_read_offset, self._whims.randint(granted.next_read_offset + 1, head)
        work.since = granted.acknowledged_offset
        counts = self._simulation.checkers.deliveries.call_started(agent.name, work, range(first, end))
        if not counts:
            return
        granted.advance_read(first, end, head)
        assert self._shell is not None
        table = pa.table({"offset": pa.array(range(first, end), pa.int64())})
        batch = Batch(table, first, end, granted, self._acknowledged, None, self._shell.transaction)
        self._in_hand.append((batch, granted))

    def _try(self, batches: Sequence[Batch]) -> None:
        assert self._shell is not None
        self._world.say(self._agent.name, "writes", batches)
        try:
            with self._shell.transaction(*batches) as connection:
                reported: Any = connection
                for batch in batches:
                    reported.store(self._shell.group_id, batch.stream_id, range(batch.first, batch.end))
        except (UnknownOutcome, DatabaseUnreachable, GrantLost, UsageError, psycopg.Error) as error:
            self._world.say(self._agent.name, f"{type(error).__name__}: {error}")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _acknowledged(self, granted: GrantedStream, ticket: int) -> None:
        work = self._granted.get(granted.stream_id)
        if granted.mark_done(ticket) and work is not None and work.granted is granted:
            self._say(work)

    def _say(self, work: GrantedWork) -> None:
        reported = work.granted.to_progress()
        work.position = reported.position
        self._simulation.checkers.transactions.reported(work)
        self._agent.say(self._handle, work, replace(reported, size=0))

    def _soon(self, happening: Callable[[], None]) -> None:
        def unless_over() -> None:
            if self._agent.alive and not self._closed:
                happening()

        self._later(self._whims.uniform(0.1, 0.8), unless_over)
