"""A part of a process that fails where nothing may: the process ends, or says so; nothing is left standing half."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.machine.agent import Agent
from sublet_protocol.domain.errors import SubscriptionEnded
from tests.integration.log_kit import Connection
from tests.kit import WAIT_S, eventually

NODE = """
import sys
from {module} import {name}

def broken(*arguments):
    raise AssertionError("a rule is broken")

{name}.{method} = broken
from sublet.cli import main
sys.exit(main())
"""


@pytest.mark.conforms("A8")
def test_a_node_that_breaks_a_rule_of_its_own_ends(database: str, tmp_path: Path) -> None:
    """Wherever it does: each of these nodes, which run at the same time, has another part that does."""
    parts = [
        ("sublet_leader.node.machine", "Node", "_pass_time"),
        ("sublet_leader.node.database_worker", "DatabaseWorker", "_execute_observed"),
        ("sublet_leader.jobs.node_registration", "NodeRegistration", "_renew_in_time"),
    ]
    with ExitStack() as stack:
        nodes = []
        for number, (module, name, method) in enumerate(parts):
            program = tmp_path / f"node{number}.py"
            program.write_text(NODE.format(module=module, name=name, method=method))
            command = [sys.executable, str(program), "leader", "--name", f"n{number}", "--listen", "127.0.0.1:0"]
            node = subprocess.Popen([*command, "--database-url", database], stderr=subprocess.PIPE, text=True)
            nodes.append(stack.enter_context(node))
            stack.callback(node.kill)
        for number, node in enumerate(nodes):
            _, said = node.communicate(timeout=WAIT_S)
            assert (node.returncode, said.count("Traceback")) == (1, 1), said
            assert f"node n{number} broke a rule of its own and has ended: AssertionError" in said


@pytest.mark.conforms("E36")
def test_a_session_with_a_broken_agent_raises(database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is free, so that its streams need not wait for the eviction timeout, and nothing is left of it."""

    def lock_connections() -> int:
        of_locks = (
            "select from pg_stat_activity where application_name = 'sublet lock' and datname = current_database()"
        )
        return len(conn.execute(of_locks).fetchall())

    def broken(*_: object) -> None:
        raise AssertionError("a rule is broken")

    with Session("$share/g/#", database, nodes=["127.0.0.1:1"]) as session:
        monkeypatch.setattr(Agent, "decide", broken)
        with pytest.raises(SubscriptionEnded, match="a rule is broken"):
            session.poll(WAIT_S)
        eventually(lambda: lock_connections() == 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "sublet-lock"]
