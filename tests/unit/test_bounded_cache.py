"""What a cache of texts keeps, and what it drops first."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.bounded_cache import BoundedCache

TEXTS = ["a", "bb", "a", "éc", "a", "bb"]


@pytest.mark.parametrize(
    ("max_entries", "max_bytes", "computed"),
    [
        (3, 99, ["a", "bb", "éc"]),
        (2, 99, ["a", "bb", "éc", "bb"]),
        (9, 6, ["a", "bb", "éc"]),
        (9, 5, ["a", "bb", "éc", "bb"]),
        (9, 0, TEXTS),
    ],
    ids=["entries fit", "an entry too many", "bytes fit", "a byte too many", "nothing fits"],
)
def test_the_one_used_longest_ago_is_dropped(max_entries: int, max_bytes: int, computed: list[str]) -> None:
    calls: list[str] = []

    def compute(text: str) -> str:
        calls.append(text)
        return text.upper()

    cache = BoundedCache(compute, max_entries, max_bytes)
    assert [cache.get(text) for text in TEXTS] == ["A", "BB", "A", "ÉC", "A", "BB"]
    assert calls == computed
