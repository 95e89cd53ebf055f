"""The tutorial's commands do what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import kit_nodes
from tests.spark.stage import SPEED
from tools.tutorial import PAGE, tour

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.mark.conforms("E26", "E27")
def test_the_tutorial_ends_with_every_order_there_once(server_home: Path) -> None:
    page, watch = tour(PAGE.read_text(), server_home, kit_nodes.environment(SPEED, {}))
    [orders] = re.findall(r"^(\d+) orders$", page, re.MULTILINE)
    assert re.search(rf"^\| *{orders}\| *{orders}\|", page, re.MULTILINE)
    assert {who for _, _, holders in watch.samples for who in holders} >= {"one", "two", "reserved for one"}
    assert [words for _, words in watch.marks] == ["one is killed", "one is back"]
