"""A group with real nodes for the tests of `AsyncSession`, and what became of each message."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import psycopg

from sublet_borrower.consumer.async_session import AsyncSession
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_storage.db.connect import connect
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space
from tests.integration.session_kit import until
from tests.kit import WAIT_S
from tests.kit_nodes import SPEED, Fleet

QUICK = BorrowerSettings().scaled(SPEED)
LIMIT_S = 110.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DeliveryCounts:
    """What was delivered: {(stream, offset): how often}."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, int]] = Counter()

    def __len__(self) -> int:
        return len(self.counts)

    def add(self, batch: Batch) -> None:
        self.counts.update((batch.stream_id, offset) for offset in batch.table.column("offset").to_pylist())


class Scene:
    """A space of its own with a group, both on nodes that others may use too: a publisher's side and a reader's of the
    tables; a session of the group on demand."""

    def __init__(self, fleet: Fleet, space: str, shards: int) -> None:
        self.url, self.fleet, self.space = fleet.url, fleet, space
        self.group = f"$share/g/{space}/#"
        self.connection = connect(fleet.url)
        create_space(self.connection, space, f"{space}/#", shards=shards)

    def close(self) -> None:
        self.connection.close()

    def session(self, **settings: Any) -> AsyncSession:
        """One that takes each block as a batch."""
        usual: dict[str, Any] = {
            "url": self.url,
            "starting_position": "earliest",
            "max_batch_bytes": 1,
            "settings": QUICK,
        }
        return AsyncSession(self.group, **usual | settings)

    def publish(self, count: int, block: int = 10) -> None:
        """Under many keys, durable when it returns."""
        with Publisher(self.url, block_messages=block) as publisher:
            for number in range(count):
                publisher.publish(f"{self.space}/{number % 5}", b"%d" % number, key=b"k%d" % (number % 97))

    def everything(self) -> Counter[tuple[int, int]]:
        return Counter((stream, offset) for stream, head in self.heads().items() for offset in range(head))

    def heads(self) -> dict[int, int]:
        of_space = "from stream join space using (space_id) where name = %s"
        return dict(self.connection.execute(f"select stream_id, head {of_space}".encode(), (self.space,)).fetchall())

    def rows(self) -> dict[int, tuple[str, int]]:
        """Return {stream: (status, durable position)}."""
        return {stream: (status, position) for stream, status, position, _ in self._lending()}

    def holders(self) -> set[str]:
        """The agents that hold something."""
        return {agent for _, status, _, agent in self._lending() if status == "held"}

    def is_handed_over(self) -> bool:
        """Return whether no stream is held and all messages are consumed."""
        return self.rows() == {stream: ("free", head) for stream, head in self.heads().items()}

    def _lending(self) -> list[tuple[int, str, int, str]]:
        statement = "select stream_id, status, position, agent from lending where stream_id = any(%s) order by 1"
        return self.connection.execute(statement, (list(self.heads()),)).fetchall()

    async def consume(self, session: AsyncSession, seen: DeliveryCounts, pause_s: float = 0.0) -> None:
        async for batch in session:
            seen.add(batch)
            await asyncio.sleep(pause_s)

    async def all_seen(self, *seen: DeliveryCounts) -> None:
        """Wait until they have seen everything together; and nothing of it twice."""
        wanted = self.everything()
        await until(lambda: sum(map(len, seen)) >= len(wanted), WAIT_S)
        assert sum((one.counts for one in seen), Counter()) == wanted


async def polled(session: AsyncSession) -> Batch:
    batch = await session.poll(WAIT_S)
    assert batch is not None
    return batch


def run(test: Awaitable[_T]) -> _T:
    """It in a loop of its own, for so long at most."""

    async def bounded() -> _T:
        return await asyncio.wait_for(test, LIMIT_S)

    return asyncio.run(bounded())


def in_a_loop(test: Callable[_P, Awaitable[None]]) -> Callable[_P, None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def runs(*arguments: _P.args, **named: _P.kwargs) -> None:
        run(test(*arguments, **named))

    return runs


@contextlib.asynccontextmanager
async def postgres_through_this_loop(url: str, gate: asyncio.Event | None = None) -> AsyncIterator[str]:
    """The database's URL by way of this very event loop: whoever blocks the loop gets no answer.

    With a gate it says nothing until that is open.
    """
    info = psycopg.conninfo.conninfo_to_dict(url)
    host, port = str(info["host"]), str(info.get("port") or 5432)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if gate is not None:
            await gate.wait()
        opens = (
            functools.partial(asyncio.open_unix_connection, f"{host}/.s.PGSQL.{port}")
            if host.startswith("/")
            else functools.partial(asyncio.open_connection, host, int(port))
        )
        theirs, ours = await opens()
        await asyncio.gather(carry(reader, ours), carry(theirs, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    mine = server.sockets[0].getsockname()[1]
    try:
        user, name = info["user"], info["dbname"]
        secret = f":{info['password']}" if info.get("password") else ""
        yield f"postgresql://{user}{secret}@127.0.0.1:{mine}/{name}"
    finally:
        server.close()
