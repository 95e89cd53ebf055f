"""A program beside files of its user's own whose names are those of our folders: each gets what it asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.cli_kit import QUICK, a_shell
from tests.readme import environment

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


def test_a_session_runs_beside_files_of_our_names(database: str, tmp_path: Path) -> None:
    write_user_files(tmp_path)
    (tmp_path / "job.py").write_text(PROGRAM)
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
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
