"""The consumer for asyncio when tasks are cancelled, loops end, leaders die and people press Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet_borrower.consumer.async_session import AsyncSession
from tests.integration.async_kit import DeliveryCounts, Scene, in_a_loop, polled, postgres_through_this_loop
from tests.integration.session_kit import until
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import ROOT, Fleet, environment


@pytest.fixture
def own_scene(empty_fleet: Fleet) -> Iterator[Scene]:
    """One whose nodes nobody else uses."""
    empty_fleet.serve("n1")
    with contextlib.closing(Scene(empty_fleet, "s", 16)) as scene:
        yield scene


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sublet-session"]


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.conforms("E29")
@in_a_loop
async def test_a_cancelled_wait_loses_no_batch(scene: Scene) -> None:
    seen, interrupted_count = DeliveryCounts(), 0
    async with asyncio.timeout(WAIT_S), scene.session() as session:
        waiting = asyncio.create_task(session.poll())
        await until(lambda: len(session.assignment()) == 16, WAIT_S)
        await cancelled(waiting)
        scene.publish(500, block=5)
        while len(seen) < 500:
            waiting = asyncio.create_task(session.poll())
            for _ in range(interrupted_count % 7):
                await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                batch = await waiting
                assert batch is not None
                seen.add(batch)
            interrupted_count += 1
            with contextlib.suppress(TimeoutError):
                batch = await asyncio.wait_for(session.poll(), 0.001)
                assert batch is not None
                seen.add(batch)
        assert seen.counts == scene.everything()
        waiting = asyncio.create_task(session.poll())
        await asyncio.sleep(0)
        await cancelled(waiting)
    assert scene.is_handed_over()
    assert interrupted_count > 1


@pytest.mark.conforms("E8")
@in_a_loop
async def test_a_batch_whose_work_was_cancelled_comes_again(scene: Scene) -> None:
    scene.publish(300)
    done, begun = DeliveryCounts(), asyncio.Event()
    at_work: list[tuple[int, int]] = []

    async def work() -> None:
        async with scene.session() as session:
            async for batch in session:
                if len(done) >= 100:
                    at_work.extend((batch.stream_id, offset) for offset in range(batch.first, batch.end))
                    begun.set()
                    await asyncio.sleep(WAIT_S * 10)
                done.add(batch)

    task = asyncio.create_task(work())
    await begun.wait()
    await cancelled(task)
    assert not scene.holders()
    async with scene.session() as session:
        consuming = asyncio.create_task(scene.consume(session, done))
        await scene.all_seen(done)
        assert set(at_work) <= set(done.counts)
    await consuming


@in_a_loop
async def test_cancelling_an_opening_leaves_nothing_behind(scene: Scene) -> None:
    before, gate = workers(), asyncio.Event()
    async with postgres_through_this_loop(scene.url, gate) as url:
        session = scene.session(url=url)

        async def enter() -> None:
            async with session:
                pytest.fail("it was cancelled before")

        task = asyncio.create_task(enter())
        await until(lambda: workers() != before)
        task.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.is_closed
        await until(lambda: workers() == before)
        assert not scene.holders()


@in_a_loop
async def test_a_session_that_cannot_open_leaves_no_thread() -> None:
    before = workers()
    for _ in range(3):
        with pytest.raises(Exception, match="cannot connect"):
            async with AsyncSession("$share/g/#", "postgresql://me@127.0.0.1:1/x"):
                pytest.fail("there is nothing to open")
        with pytest.raises(Exception, match="cannot connect"):
            await AsyncSession("$share/g/#", "postgresql://me@127.0.0.1:1/x").open()
    await until(lambda: gc.collect() >= 0 and workers() == before)


@pytest.mark.conforms("E16")
@in_a_loop
@pytest.mark.long
async def test_a_killed_leader_loses_and_repeats_nothing(own_scene: Scene) -> None:
    scene = own_scene
    seen = [DeliveryCounts(), DeliveryCounts()]
    sessions = [scene.session(), scene.session()]
    tasks = [
        asyncio.create_task(scene.consume(session, one, 0.005)) for session, one in zip(sessions, seen, strict=True)
    ]
    await until(lambda: [len(session.assignment()) for session in sessions] == [8, 8], WAIT_S)
    scene.fleet.serve("n2")
    scene.publish(2_000, block=5)
    await until(lambda: all(len(one) > 20 for one in seen), WAIT_S)
    scene.fleet.nodes["n1"].kill()
    scene.publish(1_000)
    await scene.all_seen(*seen)
    await asyncio.gather(*(session.close() for session in sessions))
    await asyncio.gather(*tasks)


@pytest.mark.conforms("E29")
@in_a_loop
@pytest.mark.long
async def test_a_batch_in_store_waits_for_the_leader(own_scene: Scene) -> None:
    """One that was fetched and that nobody has taken is not given out when the leader's last message is too old."""
    scene = own_scene
    async with scene.session(auto_ack=False) as session:
        scene.publish(1)
        taken = await polled(session)
        assert await session.poll(0.0) is None  # this fetches the next one
        scene.publish(1)
        await asyncio.sleep(1.0)
        scene.fleet.nodes["n1"].kill()
        await until(lambda: not session.may_continue(taken), WAIT_S)
        assert await session.poll(0.3) is None
        scene.fleet.serve("n2")
        batch = await polled(session)
        assert batch.first == 1
        await until(lambda: session.may_continue(batch), WAIT_S)


