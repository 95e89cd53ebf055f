"""What people are shown of a table on terminals of any width."""

from __future__ import annotations

import io
import json
import logging
import re
import sys

import pytest

from sublet import cli
from sublet.cli.base.command import EscapingLogFormatter
from sublet.cli.base.output import MAX_FITTED_ROWS, MIN_WRAPPED_WIDTH, CliOutput
from sublet_protocol.domain.errors import SubletError, UsageError

COLUMNS = ("STREAM>", "POSITION>", "AT", "OWNER", "REASON")
ROW = (123456, 9876543210, "2026-11-22T21:50:03.818407Z", "host:7791:95479c576de2", "the session has left, and is back")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_numbers_and_times_fit_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    CliOutput(json=False).print_table(COLUMNS, [ROW])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    for entire in map(str, ROW[:3]):
        assert entire in shown, shown
    assert (ROW[4] in shown) is (width != 80), "it is broken where it has room at all"


@pytest.mark.parametrize("room", [0, -1])
def test_a_table_fits_a_terminal_of_its_width(
    room: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrapped has its least width then; in a narrower one nothing is wrapped."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(len("STREAM>") - 1 + 1 + MIN_WRAPPED_WIDTH + room))
    CliOutput(json=False).print_table(("STREAM>", "REASON"), [(123456, ROW[4])])
    assert (ROW[4] in capsys.readouterr().out) is (room < 0)


@pytest.mark.parametrize("more", [0, 1])
def test_a_table_of_many_rows_is_not_fitted(
    more: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    CliOutput(json=False).print_table(("STREAM>", "REASON"), [(1, ROW[4])] * (MAX_FITTED_ROWS + more))
    assert (ROW[4] in capsys.readouterr().out) is (more > 0)


def test_colours_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert CliOutput(json=False).is_coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert not CliOutput(json=False).is_coloured


@pytest.mark.parametrize("odd", ["\x9b2J", "\u202eabc", "\u2028", "\u2029", "\u200b", "\U000e0041", "\ud800", "\u2800"])
def test_what_moves_a_cursor_is_escaped(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Or turns a line around: in JSON and in tables alike."""
    text = f"ü☃{odd}"
    CliOutput(json=True).print_json({"subscription": text})
    CliOutput(json=False).print_table(("GROUP",), [(text,)])
    CliOutput(json=False).print_lines([text])
    CliOutput(json=False).print_info(text)
    reported = capsys.readouterr()
    shown = reported.out.replace("\n", "") + reported.err.replace("\n", "")
    assert shown.isprintable(), shown
    assert "\u2800" not in reported.out.partition("\n")[2] + reported.err
    assert "ü☃" in shown
    assert json.loads(reported.out.splitlines()[0]) == {"subscription": text}


def test_a_name_is_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    CliOutput(json=False).print_table(("GROUP",), [(":skull:",), (r"\[b",), ("a\\",)])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert [line.strip() for line in shown.splitlines()[1:]] == [":skull:", r"\[b", "a\\"]


def test_a_log_for_people_turns_no_line_around() -> None:
    record = logging.LogRecord(
        "leader", logging.WARNING, __file__, 1, "%s: two\nlines", ("$share/a\u202e\x1b[2J/#",), None
    )
    assert EscapingLogFormatter("%(levelname)s %(message)s").format(record) == (
        "WARNING $share/a\\u202e\\x1b[2J/#: two\nlines"
    )


class Terminal(io.StringIO):
    """A stdin that somebody types into."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("as_json", [True, False])
def test_who_sits_at_a_terminal_is_asked(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("y\nn\n"))
    CliOutput(as_json).confirm("Delete it?", "Nothing was deleted.")
    with pytest.raises(SubletError, match=r"Nothing was deleted\. Answer y, or give --yes\.") as refused:
        CliOutput(as_json).confirm("Delete it?", "Nothing was deleted.")
    assert refused.value.exit_code == 1
    assert capsys.readouterr().err == "Delete it? [y/N]\n" * 2


def test_who_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin in (None, io.StringIO("y\n")):
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(UsageError, match="Give --yes"):
            CliOutput(json=True).confirm("Delete it?", "Nothing was deleted.")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(SubletError, match="Nothing was deleted"):
        CliOutput(json=False).confirm("Delete it?", "Nothing was deleted.")


def test_only_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module of our own that is missing is a fault."""
    monkeypatch.setitem(sys.modules, "sublet.cli.app", None)
    with pytest.raises(ModuleNotFoundError, match=r"sublet\.cli\.app"):
        cli.main()
    assert capsys.readouterr().err == ""
