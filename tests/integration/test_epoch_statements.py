"""Functions of the database about epochs say what their twins in Python say, and take nothing that is none."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, UpperFrontier
from sublet_protocol.domain.limits import MAX_ANTICHAIN
from sublet_storage.db.connect import connect
from tests.integration.log_kit import Connection

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
def test_what_is_left_when_all_is_completed(conn: Connection, pair: tuple[list[Epoch], list[Epoch]]) -> None:
    lower, begun = LowerFrontier.from_epochs(pair[0]), UpperFrontier.from_epochs(pair[1])
    asked = (json.dumps(lower.least), json.dumps(pair[1]))
    ((found,),) = conn.execute("select complete_epochs(%s, %s)", asked).fetchall()
    assert [tuple(epoch) for epoch in found] == list(lower.after_completing(begun).least)


def test_nothing_comes_after_the_largest_number(conn: Connection) -> None:
    """Which is in no epoch of a publisher's."""
    ((found,),) = conn.execute("select complete_epochs('[[5, 5]]', '[[9223372036854775807, 7]]')").fetchall()
    assert found == [[5, 8]]
    ((found,),) = conn.execute("select complete_epochs('[[5, 5]]', '[[9223372036854775806, 7]]')").fetchall()
    assert found == [[5, 8], [9223372036854775807, 5]]


@pytest.mark.parametrize("dimensions", [1, 2, 8])
def test_one_epoch_is_before_another_by_each_number(conn: Connection, dimensions: int) -> None:
    asked = "select epoch_at_or_before(%s, %s), numbers_at_or_before(%s, %s)"
    for changed in range(dimensions):
        for number in (0, 1, 2):
            one, other = [1] * dimensions, [1 if each != changed else number for each in range(dimensions)]
            both = conn.execute(asked, (json.dumps(one), json.dumps(other), one, other)).fetchone()
            assert both == (number >= 1, number >= 1), (changed, number)


MANY = [(number, -number) for number in range(MAX_ANTICHAIN + 1)]


@pytest.mark.parametrize(
    ("lower", "begun"),
    [
        ([(0, -MAX_ANTICHAIN)], MANY[:-2]),
        ([(0, -MAX_ANTICHAIN)], MANY[:-1]),
        (MANY[:-1], [(x, y + 1) for x, y in MANY[1:-1]]),
        (MANY[:-1], [(x + 1, y + 1) for x, y in MANY[:-1:2]]),
        ([(0, 0, 0)], [(x, y, 20 - x - y) for x in range(20) for y in range(20 - x)]),
    ],
    ids=range(5),
)
def test_so_many_are_left_when_all_is_completed(conn: Connection, lower: list[Epoch], begun: list[Epoch]) -> None:
    asked = (json.dumps(lower), json.dumps(begun))
    ((found,),) = conn.execute("select complete_epochs(%s, %s)", asked).fetchall()
    left = LowerFrontier(tuple(tuple(epoch) for epoch in found))
    assert left == LowerFrontier.from_epochs(lower).after_completing(UpperFrontier.from_epochs(begun))
    assert 0 < len(left.least) <= MAX_ANTICHAIN
    assert not any(map(left.admits, begun))
    assert LowerFrontier.from_epochs(lower).is_at_or_before(left)


