"""What people are shown of a table on terminals of any width."""

from __future__ import annotations

import re

import pytest

from sublet.cli.output import Output

COLUMNS = ("STREAM>", "POSITION>", "AT", "OWNER", "REASON")
ROW = (123456, 9876543210, "2026-11-22T21:50:03.818407Z", "host:7791:95479c576de2", "the session has left, and is back")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_numbers_and_times_are_read_whole_however_narrow_the_terminal_is(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    Output(json=False).table(COLUMNS, [ROW])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    for whole in map(str, ROW[:3]):
        assert whole in shown, shown
    assert (ROW[4] in shown) is (width != 80), "it is broken where it has room at all"
