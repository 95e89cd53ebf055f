"""Runs docs/tutorial.md: writes its programs, runs its commands and inserts their output.

    python -m tools.tutorial [--check]

A block of Python is a file, named by the line above it. In a `console` block a line `$ COMMAND` is run, in one
directory for the page, and one that ends with `&` runs in the background. A comment `<!-- until: WORDS -->` waits for
the condition of that name, `<!-- mark: WORDS -->` labels the present time in the pictures. `--check` writes nothing.
Exit code 1: a command has failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from psycopg.errors import UndefinedTable

from sublet.demo.child_processes import remove_settings
from sublet.demo.java import find_java_home
from sublet_protocol.domain.errors import NotFound
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.db.connect import connect
from sublet_storage.groups.status.overview import describe_group

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
PICTURES = ROOT / "docs" / "pictures"
GROUP = Subscription.parse("$share/billing/orders/#")
WAIT_S = 600.0
POLL_INTERVAL_S = 0.2

_PART = re.compile(r"^(?:`(?P<file>\w+\.py)`[^\n]*:\n\n)?```(?P<kind>python|console)\n(?P<text>.*?)^```$"
                   r"|^<!-- (?P<what>until|mark): (?P<words>[^>]*?) -->$", re.DOTALL | re.MULTILINE)  # fmt: skip


IN_BATCH = "select from lending where session = 'one' and status = 'held' and (in_doubt ->> 'end')::bigint > position"
"""Finds streams of which `one` has planned messages that are not known to be done."""


@dataclass
class Watch:
    """Samples the group periodically. `samples`: (seconds, lag, {session or status: streams}).
    `is_in_batch`: `one` was in a micro-batch at the last sample."""

    url: str
    begun: float = field(default_factory=time.monotonic)
    samples: list[tuple[float, int, dict[str, int]]] = field(default_factory=list)
    is_in_batch: bool = False
    marks: list[tuple[float, str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Sample until `over` is set."""
        with connect(self.url) as connection:
            while not self.over.wait(POLL_INTERVAL_S):
                self.look(connection)

    def look(self, connection: Any) -> None:
        """Take one sample; at first the group and its table do not exist."""
        try:
            found = describe_group(connection, GROUP)
        except (NotFound, UndefinedTable):
            return
        holders: dict[str, int] = {}
        for stream in found.streams:
            who = f"reserved for {stream.session}" if stream.status == "reserved" else stream.session or "nobody"
            holders[who] = holders.get(who, 0) + 1
        lag = found.known_lag
        self.is_in_batch = bool(connection.execute(IN_BATCH).fetchall())
        self.samples.append((time.monotonic() - self.begun, lag, holders))

    def changes(self) -> list[tuple[float, dict[str, int]]]:
        """Return (seconds, holders) at each change, and at the beginning and the end."""
        moments = [(at, holders) for at, _, holders in self.samples]
        changed = [new for old, new in pairwise(moments) if old[1] != new[1]]
        return [moments[0], *changed, moments[-1]]

    def mark(self, words: str) -> None:
        """Label the present time in the pictures."""
        self.marks.append((time.monotonic() - self.begun, words))


class Failed(Exception):
    """Raised if a command failed, or a condition did not come true in time."""


