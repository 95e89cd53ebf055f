"""Strategies by name, those of others among them, and what a plan must not say."""

from __future__ import annotations

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
        (AllocationPlan(grants=((5, "a"), (5, "b"))), "stream 5 is granted twice"),
        (AllocationPlan(revokes=(5,)), "revokes stream 5, which is not held"),
        (AllocationPlan(revokes=(2,)), "revokes stream 2, which is not held, or is being revoked already"),
        (AllocationPlan(revokes=(3,)), "revokes stream 3, which may not move yet"),
        (AllocationPlan(revokes=(1, 1)), "stream 1 is revoked twice"),
        (None, "answered None: it must answer a Plan"),
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
