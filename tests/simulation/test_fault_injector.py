"""Tests that the faults leave what the liveness phase needs: a node."""

from __future__ import annotations

import pytest

from tests.simulation.simulation import Simulation
from tests.simulation.world import Weather


@pytest.mark.parametrize("kind", ["trouble", "flutter"])
def test_the_last_node_stays_once_the_faults_are_over(kind: str) -> None:
    for seed in range(40):
        simulation = Simulation(seed)
        simulation.fault_injector.begin(until=0.0)
        for node in simulation.nodes:
            for _ in range(8):
                simulation.fault_injector.befall_node(node, kind)
        simulation.world.weather = Weather.calm()
        for node in simulation.nodes:
            node.start()
        simulation.world.run_until(20.0)
        assert any(node.alive for node in simulation.nodes), f"none in seed {seed}"
