"""The consumer for asyncio, with real nodes and a real Postgres: what `Session` promises, and that the loop goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from sublet_borrower.consumer import async_session
from sublet_borrower.consumer.session import Session
from sublet_protocol.domain.errors import UsageError
from tests.integration.async_kit import QUICK, DeliveryCounts, Scene, in_a_loop, polled, postgres_through_this_loop
from tests.integration.session_kit import until
from tests.kit import WAIT_S, eventually

pytestmark = pytest.mark.shards(1)


@pytest.fixture
def stream(scene: Scene) -> int:
    """The only stream there is."""
    (stream,) = scene.heads()
    return stream


@pytest.mark.conforms("E1", "E29")
@pytest.mark.shards(16)
@in_a_loop
async def test_all_is_consumed_once_and_durable_at_the_end(scene: Scene) -> None:
    scene.publish(1_000)
    seen = DeliveryCounts()
    async with scene.session() as session:
        async for batch in session:
            seen.add(batch)
            if len(seen) == 1_000:
                session.drain()
        assert session.is_closed
        assert await session.poll() is None
    assert seen.counts == scene.everything()
    assert len({stream for stream, _ in seen.counts}) > 3
    assert scene.is_handed_over()


@pytest.mark.conforms("E29")
@in_a_loop
async def test_what_is_not_acknowledged_holds_progress_back(scene: Scene, stream: int) -> None:
    scene.publish(30)
    async with scene.session(auto_ack=False) as session:
        first, second, third = [await polled(session) for _ in range(3)]
        waiting = asyncio.create_task(session.poll())
        second.ack()
        await session.wait(0.0)
        assert session.assignment() == {stream: 0}
        first.ack(up_to_offset=4)
        await until(lambda: scene.rows() == {stream: ("held", 4)})
        first.ack()
        await until(lambda: scene.rows() == {stream: ("held", second.end)})
        threading.Thread(target=third.ack).start()
        await until(lambda: scene.rows() == {stream: ("held", third.end)})
        assert not waiting.done()
        scene.publish(5)
        batch = await waiting
        assert batch is not None
        assert batch.first == third.end


@in_a_loop
async def test_a_timeout_of_0_gets_what_has_come(scene: Scene) -> None:
    seen = DeliveryCounts()
    async with asyncio.timeout(WAIT_S), scene.session() as session:
        for _ in range(2):
            scene.publish(20)
            wanted = len(scene.everything())
            while len(seen) < wanted:
                if (batch := await session.poll(0.0)) is not None:
                    seen.add(batch)
                await asyncio.sleep(0.001)
    assert seen.counts == scene.everything()


@in_a_loop
async def test_a_timeout_begins_when_a_session_is_open(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, ahead_s = asyncio.Event(), [0.0]
    monkeypatch.setattr(async_session, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[-1]))
    scene.publish(1)
    async with postgres_through_this_loop(scene.url, gate) as url:
        session = scene.session(url=url)
        polling = asyncio.create_task(session.poll(WAIT_S))
        await asyncio.sleep(0)
        ahead_s.append(3600.0)  # it opens for an hour
        gate.set()
        assert await polling is not None
        await session.close()


def test_a_plain_session_with_a_timeout_of_0_does_too(scene: Scene) -> None:
    seen = DeliveryCounts()

    def look(session: Session, wanted: int) -> bool:
        if (batch := session.poll(0.0)) is not None:
            seen.add(batch)
        return len(seen) == wanted

    with Session(scene.group, scene.url, starting_position="earliest", max_batch_bytes=1, settings=QUICK) as session:
        for _ in range(2):
            scene.publish(20)
            eventually(partial(look, session, len(scene.everything())), WAIT_S)
    assert seen.counts == scene.everything()


@pytest.mark.conforms("E18", "E29")
@pytest.mark.shards(16)
@in_a_loop
async def test_sessions_in_one_loop_share_the_streams(scene: Scene) -> None:
    seen = [DeliveryCounts() for _ in range(3)]
    sessions = [scene.session(name=f"s{number}") for number in range(3)]
    tasks = [asyncio.create_task(scene.consume(session, one)) for session, one in zip(sessions, seen, strict=True)]
    await until(lambda: sorted(len(session.assignment()) for session in sessions) == [5, 5, 6], WAIT_S)
    scene.publish(2_000)
    await scene.all_seen(*seen)
    assert all(len(one) for one in seen)
    await asyncio.gather(*(session.close() for session in sessions))
    await asyncio.gather(*tasks)
    assert not scene.holders()


@pytest.mark.conforms("E29")
@in_a_loop
async def test_each_task_of_one_session_gets_a_batch(scene: Scene, stream: int) -> None:
    seen = [DeliveryCounts() for _ in range(4)]

    async def work(mine: DeliveryCounts) -> None:
        while (batch := await session.poll()) is not None:
            mine.add(batch)
            await asyncio.sleep(0)
            batch.ack()

    async with scene.session(auto_ack=False) as session:
        tasks = [asyncio.create_task(work(one)) for one in seen]
        await until(lambda: session.assignment() == {stream: 0}, WAIT_S)
        scene.publish(400)
        await scene.all_seen(*seen)
        await until(lambda: scene.rows() == {stream: ("held", 400)})
        session.drain()
        await asyncio.gather(*tasks)


@pytest.mark.shards(16)
@in_a_loop
async def test_a_session_never_blocks_the_loop(scene: Scene) -> None:
    """All that it asks of the database passes through this loop: were the loop blocked, it would wait for ever."""
    async with postgres_through_this_loop(scene.url) as url:
        seen, ticks = DeliveryCounts(), 0
        session = scene.session(url=url)
        async with session:
            consuming = asyncio.create_task(scene.consume(session, seen))
            await until(lambda: len(session.assignment()) == 16, WAIT_S)
            for _ in range(200):
                await asyncio.sleep(0)
                ticks += 1
            assert ticks == 200
            assert not consuming.done()
            scene.publish(300)
            await scene.all_seen(seen)
        await consuming


@in_a_loop
async def test_closing_ends_the_iteration(scene: Scene) -> None:
    scene.publish(100)
    session, count = scene.session(), 0
    async for _ in session:
        count += 1
        await session.close()
    assert count == 1


@in_a_loop
async def test_closing_twice_waits_for_one_end(scene: Scene, stream: int) -> None:
    session = await scene.session().open()
    await until(lambda: not session.is_closed and scene.holders(), WAIT_S)
    waiting = asyncio.create_task(session.poll())
    await asyncio.sleep(0)
    first, second = asyncio.create_task(session.close()), asyncio.create_task(session.close(aborted=True))
    await second
    assert session.is_closed
    assert scene.rows() == {stream: ("free", 0)}
    await first
    assert await waiting is None
    await session.close()
    session.drain()
    session.leave()
    assert session.assignment() == {}
    for use in (session.open(), session.poll(), session.poll(0.0), session.wait(0.0)):
        with pytest.raises(UsageError, match=r"\$share/g/.*: this session is closed. Make another"):
            await use
    with pytest.raises(UsageError, match="closed"):
        await anext(aiter(session))
    never = scene.session()
    await never.close()
    assert never.is_closed


@in_a_loop
async def test_draining_before_it_is_open_gives_no_messages(scene: Scene) -> None:
    scene.publish(10)
    session = scene.session()
    session.drain()
    async with session:
        assert await session.poll(WAIT_S) is None
        assert session.is_closed
    opening = scene.session()
    task = asyncio.create_task(opening.poll())
    await asyncio.sleep(0)
    opening.drain()
    assert await task is None
    await opening.close()
    assert not scene.holders()


@pytest.mark.conforms("E8")
@in_a_loop
async def test_leaving_waits_for_the_batch_in_hand(scene: Scene, stream: int) -> None:
    scene.publish(20)
    async with scene.session(auto_ack=False) as session:
        batch = await polled(session)
        session.leave()
        assert session.may_continue(batch)
        waiting = asyncio.create_task(session.poll())
        batch.ack()
        assert await waiting is None
        assert session.is_closed
    assert scene.rows() == {stream: ("free", batch.end)}
