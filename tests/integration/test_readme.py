"""The README's first program, as printed. What it says of Spark is run in `tests/spark/test_readme.py`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sublet._version import __version__
from tests.integration.cli_kit import QUICK, Shell, a_shell
from tests.integration.test_cli import COMMANDS
from tests.kit import eventually
from tests.readme import ROOT, environment, programs

GROUP = "$share/billing/orders/#"


@pytest.mark.conforms("E1")
def test_the_first_program_does_what_is_written(database: str, tmp_path: Path) -> None:
    """It prints what it published, and hands over on Ctrl-C."""
    program, _ = programs()
    (tmp_path / "first.py").write_text(program)
    with a_shell(SUBLET_DATABASE_URL=database) as shell, (tmp_path / "out").open("w") as out:
        shell.leader("n1")
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


def test_the_version_is_said(database: str) -> None:
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        answer = shell.run("--version")
        assert (answer.code, answer.out) == (0, f"sublet {__version__}\n")
