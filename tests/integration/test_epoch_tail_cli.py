"""`sublet tail --epochs`: a real process, a real database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sublet_storage.producer import Publisher
from tests.integration.cli_kit import Shell


@pytest.fixture
def publisher(database: str) -> Iterator[Publisher]:
    """It has completed 0, 1 and 2, and begun 3 and 5."""
    with Publisher(database, space="default") as publisher:
        for epoch in (0, 3, 5):
            publisher.in_epoch(epoch).publish("t", b"%d" % epoch)
        publisher.advance(3)
        yield publisher


@pytest.mark.conforms("S1", "S2", "A9")
def test_live_it_shows_entire_epochs_and_frontiers(shell: Shell, publisher: Publisher) -> None:
    live = shell.start("tail", "#", "--epochs", "--max-messages", "1", "--json")
    live.says('{"snapshot":{"lower":[[3]],"upper":[[5]]}}')
    publisher.in_epoch(4).publish("t", b"4")
    publisher.advance(5)
    live.says('{"lower":[[5]]}')
    publisher.in_epoch(6).publish("t", b"6")
    answer = live.end()
    assert answer.code == 0, answer.err
    assert [row.get("value") for row in answer.lines] == [None, None, "6"]


@pytest.mark.conforms("S7", "A9")
def test_from_history_it_ends_where_the_log_ends(shell: Shell, publisher: Publisher) -> None:
    publisher.flush()
    answer = shell.run("tail", "#", "--epochs", "--from", "active", "--no-follow", "--json")
    assert answer.code == 0, answer.err
    assert "snapshot" in answer.lines[0]
    assert sorted(row["value"] for row in answer.lines if "value" in row) == ["3", "5"]
    assert not [row for row in answer.lines if "lower" in row]


@pytest.mark.usefixtures("publisher")
def test_for_people_it_shows_what_is_completed(shell: Shell) -> None:
    answer = shell.run("tail", "#", "--epochs", "--from", "earliest", "--no-follow")
    lines = answer.out.splitlines()
    assert (lines[0], lines[-1]) == ("snapshot\tfrom any\tbegun 5", "completed\tbefore 3")
    assert sorted(lines[1:-1]) == ["t\t\t0", "t\t\t3", "t\t\t5"]
    assert shell.run("tail", "#", "--epochs", "--no-follow").out == "snapshot\tfrom 3\tbegun 5\n"


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--epochs", "--node", "127.0.0.1:1"], "--epochs and --node: nodes do not serve epochs yet"),
        (["--epochs", "--from", "15m"], "--from '15m': with --epochs, give latest, active, earliest"),
        (["--from", "active"], "--from 'active': is for whole epochs. Add --epochs"),
    ],
)
def test_what_does_not_go_together_is_refused(shell: Shell, arguments: list[str], reported: str) -> None:
    answer = shell.run("tail", "#", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert reported in answer.err
