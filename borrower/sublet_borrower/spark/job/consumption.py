"""Consuming in Spark's executors: a job of N tasks, each a session of the group.

    def work(batch):
        store(batch.table)

    with consume(spark, "$share/billing/orders/#", work, tasks=8) as running:
        running.wait()

Progress follows the function, batch by batch: at least once. A task whose process dies is started again by Spark, as a
new session; its streams move on once it is evicted, and late messages of the dead attempt have no effect.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sublet_borrower.consumer.arguments import check_arguments, check_name
from sublet_borrower.consumer.runner import RetryPolicy, UserFunction
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.common.database_credentials import FROM_ENVIRONMENT, driver_url, task_address
from sublet_borrower.spark.job import cluster_checks
from sublet_borrower.spark.job.exception_transport import unpack
from sublet_borrower.spark.job.status import ConsumptionStatus, TaskStatus
from sublet_borrower.spark.job.task import TaskAttempt, TaskSpec, TaskSummary, decode_summary, encode_summary, run
from sublet_protocol.domain.errors import Unavailable
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.bootstrap.given_or_embedded_database import open_database
from sublet_storage.db.connect import resolve_schema_name
from sublet_storage.util.timeouts import check_timeout

if TYPE_CHECKING:
    import pyarrow as pa

    from sublet_borrower.spark.job.driver_endpoint import DriverReportServer

log = logging.getLogger(__name__)

MAX_NAME = 200
"""Longest name, in bytes: each session's own has the application, the task and the attempt behind it."""
DRAIN_S = 60.0
STOP_GRACE_S = 10.0
FAILURE_GRACE_S = 30.0
"""How long the other tasks have, after one has failed, before Spark cancels them."""


def consume(
    spark: Any,
    subscription: str,
    fn: UserFunction,
    *,
    tasks: int,
    url: str | None = None,
    data_dir: Path | str | None = None,
    credentials: str = FROM_ENVIRONMENT,
    nodes: Sequence[str] | None = None,
    name: str | None = None,
    weight: float = 1.0,
    starting_position: str = "latest",
    max_batch_bytes: int = 4 * 1024 * 1024,
    whole_epochs: bool = False,
    retry_policy: RetryPolicy | None = None,
    settings: BorrowerSettings | None = None,
    on_attempt: Callable[[TaskAttempt], Any] | None = None,
    driver_host: str | None = None,
) -> Consumption:
    """Start `tasks` sessions in Spark's executors that call `fn(batch)`, and return at once.

    `url`, `nodes`, `weight`, `starting_position`, `max_batch_bytes`, `whole_epochs`: as for a `Session`; a database
    that is not given is looked for, or started, on the driver. `url` has no password: `credentials` names where driver
    and executors find it, `env` (their SUBLET_DATABASE_URL or SUBLET_DATABASE_URL_FILE), `file:PATH`, or
    `class:MODULE.NAME` of something that is called there, if their SUBLET_CREDENTIALS_CLASSES names it. `name`: begins
    the sessions' names, for operators. `retry_policy`: how often a raising `fn` is tried, and what happens to a record
    that it cannot process; `sys.exit` in it counts as raising, since the process is Spark's. `settings`: the borrowers'
    times (default: the driver's environment). `on_attempt`: called in the task before its session begins, to open what
    `fn` needs. `driver_host`: under which address the executors reach the driver (default: Spark's own).

    Raise `InvalidSubscription`, `InvalidSetting`, `Unavailable`, `DatabaseUnreachable`, `SchemaMismatch`; warns
    (`SparkSettingsWarning`) of Spark settings under which the tasks would not last or not all run.
    """
    cluster_checks.check_cluster(spark, fn, tasks)
    check_arguments(
        weight=weight,
        starting_position=starting_position,
        max_batch_bytes=max_batch_bytes,
        nodes=nodes,
        subscription=subscription,
        whole_epochs=whole_epochs,
        settings=settings,
    )
    check_name(name, MAX_NAME)
    parsed = Subscription.parse(subscription)
    cluster_checks.check_policy(parsed, retry_policy)
    with contextlib.ExitStack() as opened:
        database = opened.enter_context(open_database(driver_url(url, data_dir, credentials), data_dir))
        # Not of the token: names and tags are seen by all who see the group, or Spark's page.
        job = secrets.token_hex(4)
        consumption = Consumption(spark, tasks, f"sublet-{job}")
        opened.callback(consumption._close)
        control = consumption._serve(driver_host)
        work = TaskSpec(
            str(parsed),
            fn,
            address=task_address(database.url),
            credentials=credentials,
            driver=control.address,
            token=control.token,
            driver_host=socket.gethostname(),
            name=f"{name or 'spark'}-{job}",
            nodes=None if nodes is None else tuple(nodes),
            weight=weight,
            starting_position=starting_position,
            max_batch_bytes=max_batch_bytes,
            whole_epochs=whole_epochs,
            policy=retry_policy or RetryPolicy(),
            settings=(settings or BorrowerSettings.from_env()).check(),
            schema=resolve_schema_name(),
            on_attempt=on_attempt,
        )
        consumption._start(work, opened.pop_all())
    return consumption


