"""What is true of every built-in strategy, over random groups."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sublet_leader.allocation import (
    AllocationInput,
    AllocationStrategy,
    EvenStrategy,
    StreamLoad,
    load_strategy,
    validate_plan,
)
from tests.property.sharing import NAMES, WEIGHTS, World, allocation_inputs, counts

pytestmark = pytest.mark.parametrize("strategy", [load_strategy("even"), load_strategy("load")], ids=["even", "load"])
EXAMPLES = settings(max_examples=60)
LOAD = StreamLoad(100.0, 0)


def leave(world: World, leaver: str) -> list[int]:
    """Have all streams of that member released; return them."""
    own = [stream for stream, who in world.held.items() if who == leaver]
    for stream_id in own:
        world.set_free(stream_id)
    return own


def settled(strategy: AllocationStrategy, streams: int, members: int) -> World:
    """So many streams that all cost the same, shared by so many equal members."""
    weights = dict.fromkeys(NAMES[:members], 1.0)
    world = World(strategy, {}, set(range(streams)), weights, dict.fromkeys(range(streams), LOAD))
    world.settle()
    return world


@pytest.mark.conforms("E18", "E19")
@EXAMPLES
@given(allocation_input=allocation_inputs())
def test_all_that_is_free_is_granted_once(strategy: AllocationStrategy, allocation_input: AllocationInput) -> None:
    """And only what may move is revoked."""
    plan = validate_plan(strategy.plan(allocation_input), allocation_input)
    assert [stream for stream, _ in plan.grants] == (
        sorted(allocation_input.free_streams) if allocation_input.weights else []
    )
    assert list(plan.revokes) == sorted(plan.revokes)
    assert all(allocation_input.holders[stream] in allocation_input.weights for stream in plan.revokes), (
        "a stranger's stream"
    )


@pytest.mark.conforms("E18")
@EXAMPLES
@given(allocation_input=allocation_inputs(), rng=st.randoms(use_true_random=False))
def test_the_order_of_the_arguments_does_not_matter(
    strategy: AllocationStrategy,
    allocation_input: AllocationInput,
    rng: st.randoms,  # type: ignore[valid-type]
) -> None:
    def mixed(mapping: dict) -> dict:  # type: ignore[type-arg]
        return dict(rng.sample(list(mapping.items()), len(mapping)))  # type: ignore[attr-defined]

    other = replace(
        allocation_input,
        holders=mixed(dict(allocation_input.holders)),
        free_streams=sorted(allocation_input.free_streams, reverse=True),
        weights=mixed(dict(allocation_input.weights)),
        loads=mixed(dict(allocation_input.loads)),
        last_holders=mixed(dict(allocation_input.last_holders)),
    )
    assert strategy.plan(other) == strategy.plan(allocation_input)


@pytest.mark.conforms("E18")
@EXAMPLES
@given(allocation_input=allocation_inputs())
def test_at_rest_nothing_moves(strategy: AllocationStrategy, allocation_input: AllocationInput) -> None:
    members = {stream: who for stream, who in allocation_input.holders.items() if who in allocation_input.weights}
    free, weights = set(allocation_input.free_streams), dict(allocation_input.weights)
    world = World(strategy, members, free, weights, dict(allocation_input.loads))
    world.settle()
    before = dict(world.held)
    assert not world.round()
    assert world.held == before


@pytest.mark.conforms("E18")
@EXAMPLES
@given(streams=st.integers(0, 60), members=st.integers(1, 7))
def test_one_join_moves_about_its_share(strategy: AllocationStrategy, streams: int, members: int) -> None:
    world = settled(strategy, streams, members)
    newcomer, share = NAMES[members], streams / (members + 1)
    before = world.moves()
    world.weights = {**world.weights, newcomer: 1.0}
    world.settle()
    moved = {stream for stream, times in world.moves().items() if times > before[stream]}
    assert all(world.moves()[stream] == before[stream] + 1 for stream in moved)
    assert {world.held[stream] for stream in moved} <= {newcomer}
    assert 0.75 * share - 1 <= len(moved) <= math.ceil(share)
    assert len(moved) >= (streams > members)


@pytest.mark.conforms("E18", "E20")
@EXAMPLES
@given(streams=st.integers(0, 60), members=st.integers(2, 8))
def test_one_leave_moves_only_what_the_leaver_held(strategy: AllocationStrategy, streams: int, members: int) -> None:
    world = settled(strategy, streams, members)
    leave(world, NAMES[0])
    world.weights = {name: 1.0 for name in world.weights if name != NAMES[0]}
    plan = world.round()
    assert not plan.revokes
    assert not world.free
    assert not world.round()


@pytest.mark.conforms("E19")
@settings(max_examples=20)
@given(streams=st.integers(0, 60), members=st.integers(1, 3))
def test_many_joins_move_each_stream_at_most_once(strategy: AllocationStrategy, streams: int, members: int) -> None:
    world = settled(strategy, streams, members)
    before = world.moves()
    world.weights = dict.fromkeys(NAMES, 1.0)
    world.settle()
    assert all(times <= before[stream] + 1 for stream, times in world.moves().items())
    level, mean = counts(world.held, world.weights).values(), streams / len(NAMES)
    assert 0.75 * mean - 1 <= min(level) <= max(level) <= 1.25 * mean + 1


@pytest.mark.conforms("E20")
@EXAMPLES
@given(streams=st.integers(0, 8), weights=st.lists(WEIGHTS, min_size=8, max_size=8))
def test_the_surplus_members_stand_by(strategy: AllocationStrategy, streams: int, weights: list[float]) -> None:
    members = dict(zip(NAMES, weights, strict=True))
    world = World(strategy, {}, set(range(streams)), members)
    world.settle()
    assert len(world.held) == streams
    if len(set(weights)) == 1:
        assert max(counts(world.held, members).values(), default=0) <= 1
    for leaver in sorted(set(world.held.values())):
        leave(world, leaver)
        del world.weights[leaver]
        plan = world.round()
        assert not world.free - set(plan.revokes) or not world.weights, "nobody took over"


@pytest.mark.conforms("E18")
@EXAMPLES
@given(streams=st.integers(0, 60), members=st.integers(1, 8))
def test_who_lost_its_streams_gets_them_back(strategy: AllocationStrategy, streams: int, members: int) -> None:
    world = settled(strategy, streams, members)
    own = leave(world, NAMES[0])
    world.round()
    back = sum(world.held[stream] == NAMES[0] for stream in own)
    assert back >= math.floor(len(own) * 2 / 3)
    if isinstance(strategy, EvenStrategy):
        assert back == len(own)
