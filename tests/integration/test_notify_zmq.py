"""Many publishing processes of one machine: a node sees one of them, and another when that one dies."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sublet_storage.notify.drivers.registry import load
from tests.contract.notify_conformance import Heard
from tests.kit import eventually
from tests.kit_nodes import Process

pytestmark = pytest.mark.conforms("D2")

Start = Callable[..., Process]


@pytest.fixture
def heard(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    heard = Heard(load("zmq")(database))
    yield heard
    heard.inlet.close()


@pytest.fixture
def start(database: str, heard: Heard, tmp_path: Path) -> Iterator[Start]:
    """Starts a process that sends to `heard` under a name."""
    running: list[Process] = []

    def begin(name: str, *how: str) -> Process:
        arguments = ("zmq", database, heard.inlet.endpoint, name, *how)
        running.append(Process("tests.processes.telling", *arguments, log=tmp_path / f"{name}.log"))
        return running[-1]

    yield begin
    for process in running:
        process.signal(signal.SIGCONT)
        process.kill()


def from_all(heard: Heard, names: str) -> None:
    """Wait until something that was not there before has come from each of them."""
    known = len(heard.messages)
    eventually(
        lambda: {message.split()[0].decode() for message in heard.messages[known:]} >= set(names),
        20,
        lambda: f"only {heard.messages[known:][-9:]} from {names}",
    )


def connected(heard: Heard) -> set[int]:
    """The processes that have a connection to the inlet."""
    found = re.search(r":(\d+)\?", heard.inlet.endpoint)
    assert found
    return {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.raddr and each.raddr.port == int(found[1]) and each.status == "ESTABLISHED" and each.pid
    }


def the_publisher(heard: Heard, among: dict[str, Process]) -> str:
    """The only one of them that is connected to the inlet."""
    (pid,) = eventually(lambda: connected(heard), 10)
    return next(name for name, process in among.items() if process.pid == pid)


def test_many_processes_share_one_connection_and_another_takes_over_from_one_that_was_killed(
    heard: Heard, start: Start
) -> None:
    processes = {name: start(name) for name in "abcd"}
    from_all(heard, "abcd")
    seen: set[int] = set()
    enough = len(heard.messages) + 2000
    while len(heard.messages) < enough:
        seen |= connected(heard)
    assert len(seen) == 1, "they pass the part of the publisher round"
    while len(processes) > 1:
        publisher = the_publisher(heard, processes)
        processes.pop(publisher).kill()
        from_all(heard, "".join(processes))
    assert {"connected", "lost"} == set(heard.events)
    eventually(lambda: heard.events[-1] == "connected")


def test_a_killed_publishers_fork_does_not_stand_in_its_successors_way(heard: Heard, start: Start) -> None:
    forked = start("a", "fork")
    from_all(heard, "a")
    other = start("b")
    from_all(heard, "ab")
    child = int(eventually(forked.output))
    assert connected(heard) <= {forked.pid, child}
    try:
        forked.kill()
        from_all(heard, "b")
        assert other.pid in connected(heard)
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_one_that_ends_properly_hands_over_too(heard: Heard, start: Start, database: str) -> None:
    mine = load("zmq")(database).outlet([heard.inlet.endpoint])
    mine.send(b"mine 0")
    eventually(lambda: heard.messages)
    other = start("b")
    from_all(heard, "b")
    assert connected(heard) == {os.getpid()}
    mine.close()
    from_all(heard, "b")
    eventually(lambda: connected(heard) == {other.pid})


def test_a_frozen_publisher_is_replaced_and_makes_way_when_it_wakes(heard: Heard, start: Start) -> None:
    processes = {name: start(name) for name in "abc"}
    from_all(heard, "abc")
    frozen = the_publisher(heard, processes)
    processes[frozen].signal(signal.SIGSTOP)
    others = {name: process for name, process in processes.items() if name != frozen}
    eventually(lambda: connected(heard) & {each.pid for each in others.values()}, 20)
    from_all(heard, "".join(others))
    processes[frozen].signal(signal.SIGCONT)
    eventually(lambda: processes[frozen].pid not in connected(heard), 20)
    from_all(heard, "abc")
    assert len(connected(heard)) == 1
