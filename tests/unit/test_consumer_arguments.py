"""Which arguments of a consumer are accepted, and which do not go together; what is bad by itself comes elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from sublet_borrower.consumer.arguments import MAX_BATCH_BYTES, check_arguments
from sublet_borrower.consumer.runner import RetryPolicy
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.limits import MAX_ID_BYTES, MAX_WEIGHT, MIN_WEIGHT

LEAST: dict[str, Any] = {"weight": 1, "starting_position": "latest", "max_batch_bytes": 1}
AT_NODES: dict[str, Any] = {"transport": "nodes", "nodes": ["127.0.0.1:7411"]}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"weight": MIN_WEIGHT},
        {"weight": MAX_WEIGHT},
        {"max_batch_bytes": MAX_BATCH_BYTES},
        {"name": "n" * MAX_ID_BYTES},
        {"url": "postgresql://h/d"},
        {"data_dir": "/there"},
        AT_NODES,
    ],
    ids=str,
)
def test_what_is_just_within_bounds_is_accepted(given: dict[str, Any]) -> None:
    check_arguments(**{**LEAST, **given})


@pytest.mark.parametrize("location", ["url", "data_dir"])
def test_with_nodes_there_is_no_database(location: str) -> None:
    with pytest.raises(InvalidSetting, match=f"transport 'nodes' and {location}: one of them is enough"):
        check_arguments(**{**LEAST, **AT_NODES, location: "there"})


def test_one_try_and_equal_pauses_are_enough() -> None:
    for backoff_s in (0.0, 5.0):
        RetryPolicy(max_attempts=1, backoff_s=backoff_s, max_backoff_s=backoff_s)
