"""The memory for pages that readers have not taken yet."""

from __future__ import annotations

import asyncio

import pytest

from sublet_leader.feed.page_memory import PageMemory, ReaderMemory

pytestmark = pytest.mark.conforms("X4")


async def turns() -> None:
    """Let all that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_who_finds_no_memory_waits() -> None:
    """What was read may be larger than what was reserved; then nobody reads until it is taken."""

    async def run() -> None:
        memory = PageMemory(100)
        first, second = ReaderMemory(memory, "a"), ReaderMemory(memory, "b")
        await first.reserve(60)
        first.resize(150)
        waiting = asyncio.create_task(second.reserve(40))
        await turns()
        assert (waiting.done(), memory.is_short, memory.bytes_held) == (False, True, 150)
        first.resize(61)
        await turns()
        assert not waiting.done()
        first.resize(60)
        await waiting
        assert (memory.is_short, memory.bytes_held) == (False, 100)

    asyncio.run(run())


def test_a_principal_leaves_memory_to_the_next() -> None:
    """It has half of it, and as much as others leave free; another one does not wait behind it."""

    async def run() -> None:
        memory = PageMemory(100)
        for _ in range(5):
            await ReaderMemory(memory, "a").reserve(10)
        more = [asyncio.create_task(ReaderMemory(memory, "a").reserve(10)) for _ in range(2)]
        await turns()
        other = ReaderMemory(memory, "b")
        await other.reserve(20)
        assert (memory.bytes_held, [each.done() for each in more]) == (70, [False, False])
        other.resize(0)
        memory.add(-10, "a")
        await turns()
        assert [each.done() for each in more] == [True, False]
        memory.add(-10, "a")
        await turns()
        assert (more[1].done(), memory.bytes_held) == (True, 50)

    asyncio.run(run())


def test_who_stops_waiting_for_memory_holds_none() -> None:
    """The next one has its turn."""

    async def run() -> None:
        memory = PageMemory(100)
        await ReaderMemory(memory, "b").reserve(80)
        large = asyncio.create_task(ReaderMemory(memory, "a").reserve(30))
        await turns()
        small = asyncio.create_task(ReaderMemory(memory, "a").reserve(20))
        await turns()
        assert not small.done()
        large.cancel()
        await turns()
        assert (small.done(), memory.bytes_held, memory.is_short) == (True, 100, False)

    asyncio.run(run())
