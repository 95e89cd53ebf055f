"""`python -m tools.transcripts`: runs the commands of docs/operations.md and inserts their output.

In a `console` block a line `$ sublet ...` is run, on a Postgres of the page's own; its output follows, and its exit
code if that is not 0. A comment `<!-- scene: NAME -->` prepares a situation first: see `SCENES`. `--check` writes
nothing: it fails if a command exits otherwise than the page says, or if the columns of a table or the fields of an
object differ. Numbers, ids and times are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sublet.demo.child_processes import remove_settings
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.db.connect import connect
from tools.source_path import source_path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "operations.md"
WAIT_S = 60.0
SETTINGS = {
    "SUBLET_LEASE_DURATION_S": "3",
    "SUBLET_LEASE_RENEW_INTERVAL_S": "1",
    "SUBLET_LEASE_MARGIN_S": "0.9",
    "SUBLET_POLL_HOLD_S": "1",
    "SUBLET_PING_INTERVAL_S": "0.5",
    "SUBLET_PING_TIMEOUT_S": "2",
    "SUBLET_EVICTION_TIMEOUT_S": "4",
    "SUBLET_RECLAIM_GRACE_S": "4",
    "SUBLET_MIN_GRANT_DURATION_S": "0.2",
}
"""Short times, so that the page does not take long; the prose has the defaults."""
GROUP, AUDIT = "$share/billing/orders/#", "$share/audit/orders/#"
_PART = re.compile(r"^<!-- scene: (?P<scene>[^>]*?) -->$|^```console\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_EXIT = re.compile(r"\[exit code (\d+)\]")


class Stage:
    """A Postgres, and the nodes and consumers that scenes start."""

    def __init__(self, url: str) -> None:
        self.url, self._processes = url, dict[str, subprocess.Popen[bytes]]()
        self.environment = {**os.environ, **SETTINGS, "SUBLET_DATABASE_URL": url, "PYTHONPATH": source_path(ROOT)}

    def run(self, command: str, stdin: bytes = b"") -> str:
        """Return what a command line prints, stdout first, with a last line for an exit code other than 0."""
        shell = command.replace("sublet ", f"{sys.executable} -m sublet.cli ")
        done = subprocess.run(
            ["bash", "-c", shell], env=self.environment, input=stdin, capture_output=True, timeout=WAIT_S, check=False
        )
        lines = (done.stdout + done.stderr).decode().splitlines()
        ending = [f"[exit code {done.returncode}]"] if done.returncode else []
        return "".join(f"{line.rstrip()}\n" for line in lines + ending)

    def start(self, name: str, *arguments: str) -> None:
        """Start a process in the background."""
        argv = [sys.executable, "-m", "sublet.cli", *arguments]
        nowhere = subprocess.DEVNULL
        self._processes[name] = subprocess.Popen(
            argv, env=self.environment, stdin=nowhere, stdout=nowhere, stderr=nowhere
        )

    def serve(self, *names: str) -> None:
        """Start nodes, and wait until they are registered."""
        for name in names:
            self.start(name, "leader", "--name", name, "--listen", "127.0.0.1:0")
        self.until(f"select count(*) >= {len(names)} from node where expires_at > clock_timestamp()")
        self.until("select exists (select from leadership where leadership_id = 0 and expires_at > clock_timestamp())")

    def end(self, *names: str, kill: bool = False) -> None:
        """Stop processes with SIGTERM, or with SIGKILL if `kill`."""
        for name in names:
            (self._processes[name].kill if kill else self._processes[name].terminate)()
        for name in names:
            self._processes.pop(name).wait(WAIT_S)

    def close(self) -> None:
        """Stop all processes that are left."""
        self.end(*self._processes, kill=True)

    def until(self, question: str) -> None:
        """Wait until the query returns true. Raise `TimeoutError` if it does not."""
        deadline = time.monotonic() + WAIT_S
        with connect(self.url) as connection:
            while connection.execute(question).fetchone() != (True,):
                if time.monotonic() > deadline:
                    raise TimeoutError(question)
                time.sleep(0.05)

    def settled(self, consumers: int) -> None:
        """Wait until that number of consumers hold all streams of the group and have consumed them."""
        self.until(
            f"select count(distinct agent) = {consumers} and count(*) = 4 and bool_and(position = head)"
            " from lending join stream using (stream_id) join consumer_group g using (group_id)"
            " where g.name = 'billing' and lending.status = 'held'"
        )

    def publish(self, count: int) -> None:
        """Publish `count` orders of many customers."""
        records = (json.dumps({"key": f"customer-{n % 97}", "value": {"id": n}}) for n in range(count))
        self.run("sublet publish orders/eu/created --format ndjson", "\n".join(records).encode())


def _begin(stage: Stage) -> None:
    stage.run("sublet spaces create orders 'orders/#' --shards 4")
    stage.run(f"sublet groups create '{AUDIT}' --from offset:0")
    stage.serve("n1", "n2")
    stage.publish(2000)
    _return(stage)


def _return(stage: Stage) -> None:
    for name in ("a", "b"):
        stage.start(name, "consume", GROUP, "--from", "offset:0", "--name", name)
    stage.settled(2)


def _away(stage: Stage) -> None:
    stage.end("a", "b")
    stage.publish(500)


def _crash(stage: Stage) -> None:
    stage.end("a", kill=True)
    stage.until("select count(*) = 2 from lending_history where forced")
    stage.settled(1)
    stage.start("a", "consume", GROUP, "--name", "a")
    stage.settled(2)


def _leaderless(stage: Stage) -> None:
    stage.end("n1", "n2", kill=True)
    stage.until("select not exists (select from node where expires_at > clock_timestamp())")


def _block(stage: Stage) -> None:
    """Set a position beyond the end of a stream, as after a restore of an older backup."""
    with connect(stage.url) as connection:
        connection.execute(
            "update lending set position = 100000 where (group_id, stream_id) = (select group_id, min(stream_id)"
            " from lending join consumer_group using (group_id) where consumer_group.name = 'audit' group by group_id)"
        )
    stage.start("auditor", "consume", AUDIT)
    stage.until("select exists (select from lending where status = 'blocked')")


def _pause(stage: Stage) -> None:
    stage.until("select not exists (select from lending where status = 'held' and group_id ="
                " (select group_id from consumer_group where name = 'billing'))")  # fmt: skip


SCENES: dict[str, Callable[[Stage], None]] = {
    "two nodes, two consumers": _begin,
    "the consumers are away": _away,
    "the consumers are back": _return,
    "a consumer is killed": _crash,
    "no node is there": _leaderless,
    "the nodes are back": lambda stage: stage.serve("n1", "n2"),
    "a stream is blocked": _block,
    "it is paused": _pause,
    "it goes on": lambda stage: stage.settled(2),
}


def played(page: str, stage: Stage) -> str:
    """Return the page with the current output of its commands."""

    def part(found: re.Match[str]) -> str:
        if found["scene"] is not None:
            SCENES[found["scene"]](stage)
            return found[0]
        commands = [line for line in found["text"].splitlines() if line.startswith("$ ")]
        return "```console\n" + "\n".join(f"{line}\n{stage.run(line[2:])}" for line in commands) + "```"

    return _PART.sub(part, page)


def shapes(page: str) -> list[tuple[str, Any]]:
    """Return (command, its exit code and the shape of its output) of each transcript."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, answer = text.partition("\n")
            found.append((command, (_EXIT.findall(answer), _shape(answer))))
    return found


