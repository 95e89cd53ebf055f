"""Runs the demo: starts Postgres, nodes, Spark and the publisher, and kills two processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from msgspec import Struct, field
from msgspec.structs import asdict

from sublet.demo import delivery_check, flights
from sublet.demo.child_processes import ChildProcesses, remove_settings
from sublet.demo.display import DemoDisplay
from sublet.demo.group_monitor import DemoGroupMonitor, count_consumed, find_busiest, list_holders
from sublet.demo.holding_intervals import holding_intervals, parse_process
from sublet.demo.takeover_reporter import TakeoverReporter
from sublet_protocol.domain.errors import EmbeddedDirectoryUnusable, Unavailable, UsageError
from sublet_storage.bootstrap.given_or_embedded_database import open_database
from sublet_storage.groups.model.records import HistoryRecord
from sublet_storage.groups.status.overview_model import GroupOverview
from sublet_storage.producer import Publisher
from sublet_storage.util.name_list import format_names

TASKS = 4
NODES = ("demo-1", "demo-2")
PUBLISH_S = 30.0
"""Seconds over which the flights are published, so that consumption overlaps it."""
SECONDS_PER_MESSAGE = 0.0004
"""Simulated work per message: four tasks need about 35 s for all."""
KILL_WORKER_AT, KILL_LEADER_AT = 0.33, 0.5
"""When to kill: not before that share is consumed, and as soon as there is a worker to kill;
`delivery_check.KILLS_BETWEEN` decides the verdict."""
LIMIT_S = 170.0


def run_demo(as_json: bool, keep: str | None) -> int:
    """Run the demo; return its exit code."""
    remove_settings()
    show = DemoDisplay()
    home = _make_empty_directory(Path(keep)) if keep else _make_temporary_directory()
    try:
        with open_database(None, home / "postgres") as database:
            show.print_line("Postgres is up, embedded")
            environment = {**os.environ, "SUBLET_DATABASE_URL": database.url.reveal()}
            with ChildProcesses(home, environment) as processes:
                return _DemoRun(database.url, home, show, processes, TakeoverReporter(show.print_line)).play(as_json)
    except EmbeddedDirectoryUnusable as error:
        raise EmbeddedDirectoryUnusable(str(error).replace("--data-dir, SUBLET_DATA_DIR", "--keep")) from None
    except KeyboardInterrupt:
        show.print_line("interrupted: everything that was started has ended")
        raise
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)


def _make_temporary_directory() -> Path:
    """Return a temporary directory that Postgres's user can enter, should it be another."""
    home = Path(tempfile.mkdtemp(prefix="sublet-demo-"))
    home.chmod(0o755)
    return home


