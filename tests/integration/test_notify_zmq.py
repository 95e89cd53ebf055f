"""Several publishing processes: each has a connection of its own, and what happens to one is nothing to the others."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sublet_storage.notify.drivers.registry import load_driver
from tests.contract.notify_conformance import Received
from tests.kit import eventually
from tests.kit_nodes import Process

pytestmark = pytest.mark.conforms("D2")

Start = Callable[..., Process]


@pytest.fixture
def received(database: str) -> Iterator[Received]:
    received = Received(load_driver("zmq")(database))
    yield received
    received.receiver.close()


@pytest.fixture
def start(database: str, received: Received, tmp_path: Path) -> Iterator[Start]:
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


def test_who_is_frozen_or_killed_harms_no_other(received: Received, start: Start) -> None:
    """Each process has one connection; one that was frozen goes on when it wakes."""
    processes = {name: start(name) for name in "abc"}
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


def test_a_fork_does_not_stand_in_a_successors_way(received: Received, start: Start) -> None:
    """The fork of a process that was killed has its socket, and a process of the same name comes after it."""
    forked = start("a", "fork")
    from_all(received, "a")
    child = int(eventually(forked.output))
    try:
        forked.kill()
        assert psutil.pid_exists(child)
        start("a")
        from_all(received, "a")
    finally:
        os.kill(child, signal.SIGKILL)