def _shape(answer: str) -> Any:
    """Return the fields of an object, else the words of the first line without those that contain digits."""
    first = answer.partition("\n")[0]
    if first.startswith("{"):
        return _fields(json.loads(first))
    return re.sub(r"\d+", "#", first).split()[:4]


def _fields(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {name: _fields(value) for name, value in thing.items() if isinstance(value, dict | list)} | {
            name: None for name, value in thing.items() if not isinstance(value, dict | list)
        }
    return [_fields(thing[0])] if isinstance(thing, list) and thing else None


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with `--check` compare its shapes; return 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    remove_settings()
    directory = Path(tempfile.mkdtemp(prefix="sublet-transcripts-"))
    directory.chmod(0o755)  # a server started by root runs as another user
    try:
        from sublet_storage.bootstrap.migrate import migrate

        with EmbeddedPostgres(directory / "data") as server:
            migrate(server.url)
            stage = Stage(server.url)
            try:
                now = played(PAGE.read_text(), stage)
            finally:
                stage.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if not check:
        PAGE.write_text(now)
        return 0
    differ = [(old, new) for old, new in zip(shapes(PAGE.read_text()), shapes(now), strict=True) if old != new]
    for old, new in differ:
        print(f"docs/operations.md: $ {old[0]}\n  says {old[1]}\n  now  {new[1]}\nRun python -m tools.transcripts.")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
