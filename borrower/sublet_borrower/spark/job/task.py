"""The code of an executor: one attempt of one task, which is one session.

Nothing here may load grpc before `run` is called, in the worker that stays.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from sublet_borrower.consumer.runner import RetryPolicy, RunSummary, UserFunction
from sublet_borrower.consumer.runner import run as run_function
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.common.database_credentials import FROM_ENVIRONMENT, task_url
from sublet_borrower.spark.common.database_reachability import check_socket_reachable
from sublet_borrower.spark.job.exception_transport import UserCodeCalledExit, pack
from sublet_borrower.spark.job.shutdown_signals import ShutdownSignalHandler
from sublet_borrower.spark.job.task_reports import TaskReport
from sublet_borrower.util.unfinished_work import check_has_run
from sublet_protocol.domain.errors import Unavailable, UsageError
from sublet_storage.util.retry import Backoff, call_with_retry

if TYPE_CHECKING:
    from sublet_borrower.consumer.session import Session
    from sublet_borrower.streams.batch import Batch

log = logging.getLogger(__name__)

CALL_SHARE = 0.8
"""How much of the unsubscribe timeout a running call gets when the process must end; the rest is for the hand-over."""


class TaskAttempt(Struct, frozen=True):
    """One attempt of one task. `session` is its name in the group; no other attempt anywhere has it."""

    partition: int
    number: int
    session: str


class TaskSummary(Struct, frozen=True):
    """The outcome of an attempt. `failure`: see `exception_transport.pack`; None if it was drained."""

    attempt: TaskAttempt
    summary: RunSummary
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """The arguments of a task, which Spark pickles with the job."""

    subscription: str
    fn: UserFunction
    address: str
    driver: str
    token: str = field(repr=False)
    driver_host: str
    name: str
    nodes: tuple[str, ...] | None
    weight: float
    starting_position: str
    max_batch_bytes: int
    whole_epochs: bool
    policy: RetryPolicy
    settings: BorrowerSettings
    schema: str
    on_attempt: Callable[[TaskAttempt], Any] | None
    credentials: str = FROM_ENVIRONMENT


def run(work: TaskSpec) -> TaskSummary:
    """Run one attempt; Spark calls this in the task's process."""
    os.environ["SUBLET_SCHEMA"] = work.schema  # also the default: the worker may have had a job with another
    return run_attempt(work, _get_attempt(work))


def run_attempt(work: TaskSpec, attempt: TaskAttempt) -> TaskSummary:
    """Run one attempt, from its first report to its last. A failure that must not be retried is returned, not raised.

    Raise `Unavailable` where the driver was silent for too long: if it is there all the same, Spark tries it again.
    Raise SystemExit if the process was signalled to end meanwhile: see `shutdown_signals`.
    """
    task = _Task(work, attempt)
    with ShutdownSignalHandler(task.leave, CALL_SHARE * work.settings.unsubscribe_timeout_s) as ending:
        return task.run(ending)


def _get_attempt(work: TaskSpec) -> TaskAttempt:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    partition, number = context.partitionId(), context.attemptNumber()
    return TaskAttempt(partition, number, f"{work.name}-p{partition}-a{number}-t{context.taskAttemptId()}")


