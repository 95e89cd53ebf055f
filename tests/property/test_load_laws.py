"""What is true of `load` alone: it comes to rest, measurements that tremble move nothing back, and its bounds hold."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_leader.allocation import AllocationInput, StreamLoad, compute_quotas, load_strategy
from tests.property.sharing import NAMES, ROUNDS, World, allocation_inputs, counts, jittered

LOAD = load_strategy("load")
TENTH = 10
_RATES: list[Callable[[random.Random], float]] = [
    lambda _: 100.0,
    lambda rng: 10 * rng.paretovariate(0.8),
    lambda rng: rng.expovariate(0.01),
    lambda _: 0.0,
]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw a group of members, with constant loads of every kind."""
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    members, streams = draw(st.integers(1, 8)), draw(st.integers(0, 40))
    rate = draw(st.sampled_from(_RATES))
    odd = draw(st.booleans())
    weights = {name: rng.choice([1.0, 1.0, 2.0, 0.1, 0.3, 7.5]) if odd else 1.0 for name in NAMES[:members]}
    load = {i: StreamLoad(rate(rng), rng.choice([-1, 0, 0, 500, 50_000])) for i in range(streams) if rng.random() < 0.9}
    start = draw(st.sampled_from([0.0, 0.8, 1.0]))
    held = {i: rng.choice(NAMES[:members]) for i in range(streams) if rng.random() < start}
    free = set(range(streams)) - held.keys()
    return World(LOAD, held, free, weights, load, follows_moves=draw(st.booleans()))


@pytest.mark.conforms("E18")
@settings(max_examples=80)
@given(worlds(), st.integers(0, 3))
def test_it_comes_to_rest_and_no_stream_comes_back(world: World, delay: int) -> None:
    quiet = 0
    for _ in range(ROUNDS):
        quiet = 0 if world.round(delay=delay) or world.moving or world.free else quiet + 1
        if quiet == 2:
            break
    assert quiet == 2, "streams still move"
    assert all(len(set(holders)) == len(holders) for holders in world.past.values()), "there and back"


@pytest.mark.conforms("E18")
@settings(max_examples=80)
@given(worlds(), st.integers(0, 3), st.integers(0, 1 << 32))
def test_measurements_that_tremble_move_no_stream_back(world: World, delay: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(80):
        world.round(jittered(world.load, rng), delay)
    assert all(len(set(holders)) == len(holders) for holders in world.past.values()), "there and back"


@pytest.mark.conforms("E18")
@settings(max_examples=60)
@given(allocation_inputs())
def test_few_streams_are_on_their_way_at_once(allocation_input: AllocationInput) -> None:
    members = sum(
        who in allocation_input.weights
        for s, who in allocation_input.holders.items()
        if s not in allocation_input.moving_streams
    )
    on_their_way = len(set(allocation_input.moving_streams))
    revokes = LOAD.plan(allocation_input).revokes
    assert not revokes or len(revokes) + on_their_way <= max(1, (members + on_their_way) // TENTH)


@pytest.mark.conforms("E18", "E20")
@settings(max_examples=60)
@given(worlds())
def test_at_rest_nobody_starves_and_nobody_hoards(world: World) -> None:
    world.settle()
    total, held = len(world.held), counts(world.held, world.weights)
    assert total < len(held) or min(held.values()) > 0
    bound = {name: 2 * share + 1 for name, share in compute_quotas(total, world.weights).items()}
    assert all(count <= bound[name] for name, count in held.items())


@pytest.mark.conforms("E18")
@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(4, 12), st.integers(0, 1 << 32))
def test_ordinary_loads_end_near_the_mean(members: int, each: int, seed: int) -> None:
    """Within a quarter of it and a stream."""
    rng = random.Random(seed)
    streams, names = members * each, NAMES[:members]
    load = {i: StreamLoad(rng.uniform(50, 150), 0) for i in range(streams)}
    start = {i: rng.choice(names[: rng.randint(1, members)]) for i in range(streams)}
    world = World(LOAD, start, set(), dict.fromkeys(names, 1.0), load)
    world.settle()
    level = dict.fromkeys(names, 0.0)
    for stream_id, borrower in world.held.items():
        level[borrower] += load[stream_id].bytes_per_s
    mean = sum(level.values()) / members
    assert max(level.values()) <= 1.25 * mean + 150
    assert min(level.values()) >= 0.75 * mean - 150


@pytest.mark.conforms("E18")
@settings(max_examples=40)
@given(st.integers(2, 8), st.integers(0, 60))
def test_where_no_load_is_known_it_goes_by_number(members: int, streams: int) -> None:
    world = World(LOAD, {}, set(range(streams)), dict.fromkeys(NAMES[:members], 1.0))
    world.round()
    held = counts(world.held, world.weights).values()
    assert max(held) - min(held) <= 1