class Consumption:
    """A consumption under way; made by `consume`. All methods may be called from any thread, and again.

    As a context manager it is drained at the end of the block.
    """

    def __init__(self, spark: Any, tasks: int, tag: str) -> None:
        self._spark, self._tasks, self._tag = spark, tasks, tag
        self._report_server: DriverReportServer | None = None
        self._over = threading.Event()
        self._stopped = False
        self._summaries: list[TaskSummary] | None = None
        self._error: BaseException | None = None
        self._watchdog: threading.Timer | None = None

    def __repr__(self) -> str:
        return f"Consumption({self._tasks} tasks, {'running' if self.is_running else 'over'})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.drain()
        except Unavailable:
            self.stop(0.0)
            raise

    @property
    def is_running(self) -> bool:
        """Return whether the Spark job is under way."""
        return not self._over.is_set()

    def status(self) -> ConsumptionStatus:
        """Return what every attempt reported last, at most about a second ago while it lives."""
        assert self._report_server is not None
        reports = self._report_server.last_reports().values()
        return ConsumptionStatus(self.is_running, tuple(TaskStatus.of(report, age_s) for report, age_s in reports))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the job's end, and return whether it has ended. It ends when it is drained or stopped, or has
        failed.
        """
        return self._over.wait(check_timeout(timeout_s))

    def drain(self, timeout_s: float = DRAIN_S) -> list[TaskSummary]:
        """Let every task finish its running batch and hand its streams over; return what `result` returns.

        Raise `Unavailable` if a function is still running when the time is over: drain again to wait longer.
        """
        self._request_drain()
        if not self.wait(timeout_s):
            busy = ", ".join(
                task.session if task.is_alive else f"{task.session}, silent for {task.age_s:.0f} s"
                for task in self.status().tasks
                if task.state != "ended"
            )
            raise Unavailable(
                f"the function has not returned {timeout_s:g} s after the drain began, in: "
                f"{busy or 'none that has reported'}. They hand over as "
                "soon as it does: drain again to wait longer, or stop to have Spark kill them."
            )
        return self.result()

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Drain, and have Spark cancel the tasks that have not ended within `grace_s`.

        A cancelled task runs on for some seconds and is then killed; its messages since the last progress are delivered
        again, to the next holders of its streams after the eviction time.
        """
        self._request_drain()
        if self.wait(grace_s):
            return
        self._stopped = True
        self._cancel()
        self.wait(grace_s + 5.0)

    def result(self, timeout_s: float | None = None) -> list[TaskSummary]:
        """Wait for the job's end, and return how each task ended, in order of partitions (those that Spark still has).

        Raise `UserFunctionFailed` from a `TaskFailed`, which names the class of what the function raised, the error
        that ended a task for good, or `Unavailable` when the time is over or when the Spark job itself has failed.
        """
        if not self.wait(timeout_s):
            raise Unavailable(f"the job has not ended within {timeout_s:g} s. Drain or stop it, or wait longer.")
        if (failure := self._find_failure()) is not None:
            raise unpack(failure)
        if self._error is not None and not self._stopped:
            raise Unavailable(f"the Spark job has failed: {_format_job_error(self._error)}") from self._error
        return list(self._summaries or ())

    # --- inside -----------------------------------------------------------------------------------------------------

    def _serve(self, driver_host: str | None) -> DriverReportServer:
        from sublet_borrower.spark.job.driver_endpoint import DriverReportServer

        bind, advertised = _choose_addresses(self._spark, driver_host)
        speculates = cluster_checks.read_setting(self._spark, "spark.speculation", "false").lower() == "true"
        self._report_server = DriverReportServer(bind, advertised, self._note_failure, speculates)
        return self._report_server

    def _start(self, work: TaskSpec, resources: contextlib.ExitStack) -> None:
        threading.Thread(target=self._run_job, args=(work, resources), name="sublet-job", daemon=True).start()

    def _run_job(self, work: TaskSpec, resources: contextlib.ExitStack) -> None:
        try:
            self._describe(work)
            rows = (
                self._spark.range(0, self._tasks, 1, self._tasks)
                .mapInArrow(make_task_function(work), "summary string")
                .collect()
            )
            summaries = [decode_summary(row["summary"]) for row in rows]
            self._summaries = sorted(summaries, key=lambda summary: summary.attempt.partition)
        except BaseException as error:  # noqa: BLE001 raised where the result is read
            self._error = error
        finally:
            try:
                resources.close()
            except Exception as error:  # noqa: BLE001 the job's outcome is known, even if its helpers fail
                log.warning("job resources not closed: %s", error)
            finally:
                self._over.set()

    def _describe(self, work: TaskSpec) -> None:
        """Tag the job, so that it can be cancelled, and describe it for Spark's page. Both belong to this thread."""
        sc = cluster_checks.spark_context(self._spark)
        if sc is None:
            self._spark.addTag(self._tag)
        else:
            sc.addJobTag(self._tag)
            sc.setJobDescription(f"{work.name}: {work.subscription}")

    def _cancel(self) -> None:
        sc = cluster_checks.spark_context(self._spark)
        if sc is None:
            self._spark.interruptTag(self._tag)
        else:
            sc.cancelJobsWithTag(self._tag)

    def _request_drain(self) -> None:
        if self._report_server is not None:
            self._report_server.drain()

    def _note_failure(self) -> None:
        """Cancel the job after a time, since one task has failed for good and the others are draining."""
        self._watchdog = threading.Timer(FAILURE_GRACE_S, self._cancel)
        self._watchdog.daemon = True
        self._watchdog.start()

    def _find_failure(self) -> str | None:
        """Return the first there was, from the results, or as reported by a task whose result never came."""
        failures = [summary.failure for summary in self._summaries or ()]
        if self._report_server is not None:
            failures = [report.failure for report, _ in self._report_server.last_reports().values()] + failures
        return next((failure for failure in failures if failure is not None), None)

    def _close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._report_server is not None:
            self._report_server.close()


