"""Functions of the database about epochs say what their twins in Python say, and take nothing that is none."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet_protocol.domain.epochs import Epoch, LowerFrontier, UpperFrontier
from sublet_storage.db.connect import connect

SMALL = st.integers(-2, 4)
EDGES = st.one_of(SMALL, st.sampled_from([-(2**63), 2**63 - 2]))


def epochs_of(dimensions: int) -> st.SearchStrategy[list[Epoch]]:
    return st.lists(st.tuples(*[EDGES] * dimensions), max_size=5)


PAIRS = st.integers(1, 3).flatmap(lambda dimensions: st.tuples(epochs_of(dimensions), epochs_of(dimensions)))


@pytest.fixture(scope="module")
def conn(shared_database: str) -> Any:
    with connect(shared_database) as connection:
        yield connection


@given(PAIRS)
def test_what_is_left_when_all_is_completed(
    conn: psycopg.Connection[Any], pair: tuple[list[Epoch], list[Epoch]]
) -> None:
    lower, begun = LowerFrontier.from_epochs(pair[0]), UpperFrontier.from_epochs(pair[1])
    asked = (json.dumps(lower.least), json.dumps(pair[1]))
    ((found,),) = conn.execute("select complete_epochs(%s, %s)", asked).fetchall()
    assert [tuple(epoch) for epoch in found] == list(lower.after_completing(begun).least)


@pytest.mark.conforms("X7")
@pytest.mark.parametrize(
    ("least", "lease_s", "producer"),
    [
        ("[]", 30, "p"),
        ("{}", 30, "p"),
        ("[[1], [1, 2]]", 30, "p"),
        ('[["1"]]', 30, "p"),
        ("[[9223372036854775807]]", 30, "p"),
        (None, 30, "p"),
        (json.dumps([[number] for number in range(1001)]), 30, "p"),
        ("[[1]]", 604_801, "p"),
        ("[[1]]", -1, "p"),
        ("[[1]]", float("nan"), "p"),
        ("[[1]]", 30, ""),
        ("[[1]]", 30, "p" * 513),
        ("[[1]]", 30, None),
    ],
    ids=range(13),
)
def test_no_frontier_is_set_to_what_is_none(
    conn: psycopg.Connection[Any], least: str | None, lease_s: float, producer: str | None
) -> None:
    before = conn.execute("select * from space").fetchall()
    with pytest.raises(psycopg.Error) as rejected:
        conn.execute("select hold_epochs(1, %s, 1, %s, %s)", (producer, least, lease_s))
    assert rejected.value.sqlstate == "SB002"
    assert conn.execute("select * from space").fetchall() == before