class _Task:
    def __init__(self, work: TaskSpec, attempt: TaskAttempt) -> None:
        self._work, self._attempt = work, attempt
        self._summary = RunSummary()
        self._state = "opening"
        self._failure: str | None = None
        self._session: Session | None = None
        self._draining = threading.Event()

    def run(self, ending: ShutdownSignalHandler) -> TaskSummary:
        from sublet_borrower.spark.job.driver_link import REPORT_INTERVAL_S, SparkDriverLink

        work = self._work
        with SparkDriverLink(work.driver, work.token, self._attempt.session, self._make_report, self._drain) as link:
            try:
                with ending.user_call():
                    self._consume(ending)
            except Exception as error:
                log.exception("task failed: session=%s", self._attempt.session)
                if ending.received_signal is None:  # else it may be only the end of its process: Spark tries it again
                    self._failure = pack(error)
                link.report_now()
            finally:
                self._release(ending.cut)
                self._state = "ended"
                link.report_now()
            while ending.received_signal is None and not link.may_end.wait(REPORT_INTERVAL_S):
                pass  # Spark would kill the other attempt at this task, which is still at work
        if link.silence is not None and self._failure is None:
            raise Unavailable(f"{link.silence}, and the task has handed over its streams. Spark tries it again.")
        return TaskSummary(self._attempt, self._summary, self._failure)

    def leave(self) -> None:
        """Hand over within the unsubscribe timeout, after a signal. Called on the network thread."""
        log.info("task stopping, signal received: session=%s", self._attempt.session)
        self._draining.set()
        if (session := self._session) is not None:
            session.leave()

    def _consume(self, ending: ShutdownSignalHandler) -> None:
        check_socket_reachable(self._work.address, self._work.driver_host)
        if self._work.on_attempt is not None:
            with _refuse_exit(ending, "on_attempt"):
                check_has_run(self._work.on_attempt(self._attempt), "on_attempt")
        session = self._open()
        if session is not None:
            self._state = "running"
            run_function(session, partial(self._call, ending), policy=self._work.policy, summary=self._summary)

    def _call(self, ending: ShutdownSignalHandler, batch: Batch) -> Any:
        with _refuse_exit(ending, "the function"):
            return self._work.fn(batch)

    def _open(self) -> Session | None:
        """Return the session; None if the task was drained before the database was there."""
        from sublet_borrower.consumer.session import Session

        work = self._work

        def attempt() -> Session | None:
            if self._draining.is_set():
                return None
            return Session(
                work.subscription,
                task_url(work.address, work.credentials),
                nodes=work.nodes,
                name=self._attempt.session,
                is_name_stable=False,
                weight=work.weight,
                starting_position=work.starting_position,
                max_batch_bytes=work.max_batch_bytes,
                whole_epochs=work.whole_epochs,
                auto_ack=False,
                settings=work.settings,
            )

        self._session = call_with_retry(
            "open session", attempt, lambda error: isinstance(error, Unavailable), Backoff(), self._draining.wait
        )
        if self._session is not None and self._draining.is_set():
            self._session.drain()
        return self._session

    def _release(self, aborted: bool) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close(aborted=aborted)

    # --- called by the link -----------------------------------------------------------------------------------------

    def _drain(self, reason: str) -> None:
        if not self._draining.is_set():
            log.info("task draining: session=%s: %s", self._attempt.session, reason)
        self._draining.set()
        if (session := self._session) is not None:
            session.drain()

    def _make_report(self) -> TaskReport:
        done, session = self._summary, self._session
        return TaskReport(
            self._attempt.session,
            self._attempt.partition,
            self._attempt.number,
            self._state,
            done.messages,
            done.batches,
            done.failures,
            done.lost_batches,
            done.dead_lettered,
            0 if session is None else len(session.assignment()),
            0 if session is None else sum(session.lag().values()),
            self._failure,
        )


@contextlib.contextmanager
def _refuse_exit(ending: ShutdownSignalHandler, subject: str) -> Iterator[None]:
    """Fail if a user's code ends the process, which is Spark's, or raises what is no `Exception`: Spark would start the
    task again and again. `shutdown_signals` may end it all the same."""
    try:
        yield
    except Exception:
        raise
    except SystemExit as exit_asked:
        if ending.cut:
            raise
        raise UserCodeCalledExit(
            f"{subject} asked for the end of its process, which is Spark's, by SystemExit({exit_asked.code!r}): return "
            "where all is done, and raise another exception where it cannot be"
        ) from exit_asked
    except BaseException as error:
        raise UserCodeCalledExit(
            f"{subject} raised {type(error).__name__}, which is no Exception and so meant for its process, which is "
            "Spark's: raise an Exception"
        ) from error


def encode_summary(summary: TaskSummary) -> str:
    """Return the summary as the one value of the task's result row."""
    return msgspec.json.encode(summary).decode()


def decode_summary(value: str) -> TaskSummary:
    """Return the value of a result row. Raise `UsageError` for what no task has made."""
    try:
        fields: dict[str, Any] = json.loads(value)
        attempt, summary, failure = (fields[name] for name in ("attempt", "summary", "failure"))
        return TaskSummary(TaskAttempt(**attempt), RunSummary(**summary), None if failure is None else str(failure))
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise UsageError(f"not a task's summary ({type(error).__name__}: {error}).") from None
