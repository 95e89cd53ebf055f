"""A process that uses grpc and starts others: nothing about that on its stderr."""

from __future__ import annotations

import subprocess
import sys

from tests.integration.cli_kit import QUICK, a_shell
from tests.readme import environment

PROGRAM = """
import os, sublet
with sublet.Publisher() as publisher:
    publisher.publish("a", b"1")
with sublet.Session("$share/g/#", start="earliest") as session:
    assert session.next_batch(30) is not None
    for _ in range(20):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
"""


def test_a_consumer_forks_without_a_word_from_grpc(database: str) -> None:
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        shell.leader("n1")
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment(database) | QUICK,
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr.decode()) == (0, "")