class Tour:
    """One run of the page in a directory."""

    def __init__(self, place: Path, url: str, settings: Mapping[str, str]) -> None:
        self._place, self._settings, self._commands = place, settings, 0
        self.watch = Watch(url)

    def console(self, text: str) -> str:
        """Run the commands of a block; return the block with their output."""
        lines = []
        for line in text.splitlines():
            if line.startswith("$ "):
                lines += [line, *self._run(line.removeprefix("$ "))]
        return "\n".join(lines) + "\n"

    def until(self, words: str) -> None:
        """Wait until the condition named `words` is true."""
        deadline = time.monotonic() + WAIT_S
        while not self._is(words):
            if time.monotonic() > deadline:
                logs = {log.name: log.read_text()[:4000] for log in sorted(self._place.glob("*.log"))}
                raise Failed(f"not within {WAIT_S:g} s: {words}. Last seen: {self.watch.samples[-1:]}. Logs: {logs}")
            time.sleep(POLL_INTERVAL_S)

    def _run(self, command: str) -> list[str]:
        # Its output goes to a file: a command in the background would keep a pipe open. Job control is on, as in the
        # shell of a reader.
        self._commands += 1
        said = self._place / f".said-{self._commands}"
        with said.open("wb") as output:
            done = subprocess.run(
                ["bash", "-c", f"set -m; {command}"],
                cwd=self._place,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                check=False,
            )
        text = said.read_text()
        if done.returncode != 0:
            raise Failed(f"{command} ended with {done.returncode}: {text}")
        return [line.rstrip() for line in text.rstrip().splitlines()]

    def _environment(self) -> dict[str, str]:
        """Return the environment of a user with the virtual environment activated."""
        programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        java = str(find_java_home(ROOT / ".cache"))
        ours = {"PATH": programs, "JAVA_HOME": java, "PYSPARK_PYTHON": sys.executable, "COLUMNS": "110"}
        return {**os.environ, **self._settings, **ours}

    def _is(self, words: str) -> bool:
        if words == "leads":
            log = self._place / "leader.log"
            return log.exists() and "serves on" in log.read_text()
        if not self.watch.samples:
            return False
        _, lag, holders = self.watch.samples[-1]
        if words == "reserved":
            return any(who.startswith("reserved") for who in holders)
        if words == "one is in a micro-batch":
            return self.watch.is_in_batch
        if words == "consumed":
            published = int((self._place / "publish.pid").read_text())
            return lag == 0 and not (psutil.pid_exists(published) and psutil.Process(published).status() != "zombie")
        return holders.keys() == set(words.split()) and max(holders.values()) == min(holders.values())


def draw(watch: Watch) -> None:
    """Draw the page's pictures."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "sublet", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot as plt

    first = next(at for at, _, holders in watch.samples if "one" in holders)

    def picture(name: str, title: str) -> Any:
        figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
        for at, words in watch.marks:
            axes.axvline(at - first, color="black", linewidth=0.8, linestyle=":")
            axes.annotate(words, (at - first, 1.02), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
        axes.set(xlim=(0, watch.samples[-1][0] - first), xlabel="seconds", ylabel=title)
        axes.spines[["top", "right"]].set_visible(False)
        return figure, axes, PICTURES / name

    figure, axes, target = picture("tutorial-lag.svg", "orders waiting")
    axes.plot([at - first for at, _, _ in watch.samples], [lag for _, lag, _ in watch.samples], color="#0b6e99")
    axes.set_ylim(bottom=0)
    figure.savefig(target, metadata={"Date": None})
    figure, axes, target = picture("tutorial-streams.svg", "streams")
    colours = {"one": "#0b6e99", "reserved for one": "#9cc9dc", "two": "#e08e2b", "nobody": "#dddddd"}
    times = [at - first for at, _ in watch.changes()]
    shares = [[holders.get(who, 0) for _, holders in watch.changes()] for who in colours]
    axes.stackplot(times, shares, labels=list(colours), colors=list(colours.values()), step="post")
    axes.legend(loc="lower right", ncols=4, fontsize=8)
    figure.savefig(target, metadata={"Date": None})


def tour(page: str, place: Path, settings: Mapping[str, str] | None = None) -> tuple[str, Watch]:
    """Run the page in this directory, with these variables in its environment. Return the page with the new output, and
    the samples of the group. Raise `Failed` if a command fails."""
    with EmbeddedPostgres(place / ".sublet") as server:
        run = Tour(place, server.url, settings or {})

        def part(found: re.Match[str]) -> str:
            text = found.group("text")
            if found.group("what") == "mark":
                run.watch.mark(found.group("words"))
            elif found.group("what") == "until":
                run.until(found.group("words"))
            elif found.group("kind") == "console":
                print(text, end="", flush=True)
                return found.group().replace(text, run.console(text))
            elif found.group("file"):
                (place / found.group("file")).write_text(text)
            return found.group()

        watching = threading.Thread(target=run.watch.run)
        watching.start()
        try:
            page = _PART.sub(part, page)
        finally:
            run.watch.over.set()
            watching.join()
            for one in psutil.process_iter(["cwd"]):
                if one.info["cwd"] == str(place):
                    one.send_signal(signal.SIGKILL)
    return page, run.watch


def main(arguments: list[str]) -> int:
    """Run the page, and without `--check` write it; return 1 if a command failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.tutorial", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args(arguments)
    remove_settings()
    with tempfile.TemporaryDirectory(prefix="tutorial-") as place:
        Path(place).chmod(0o755)  # Postgres's own user enters it
        try:
            page, watch = tour(PAGE.read_text(), Path(place).resolve())
        except Failed as failed:
            print(failed, file=sys.stderr)
            return 1
    if not asked.check:
        PAGE.write_text(page)
        draw(watch)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
