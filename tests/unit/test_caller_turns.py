"""How callers share a node's event loop."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from sublet_protocol.domain.limits import MAX_CALLS_OF_PRINCIPAL, SLICE_ITEMS
from sublet_protocol.gate.caller_turns import CallerTurns, SlicedWork
from tests.kit import in_loop

pytestmark = pytest.mark.conforms("X4")

SLICES = 5


async def work(turns: CallerTurns, caller: str, done: list[tuple[str, int]], rounds: list[int], slices: int) -> None:
    async with SlicedWork(turns, caller) as turn:
        for _ in range(slices):
            done.append((caller, rounds[0]))
            await turn.spend(SLICE_ITEMS)


def run_work(*pieces: tuple[str, int]) -> list[tuple[str, int]]:
    """Return the caller and the loop's round of each slice, of pieces of work that begin together."""
    done: list[tuple[str, int]] = []

    async def run() -> None:
        rounds, loop = [0], asyncio.get_running_loop()

        def count() -> None:
            rounds[0] += 1
            loop.call_soon(count)

        count()
        turns = CallerTurns()
        await asyncio.gather(*(work(turns, caller, done, rounds, slices) for caller, slices in pieces))

    asyncio.run(run())
    return done


def test_the_turn_goes_round_by_caller() -> None:
    """However much one has sent, another's work is delayed by a slice of it."""
    done = [caller for caller, _ in run_work(*[("many", SLICES)] * 20, ("one", SLICES))]
    assert [place for place, caller in enumerate(done) if caller == "one"] == [2, 4, 6, 8, 10]
    assert len(done) == 21 * SLICES


def test_a_round_of_the_loop_has_one_slice() -> None:
    """Between two slices comes whatever else is ready: else a call that arrives waited for one of each sender."""
    rounds = [at for _, at in run_work(*[("many", SLICES)] * 20)]
    assert all(former < later for former, later in itertools.pairwise(rounds))


@pytest.mark.parametrize("is_given", [False, True])
@in_loop
async def test_a_turn_that_is_cancelled_passes_on(is_given: bool) -> None:
    """Before it is given, or between that and the caller's next step: else nobody had a turn any more."""
    turns = CallerTurns()
    await turns.acquire("one")
    cancelled = asyncio.create_task(turns.acquire("two"))
    last = asyncio.create_task(turns.acquire("three"))
    await asyncio.sleep(0)
    if not is_given:
        cancelled.cancel()
    turns.release()
    asyncio.get_running_loop().call_later(0.0, cancelled.cancel)
    await last


@in_loop
async def test_thousands_of_cancelled_turns_pass_on() -> None:
    """As where a client closes its connection with all its calls."""
    turns = CallerTurns()
    await turns.acquire("one")
    gone = [asyncio.create_task(turns.acquire("gone")) for _ in range(MAX_CALLS_OF_PRINCIPAL)]
    last = asyncio.create_task(turns.acquire("gone"))
    await asyncio.sleep(0)
    for each in gone:
        each.cancel()
    await asyncio.sleep(0)
    turns.release()
    await last
    turns.release()
    await turns.acquire("next")


@in_loop
async def test_work_cancelled_between_slices_gives_no_turn() -> None:
    """It has none while it waits for its next slice: else two worked at a time from then on."""
    turns, has_begun, is_over = CallerTurns(), asyncio.Event(), asyncio.Event()
    working = most = 0

    async def spend() -> None:
        async with SlicedWork(turns, "cancelled") as turn:
            await asyncio.sleep(0)  # until the others wait
            await turn.spend(SLICE_ITEMS)

    async def hold() -> None:
        nonlocal working, most
        async with SlicedWork(turns, "other"):
            working += 1
            most = max(most, working)
            has_begun.set()
            await is_over.wait()
            working -= 1

    cancelled, others = asyncio.create_task(spend()), [asyncio.create_task(hold()) for _ in range(2)]
    await asyncio.wait_for(has_begun.wait(), 10)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.0, is_over.set)
    await asyncio.wait_for(asyncio.gather(*others), 10)
    assert most == 1


@in_loop
async def test_who_waits_has_not_the_turn() -> None:
    turns, over = CallerTurns(), asyncio.Event()

    async def wait() -> None:
        async with SlicedWork(turns, "waiting") as turn:
            await turn.wait(over.wait())

    waiting = asyncio.create_task(wait())
    async with SlicedWork(turns, "other"):
        over.set()
    await waiting
