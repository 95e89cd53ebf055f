"""What a publisher is made with: refused by name, with value, rule and a hint, before anything is opened."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sublet_protocol.domain.errors import InvalidSetting
from sublet_storage.producer import Publisher
from sublet_storage.producer.arguments import check_duration, check_int, check_producer_name

COMPLETE = ["block_messages", "block_bytes", "blocks_per_commit", "max_buffered_bytes", "max_message_bytes"]


@pytest.mark.parametrize("name", COMPLETE)
@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (0, "must be at least 1"),
        (-(10**30), "must be at least 1"),
        (10**30, "must be at most"),
        (None, "must be a whole number"),
        (1.5, "must be a whole number"),
        (math.inf, "must be a whole number"),
        (True, "must be a whole number"),
        ("10", "must be a whole number"),
    ],
    ids=repr,
)
def test_counts_and_sizes(name: str, value: Any, rule: str) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        Publisher("postgresql://nowhere", **{name: value})
    shown = str(refusal.value)
    assert shown.startswith(f"{name} {value!r}: {rule}")
    assert shown.endswith("Leave it out for the default.")


def test_the_least_and_the_most_are_taken() -> None:
    assert [check_int("block_messages", value, 5) for value in (1, 5)] == [1, 5]


@pytest.mark.parametrize("name", ["linger_ms", "delivery_timeout_s"])
@pytest.mark.parametrize("value", [-1, math.nan, -math.inf, None, "5", True, [5]], ids=repr)
def test_durations(name: str, value: Any) -> None:
    with pytest.raises(
        InvalidSetting, match=rf"^{name} .*: must be a number from 0 to .* Leave it out for the default"
    ):
        Publisher("postgresql://nowhere", **{name: value})


def test_only_retrying_may_last_for_ever() -> None:
    with pytest.raises(InvalidSetting, match="linger_ms inf: must be a number from 0 to 86400000"):
        Publisher("postgresql://nowhere", linger_ms=math.inf)
    assert check_duration("delivery_timeout_s", math.inf, math.inf) == math.inf


@pytest.mark.parametrize("value", ["", "a\0", "a\n", "\ud800", "x" * 256, "é" * 128, 5, b"a"], ids=ascii)
def test_producers(value: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"^producer .*: must be "):
        Publisher("postgresql://nowhere", producer=value)


@pytest.mark.parametrize("changes", [{"url": 5}, {"space": 5}, {"space": ["a"]}], ids=repr)
def test_what_is_no_text(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(InvalidSetting, match=rf"^{name} of type \w+: must be text"):
        Publisher(**{"url": "postgresql://nowhere", **changes})


def test_what_is_fit_is_taken() -> None:
    assert check_int("block_messages", np.int64(5)) == 5
    assert check_duration("linger_ms", 0, 10.0) == 0
    assert check_producer_name("Zähler 1") == "Zähler 1"
    assert check_producer_name(None) is None
