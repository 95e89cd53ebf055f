"""The way to Postgres is cut, frozen and slowed: of a leader, of a consumer, of all at once.

Whoever cannot reach it waits; whoever can goes on. Afterwards nothing is lost, and what was done twice is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.sharing_kit import ALL, LEADER, Stage, last
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED
from tests.postgres_proxy import PostgresProxy

ROUND_TRIP_S = 0.2 / SPEED


@pytest.fixture
def network() -> Iterator[ExitStack]:
    """Whatever proxies a test puts between."""
    with ExitStack() as opened:
        yield opened


@pytest.mark.conforms("E13", "E15", "E16")
@pytest.mark.long
def test_a_leader_cut_off_costs_consumers_nothing(stage: Stage, network: ExitStack) -> None:
    paths = {name: network.enter_context(PostgresProxy(stage.scene.url)) for name in ("n1", "n2")}
    for name, way in paths.items():
        stage.serve(name, url=way.url)
    stage.share("a", "b")
    granted = stage.scene.grants()
    with stage.scene.load():
        paths[stage.scene.claim().node.name].hang_up()
        stage.more()
        for trouble in (PostgresProxy.go_away, PostgresProxy.hold):
            before = stage.scene.claim()
            way = paths[before.node.name]
            trouble(way)
            stage.next_leader(before)
            stage.more()
            way.resume()
            stage.more()
        paths[stage.scene.claim().node.name].slow(ROUND_TRIP_S)
        stage.more(40)
    assert stage.verdict().explained == []
    assert stage.scene.grants() == granted, "a stream has changed hands"
    stage.written_by_one_at_a_time()


@pytest.mark.conforms("E17", "E28")
@pytest.mark.long
def test_a_consumer_cut_off_keeps_its_streams(stage: Stage, network: ExitStack) -> None:
    way = network.enter_context(PostgresProxy(stage.scene.url))
    stage.serve("n1")
    stage.fleet.consumer("a", ALL, 0.01, way.url)
    stage.share("b")
    granted = stage.scene.grants()
    with stage.scene.load():
        stage.more(of="a")
        way.hang_up()
        stage.more(of="a")
        for trouble in (PostgresProxy.go_away, PostgresProxy.hold):
            trouble(way)
            last(1.2 * LEADER.eviction_timeout_s)
            stage.more(of="b")
            way.resume()
            stage.more(of="a")
        way.slow(ROUND_TRIP_S)
        stage.more(40, of="a")
        way.slow(0.0)
    assert stage.verdict().explained == []
    assert stage.scene.grants() == granted, "a stream has changed hands"


@pytest.mark.long
@pytest.mark.conforms("E12", "E13", "E17")
def test_all_wait_for_the_database_and_go_on(stage: Stage, network: ExitStack) -> None:
    way = network.enter_context(PostgresProxy(stage.scene.url))
    stage.serve("n1", "n2", url=way.url)
    stage.share("a", "b", url=way.url)
    with stage.scene.load(way.url):
        stage.more()
        way.hang_up()
        stage.more()
        for trouble in (PostgresProxy.go_away, PostgresProxy.hold):
            trouble(way)
            eventually(lambda: stage.scene.claim().remaining_s < 0, WAIT_S, stage.said)
            last(LEADER.reclaim_grace_s)
            way.resume()
            stage.more()
        way.slow(ROUND_TRIP_S)
        stage.more(40)
        way.slow(0.0)
    stage.verdict()
    stage.written_by_one_at_a_time()


@pytest.mark.conforms("E16")
@pytest.mark.long
def test_a_node_ends_though_the_database_is_silent(stage: Stage, network: ExitStack) -> None:
    way = network.enter_context(PostgresProxy(stage.scene.url))
    stage.serve("n1", url=way.url)
    stage.share("a")
    way.hold()
    assert stage.fleet.nodes["n1"].stop(25.0) == 0
