"""`AsyncPublisher` without `open`: one publisher for all who are the first, and nothing left of it at the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import warnings
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from sublet_protocol.domain.errors import DatabaseUnreachable, EpochAlreadyCompleted, PublisherClosed, UnknownOutcome
from sublet_storage.db.connect import connect
from sublet_storage.producer import AsyncPublisher, Publisher, async_publisher
from sublet_storage.producer.delivery import BatchDelivery, Delivery
from tests.integration.async_kit import in_a_loop, run
from tests.integration.log_kit import Connection, everything
from tests.kit import WAIT_S, eventually


class Slow:
    """Publishers that open when the test says so."""

    def __init__(self) -> None:
        self.may_open = threading.Event()
        self.made: list[Publisher] = []
        self.asked = 0

    def __call__(self, *arguments: Any, **settings: Any) -> Publisher:
        self.asked += 1
        assert self.may_open.wait(20)
        self.made.append(Publisher(*arguments, **settings))
        return self.made[-1]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    eventually(lambda: threads() == [])


async def begun(call: Coroutine[Any, Any, Any], slow: Slow) -> asyncio.Task[Any]:
    """The call, in the middle of opening the publisher."""
    task = asyncio.create_task(call)
    await _until(lambda: slow.asked == 1)
    return task


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    slow = Slow()
    monkeypatch.setattr(async_publisher, "Publisher", slow)
    return slow


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sublet publisher")]


def values(conn: Connection) -> list[bytes]:
    return sorted(message["value"] for messages in everything(conn).values() for message in messages)


@pytest.mark.conforms("W1")
@pytest.mark.parametrize("end", ["close", "flush"])
@in_a_loop
async def test_first_messages_share_one_publisher(database: str, end: str) -> None:
    """All that ask at once have it open one, and are durable after `close`, or `flush`."""
    publisher = AsyncPublisher(database, linger_ms=60_000)
    deliveries = await asyncio.gather(*(publisher.publish("t", b"%02d" % index) for index in range(12)))
    if end == "flush":
        await publisher.publish_batch({"topic": "t", "value": [b"batch"] * 3})
        await publisher.flush(20)
        assert len(threads()) == 1, "one sender"
    else:
        await publisher.close()
    assert all(delivery.is_done for delivery in deliveries)
    assert len({(await each).offset for each in deliveries}) == 12
    await publisher.close()
    with connect(database) as conn:
        batch = [b"batch"] * 3 if end == "flush" else []
        assert values(conn) == [*(b"%02d" % index for index in range(12)), *batch]


@in_a_loop
async def test_closed_before_it_was_opened_it_stays_closed(database: str) -> None:
    publisher = AsyncPublisher(database)
    await publisher.flush()
    await publisher.close()
    await publisher.close()
    for call in (publisher.publish("a", b"x"), publisher.publish_batch({"topic": "a", "value": [b"x"]})):
        with pytest.raises(PublisherClosed, match="this publisher is closed"):
            await call
    with pytest.raises(PublisherClosed):
        await publisher.open()


@in_a_loop
async def test_closing_while_it_opens_ends_it(database: str, slow: Slow) -> None:
    publisher = AsyncPublisher(database)
    waiting = await begun(publisher.publish("a", b"x"), slow)
    closing = asyncio.create_task(publisher.close())
    await asyncio.sleep(0)
    slow.may_open.set()
    await closing
    with contextlib.suppress(PublisherClosed):
        await (await waiting)
    assert len(slow.made) == 1


@pytest.mark.parametrize("how", ["open", "publish", "with"])
def test_cancelling_an_opening_leaves_nothing_behind(database: str, slow: Slow, how: str) -> None:
    async def main() -> None:
        publisher = AsyncPublisher(database)
        opening = {
            "open": publisher.open,
            "publish": lambda: publisher.publish("a", b"x"),
            "with": publisher.__aenter__,
        }
        waiting = await begun(opening[how](), slow)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(main())
    slow.may_open.set()
    eventually(lambda: slow.made and threads() == [])


@in_a_loop
async def test_one_of_two_cancelled_the_other_publishes(database: str, slow: Slow) -> None:
    publisher = AsyncPublisher(database)
    first, second = (asyncio.create_task(publisher.publish("a", value)) for value in (b"1", b"2"))
    await _until(lambda: slow.asked == 1)
    first.cancel()
    await asyncio.wait({first})
    slow.may_open.set()
    await (await second)
    await publisher.close()
    assert slow.asked == 1


@in_a_loop
async def test_cancelled_and_asked_again_it_connects_again(database: str, slow: Slow) -> None:
    publisher = AsyncPublisher(database)
    waiting = await begun(publisher.publish("a", b"1"), slow)
    waiting.cancel()
    await asyncio.wait({waiting})
    slow.may_open.set()
    await _until(lambda: slow.made and threads() == [])
    await (await publisher.publish("a", b"2"))
    await publisher.close()
    assert slow.asked == 2


def test_what_could_not_be_opened_is_tried_again(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def away_at_first(*arguments: Any, **settings: Any) -> Publisher:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise DatabaseUnreachable("not there now")
        return Publisher(*arguments, **settings)

    async def main() -> None:
        monkeypatch.setattr(async_publisher, "Publisher", away_at_first)
        publisher = AsyncPublisher(database)
        for _ in range(2):
            with pytest.raises(DatabaseUnreachable, match="not there now"):
                await publisher.publish("a", b"x")
        await publisher.flush()
        assert tries == 2, "there is nothing to be flushed"
        async with publisher:
            await (await publisher.publish("a", b"x"))

    run(main())


async def _until(fact: Any) -> None:
    await asyncio.to_thread(eventually, fact)


@pytest.mark.conforms("S9")
@in_a_loop
async def test_coroutines_publish_in_epochs(database: str) -> None:
    async with AsyncPublisher(database, space="default") as publisher:
        await publisher.advance(7)
        seventh = await publisher.in_epoch(7)
        await (await seventh.publish("t", b"1"))
        await (await seventh.publish_batch({"topic": "t", "value": [b"2", b"3"]}))
        await publisher.advance(8)
        with pytest.raises(EpochAlreadyCompleted):
            await publisher.in_epoch(7)
    with connect(database) as connection:
        bounds = connection.execute("select epoch_bounds from block where epoch_bounds is not null").fetchall()
        assert {json.dumps(bound["least"]) for (bound,) in bounds} == {"[[7]]"}
        assert connection.execute("select lower_frontier from space").fetchall() == [([[8]],)]


@pytest.mark.conforms("W1")
def test_a_publisher_outlives_its_loop(database: str) -> None:
    """Those that wait, for a full buffer and for a message on its way, are cancelled with their loop."""
    publisher = AsyncPublisher(database, linger_ms=300, max_buffered_bytes=1)

    async def first() -> None:
        waiting = [asyncio.ensure_future(publisher.publish("t", b"%d" % index)) for index in range(3)]
        position = asyncio.ensure_future(_position(await waiting[0]))
        await asyncio.sleep(0)
        assert not position.done()

    async def second() -> None:
        await (await publisher.publish("t", b"last"))
        await publisher.close()

    run(first())
    run(second())
    with connect(database) as conn:
        assert {b"0", b"last"} <= set(values(conn))


async def _position(sent: Delivery) -> object:
    return await sent


@pytest.mark.conforms("W1")
@in_a_loop
async def test_waiting_batches_delay_no_close(conn: Connection, database: str) -> None:
    """While more batches wait for room than the loop has threads, and nothing is stored, flush and close return in
    their time, and what else the program does in threads goes on."""
    publisher = AsyncPublisher(database, max_buffered_bytes=1, delivery_timeout_s=300)
    await (await publisher.publish("t", b"first"))
    batch = {"topic": "t", "value": [b"v"]}
    with conn.transaction():
        conn.execute("lock table stream in exclusive mode")
        waiting = [asyncio.create_task(publisher.publish_batch(batch)) for _ in range(40)]
        await _until(lambda: any(task.done() for task in waiting))
        await asyncio.wait_for(asyncio.to_thread(threading.get_ident), WAIT_S)
        with pytest.raises(TimeoutError, match="not everything was durable"):
            await asyncio.wait_for(publisher.flush(timeout_s=0.1), WAIT_S)
        with pytest.raises(UnknownOutcome):
            await asyncio.wait_for(publisher.close(timeout_s=0.1), WAIT_S)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(each) for each in outcomes} == {BatchDelivery, PublisherClosed}
    with pytest.raises(PublisherClosed):
        await publisher.publish_batch(batch)


@pytest.mark.conforms("W1")
def test_first_messages_on_several_loops(database: str, slow: Slow) -> None:
    """Threads with a loop each share one publisher from the first message on: all is durable after `close`."""
    publisher, deliveries, ready = AsyncPublisher(database), list[Delivery](), threading.Barrier(8)
    slow.may_open.set()

    async def main(index: int) -> None:
        ready.wait(WAIT_S)
        deliveries.append(await publisher.publish("t", b"%d" % index))

    loops = [threading.Thread(target=asyncio.run, args=(main(index),)) for index in range(8)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(WAIT_S)
    asyncio.run(publisher.close())
    assert (slow.asked, len(deliveries), all(each.is_done for each in deliveries)) == (1, 8, True)


@in_a_loop
async def test_closing_waits_no_longer_for_an_opening(database: str, slow: Slow) -> None:
    """What `close` may take includes the opening: the publisher is closed as soon as it is there."""
    publisher = AsyncPublisher(database)
    waiting = await begun(publisher.publish("a", b"x"), slow)
    await asyncio.wait_for(publisher.close(timeout_s=0.1), 10)
    with pytest.raises(PublisherClosed):
        await publisher.publish("a", b"y")
    slow.may_open.set()
    with pytest.raises(PublisherClosed):
        await waiting
    assert len(slow.made) == 1


def test_a_dropped_publisher_ends(database: str) -> None:
    """With all that is queued stored, and the line that made it in the warning."""

    async def drop() -> Delivery:
        publisher = AsyncPublisher(database, linger_ms=60_000)
        return await publisher.publish("t", b"queued")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        delivery = asyncio.run(drop())
        gc.collect()
    line = drop.__code__.co_firstlineno + 1
    assert any(f"an AsyncPublisher, made at {__file__}:{line}, was dropped" in str(each.message) for each in caught)
    delivery.result(WAIT_S)
