"""Stories of processes that fork while they publish: `python -m tests.processes.forking STORY DATABASE`.

Each runs in a process of its own: what others have left in this one (threads, gRPC) must not come along.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sublet_protocol.domain.errors import UsageError
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.db.connect import connect
from sublet_storage.producer import AsyncPublisher, Publisher
from tests.kit import eventually


def in_a_child(story: Callable[[], None]) -> None:
    """Fork, run the function there, and fail if it fails or does not end."""
    child = multiprocessing.get_context("fork").Process(target=story)
    child.start()
    child.join(20)
    hangs = child.is_alive()
    child.kill()
    child.join()
    assert (hangs, child.exitcode) == (False, 0), "see the child's traceback"


def publishers(conn: psycopg.Connection[Any]) -> list[int]:
    found = conn.execute("select pid from pg_stat_activity where application_name = 'sublet publisher'")
    return [pid for (pid,) in found]


def every_use_in_a_child_is_refused(database: str) -> None:
    with Publisher(database, "default", linger_ms=60_000) as publisher:
        publisher.publish("t", b"before")
        publisher.flush(20)
        in_epoch = publisher.in_epoch(1)
        queued = publisher.publish("t", b"queued")

        def story() -> None:
            reported = (
                rf"this publisher was made in process {os.getppid()}, .* Make one in this process, after the fork\."
            )
            for use in (
                lambda: publisher.publish("t", b"child"),
                lambda: publisher.publish_batch({"topic": "t", "value": [b"child"]}),
                publisher.flush,
                in_epoch.check,
                lambda: in_epoch.publish("t", b"child"),
            ):
                with pytest.raises(UsageError, match=reported):
                    use()
            with pytest.raises(UsageError, match="Wait for it in the process that published"):
                queued.result()
            publisher.close()
            with Publisher(database) as own:
                own.publish("t", b"child's own").result(20)

        in_a_child(story)
        after = publisher.publish("t", b"after")
        publisher.flush(20)
        assert (queued.result(20).offset, after.result(20).offset) == (2, 3)
    with connect(database) as conn:
        assert conn.execute("select sum(head) from stream").fetchone() == (4,)


def a_child_that_drops_it_touches_nothing(database: str) -> None:
    made = [Publisher(database)]
    made[0].publish("t", b"1").result(20)

    def story() -> None:
        with made[0]:
            pass
        made.clear()
        gc.collect()

    with connect(database) as conn:
        before = eventually(lambda: found if len(found := publishers(conn)) == 1 else None)
        in_a_child(story)
        made[0].publish("t", b"2").result(20)
        assert publishers(conn) == before, "the connection is still the first"
    made[0].close()


def a_childs_copies_of_connections_lead_nowhere(database: str) -> None:
    with connect(database) as plain:

        def story() -> None:
            with pytest.raises(psycopg.OperationalError):
                plain.execute("select 1")
            plain.close()

        in_a_child(story)
        assert plain.execute("select 1").fetchone() == (1,)


def the_async_twin_refuses_too(database: str) -> None:
    async def publish(publisher: AsyncPublisher) -> None:
        await (await publisher.publish("t", b"x"))

    async def close(publisher: AsyncPublisher) -> None:
        await publisher.close()

    publisher = AsyncPublisher(database)
    asyncio.run(publish(publisher))

    def story() -> None:
        with pytest.raises(UsageError, match="Make one in this process"):
            asyncio.run(publish(publisher))
        asyncio.run(close(publisher))

    in_a_child(story)
    asyncio.run(publish(publisher))
    asyncio.run(close(publisher))


def a_child_does_not_stop_the_server(data_dir: str) -> None:
    def use_for_a_while() -> None:
        with EmbeddedPostgres(data_dir) as own:
            psycopg.connect(own.url).close()

    with EmbeddedPostgres(data_dir) as server:
        in_a_child(server.stop)
        with psycopg.connect(server.url) as conn:
            assert conn.execute("select 1").fetchone() == (1,)
        in_a_child(use_for_a_while)
        psycopg.connect(server.url).close()


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
