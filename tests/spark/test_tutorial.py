"""The tutorial's commands do what it says, with fewer orders and shorter times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import kit_nodes
from tests.spark.stage import SPEED
from tools.tutorial import PAGE, tour

pytestmark = [pytest.mark.spark, pytest.mark.long]
ORDERS = 20_000


@pytest.mark.conforms("E26", "E27")
def test_the_tutorial_ends_with_every_order_there_once(server_home: Path) -> None:
    text = PAGE.read_text()
    assert text.count("30_000") == 1
    page, watch = tour(text.replace("30_000", f"{ORDERS}"), server_home, kit_nodes.environment(SPEED, {}))
    assert f"|{ORDERS}| {ORDERS}|" in page
    assert {who for _, _, holders in watch.samples for who in holders} >= {"one", "two", "reserved for one"}
    assert [words for _, words in watch.marks] == ["one is killed", "one is back"]
