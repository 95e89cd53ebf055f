"""Strategies by name, those of others among them, what a plan must not say, and what `load` plans."""

from __future__ import annotations

import math
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from sublet_leader.allocation import (
    ENTRY_POINTS,
    AllocationInput,
    AllocationPlan,
    EvenStrategy,
    LoadStrategy,
    StreamLoad,
    load_strategy,
    validate_plan,
)
from sublet_protocol.domain.errors import InvalidSetting, UsageError

PAGE = Path(__file__).parents[2] / "docs" / "allocation.md"
Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution where the interpreter looks: its name, its module's source, its entry points."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, source: str, entry_points: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{entry_points}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return put


def block(language: str) -> str:
    """The page's block in that language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_strategy_on_the_page_works(install: Install) -> None:
    ((name, value),) = tomllib.loads(block("toml"))["project"]["entry-points"][ENTRY_POINTS].items()
    module, _, _ = value.partition(":")
    with pytest.raises(InvalidSetting, match=name):
        load_strategy(name)
    install(module, block("python"), f"{name} = {value}")
    allocation_input = AllocationInput({1: "b"}, [2, 3, 4, 5, 6], {"b": 1.0, "a": 1.0})
    plan = validate_plan(load_strategy(name).plan(allocation_input), allocation_input)
    assert plan == AllocationPlan(grants=((2, "a"), (3, "a"), (4, "a"), (5, "b"), (6, "b")))
    assert load_strategy(name).plan(AllocationInput({1: "b"}, [2], {})) == AllocationPlan()


def test_an_unknown_name_is_refused(install: Install) -> None:
    install("acme_known", "class A: plan = print", "acme = acme_known:A")
    with pytest.raises(InvalidSetting, match=r"'eevn' is not known: there are acme, even, load\..*sublet.allocation"):
        load_strategy("eevn")


def test_the_built_in_names_cannot_be_taken(install: Install) -> None:
    install("acme_thief", "class A: plan = print", "even = acme_thief:A")
    assert isinstance(load_strategy("even"), EvenStrategy)
    assert isinstance(load_strategy("load"), LoadStrategy)


def test_two_that_claim_one_name_are_both_named(install: Install) -> None:
    install("acme_one", "class A: plan = print", "acme = acme_one:A")
    install("acme_two", "class A: plan = print", "acme = acme_two:A")
    with pytest.raises(InvalidSetting, match=r"acme_one 1\.2, acme_two 1\.2: uninstall all but one"):
        load_strategy("acme")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('no disk')", "cannot be loaded: OSError: no disk"),
        ("B = 1", "cannot be loaded: AttributeError"),
        ("def A(): raise ValueError('no such thing')", "cannot be loaded: ValueError: no such thing"),
        ("class A: pass", "has no method `plan"),
    ],
)
def test_a_broken_strategy_is_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.delitem(sys.modules, "acme_broken", raising=False)
    install("acme_broken", source, "broken = acme_broken:A")
    with pytest.raises(InvalidSetting, match=rf"'broken' \(acme_broken:A, brought by acme_broken 1\.2\) .*{said}"):
        load_strategy("broken")


SITUATION = AllocationInput({1: "a", 2: "a", 3: "a", 4: "away"}, [5, 6], {"a": 1.0, "b": 1.0}, [1, 2], [2])


@pytest.mark.parametrize(
    "plan",
    [
        AllocationPlan(),
        AllocationPlan(grants=((6, "b"), (5, "b"))),
        AllocationPlan(revokes=(1,)),
        AllocationPlan(grants=((5, "a"),), revokes=(1,)),
        AllocationPlan(revokes=(1,), moves=((2, "a"), (1, "b"))),
    ],
)
def test_a_plan_that_can_be_carried_out_is_let_through(plan: AllocationPlan) -> None:
    assert validate_plan(plan, SITUATION) is plan


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (AllocationPlan(grants=((1, "b"),)), "grants stream 1, which is not free"),
        (AllocationPlan(grants=((7, "b"),)), "grants stream 7, which is not free"),
        (AllocationPlan(grants=((5, "away"),)), "grants stream 5 to 'away', who is no member"),
        (AllocationPlan(grants=((5, "a"), (5, "b"))), "grants stream 5 twice"),
        (AllocationPlan(moves=((1, "b"),)), "moves stream 1, which is not being revoked"),
        (AllocationPlan(revokes=(1,), moves=((1, "away"),)), "moves stream 1 to 'away', who is no member"),
        (AllocationPlan(moves=((2, "a"), (2, "b"))), "moves stream 2 twice"),
        (AllocationPlan(revokes=(5,)), "revokes stream 5, which is not held"),
        (AllocationPlan(revokes=(2,)), "revokes stream 2, which is not held, or is being revoked already"),
        (AllocationPlan(revokes=(3,)), "revokes stream 3, which may not move yet"),
        (AllocationPlan(revokes=(1, 1)), "revokes stream 1 twice"),
        (None, "answered None: it must answer an AllocationPlan"),
    ],
)
def test_a_plan_that_cannot_be_done_is_refused(plan: AllocationPlan, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        validate_plan(plan, SITUATION)


def test_what_a_strategy_learns_of_the_holders() -> None:
    assert SITUATION.streams_by_member() == {"a": [1, 3], "b": []}
    assert [stream for stream in (1, 2, 3, 4) if stream in SITUATION.revocable_streams()] == [1, 2]
    assert 3 in AllocationInput({3: "a"}, (), {"a": 1.0}).revocable_streams()
    assert StreamLoad(1.0).lag < 0


# --- load by example; its laws are in tests/property/test_load_laws.py ------------------------------------------------


PAIR = {"a": 1.0, "b": 1.0}


def plan(
    held: dict[int, str],
    free: list[int],
    rates: dict[int, float],
    weights: dict[str, float] | None = None,
    last: dict[int, str] | None = None,
) -> AllocationPlan:
    """The plan where streams have these bytes per second, and are not behind."""
    load = {stream: StreamLoad(rate, 0) for stream, rate in rates.items()}
    return LoadStrategy().plan(AllocationInput(held, free, weights or PAIR, last_holders=last or {}, loads=load))


def test_the_heaviest_streams_are_dealt_first() -> None:
    rates = {1: 10.0, 2: 20.0, 3: 30.0, 4: 60.0}
    assert plan({}, [1, 2, 3, 4], rates).grants == ((1, "b"), (2, "b"), (3, "b"), (4, "a"))


def test_a_heavier_member_gets_more() -> None:
    plans = plan({}, list(range(9)), dict.fromkeys(range(9), 100.0), {"a": 1.0, "b": 2.0})
    assert [who for _, who in plans.grants].count("b") == 6


@pytest.mark.conforms("E18")
def test_the_full_give_until_all_are_about_even() -> None:
    held = dict.fromkeys(range(4), "a") | {4: "b"}
    rates = {0: 100.0, 1: 100.0, 2: 100.0, 3: 300.0, 4: 20.0}
    assert plan(held, [], rates) == AllocationPlan(revokes=(3,), moves=((3, "b"),))
    assert plan({0: "a", 1: "a", 2: "b"}, [], {0: 100.0, 1: 100.0, 2: 1.0}).revokes == (1,)


@pytest.mark.conforms("E18")
def test_within_a_quarter_of_the_mean_nothing_moves() -> None:
    held = dict.fromkeys(range(6), "a") | dict.fromkeys(range(6, 10), "b")
    assert not plan(held, [], dict.fromkeys(range(10), 100.0))
    assert plan(held | {6: "a"}, [], dict.fromkeys(range(10), 100.0)).revokes


def test_one_heavy_stream_and_its_neighbour_stay() -> None:
    held = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert not plan(held, [], {0: 1000.0, 1: 1.0, 2: 10.0, 3: 10.0})


def test_a_stream_taken_is_not_given_back() -> None:
    held = {0: "a", 1: "a", 2: "b"}
    rates = {0: 100.0, 1: 100.0, 2: 110.0, 3: 100.0}
    # It would fit either nearly as well: "b" has a tenth more than half of "a".
    assert plan({0: "a", 2: "b"}, [3], rates, last={3: "a"}).grants == ((3, "b"),)
    assert plan({0: "a", 2: "b"}, [3], rates).grants == ((3, "a"),)
    assert plan(held, [3], rates, last={3: "a"}).grants == ((3, "b"),)


def test_the_last_holder_gets_it_back_if_it_fits() -> None:
    held = dict.fromkeys(range(6), "a") | dict.fromkeys(range(6, 12), "b") | {12: "c", 13: "d"}
    rates, members = dict.fromkeys(range(16), 100.0), {**PAIR, "c": 1.0, "d": 1.0}
    assert plan(held, [14], rates, members).grants == ((14, "c"),)
    assert plan(held, [14], rates, members, last={14: "d"}).grants == ((14, "d"),)
    assert plan(held, [14], rates, members, last={14: "a"}).grants == ((14, "c"),)
    assert plan(held, [14, 15], rates, members, last={14: "d", 15: "gone"}).grants == ((14, "d"), (15, "c"))


@pytest.mark.conforms("E20")
def test_nobody_holds_nothing_while_another_holds_two() -> None:
    assert plan({0: "a", 1: "a"}, [], {0: 1.0, 1: 1000.0}).revokes
    assert plan({}, [0, 1], {0: 1.0, 1: 1.0}, {"a": 100.0, "b": 1.0}).grants == ((0, "a"), (1, "b"))
    assert not plan({0: "a"}, [], {0: 1.0})


@pytest.mark.conforms("E20")
def test_nobody_gives_its_only_stream() -> None:
    """Also where it is the one with the highest load."""
    members, light = dict.fromkeys("abcd", 1.0), range(2, 30)
    rates = {0: 1000.0, 1: 1.0, **dict.fromkeys(light, 1.0)}
    for held in ({0: "a"}, {0: "a", 1: "a"}):
        revokes = plan(held | dict.fromkeys(light, "b"), [], rates, members).revokes
        assert len(revokes) >= 2
        assert 0 not in revokes


def test_a_light_member_keeps_its_last_stream() -> None:
    held, weights = {0: "a", 1: "a"} | dict.fromkeys(range(2, 20), "b"), {"a": 0.1, "b": 10.0}
    assert plan(held, [], dict.fromkeys(held, 100.0), weights).revokes == (1,)


def test_no_more_is_given_than_is_too_much() -> None:
    """Of 20 streams each of four members may hold 11."""
    held = dict.fromkeys(range(12), "a") | dict(zip(range(12, 20), "bbbcccdd", strict=True))
    rates = dict.fromkeys(range(12), 10.0) | dict.fromkeys(range(12, 20), 60.0)
    assert plan(held, [], rates, dict.fromkeys("abcd", 1.0)).revokes == (11,)


def test_one_that_is_behind_counts_for_more() -> None:
    load = {0: StreamLoad(100.0, 1_000_000), 1: StreamLoad(100.0, 0), 2: StreamLoad(100.0, 0)}
    grants = LoadStrategy().plan(AllocationInput({}, [0, 1, 2], PAIR, loads=load)).grants
    assert grants == ((0, "a"), (1, "b"), (2, "b"))


def test_what_is_not_known_counts_as_the_mean() -> None:
    rates = {0: 100.0, 1: 300.0}
    assert plan({0: "a", 1: "b"}, [2], rates).grants == ((2, "a"),)
    assert plan({}, [0, 1, 2], rates).grants == ((0, "b"), (1, "a"), (2, "b"))


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_a_figure_that_cannot_be_counts_as_not_known(rate: float) -> None:
    assert plan({}, [0, 1, 2], {0: 100.0, 1: 300.0, 2: rate}) == plan({}, [0, 1, 2], {0: 100.0, 1: 300.0})


LIGHT_AND_FULL = "aaaaaaaaabc."  # a holds nine light streams, and may hold no more


@pytest.mark.conforms("E18")
@pytest.mark.parametrize(
    ("holders", "rates", "weights", "last", "grants", "moves"),
    [
        ("...ab.", [], {}, {0: "a", 2: "a"}, {0: "a", 1: "b", 2: "b", 5: "a"}, {}),
        ("a.aa...a", [], {"b": 1}, {1: "b", 6: "b"}, {1: "b", 4: "b", 5: "b", 6: "b"}, {}),
        (LIGHT_AND_FULL, [0] * 9 + [6000, 6000, 0], {}, {}, {11: "b"}, {}),
        (LIGHT_AND_FULL, [0] * 9 + [6000, 6000, 0], {}, {11: "a"}, {11: "b"}, {}),
        ("aa.bbba", [0, 0, 1800, 0, 3400, 1800, 0], {"b": 4}, {2: "a"}, {2: "b"}, {}),
        ("aabaabab", [], {}, {}, {}, {}),
        ("ddddddddd" + "aabbbb" + "c", [0] * 9 + [800, 4500, 0, 0, 0, 3000, 7700], {}, {}, {}, {}),
        ("aab", [1100, 1200, 700], {}, {}, {}, {0: "b"}),
        ("aab", [2150, 150, 700], {}, {}, {}, {1: "b"}),
        ("a" * 7 + "b" * 17 + "c" * 16, [1000] * 7 + [0] * 33, {"a": 3}, {}, {}, {6: "c"}),
        ("bab", [800, 900, 1300], {"c": 1}, {}, {}, {2: "c"}),
        ("aa", [0, 2000], {"b": 1, "c": 1}, {}, {}, {}),
        ("a" * 20, [20_000] + [0] * 19, {"b": 1}, {}, {}, {19: "b"}),
        ("aaa", [], {"b": 1, "c": 1}, {}, {}, {2: "b"}),
        ("aaa" + "b" * 10 + "c" * 8, [], {}, {}, {}, {12: "a", 20: "a"}),
        ("acc" + "b" * 17, [1000, 1660, 1440, 7900] + [500] * 16, {"b": 8}, {}, {}, {1: "b"}),
    ],
    ids=[
        "two thirds of the mean",
        "a fifth below all others",
        "twice the share and one",
        "the same at home",
        "the other has no room",
        "a quarter below",
        "a quarter above",
        "a fifth below the giver",
        "a tenth of the load",
        "room for one more",
        "two streams",
        "fewer than members",
        "one idle member",
        "one move at once",
        "down to the mean",
        "who was at the mean gives nothing",
    ],
)
def test_each_bound_holds_at_the_bound(
    holders: str,
    rates: list[float],
    weights: dict[str, float],
    last: dict[int, str],
    grants: dict[int, str],
    moves: dict[int, str],
) -> None:
    """`holders`: of stream 0 and so on, a dot where it is free. The costs of most are round numbers."""
    held = {stream: name for stream, name in enumerate(holders) if name != "."}
    free = [stream for stream, name in enumerate(holders) if name == "."]
    members = dict.fromkeys(held.values(), 1.0) | weights
    expected = AllocationPlan(tuple(grants.items()), tuple(moves), tuple(moves.items()))
    assert plan(held, free, dict(enumerate(rates)), members, last) == expected


def test_extreme_weights_are_only_weights() -> None:
    grants = plan({}, list(range(10)), {}, {"a": 5e-324, "b": 1.7e308, "c": 1.7e308}).grants
    counts = {name: sum(who == name for _, who in grants) for name in "abc"}
    assert counts == {"a": 1, "b": 5, "c": 4}
