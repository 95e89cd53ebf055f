"""`sublet groups watch`: what happens in a group is seen while it happens, whoever leads it, and disturbs nobody."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GroupOptions
from tests.integration.cli_kit import TIMEOUT_S, Running, Shell, a_shell, refused
from tests.kit import eventually
from tests.kit_nodes import environment

GROUP = "$share/billing/orders/#"
FIELDS = ("at", "event", "reason", "stream_id", "grant_id", "agent", "session", "position", "redelivery_end", "term")


@pytest.fixture
def shell(database: str) -> Iterator[Shell]:
    quick = {name: value for name, value in environment().items() if name.startswith("SUBLET_")}
    with a_shell(**quick | {"SUBLET_DATABASE_URL": database}) as shell:
        assert shell.run("spaces", "reshard", "default", "2").code == 0
        yield shell


def seen(watch: Running) -> list[dict[str, Any]]:
    """The events so far; the last line may be under way."""
    return [json.loads(line) for line in watch.out.splitlines(keepends=True) if line.endswith("\n")]


def saw(watch: Running, *events: str, of: str | None = None) -> list[dict[str, Any]]:
    """Wait until it has seen all of these, be it of that node only; all that it has seen."""

    def all_there() -> bool:
        names = [event["event"] for event in seen(watch) if of in (None, event.get("node"))]
        return all(names.count(event) >= events.count(event) for event in events)

    eventually(all_there, TIMEOUT_S, lambda: watch.out + watch.err)
    return seen(watch)


def watching(shell: Shell, *options: str, leader: str = "nobody") -> Running:
    """A watch that misses nothing from now on."""
    watch = shell.start("groups", "watch", GROUP, "--json", *options)
    watch.says(f"{leader} leads it")
    return watch


def history(shell: Shell) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = shell.run("groups", "history", GROUP, "--json").object["history"]
    return [{name: line[name] for name in FIELDS} for line in lines if line["stream_id"]]


@contextlib.contextmanager
def away(shell: Shell) -> Iterator[None]:
    """Commands meanwhile know of no database."""
    here = shell.environment
    shell.environment = {name: value for name, value in here.items() if name != "SUBLET_DATABASE_URL"}
    yield
    shell.environment = here


def by_database_and_node(shell: Shell, address: str) -> Iterator[tuple[str, ...]]:
    """Yield the arguments to watch by the database, and then by a node alone."""
    yield ()
    with away(shell):
        yield "--node", address


def consume(shell: Shell) -> Running:
    """Start a consumer, and wait until it holds streams."""
    consumer = shell.start("consume", GROUP)
    eventually(lambda: "held" in shell.run("groups", "list", "--json").out, TIMEOUT_S)
    return consumer


def leader_of(shell: Shell) -> str:
    return str(shell.run("groups", "describe", GROUP, "--json").object["leader"]["node"])


@pytest.mark.conforms("A9")
def test_a_watcher_sees_what_history_records(shell: Shell) -> None:
    """It sees who comes and goes, too."""
    shell.leader("n1")
    assert shell.run("groups", "create", GROUP).code == 0
    watch = watching(shell)
    plain = shell.start("groups", "watch", GROUP)
    plain.says("nobody leads it")
    consumer = shell.start("consume", GROUP, "--name", "worker")
    saw(watch, "takeover", "join", "grant", "grant")
    consumer.ask(signal.SIGINT)
    events = saw(watch, "leave", "release", "release")
    assert [event["event"] for event in events][:2] == ["takeover", "join"]
    assert events[-1]["event"] == "leave", "after all that it had was written"
    assert {(event["node"], event["subscription"], event["group_id"]) for event in events} == {("n1", GROUP, 1)}
    assert {event["session"] for event in events if event["event"] in ("join", "leave")} == {"worker"}
    reported = [{name: event.get(name) for name in FIELDS} for event in events if "stream_id" in event]
    assert reported == history(shell), "the very same lines"
    plain.says("leave          worker")
    assert watch.ask(signal.SIGINT).code == 0
    assert plain.ask(signal.SIGINT).code == 0
    assert "Traceback" not in watch.err + plain.err


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.long
def test_a_watch_goes_on_with_the_next_leader(shell: Shell, end: signal.Signals) -> None:
    nodes = {name: shell.leader(name) for name in ("n1", "n2")}
    consumer = consume(shell)
    first = leader_of(shell)
    (second,) = nodes.keys() - {first}
    watch = watching(shell, leader=first)
    nodes[first].process.send_signal(end)
    events = saw(watch, "takeover", "reclaim", "reclaim", of=second)
    stepped_down = [(event["node"], event["reason"]) for event in events if event["event"] == "step_down"]
    assert stepped_down == ([] if end == signal.SIGKILL else [(first, "the node is shutting down")])
    takeover = next(event for event in events if event["event"] == "takeover")
    assert all(event["term"] == takeover["term"] for event in events if event["node"] == second)
    watch.says(f"Now node {second} leads it")
    consumer.ask(signal.SIGINT)
    saw(watch, "leave", of=second)


@pytest.mark.long
def test_any_node_shows_the_way_to_the_leader(shell: Shell) -> None:
    """The watcher knows of no database."""
    nodes = {name: shell.leader(name) for name in ("n1", "n2")}
    consume(shell)
    leader = leader_of(shell)
    (other,) = nodes.keys() - {leader}
    port = nodes[leader].address.rpartition(":")[2]
    with away(shell):
        by_other = watching(shell, "--node", nodes[other].address, leader=leader)
        by_both = watching(shell, "--node", f"localhost:{port}", "--node", nodes[other].address, leader=leader)
    shell.start("consume", GROUP)
    for watch in (by_other, by_both):
        events = saw(watch, "join", "revoke", "release", "grant")
        names = [(event["event"], event.get("stream_id"), event.get("borrower_id")) for event in events]
        assert len(names) == len(set(names)), "each once"


@pytest.mark.conforms("A9")
def test_a_group_that_is_not_there_is_not_found(shell: Shell) -> None:
    """Nor is one that was deleted meanwhile."""
    node = shell.leader("n1")
    for way in by_database_and_node(shell, node.address):
        refused(shell.run("groups", "watch", GROUP, *way), 3, "there is no such group")
    assert shell.run("groups", "list", "--json").object == {"groups": []}, "watching creates none"
    assert shell.run("groups", "create", GROUP).code == 0
    watch = watching(shell)
    assert shell.run("groups", "delete", GROUP, "--yes").code == 0
    ended = watch.end()
    assert (ended.code, "was deleted while it was watched" in ended.err) == (3, True), ended.err


@pytest.mark.conforms("A9")
def test_a_group_is_watched_by_its_printed_name(shell: Shell, database: str) -> None:
    printed, literal = "$share/evil\\x1b\\u202ea/a", Subscription("share", "evil\\x1b\\u202ea", TopicFilter("a"))
    store = PostgresGroupStore(database)
    store.declare_group(Subscription("share", "evil\x1b\u202ea", TopicFilter("a")), GroupOptions())
    node = shell.leader("n1")
    for way in by_database_and_node(shell, node.address):
        watch = shell.start("groups", "watch", printed, *way)
        watch.says(f"Watching {printed}: nobody leads it at present.")
        assert watch.ask(signal.SIGINT).code == 0
    store.declare_group(literal, GroupOptions())
    watch = shell.start("groups", "watch", printed, "--node", node.address)
    watch.says("Watching")
    assert shell.run("groups", "delete", printed, "--yes").code == 0
    ended = watch.end()
    assert (ended.code, "was deleted while it was watched" in ended.err) == (3, True), "and it goes on with no other"
    store.close()


def test_a_caller_who_may_not_watch_gets_the_reason(shell: Shell) -> None:
    """With the right that is wanting, and not that no node is there."""
    assert shell.run("groups", "create", GROUP).code == 0
    node = shell.leader("n1", "--auth", "required")
    shell.environment["SUBLET_TOKEN"] = shell.run("access", "token", "user:etl").out.strip()
    with away(shell):
        answer = shell.run("groups", "watch", GROUP, "--node", node.address)
    refused(answer, 5, f"Node {node.address} refuses: user:etl has no right to watch")
    assert "does not answer" not in answer.err
    assert "Start one" not in answer.err
    assert len([line for line in answer.err.splitlines() if "WARNING" not in line]) == 1, answer.err


@pytest.mark.long
@pytest.mark.conforms("A9")
def test_without_a_node_there_is_nothing_to_watch(shell: Shell) -> None:
    assert shell.run("groups", "create", GROUP).code == 0
    for way in by_database_and_node(shell, "127.0.0.1:1"):
        answer = shell.run("groups", "watch", GROUP, *way)
        refused(answer, 5)
        assert answer.err.count("UNAVAILABLE") == len(way) // 2, answer.err
        assert answer.err.count("127.0.0.1:1 does not answer: UNAVAILABLE: ") == len(way) // 2, answer.err
    with away(shell):
        answer = shell.run("groups", "watch", GROUP, "--node", "127.0.0.1:1", "--json")
    assert json.loads(answer.err)["exit_code"] == 5
    assert answer.err.count("UNAVAILABLE") == 1, "one object, with the reason in it"
    refused(shell.run("groups", "watch", GROUP, "--node", "nowhere"), 2, "HOST:PORT")
