"""What the benches compute from what they measured, and where they write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench._footprint import footprint
from bench._report import SECTIONS, Beside, page, quantile, significant, table
from bench.handover import Move, moves_of
from bench.takeover import Kill, longest_pause
from sublet_storage.groups.model.records import HistoryRecord
from tests.kit_nodes import Delivered


def line(at_us: int, event: str, grant_id: int, stream: int = 1) -> HistoryRecord:
    return HistoryRecord(at_us, 1, stream, event, "", grant_id, None, None, 0, 1, is_forced=False)


def batch(at: float) -> Delivered:
    return Delivered("a", 1, 1, (), at)


def test_a_move_ends_with_the_next_message() -> None:
    history = [
        line(1, "grant", 5),
        line(10, "revoke", 5),
        line(11, "revoke", 50, stream=2),
        line(20, "release", 6),
        line(30, "grant", 7),
        line(40, "release", 8),  # its holder left: nothing was revoked
        line(50, "grant", 9),
        line(60, "revoke", 9),
        line(70, "force_release", 10),
        line(80, "grant", 11),
    ]
    first = {(1, 5): 2, (1, 7): 35, (1, 9): 55, (1, 11): 85, (2, 50): 3}
    assert moves_of(history, first) == [Move(10, 30, 35)]


def test_a_pause_is_between_two_batches() -> None:
    kill = Kill(at=10.0, claimed=18.5, progressed=19.0)
    assert longest_pause(kill, [batch(at) for at in (1.0, 9.5, 10.5, 14.0, 18.75, 19.25, 30.0)]) == 4.75
    assert longest_pause(kill, [batch(at) for at in (9.0, 20.0)]) == 11.0
    assert longest_pause(kill, []) == 9.0


def test_a_quantile_is_a_value_that_was_measured() -> None:
    assert [quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0.01, 0.5, 0.75, 0.99)] == [1.0, 2.0, 3.0, 4.0]
    assert quantile(range(1, 201), 0.99) == 198


@pytest.mark.parametrize(("value", "said"), [(0.012345, 0.0123), (1.2345, 1.23), (12.345, 12.3), (1234.5, 1234.0)])
def test_figures_have_three_digits_that_count(value: float, said: float) -> None:
    assert significant(value) == said


def test_a_figure_is_held_against_its_limit() -> None:
    said = table([Beside("one", 3.0, "ms", "peer", 2.0, 1.0), Beside("two", 1.0, "s", "peer", 2.0, 1.0)])
    assert "| one | 3 ms | peer | 2 ms | 1.5 | 1 | **missed** |\n| two | 1 s | peer | 2 s | 0.5 | 1 | holds |\n" in said
    assert Beside("three", 3.0, "ms", "peer", 2.0).judged()["holds"] is None


def test_a_section_replaces_itself_in_its_place(tmp_path: Path) -> None:
    file = tmp_path / "docs" / "bench.md"
    for name, section in (("node", "| old |"), ("log", "| log |\n\n| more |\n"), ("node", "| new |\n")):
        page(file, name, f"Prose of {name}.", section)
    _, log, node = file.read_text().split("\n## ")
    assert log == f"{SECTIONS['log']}\n\nProse of log.\n\n| log |\n\n| more |\n"
    assert node == f"{SECTIONS['node']}\n\nProse of node.\n\n| new |\n"


def test_a_footprint_counts_everything_once() -> None:
    shared = b"x" * 1000
    assert footprint([shared, shared]) < 1200
    assert footprint([shared, b"y" * 1000]) > 2000
    assert footprint(test_a_footprint_counts_everything_once) == 0
