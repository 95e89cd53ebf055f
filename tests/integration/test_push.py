"""Notifications by push, from publishers through a node to consumers: how many arrive changes only the time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_storage.db.connect import connect
from sublet_storage.notify.changes import NotifySettings
from sublet_storage.notify.drivers.listener_slots import acquire_listener_slot
from sublet_storage.notify.drivers.registry import load_driver
from sublet_storage.producer import Publisher
from tests.contract.notify_conformance import Received
from tests.integration.sharing_kit import Stage
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import ROOT, SPEED, Process, environment
from tools.source_path import source_path

PLUGINS = ROOT / "tests" / "plugins"
SETTINGS = NotifySettings().scaled(SPEED)

Staged = Callable[[dict[str, str]], Stage]


@pytest.fixture
def staged(database: str, tmp_path: Path) -> Iterator[Staged]:
    """Sets a stage whose processes have these settings, on a database of the test's own."""
    settings = {f"SUBLET_NOTIFY_{name.upper()}": str(value) for name, value in asdict(SETTINGS).items()}
    path = {"PYTHONPATH": f"{source_path(ROOT)}:{PLUGINS}"}
    with contextlib.ExitStack() as stages:

        def build(extra: dict[str, str]) -> Stage:
            stage = Stage(database, tmp_path, extra={**settings, **path, **extra})
            stages.callback(stage.close)
            return stage

        yield build


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the driver of somebody else, too: publishers use whatever the nodes listen by."""
    monkeypatch.syspath_prepend(str(PLUGINS))


@pytest.mark.conforms("D1", "P1", "P4", "R12")
@pytest.mark.parametrize("driver", ["postgres", "zmq", "poll"])
def test_consumers_are_notified_of_messages_by_push(staged: Staged, driver: str) -> None:
    """Without push they find all by looking. Each gets each once, in order."""
    stage = staged({"SUBLET_NOTIFY": driver, "SUBLET_NOTIFY_DIRECT_LISTENERS": "0"})  # by the nodes' push alone
    stage.serve("n1", "n2")
    stage.share("a", "b")
    with stage.scene.load():
        stage.more(40)
    assert stage.verdict().explained == []
    for name in ("a", "b"):
        assert stage.fleet.consumers[name].stop() == 0
        counters = stage.fleet.head_counters(name)
        assert (counters["pushed"] > 0) == (driver != "poll")
        assert counters["polled"] > 0 or driver != "poll"


@pytest.mark.conforms("D1", "D11")
def test_nodes_push_no_heads_to_who_listens(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    """They push them again to a process that has lost its place."""
    stage = staged({})
    stage.serve("n1")
    monkeypatch.setenv("SUBLET_NOTIFY_DIRECT_LISTENERS", "1")
    settings = BorrowerSettings().scaled(SPEED)
    with Session("$share/g/#", stage.fleet.url, settings=settings) as session, connect(stage.fleet.url) as other:

        def heads_at_node() -> int:
            assert session.poll(0.05) is None
            return len(stage.fleet.state("n1")["heads"])

        def takes_the_place() -> bool:
            others = "select pid from pg_stat_activity where application_name = 'sublet direct listener'"
            other.execute(f"select pg_terminate_backend(pid) from ({others}) o")
            return acquire_listener_slot(other)

        eventually(lambda: session.assignment() and heads_at_node() == 0, WAIT_S)
        eventually(takes_the_place, WAIT_S, every_s=0.001)
        eventually(heads_at_node, WAIT_S)
        other.close()
        eventually(lambda: heads_at_node() == 0, WAIT_S)
        with Publisher(stage.fleet.url) as publisher:

            def is_pushed() -> bool:
                publisher.publish("t", b"1").result(WAIT_S)
                assert session.poll(WAIT_S)
                return session.head_counters.pushed > 0

            eventually(is_pushed, WAIT_S)


@pytest.mark.conforms("D1", "D2", "D4", "D6", "P4", "P6", "R1", "R12", "E16")
@pytest.mark.usefixtures("plugged")
@pytest.mark.long
@pytest.mark.parametrize("loss", [0, 50, 100])
def test_lost_pushes_and_dead_leaders_lose_nothing(staged: Staged, loss: int) -> None:
    """Two leaders in turn. In the end the last node holds one poll of each agent and knows of the streams what is
    true, nothing was missing of what it sent, and its counters say how it came by what was lost."""
    stage = staged({"SUBLET_NOTIFY": "lossy", "LOSS": str(loss), "SUBLET_NOTIFY_CATCH_UP_INTERVAL_S": "2"})
    stage.serve("n1", "n2", "n3")
    stage.share("a", "b")
    with stage.scene.load():
        for _ in range(2):
            stage.more()
            before, leader = stage.leader()
            leader.kill()
            stage.next_leader(before)
        stage.more()
        last = stage.scene.claim().node
        if loss == 50:  # how many messages come before the node knows that one is missing is chance
            eventually(lambda: "catch_ups_gap" in stage.fleet.state(last.name)["notifications"], WAIT_S, stage.said)
        if loss < 100:  # and on a busy machine it is chance how many heads a poll finds first
            eventually(
                lambda: all(stage.fleet.head_counters(name)["pushed"] for name in ("a", "b")), WAIT_S, stage.said
            )
    assert stage.verdict().explained == []
    assert not any(line.is_forced for line in stage.scene.history())
    assert stage.scene.claim().node == last

    def is_complete() -> bool:
        state = stage.fleet.state(last.name)
        heads = {str(stream): head for stream, head in stage.scene.heads().items()}
        return (state["held_polls"], state["agents"], state["leaks"], state["heads"]) == (2, 2, [], heads)

    eventually(is_complete, WAIT_S, lambda: f"{stage.fleet.state(last.name)} {stage.scene.heads()}")
    state = stage.fleet.state(last.name)
    assert (state["pubsub"]["gaps"], state["pubsub"]["dropped"]) == (0, 0)
    reported = state["notifications"]
    if loss == 0:
        assert (reported["gaps"], reported["expired_gaps"]) == (0, 0), reported
    elif loss == 50:
        assert reported["gaps"] >= reported["expired_gaps"] > 0, reported
    else:
        assert reported["received"] == 0, reported
        assert reported["catch_ups_periodic"] > 0, reported
    for name in ("a", "b"):
        assert stage.fleet.consumers[name].stop() == 0
        counters = stage.fleet.head_counters(name)
        # Where all is lost, a node still passes on what its own catch-ups find; where half is, the other half may do.
        assert counters["pushed"] > 0 or loss == 100, counters
        assert counters["polled"] > 0 or loss < 100, counters
        between = stage.fleet.connections(name)[last.address]
        assert (between["gaps"], between["connections_lost"].get("inconsistent")) == (0, None), between


@pytest.mark.conforms("P4", "P5")
@pytest.mark.usefixtures("plugged")
def test_push_that_was_lost_is_used_again(staged: Staged, tmp_path: Path) -> None:
    """It stops and comes back under load."""
    loss = tmp_path / "loss"
    loss.write_text("0")
    stage = staged({"SUBLET_NOTIFY": "lossy", "LOSS_FILE": str(loss)})
    stage.serve("n1")
    stage.share("a")

    def grows(counter: str) -> None:
        before = stage.fleet.head_counters("a").get(counter, 0)
        eventually(lambda: stage.fleet.head_counters("a").get(counter, 0) > before, WAIT_S, stage.said, 0.05)

    with stage.scene.load():
        grows("pushed")
        loss.write_text("100")
        grows("missed_pushes")
        loss.write_text("0")
        grows("pushed")
    assert stage.verdict().explained == []
    assert stage.fleet.consumers["a"].stop() == 0


@pytest.mark.conforms("D10", "E21")
@pytest.mark.parametrize("driver", ["postgres", "zmq"])
@pytest.mark.long
def test_streams_of_a_reshard_are_granted_at_once(staged: Staged, driver: str) -> None:
    """Leaders look for new streams by themselves too seldom for this test."""
    stage = staged({"SUBLET_NOTIFY": driver, "SUBLET_STREAM_SYNC_INTERVAL_S": str(20 * WAIT_S)})
    stage.serve("n1")
    stage.share("a")
    reshard = ["spaces", "reshard", "default", "4", "--database-url", stage.fleet.url]
    run_cli, environ = [sys.executable, "-m", "sublet.cli", *reshard], environment(SPEED, stage.fleet.extra)
    subprocess.run(run_cli, check=True, cwd=ROOT, env=environ, capture_output=True)
    eventually(lambda: stage.scene.shares() == [4], WAIT_S, lambda: f"{stage.scene.rows()}{stage.said()}")


Begin = Callable[..., Process]


# --- several publishing processes, by zmq: what happens to one is nothing to the others -------------------------------


@pytest.fixture
def received(database: str) -> Iterator[Received]:
    received = Received(load_driver("zmq")(database))
    yield received
    received.receiver.close()


@pytest.fixture
def sender(database: str, received: Received, tmp_path: Path) -> Iterator[Begin]:
    """Starts a process that sends to `received` under a name."""
    running: list[Process] = []

    def begin(name: str, *how: str) -> Process:
        arguments = ("zmq", database, received.receiver.endpoint, name, *how)
        running.append(Process("tests.processes.notification_sender", *arguments, log=tmp_path / f"{name}.log"))
        return running[-1]

    yield begin
    for process in running:
        process.signal(signal.SIGCONT)
        process.kill()


def from_all(received: Received, names: str) -> None:
    """Wait until something that was not there before has come from each of them."""
    known = len(received.messages)
    eventually(
        lambda: {message.split()[0].decode() for message in received.messages[known:]} >= set(names),
        20,
        lambda: f"only {received.messages[known:][-9:]} from {names}",
    )


def connected(received: Received) -> list[int]:
    """The processes that have a connection to the receiver, each as often as it has one."""
    found = re.search(r":(\d+)\?", received.receiver.endpoint)
    assert found
    return sorted(
        each.pid
        for each in psutil.net_connections("tcp")
        if each.raddr and each.raddr.port == int(found[1]) and each.status == "ESTABLISHED" and each.pid
    )


@pytest.mark.conforms("D2")
def test_who_is_frozen_or_killed_harms_no_other(received: Received, sender: Begin) -> None:
    """Each process has one connection; one that was frozen goes on when it wakes."""
    processes = {name: sender(name) for name in "abc"}
    from_all(received, "abc")
    assert connected(received) == sorted(process.pid for process in processes.values())
    processes["a"].signal(signal.SIGSTOP)
    from_all(received, "bc")
    processes["a"].signal(signal.SIGCONT)
    from_all(received, "abc")
    processes.pop("a").kill()
    eventually(lambda: connected(received) == sorted(process.pid for process in processes.values()))
    from_all(received, "bc")
    eventually(lambda: received.events == ["connected", "lost", "connected"])


@pytest.mark.conforms("D2")
def test_a_fork_does_not_stand_in_a_successors_way(received: Received, sender: Begin) -> None:
    """The fork of a process that was killed has its socket, and a process of the same name comes after it."""
    forked = sender("a", "fork")
    from_all(received, "a")
    child = int(eventually(forked.output))
    try:
        forked.kill()
        assert psutil.pid_exists(child)
        sender("a")
        from_all(received, "a")
    finally:
        os.kill(child, signal.SIGKILL)
