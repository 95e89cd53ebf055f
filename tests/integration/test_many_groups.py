"""Many groups, and many members of one: a node that leads forty groups is killed, a hundred consumers join at once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually
from tests.takeover import takeover

PROMISED_S = 60.0
"""After the end of the lease, by which every group is to be led again; in real seconds, though the lease is scaled."""

TRANSACTIONS = 60.0
"""Per group moved: many times what is needed, and a small part of what all asking all the time would be."""


@pytest.mark.conforms("E15", "E16")
@pytest.mark.long
def test_groups_of_a_killed_node_are_led_again(database: str, tmp_path: Path) -> None:
    found = takeover(database, tmp_path, speed=1.0)
    print(json.dumps(asdict(found)))  # noqa: T201 - for whoever wants to know
    assert found.moved >= found.groups / found.nodes
    assert found.led_s < found.lease_s + PROMISED_S
    assert found.per_group < TRANSACTIONS
    assert found.granted_anew == 0, "streams have changed hands, and messages may be seen twice"


@pytest.mark.conforms("E19", "E20")
@pytest.mark.long
def test_a_hundred_joins_move_each_stream_once(database: str, tmp_path: Path) -> None:
    stage = Stage(database, tmp_path)
    try:
        stage.serve("n1")
        stage.share("first")
        stage.fleet.subscriber("many", ALL, 100)
        owners = "select count(distinct borrower_id) from lending where status = 'held'"
        eventually(lambda: stage.scene.ask(owners) == [(16,)], WAIT_S, stage.said)
        granted = Counter(line.stream_id for line in stage.scene.history() if line.event == "grant")
        assert sorted(granted.values()) == [1] + [2] * 15
        assert not any(line.is_forced for line in stage.scene.history())
    finally:
        stage.close()
