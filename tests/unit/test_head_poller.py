"""One look for all who follow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

import sublet_leader.feed.head_poller as watching
from sublet_leader.feed.head_poller import FeedHeadPoller, HeadWaiter
from sublet_protocol.domain.errors import DatabaseUnreachable
from sublet_storage.log.fetch import HeadState

STORY_S = 20.0


class Ends:
    """Where streams end, to be looked at."""

    def __init__(self) -> None:
        self.heads = {1: HeadState(0, False, False), 2: HeadState(0, False, False)}
        self.asked: list[list[int]] = []
        self.trouble: Exception | None = None
        self.stall_s = 0.0

    async def look(self, stream_ids: list[int]) -> tuple[str | None, dict[int, HeadState]]:
        """As the database would answer."""
        self.asked.append(stream_ids)
        if self.trouble is not None:
            raise self.trouble
        if self.stall_s:
            pass_time(self.stall_s)
            self.stall_s = 0.0
        return "1", {id: self.heads[id] for id in stream_ids if id in self.heads}


def pass_time(seconds: float) -> None:
    """Let the loop's clock go on, as when the process stands still."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + seconds  # type: ignore[method-assign]


def story(**pace: float) -> Callable[[Callable[[Ends, FeedHeadPoller], Awaitable[None]]], Callable[..., None]]:
    """Make a test of what happens with a poller; `pace`: constants of its module."""

    def decorate(happens: Callable[[Ends, FeedHeadPoller], Awaitable[None]]) -> Callable[..., None]:
        async def run() -> None:
            ends = Ends()
            watch = FeedHeadPoller(ends.look)
            try:
                await asyncio.wait_for(happens(ends, watch), STORY_S)
            finally:
                await watch.close()

        def test(monkeypatch: pytest.MonkeyPatch) -> None:
            for name, value in pace.items():
                monkeypatch.setattr(watching, name, value)
            asyncio.run(run())

        test.__doc__ = happens.__doc__
        return test

    return decorate


async def waiter_of(watch: FeedHeadPoller, stream: int) -> HeadWaiter:
    """Return one that has the stream's first head."""
    waiter = watch.add_waiter()
    waiter.set_streams([stream])
    await wait_for_head(waiter, stream, 0)
    return waiter


async def wait_for_head(follower: HeadWaiter, stream: int, head: int) -> HeadState:
    while True:
        found = await follower.wait_for_heads(5)
        if stream in found and found[stream].head >= head:
            return found[stream]


@story(BACKOFF_INITIAL_S=3600.0, BACKOFF_MAX_S=3600.0)
async def test_pushed_heads_make_it_look_and_are_checked(ends: Ends, watch: FeedHeadPoller) -> None:
    follower = watch.add_waiter()
    follower.set_streams([1])
    assert await follower.wait_for_heads(10) == {1: HeadState(0, False, False)}
    watch.poll_soon(2)
    watch.poll_soon(1)
    while len(ends.asked) < 2:
        await asyncio.sleep(0)
    ends.heads[1] = HeadState(7, False, False)
    watch.poll_soon(1)
    assert await follower.wait_for_heads(10) == {1: HeadState(7, False, False)}
    ends.heads[1] = HeadState(7, True, False)
    watch.poll_soon(1)
    assert await follower.wait_for_heads(10) == {1: HeadState(7, True, False)}


@story()
async def test_one_look_notifies_all_of_their_own_streams(ends: Ends, watch: FeedHeadPoller) -> None:
    both, second = watch.add_waiter(), watch.add_waiter()
    both.set_streams([1, 2])
    tasks = asyncio.all_tasks()
    second.set_streams([2])
    assert asyncio.all_tasks() == tasks
    await wait_for_head(both, 1, 0)
    await wait_for_head(second, 2, 0)
    ends.heads[1] = HeadState(5, False, False)
    assert (await wait_for_head(both, 1, 5)).head == 5
    assert await second.wait_for_heads(0.05) == {}
    assert all(len(asked) == len(set(asked)) for asked in ends.asked)
    late = watch.add_waiter()
    late.set_streams([1])
    assert await late.wait_for_heads(5) == {1: HeadState(5, False, False)}


@story(LONGEST_PAUSE_S=0.01)
async def test_a_slow_look_delays_no_other(ends: Ends, watch: FeedHeadPoller) -> None:
    follower = await waiter_of(watch, 1)
    ends.stall_s = STORY_S / 2
    while ends.stall_s:
        await asyncio.sleep(0)
    ends.heads[1] = HeadState(7, False, False)
    assert (await wait_for_head(follower, 1, 7)).head == 7


@story(BACKOFF_MAX_S=0.005)
async def test_it_ends_when_nobody_follows_and_begins_again(ends: Ends, watch: FeedHeadPoller) -> None:
    """The timeline may be another by then."""
    for _ in range(2):
        follower = await waiter_of(watch, 1)
        assert watch.timeline == "1"
        follower.set_streams([])
        while watch.timeline:
            await asyncio.sleep(0)
        before = watch.poll_count
        await asyncio.sleep(0.05)
        assert watch.poll_count == before


@pytest.mark.conforms("P10")
@story()
async def test_a_late_waiter_gets_what_is_seen_then(ends: Ends, watch: FeedHeadPoller) -> None:
    """After a failover the stream of that number may be another, and what was known of it is not so."""
    first, late = watch.add_waiter(), watch.add_waiter()
    ends.heads[1] = HeadState(60, True, False)
    first.set_streams([1])
    await wait_for_head(first, 1, 60)
    ends.heads[1] = HeadState(60, False, False)
    late.set_streams([1])
    assert await late.wait_for_heads(5) == {1: HeadState(60, False, False)}


@story(BACKOFF_INITIAL_S=3600.0, LONGEST_PAUSE_S=0.01)
async def test_what_is_noted_is_reported_at_once(ends: Ends, watch: FeedHeadPoller) -> None:
    """Also before the first look; of a stream that nobody follows, nothing is."""
    ends.trouble = DatabaseUnreachable("away")
    follower = watch.add_waiter()
    follower.set_streams([1])
    watch.update_heads({1: 3})
    assert await follower.wait_for_heads(5) == {1: HeadState(3, False, False)}
    ends.trouble = None
    watch.update_heads({2: 9, 1: 7})
    assert await follower.wait_for_heads(5) == {1: HeadState(7, False, False)}
    watch.update_heads({1: 6})
    watch.update_heads({1: 7})
    assert await follower.wait_for_heads(0.05) == {}


@story(LONGEST_PAUSE_S=0.01)
async def test_a_look_that_fails_is_tried_again(ends: Ends, watch: FeedHeadPoller) -> None:
    ends.trouble = DatabaseUnreachable("away")
    follower = watch.add_waiter()
    follower.set_streams([1])
    while len(ends.asked) < 3:
        await asyncio.sleep(0.001)
    ends.trouble = None
    await wait_for_head(follower, 1, 0)


@story(BACKOFF_MAX_S=3600.0)
async def test_looks_grow_seldom_while_nothing_comes(ends: Ends, watch: FeedHeadPoller) -> None:
    await waiter_of(watch, 1)
    before, began = watch.poll_count, time.monotonic()
    while watch.poll_count < before + 10:
        await asyncio.sleep(0.001)
    assert time.monotonic() - began > 0.5, "at an even pace of 5 ms it would be a tenth of that"