@pytest.mark.parametrize("count", [MAX_ANTICHAIN, MAX_ANTICHAIN + 1])
def test_so_many_greatest_epochs_are_stored(conn: Connection, count: int) -> None:
    asked = (json.dumps(MANY[: count // 2]), json.dumps(MANY[count // 2 : count]))
    ((found,),) = conn.execute("select merge_upper_frontier(%s, %s)", asked).fetchall()
    assert UpperFrontier(tuple(map(tuple, found))) == UpperFrontier.from_epochs(MANY[:count])
    assert len(found) == (count if count <= MAX_ANTICHAIN else 1)


@pytest.mark.parametrize(("count", "found"), [(4000, [[0, 9000], [9000, 0]]), (4001, [[9000, 9000]])])
def test_among_so_many_the_greatest_are_found(conn: Connection, count: int, found: list[list[int]]) -> None:
    """Among more their bound is taken, also where few are greatest."""
    every = json.dumps([[0, 9000], [9000, 0], *([number, -1] for number in range(count - 2))])
    assert conn.execute("select merge_upper_frontier('[]', %s)", (every,)).fetchone() == (found,)


DOUBT = {"grant_id": 1, "start": 0, "end": 1, "hold_s": 0.5, "consumed": None}


@pytest.mark.conforms("X7")
@pytest.mark.parametrize(
    ("function", "value", "is_valid"),
    [
        *(("is_consumed_frontier", {"upto": 4, "least": least}, True) for least in (None, [], [[5]], [[1, 2], [2, 1]])),
        ("is_consumed_frontier", {"upto": 4, "least": [[5]], "more": 1}, False),
        ("is_consumed_frontier", {"upto": 4.5, "least": None}, False),
        ("is_consumed_frontier", {"upto": 4, "least": [[1.5]]}, False),
        ("is_consumed_frontier", {"upto": 2**63, "least": None}, False),
        ("is_consumed_frontier", {"upto": 4, "least": [[5], [5, 5]]}, False),
        ("is_consumed_frontier", {"upto": 4}, False),
        ("is_consumed_frontier", [], False),
        ("is_range_in_doubt", DOUBT, True),
        ("is_range_in_doubt", {**DOUBT, "start": 1}, True),
        ("is_range_in_doubt", {**DOUBT, "start": 2}, False),
        ("is_range_in_doubt", {**DOUBT, "end": 1.5}, False),
        ("is_range_in_doubt", {**DOUBT, "more": 1}, False),
        ("is_range_in_doubt", {**DOUBT, "hold_s": 86_401}, False),
        ("is_range_in_doubt", {name: DOUBT[name] for name in ("grant_id", "start", "end", "hold_s")}, False),
        ("is_range_in_doubt", [], False),
        ("are_epochs", [[5, -6]], True),
        ("are_epochs", [[5.0]], False),
    ],
    ids=range(21),
)
def test_what_a_row_stores_is_of_this_form(conn: Connection, function: str, value: Any, is_valid: bool) -> None:
    assert conn.execute(f"select {function}(%s)".encode(), (json.dumps(value),)).fetchone() == (is_valid,)


@given(PAIRS)
def test_the_least_and_the_greatest(conn: Connection, pair: tuple[list[Epoch], list[Epoch]]) -> None:
    """And whether one list is admitted, or covered, by the other."""
    one, other = map(json.dumps, pair)
    ((least, greatest, admits, covered),) = conn.execute(
        "select least_epochs(%(one)s), merge_upper_frontier(%(one)s, %(other)s),"
        " admits_all(%(one)s, %(other)s), is_covered(%(other)s, %(one)s)",
        {"one": one, "other": other},
    ).fetchall()
    lower, upper = LowerFrontier.from_epochs(pair[0]), UpperFrontier.from_epochs(pair[0])
    assert LowerFrontier(tuple(map(tuple, least or ()))) == lower
    assert UpperFrontier(tuple(map(tuple, greatest or ()))) == UpperFrontier.from_epochs(pair[0] + pair[1])
    assert (admits, covered) == (all(map(lower.admits, pair[1])), all(map(upper.covers, pair[1])))


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
    conn: Connection, least: str | None, lease_s: float, producer: str | None
) -> None:
    before = conn.execute("select * from space").fetchall()
    with pytest.raises(psycopg.Error) as rejected:
        conn.execute("select hold_epochs(1, %s, 1, %s, %s)", (producer, least, lease_s))
    assert rejected.value.sqlstate == "SB002"
    assert conn.execute("select * from space").fetchall() == before
