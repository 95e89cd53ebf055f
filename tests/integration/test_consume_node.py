"""`sublet consume --node`: a member of a group where no database can be reached, and none can be started."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from tests.integration.cli_kit import Running, Shell, a_shell, refused
from tests.kit import eventually

GROUP = "$share/g/#"


@pytest.fixture
def node(shell: Shell) -> Running:
    return shell.leader("n1")


@pytest.fixture
def away(shell: Shell) -> Iterator[Shell]:
    """Commands of somebody who has no database, and cannot start one; `shell` is beside the database."""
    with a_shell(SUBLET_DATA_DIR="/proc/nowhere/data", SUBLET_READ_TIMEOUT_S="2") as away:
        assert "SUBLET_DATABASE_URL" not in away.environment
        yield away


def values(text: str) -> list[str]:
    return [line.rpartition("\t")[2] for line in text.splitlines()]


@pytest.mark.conforms("A9")
def test_a_member_without_a_database(node: Running, shell: Shell, away: Shell) -> None:
    through = ("--node", node.address)
    away.run("publish", "orders/eu", "--key", "k", *through, stdin="one\ntwo\nthree\n")
    first = away.run("consume", GROUP, "--from", "earliest", "--max-messages", "2", "--json", *through)
    assert [row["value"] for row in first.lines] == ["one", "two"], first.err
    assert first.code == 0
    consumer = away.start("consume", GROUP, "--name", "worker-1", *through)
    eventually(lambda: values(consumer.out) == ["three"], 60, lambda: consumer.err)
    shell.run("publish", "orders/eu", "--key", "k", stdin="four\n")
    eventually(lambda: values(consumer.out) == ["three", "four"], 60)
    answer = consumer.ask(signal.SIGINT)
    assert answer.code == 130
    assert "2 messages consumed." in answer.err
    assert "Traceback" not in answer.err
    group = shell.run("groups", "describe", GROUP, "--json").object
    assert (group["streams_by_status"], group["lag"], group["state"]) == ({"free": 16}, 0, "no_members")


@pytest.mark.long
@pytest.mark.conforms("A9", "P6")
def test_it_goes_on_at_the_other_node(shell: Shell, away: Shell) -> None:
    nodes = {name: shell.leader(name) for name in ("n1", "n2")}
    through = [word for node in nodes.values() for word in ("--node", node.address)]
    shell.run("publish", "a", stdin="1\n")
    consumer = away.start("consume", GROUP, "--from", "earliest", *through)
    eventually(lambda: values(consumer.out) == ["1"], 60, lambda: consumer.err)
    nodes["n1"].kill()
    shell.run("publish", "a", stdin="2\n")
    eventually(lambda: values(consumer.out) == ["1", "2"], 60, lambda: consumer.err)
    assert consumer.ask(signal.SIGTERM).code == 143


@pytest.fixture
def web_server() -> Iterator[str]:
    """Yield the address of another server than a node."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        client.recv(1000)
                        client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.conforms("A9")
@pytest.mark.long
def test_where_no_node_answers_is_an_error_of_its_own(away: Shell, web_server: str) -> None:
    for wrong in ("127.0.0.1:1", web_server):
        answer = away.run("consume", GROUP, "--node", wrong)
        refused(answer, 5, f"no node answers at {wrong}", "sublet leader")
    refused(away.run("consume", GROUP, "--node", "nowhere"), 2, "node 'nowhere'", "HOST:PORT")
    for option in (("--database-url", "postgresql://x/y"), ("--data-dir", "/tmp/x")):
        refused(away.run("consume", GROUP, "--node", "127.0.0.1:1", *option), 2, "one way is enough")


def test_what_a_leader_refuses_is_reported_verbatim(node: Running, shell: Shell, away: Shell) -> None:
    queue, through = "$queue/mail/#", ("--node", node.address)
    refused(away.run("consume", queue, *through), 1, "denied", f"Run: sublet groups create '{queue}'")
    assert shell.run("groups", "create", queue).code == 0
    shell.run("publish", "a", stdin="kept\n")
    answer = away.run("consume", queue, "--max-messages", "1", *through)
    assert (answer.code, values(answer.out)) == (0, ["kept"])


@pytest.mark.conforms("E20")
@pytest.mark.long
def test_a_standby_learns_why_and_ends_with_its_nodes(node: Running, shell: Shell, away: Shell) -> None:
    assert shell.run("spaces", "reshard", "default", "1").code == 0
    shell.run("publish", "a", stdin="1\n")
    holder = shell.start("consume", GROUP, "--from", "earliest")
    eventually(lambda: values(holder.out) == ["1"], 60, lambda: holder.err)
    standby = away.start("consume", GROUP, "--node", node.address, "--idle-timeout", "5s")
    standby.says("Waiting for streams: a leader is being chosen, or others hold them all. Or the leader's own address")
    node.kill()
    answer = standby.end()
    refused(answer, 5, "nothing was granted for 5 s", f"no node answers at {node.address}")
    holder.kill()


@pytest.mark.conforms("E30")
def test_another_protocol_version_is_named(shell: Shell, away: Shell) -> None:
    node = shell.newer_leader("n1")
    answer = away.run("consume", GROUP, "--node", node.address)
    refused(answer, 4, f"protocol version {PROTOCOL_VERSION}", str(PROTOCOL_VERSION + 1), "same release")
