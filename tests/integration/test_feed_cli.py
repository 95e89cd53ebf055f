"""`sublet publish` and `sublet tail` through a node: they behave as with the database."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.cli_kit import Running, Shell, a_shell
from tests.kit import eventually

NDJSON = '{"key":{"base64":"/wA="},"value":{"id":1},"topic":"t/1","headers":[["a","b"]]}\n{"value":"two"}\n'


@pytest.fixture
def node(shell: Shell) -> Running:
    return shell.leader("n1")


@pytest.fixture
def away(node: Running) -> Iterator[Shell]:
    """Commands of somebody who cannot reach the database."""
    with a_shell(SUBLET_DATABASE_URL="postgresql://nowhere.invalid/db") as shell:
        yield shell


@pytest.mark.long
@pytest.mark.conforms("A9")
def test_a_node_shows_what_the_database_shows(shell: Shell, node: Running, away: Shell) -> None:
    through = ("--node", node.address)
    published = away.run("publish", "orders/eu", "--key", "k", "--json", *through, stdin="one\ntwo\nthree")
    assert published.code == 0, published.err
    assert (published.object["read"], published.object["durable"]) == (3, 3)
    assert away.run("publish", "t/2", "--format", "ndjson", *through, stdin=NDJSON).code == 0
    for options in (["#", "--from", "earliest"], ["orders/+", "--from", "1"], ["t/#", "--from", "15m", "--json"]):
        seen = shell.run("tail", *options, "--no-follow")
        far = away.run("tail", *options, "--no-follow", *through)
        assert (far.code, far.out) == (0, seen.out)
        assert far.out
    assert away.run("tail", "#", "--no-follow", *through).out == ""
    following = away.start("tail", "orders/#", "--from", "2", "--max-messages", "2", *through)
    following.says("three")
    shell.run("publish", "orders/eu", "--key", "k", stdin="four\n")
    answer = following.end()
    assert (answer.code, answer.out) == (0, "orders/eu\tk\tthree\norders/eu\tk\tfour\n")


@pytest.mark.conforms("A9")
def test_ctrl_c_ends_both_with_its_exit_code(node: Running, away: Shell) -> None:
    through = ("--node", node.address)
    tail = away.start("tail", "#", *through, "--from", "earliest")
    publishing = away.start("publish", "a", "--json", *through, stdin=subprocess.PIPE)
    publishing.stdin.write(b"0\n1\nhalf a li")
    publishing.stdin.flush()
    eventually(lambda: len(tail.out.splitlines()) == 2, 60)
    assert tail.ask(signal.SIGINT).code == 130
    answer = publishing.ask(signal.SIGTERM)
    assert (answer.code, answer.object["durable"], answer.object["interrupted"]) == (143, 2, True)
    for ended in (tail, publishing):
        assert "Traceback" not in ended.err


@pytest.mark.conforms("A9")
@pytest.mark.long
def test_a_missing_node_has_its_own_exit_code(away: Shell) -> None:
    publish = away.run("publish", "a", "--node", "127.0.0.1:1", stdin="1\n")
    tail = away.run("tail", "#", "--node", "127.0.0.1:1")
    for answer in (publish, tail):
        assert answer.code == 5, answer.err
        assert "127.0.0.1:1" in answer.err
    both = away.run("tail", "#", "--node", "127.0.0.1:1", "--database-url", "postgresql://x/y")
    assert (both.code, "one way is enough" in both.err) == (2, True)
    wrong = away.run("publish", "a", "--node", "nowhere", stdin="1\n")
    assert (wrong.code, "HOST:PORT" in wrong.err) == (2, True)
    assert away.run("publish", "a/+", "--node", "127.0.0.1:1", stdin="1\n").code == 2