def make_task_function(work: TaskSpec) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Yield the function that Spark calls in each task."""

    def host(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in rows:
            pass
        yield _make_row(encode_summary(run(work)))

    return host


def _make_row(summary: str) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array([summary], pa.string())], ["summary"])


def _choose_addresses(spark: Any, driver_host: str | None) -> tuple[str, str]:
    """Return where the driver listens for its tasks, and under which address they reach it."""
    if driver_host is not None:
        return driver_host, driver_host
    if cluster_checks.is_local(cluster_checks.read_setting(spark, "spark.master", "")):
        return "127.0.0.1", "127.0.0.1"
    advertised = cluster_checks.read_setting(spark, "spark.driver.host", "127.0.0.1")
    return cluster_checks.read_setting(spark, "spark.driver.bindAddress", advertised), advertised


def _format_job_error(error: BaseException) -> str:
    """Return what Spark says of a job in a line or two: the first, and where a task's traceback follows, its end."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    # Py4J's text has first the call that failed and then, after a colon, what Java has raised.
    first = next((line[2:] for line in lines[:2] if line.startswith(": ")), lines[0])[:500]
    start = next((number for number, line in enumerate(lines) if line.startswith("Traceback (")), len(lines))
    # Behind a traceback's frames, which are indented, stands what was raised.
    raised = next((line for line in lines[start + 1 :] if not line.startswith(" ")), None)
    return first if raised is None else f"{first} {raised[:500]}"