@pytest.mark.conforms("E29")
def test_a_session_outlives_its_loop(scene: Scene) -> None:
    scene.publish(200)
    session, seen = scene.session(), DeliveryCounts()

    async def some() -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                batch = await asyncio.wait_for(session.poll(), 0.02)
                assert batch is not None
                seen.add(batch)

    wanted = scene.everything()
    eventually(lambda: asyncio.run(some()) or len(seen) >= len(wanted), WAIT_S)
    asyncio.run(session.close())
    assert seen.counts == wanted
    assert scene.is_handed_over()


CONSUMER = """
    import asyncio, sys
    from sublet import AsyncSession

    async def main():
        {entering}
            async for batch in session:
                print(batch.stream_id, batch.first, batch.end, flush=True)

    asyncio.run(main())
"""
ENTERED = (
    "async with AsyncSession(sys.argv[1], sys.argv[2], starting_position='earliest', max_batch_bytes=1) as session:"
)
FORGOTTEN = "if session := await AsyncSession(sys.argv[1], sys.argv[2], starting_position='earliest').open():"


@contextlib.contextmanager
def consumer(scene: Scene, entering: str, before: str = "") -> Iterator[subprocess.Popen[str]]:
    code = "import sys\n" + textwrap.dedent(before) + textwrap.dedent(CONSUMER).format(entering=entering)
    argv, pipe = [sys.executable, "-c", code, scene.group, scene.url], subprocess.PIPE
    with subprocess.Popen(
        argv, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as program:
        try:
            yield program
        finally:
            program.kill()


AT_ANOTHER_THREAD = """
    import signal, threading

    def interrupt():
        sys.stdin.readline()
        for thread in threading.enumerate():
            if thread.name == "sublet-session":
                signal.pthread_kill(thread.ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
"""
"""The kernel gives it to any thread, and to one that waits already it says nothing."""


@pytest.mark.conforms("E8")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["the loop's thread", "another thread"])
@pytest.mark.long
def test_ctrl_c_hands_over_and_ends_as_python_does(scene: Scene, elsewhere: bool) -> None:
    scene.publish(200)
    with consumer(scene, ENTERED, AT_ANOTHER_THREAD if elsewhere else "") as program:
        assert program.stdout is not None
        lines = [program.stdout.readline()]
        eventually(lambda: all(status == "held" for status, _ in scene.rows().values()), WAIT_S)
        while sum(int(end) - int(first) for _, first, end in map(str.split, lines)) < 200:
            lines.append(program.stdout.readline())
        if not elsewhere:
            program.send_signal(signal.SIGINT)
        _, error = program.communicate("now\n" if elsewhere else None, timeout=WAIT_S)
    assert program.returncode == -signal.SIGINT
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert "never retrieved" not in error
    assert "was destroyed" not in error
    assert scene.is_handed_over()


def test_the_program_of_the_page_works(shared_fleet: Fleet, tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/asyncio.md").read_text(), re.DOTALL | re.MULTILINE)
    argv, out = [sys.executable, "-uc", program], tmp_path / "out"
    settings = environment(extra={"SUBLET_DATABASE_URL": shared_fleet.url})
    with (
        contextlib.closing(Scene(shared_fleet, "orders", 16)) as scene,
        out.open("w") as output,
        subprocess.Popen(argv, cwd=ROOT, env=settings, stdout=output, stderr=output) as running,
    ):
        eventually(lambda: "'value': b'{\"id\": 1}'" in out.read_text(), WAIT_S, out.read_text)
        eventually(lambda: sum(position for _, position in scene.rows().values()) == 1, WAIT_S)
        running.send_signal(signal.SIGINT)
        assert running.wait(WAIT_S) == -signal.SIGINT
        assert out.read_text().count("customer-7") == 1
        assert scene.is_handed_over()


def test_a_program_that_forgets_to_close_ends_too(scene: Scene) -> None:
    scene.publish(10)
    with consumer(scene, FORGOTTEN) as program:
        assert program.stdout is not None
        assert program.stdout.readline()
        eventually(lambda: sum(position for _, position in scene.rows().values()) == 10, WAIT_S)
        program.send_signal(signal.SIGINT)  # it waits for a batch
        program.communicate(timeout=WAIT_S)
    assert program.returncode == -signal.SIGINT
