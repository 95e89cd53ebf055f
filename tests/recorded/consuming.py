"""A consumer process: `python -m tests.recorded.consuming URL FILE NAME ROLE...`, until SIGTERM.

It has a thread with a session for each ROLE, which is JSON: the subscription, its starting position, whether its work
is done in transactions, and whether it has a stable name. SIGTERM lets it leave.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import psycopg

from sublet_borrower.consumer.async_session import AsyncSession
from sublet_borrower.consumer.session import Session
from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.errors import DatabaseUnreachable, GrantLost, SubletError, UnknownOutcome, UsageError
from tests.recorded.history import Outcome, Record

S = TypeVar("S", Session, AsyncSession)
BATCH_BYTES = 2000
MAX_WORK_S = 0.06
LONG_WORK_S = 2.0
IN_C = 0.3
"""Share of loops that a function in C runs."""
RETRY_INTERVAL_S = 0.3

LASTS = 0.01
"""Share of batches whose work takes long."""

TABLE = """
create table public.effect (
  number bigint generated always as identity primary key, consumers text not null, call text not null,
  stream bigint not null, at bigint not null, message text not null, lane text not null, before bigint)"""
INDEX = "create index on public.effect (consumers, lane, number)"

_APPEND = """
insert into public.effect (consumers, call, stream, at, message, lane, before)
values (%(group)s, %(call)s, %(stream)s, %(offset)s, %(message)s, %(lane)s,
        (select max(number) from public.effect where consumers = %(group)s and lane = %(lane)s))"""


class WorkFailed(Exception):
    """Raised at random by the user's function."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a thread does. `start`: starting position, if it creates the group. `fails`, `breaks`: shares of batches
    whose work fails, and after which a loop ends. `nodes`: addresses through which it reads, without the database.
    `in_parts`: a transaction for each half of a batch, with automatic acknowledgement."""

    group: str
    start: str = "earliest"
    exact: bool = False
    in_parts: bool = False
    named: bool = False
    in_asyncio: bool = False
    nodes: tuple[str, ...] = ()
    fails: float = 0.01
    breaks: float = 0.01

    def text(self) -> str:
        return json.dumps(asdict(self))


class Worker:
    """One thread that opens one session after another."""

    def __init__(self, url: str, record: Record, name: str, role: Role) -> None:
        self._url, self._record, self._role = url, record, role
        self._name = f"{name}/{role.group}{'/nodes' if role.nodes else ''}"
        self._chance = random.Random(f"{name} {role.group} {time.monotonic()}")
        self._numbers = itertools.count()
        self._session: Session | AsyncSession | None = None
        self._called = ""
        self._unknown = False
        self.over = threading.Event()

    def leave(self) -> None:
        """Finish the current batches, and end."""
        self.over.set()
        if self._session is not None:
            with contextlib.suppress(SubletError):
                self._session.drain()

    def run(self) -> None:
        """Consume until it has left; a session that ends otherwise is followed by another."""
        while not self.over.is_set():
            try:
                self._consume()
            except (SubletError, psycopg.Error, WorkFailed) as error:
                self._record.write("trouble", session=self._called, error=f"{type(error).__name__}: {error}")
                self.over.wait(RETRY_INTERVAL_S)

    def _consume(self) -> None:
        role = self._role
        self._called = f"{self._name}/{next(self._numbers)}/{time.monotonic():.3f}"
        if role.in_asyncio:
            asyncio.run(self._asynchronous(self._open(AsyncSession)))
        else:
            with self._open(Session) as session:
                self._opened(session)
                (self._in_parts if role.in_parts else self._in_transactions if role.exact else self._in_loops)(session)
        self._record.write("closed", session=self._called)

    def _open(self, kind: type[S]) -> S:
        role = self._role
        return kind(
            role.group,
            None if role.nodes else self._url,
            nodes=role.nodes or None,
            name=self._name if role.named else None,
            starting_position=role.start,
            max_batch_bytes=BATCH_BYTES,
            auto_ack=role.in_parts or not role.exact,
            transport="nodes" if role.nodes else "database",
        )

    def _opened(self, session: Session | AsyncSession) -> None:
        self._session = session
        if self.over.is_set():
            session.drain()
        self._record.write("session", session=self._called, group=self._role.group)

    # --- at least once ----------------------------------------------------------------------------------------------

    def _in_loops(self, session: Session) -> None:
        """Loop over one session, in Python or in C: a loop that ends with an exception is entered again, and a break
        ends the session."""

        def work(batch: Batch) -> None:
            with self._call(batch):
                self._work()

        while not session.is_closed:
            try:
                if self._chance.random() < IN_C:
                    collections.deque(map(work, session), maxlen=0)
                for batch in session:
                    work(batch)
                    if self._chance.random() < self._role.breaks:
                        return
            except WorkFailed:
                continue

    async def _asynchronous(self, opening: AsyncSession) -> None:
        async with opening as session:
            self._opened(session)
            while not session.is_closed:
                try:
                    async for batch in session:
                        with self._call(batch):
                            self._work()
                        if self._chance.random() < self._role.breaks:
                            return
                except WorkFailed:
                    continue

    @contextlib.contextmanager
    def _call(self, batch: Batch) -> Iterator[None]:
        call = self._begin(batch)
        try:
            yield
        except WorkFailed:
            self._end(call, Outcome.FAILED, "its work failed")
            raise
        self._end(call, Outcome.OK)

    def _work(self) -> None:
        lasts_s = self._chance.uniform(0, MAX_WORK_S)
        time.sleep(lasts_s if self._chance.random() > LASTS else LONG_WORK_S)
        if self._chance.random() < self._role.fails:
            raise WorkFailed

    # --- exactly once -----------------------------------------------------------------------------------------------

    def _in_transactions(self, session: Session) -> None:
        while (batch := session.poll()) is not None:
            batches = [batch]
            while self._chance.random() < 0.3 and (more := session.poll(0.05)) is not None:
                batches.append(more)
            self._commit(session, {self._begin(each): each for each in batches})

    def _in_parts(self, session: Session) -> None:
        """Process a batch in parts; the session ends with a part that fails, after another poll, which acknowledges
        nothing of its batch."""
        while (batch := session.poll()) is not None:
            middle = len(batch) // 2
            for part in (batch.slice(0, middle), batch.slice(middle, len(batch) - middle)):
                works = {self._begin(part): part} if len(part) else {}
                if works and not self._is_committed(session, works):
                    for call in works:
                        self._end(call, Outcome.UNKNOWN, "given up")
                    session.poll(RETRY_INTERVAL_S)
                    raise WorkFailed

    def _commit(self, session: Session, batches: dict[str, Batch]) -> None:
        """Work on them together until they are done or lost; `batches` by call. After an unknown outcome it retries in
        all the ways that a program might."""
        while batches and not self._is_committed(session, batches):
            if self._unknown:
                self._unknown = False
                batches = self._another_try(session, batches)

    def _is_committed(self, session: Session, batches: dict[str, Batch]) -> bool:
        """Try once, and return whether it committed; lost batches are removed."""
        try:
            with session.transaction(*batches.values()) as connection:
                for call, batch in batches.items():
                    self._write(connection, call, batch)
                self._work()
        except WorkFailed:
            return False
        except GrantLost as lost:
            for call in [call for call, batch in batches.items() if batch.stream_id == lost.stream_id]:
                self._end(call, Outcome.FAILED, str(lost))
                del batches[call]
            return False
        except UsageError as refused:
            for call in batches:
                self._end(call, Outcome.UNKNOWN, str(refused))
            raise
        except (DatabaseUnreachable, UnknownOutcome, psycopg.Error) as error:
            self._unknown = isinstance(error, UnknownOutcome)
            if self._unknown:
                self._record.write("unknown", session=self._called, calls=list(batches), error=str(error))
            session.wait(RETRY_INTERVAL_S)
            return False
        for call in batches:
            self._end(call, Outcome.OK)
        return True

    def _another_try(self, session: Session, batches: dict[str, Batch]) -> dict[str, Batch]:
        """Return the batches for another try: the same, in reverse, with one more, or without the first, which is
        committed alone."""
        match self._chance.choice(("same", "more", "fewer", "reversed")):
            case "more" if (more := session.poll(RETRY_INTERVAL_S)) is not None:
                return {**batches, self._begin(more): more}
            case "fewer" if len(batches) > 1:
                first = next(iter(batches))
                self._commit(session, {first: batches.pop(first)})
                return batches
            case "reversed":
                return dict(reversed(batches.items()))
        return batches

    def _write(self, connection: psycopg.Connection[Any], call: str, batch: Batch) -> None:
        rows = zip(*(batch.table.column(name).to_pylist() for name in ("offset", "value", "topic", "key")), strict=True)
        for offset, value, topic, key in rows:
            lane = topic if key is None else key.decode()
            facts = {"group": self._role.group, "call": call, "stream": batch.stream_id, "offset": offset}
            connection.execute(_APPEND, {**facts, "message": value.decode(), "lane": lane})

    # --- records ----------------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> str:
        call = f"{self._called}/{next(self._numbers)}"
        offsets, values = (batch.table.column(name).to_pylist() for name in ("offset", "value"))
        messages = [(offset, value.decode()) for offset, value in zip(offsets, values, strict=True)]
        whose = {"call": call, "group": self._role.group, "session": self._called}
        self._record.write("begin", **whose, stream=batch.stream_id, grant=batch.grant_id, messages=messages)
        return call

    def _end(self, call: str, outcome: Outcome, why: str = "") -> None:
        self._record.write("end", call=call, outcome=outcome, why=why)


def main(url: str, file: str, name: str, *roles: str) -> None:
    record = Record(Path(file))
    workers = [Worker(url, record, name, Role(**json.loads(role))) for role in roles]

    def leave(*_: object) -> None:
        for worker in workers:
            worker.leave()

    signal.signal(signal.SIGTERM, leave)
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
