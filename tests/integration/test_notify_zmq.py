"""Many publishing processes of one machine: a node sees one of them, and another when that one dies."""

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
def received(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    received = Received(load_driver("zmq")(database))
    yield received
    received.inlet.close()


@pytest.fixture
def start(database: str, received: Received, tmp_path: Path) -> Iterator[Start]:
    """Starts a process that sends to `received` under a name."""
    running: list[Process] = []

    def begin(name: str, *how: str) -> Process:
        arguments = ("zmq", database, received.inlet.endpoint, name, *how)
        running.append(Process("tests.processes.telling", *arguments, log=tmp_path / f"{name}.log"))
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


def connected(received: Received) -> set[int]:
    """The processes that have a connection to the inlet."""
    found = re.search(r":(\d+)\?", received.inlet.endpoint)
    assert found
    return {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.raddr and each.raddr.port == int(found[1]) and each.status == "ESTABLISHED" and each.pid
    }


def the_publisher(received: Received, among: dict[str, Process]) -> str:
    """The only one of them that is connected to the inlet."""
    (pid,) = eventually(lambda: connected(received), 10)
    return next(name for name, process in among.items() if process.pid == pid)


def test_many_processes_share_one_connection_and_another_takes_over_from_one_that_was_killed(
    received: Received, start: Start
) -> None:
    processes = {name: start(name) for name in "abcd"}
    from_all(received, "abcd")
    seen: set[int] = set()
    enough = len(received.messages) + 2000
    while len(received.messages) < enough:
        seen |= connected(received)
    assert len(seen) == 1, "they pass the part of the publisher round"
    while len(processes) > 1:
        publisher = the_publisher(received, processes)
        processes.pop(publisher).kill()
        from_all(received, "".join(processes))
    assert {"connected", "lost"} == set(received.events)
    eventually(lambda: received.events[-1] == "connected")


def test_a_killed_publishers_fork_does_not_stand_in_its_successors_way(received: Received, start: Start) -> None:
    forked = start("a", "fork")
    from_all(received, "a")
    other = start("b")
    from_all(received, "ab")
    child = int(eventually(forked.output))
    assert connected(received) <= {forked.pid, child}
    try:
        forked.kill()
        from_all(received, "b")
        assert other.pid in connected(received)
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_one_that_ends_properly_hands_over_too(received: Received, start: Start, database: str) -> None:
    mine = load_driver("zmq")(database).open_sender([received.inlet.endpoint])
    mine.send(b"mine 0")
    eventually(lambda: received.messages)
    other = start("b")
    from_all(received, "b")
    assert connected(received) == {os.getpid()}
    mine.close()
    from_all(received, "b")
    eventually(lambda: connected(received) == {other.pid})


def test_a_frozen_publisher_is_replaced_and_makes_way_when_it_wakes(received: Received, start: Start) -> None:
    processes = {name: start(name) for name in "abc"}
    from_all(received, "abc")
    frozen = the_publisher(received, processes)
    processes[frozen].signal(signal.SIGSTOP)
    others = {name: process for name, process in processes.items() if name != frozen}
    eventually(lambda: connected(received) & {each.pid for each in others.values()}, 20)
    from_all(received, "".join(others))
    processes[frozen].signal(signal.SIGCONT)
    eventually(lambda: processes[frozen].pid not in connected(received), 20)
    from_all(received, "abc")
    assert len(connected(received)) == 1