def _make_empty_directory(directory: Path) -> Path:
    """Create the directory if needed, and return it. Raise `UsageError` if it is not empty, or cannot be created."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        entries = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise UsageError(
            f"--keep {str(directory)!r}: {error.strerror}. Name a directory that can be written."
        ) from None
    if entries:
        raise UsageError(
            f"--keep {str(directory)!r}: it holds {format_names(entries, 3)}, and the demo's records need a "
            "directory to themselves. Name one that is new or empty."
        )
    return directory


class _DemoRun(Struct):
    """One run of the demo."""

    url: str
    home: Path
    show: DemoDisplay
    processes: ChildProcesses
    takeover_reporter: TakeoverReporter
    published: int = 0
    failure: BaseException | None = None
    kills: list[delivery_check.KillRecord] = field(default_factory=list)

    def play(self, as_json: bool) -> int:
        records = self.home / "records"
        records.mkdir()
        source = flights.load()
        self.show.print_line(f"{source.num_rows:,} flights loaded")
        with DemoGroupMonitor(self.url) as monitor:
            for name in NODES:
                self.processes.start(name, "sublet.cli", "leader", "--name", name, "--listen", "127.0.0.1:0")
            arguments = (str(records), str(TASKS), str(SECONDS_PER_MESSAGE))
            application = self.processes.start("application", "sublet.demo.application", *arguments)
            self.show.print_line(
                f"leader nodes {' and '.join(NODES)} and a Spark application with {TASKS} tasks are starting"
            )
            self._wait_until(lambda: len(list_holders(monitor.read())) == TASKS, "the tasks to share the streams")
            self.show.print_line(f"{TASKS} tasks share {len(monitor.read().streams)} streams")
            with self._publish_in_background(source), self.show.show_bars(source.num_rows):
                self._watch(monitor, source.num_rows)
            self.show.print_line("everything is consumed; draining the application")
            application.communicate(timeout=60)
            heads, history = (
                {stream.stream_id: stream.head for stream in monitor.read().streams},
                monitor.read_history(),
            )
        findings = delivery_check.check_deliveries(
            source, heads, delivery_check.read_delivered_batches(records), history, self.kills
        )
        self._report(findings, history, as_json)
        return 0 if findings.is_ok else 1

    # --- the run ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _publish_in_background(self, source: pa.Table) -> Iterator[None]:
        """Publish in the background while inside, and stop afterwards."""
        over = threading.Event()
        publisher = threading.Thread(target=self._publish, args=(source, over), name="publisher", daemon=True)
        publisher.start()
        try:
            yield
        finally:
            over.set()
            publisher.join(5.0)

    def _publish(self, source: pa.Table, over: threading.Event) -> None:
        """Publish all flights in the file's order, a tenth of a second's worth at a time."""
        published = source.select(["topic", "key", "value"])
        step = max(1, round(source.num_rows / PUBLISH_S / 10))
        try:
            with Publisher(self.url) as publisher:
                began = time.monotonic()
                for first in range(0, source.num_rows, step):
                    publisher.publish_batch(published.slice(first, step))
                    publisher.flush()
                    self.published = min(first + step, source.num_rows)
                    ahead = began + self.published / source.num_rows * PUBLISH_S - time.monotonic()
                    if over.wait(max(0.0, ahead)):
                        break
        except BaseException as error:  # noqa: BLE001 it is raised where it is seen
            self.failure = error

    def _watch(self, monitor: DemoGroupMonitor, total: int) -> None:
        """Show the progress, and kill at the right moments."""
        acts: list[tuple[float, str, Callable[[GroupOverview], bool]]] = [
            (KILL_WORKER_AT, "worker", self._kill_worker),
            (KILL_LEADER_AT, "leader", self._kill_leader),
        ]

        def is_done() -> bool:
            overview = monitor.read()
            done_so_far = count_consumed(overview)
            self.show.update(self.published, done_so_far)
            self.takeover_reporter.update(overview)
            if acts and done_so_far >= acts[0][0] * total and acts[0][2](overview):
                self.kills.append(delivery_check.KillRecord(acts.pop(0)[1], done_so_far / total))
            return done_so_far == total

        self._wait_until(is_done, "everything to be consumed")
        if acts:
            raise Unavailable("the demo was over before it could kill anything: this machine is too fast for it.")

    def _kill_worker(self, overview: GroupOverview) -> bool:
        """Kill the Python worker whose streams have the highest lag; return whether there was one."""
        agent, streams = find_busiest(overview)
        process = parse_process(agent)
        if process is None:
            return False
        os.kill(process, signal.SIGKILL)
        stream_list = ", ".join(str(stream) for stream in sorted(streams))
        self.show.print_line(
            f"[red]killed[/red] worker {process}, a task's Python process, which had work left in streams {stream_list}"
        )
        self.takeover_reporter.on_kill(agent, streams)
        return True

    def _kill_leader(self, overview: GroupOverview) -> bool:
        """Kill the node that leads the group; return whether there was one."""
        if overview.leader is None or not overview.has_leader:
            return False
        self.processes[overview.leader.node].kill()
        self.show.print_line(f"[red]killed[/red] {overview.leader.node}, the node that leads the group")
        return True

    def _wait_until(self, fact: Callable[[], bool], description: str) -> None:
        """Wait until the fact is true. Raise if the application dies, the publisher fails or the time is over."""
        while not fact():
            if self.failure is not None:
                raise self.failure
            if self.processes["application"].poll() is not None:
                raise Unavailable(f"the Spark application ended by itself:\n{self.processes.tail_log('application')}")
            if self.show.seconds > LIMIT_S:
                raise Unavailable(f"waited too long for {description}:\n{self.processes.tail_log('application')}")
            time.sleep(0.1)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _report(
        self, findings: delivery_check.DeliveryCheckResult, history: Sequence[HistoryRecord], as_json: bool
    ) -> None:
        holdings = holding_intervals(history, round((time.time() - self.show.seconds) * 1e6))
        moves = [holding for holding in holdings if holding["moved_from"] is not None]
        if not as_json:
            self.show.print_result(findings, holdings, moves)
            return
        summary: dict[str, Any] = {
            "published": findings.published,
            "consumed": findings.consumed,
            "lost": findings.lost,
            "duplicated": findings.duplicated,
            "explained_duplicates": findings.explained_duplicates,
            "moves": len(moves),
            "elapsed_s": round(self.show.seconds),
            "totals_match": all(published == consumed for published, consumed, _ in findings.totals.values()),
            "move_list": moves,
            "duplicate_ranges": findings.duplicate_ranges,
            "kills": [asdict(kill) for kill in findings.kills],
        }
        sys.stdout.write(json.dumps(summary) + "\n")
