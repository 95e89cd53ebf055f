"""The status of a consumption, from its tasks' last reports."""

from __future__ import annotations

from msgspec import Struct

from sublet_borrower.spark.job.task_reports import TaskReport

REPORT_TIMEOUT_S = 5.0
"""An attempt that has not reported for this long is dead, or disconnected."""


class TaskStatus(Struct, frozen=True):
    """One attempt of one task. `state`: opening, running, ended; `dead_lettered`: how many of the messages were passed
    over; `lag`: how many of its streams are still to be done; `age_s`: seconds since it reported."""

    session: str
    partition: int
    attempt: int
    state: str
    messages: int
    batches: int
    failures: int
    lost_batches: int
    dead_lettered: int
    streams: int
    lag: int
    age_s: float

    @classmethod
    def of(cls, report: TaskReport, age_s: float) -> TaskStatus:
        """Return the status without the failure, which `result` raises."""
        return cls(
            report.session,
            report.partition,
            report.attempt,
            report.state,
            report.messages,
            report.batches,
            report.failures,
            report.lost_batches,
            report.dead_lettered,
            report.streams,
            report.lag,
            age_s,
        )

    @property
    def is_alive(self) -> bool:
        """Return whether it has reported lately, and is not over."""
        return self.state != "ended" and self.age_s < REPORT_TIMEOUT_S


class ConsumptionStatus(Struct, frozen=True):
    """All attempts that ever reported; `is_running`: whether the Spark job is under way."""

    is_running: bool
    tasks: tuple[TaskStatus, ...]

    @property
    def alive_count(self) -> int:
        """Return how many attempts are alive."""
        return sum(task.is_alive for task in self.tasks)

    @property
    def message_count(self) -> int:
        """Return how many messages all attempts have processed; a dead one counts as it last reported."""
        return sum(task.messages for task in self.tasks)

    @property
    def dead_letter_count(self) -> int:
        """Return how many of these messages became dead letters."""
        return sum(task.dead_lettered for task in self.tasks)

    @property
    def lag(self) -> int:
        """Return how many messages are still to be processed in the streams of the attempts that are alive."""
        return sum(task.lag for task in self.tasks if task.is_alive)

    @property
    def stream_count(self) -> int:
        """Return how many streams the attempts that are alive hold."""
        return sum(task.streams for task in self.tasks if task.is_alive)
