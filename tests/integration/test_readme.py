"""The README's first program, as printed, also beside a user's files; and docs/operations.md, command by command."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sublet._version import __version__
from tests.integration.cli_kit import QUICK, Shell
from tests.integration.test_cli import COMMANDS
from tests.kit import eventually
from tests.readme import ROOT, environment, programs
from tools import transcripts

GROUP = "$share/billing/orders/#"


@pytest.mark.conforms("E1")
def test_the_first_program_does_what_is_written(database: str, shell: Shell, tmp_path: Path) -> None:
    """It prints what it published, and hands over on Ctrl-C."""
    program, _ = programs()
    (tmp_path / "first.py").write_text(program)
    shell.leader("n1")
    with (tmp_path / "out").open("w") as out:
        with subprocess.Popen(
            [sys.executable, "first.py"],
            cwd=tmp_path,
            env=environment(database) | QUICK,
            stdout=out,
            stderr=subprocess.STDOUT,
        ) as running:
            eventually(lambda: "'value': b'{\"id\": 1}'" in said(tmp_path), 40, lambda: said(tmp_path))
            eventually(lambda: lag(shell) == 0, 20)
            running.send_signal(signal.SIGINT)
            running.wait(30)
        assert said(tmp_path).count("customer-7") == 1
        group = shell.run("groups", "describe", GROUP, "--json").object
        assert (group["streams_by_status"], group["lag"]) == ({"free": 16}, 0)


def said(directory: Path) -> str:
    return (directory / "out").read_text()


def lag(shell: Shell) -> int:
    return int(shell.run("groups", "describe", GROUP, "--json").object["lag"])


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        group, _, name = command.rpartition(" ")
        lines = [line for line in text.splitlines() if line.startswith(f"| `sublet {group or name}")]
        assert any(f"`{name}`" in line or f"sublet {command}" in line for line in lines), command


def test_the_version_is_said(shell: Shell) -> None:
    answer = shell.run("--version")
    assert (answer.code, answer.out) == (0, f"sublet {__version__}\n")


NAMES = ("storage", "protocol", "leader", "borrower", "tests", "tools", "bench", "migrations")

PROGRAM = """
from sublet import Publisher, Session

with Publisher() as publisher:
    publisher.publish("orders/eu", b"mine")
with Session("$share/billing/orders/#", starting_position="earliest") as session:
    for batch in session:
        print(batch.table.column("value").to_pylist())
        break

import borrower, leader, protocol, storage, tests

print({module.MINE for module in (borrower, leader, protocol, storage, tests)})
"""


def write_user_files(directory: Path) -> None:
    """Modules of a user's, named as our folders are."""
    for name in NAMES:
        (directory / f"{name}.py").write_text("MINE = 'of the user'\n")


def test_a_session_runs_beside_files_of_our_names(database: str, tmp_path: Path, shell: Shell) -> None:
    write_user_files(tmp_path)
    (tmp_path / "job.py").write_text(PROGRAM)
    shell.leader("n1")
    done = subprocess.run(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        env=environment(database) | QUICK,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[b'mine']", "{'of the user'}"]


@pytest.mark.long
@pytest.mark.conforms("A9")
@pytest.mark.timeout(300)
def test_the_page_for_who_is_on_call_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert transcripts.main(["--check"]) == 0, capsys.readouterr().out


def test_only_what_differs_in_shape_is_reported() -> None:
    page = '```console\n$ sublet nodes list\nNAME  LEADS\nn1        1\n\n$ sublet x --json\n{"a":[{"b":1}]}\n```\n'
    same = page.replace("n1        1", "n2        7").replace('"b":1', '"b":2')
    assert transcripts.shapes(page) == transcripts.shapes(same)
    for other in (
        page.replace("LEADS", "LED"),
        page.replace('"b"', '"c"'),
        page.replace("        1\n", "        1\n[exit code 1]\n"),
    ):
        assert transcripts.shapes(page) != transcripts.shapes(other)


def test_every_scene_of_the_page_is_known() -> None:
    found = [part["scene"] for part in transcripts._PART.finditer(transcripts.PAGE.read_text()) if part["scene"]]
    assert set(found) == set(transcripts.SCENES)
