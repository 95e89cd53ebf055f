"""Numbers in the query of a request: both ends of their range are in it."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from sublet_leader.http.query_fields import read_integer
from sublet_protocol.domain.errors import UsageError


def limit_in(query: str) -> int:
    request = Request({"type": "http", "path": "/groups", "query_string": query.encode()})
    return read_integer(request, "limit", 50, 500)


@pytest.mark.parametrize(("query", "limit"), [("limit=0", 0), ("limit=500", 500), ("offset=7", 50)])
def test_a_number_in_its_range_is_taken(query: str, limit: int) -> None:
    assert limit_in(query) == limit


@pytest.mark.parametrize("value", ["-1", "501", "+1", "1.0", "", "\N{ARABIC-INDIC DIGIT THREE}", "0" * 20])
def test_another_value_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="a whole number from 0 to 500"):
        limit_in(f"limit={value}")
