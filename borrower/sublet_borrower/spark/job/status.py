"""What a consumption is doing, as its tasks last reported."""

from __future__ import annotations

from dataclasses import dataclass

from sublet_borrower.spark.job.task_reports import Report

SILENT_S = 5.0
"""An attempt that has not reported for so long is dead, or cut off."""


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """One attempt of one task. `state`: opening, running, ended; `kept`: how many of the messages were passed over;
    `lag`: how many of its streams are still to be done; `age_s`: seconds since it reported."""

    session: str
    partition: int
    attempt: int
    state: str
    messages: int
    batches: int
    failures: int
    lost: int
    kept: int
    streams: int
    lag: int
    age_s: float

    @classmethod
    def of(cls, report: Report, age_s: float) -> TaskStatus:
        """Without the failure, which `result` raises."""
        return cls(
            report.session,
            report.partition,
            report.attempt,
            report.state,
            report.messages,
            report.batches,
            report.failures,
            report.lost,
            report.kept,
            report.streams,
            report.lag,
            age_s,
        )

    @property
    def alive(self) -> bool:
        """Heard of lately, and not over."""
        return self.state != "ended" and self.age_s < SILENT_S


@dataclass(frozen=True, slots=True)
class Status:
    """All attempts that ever reported; `running`: whether the Spark job is under way."""

    running: bool
    tasks: tuple[TaskStatus, ...]

    @property
    def alive(self) -> int:
        """How many attempts are alive."""
        return sum(task.alive for task in self.tasks)

    @property
    def messages(self) -> int:
        """Done by all attempts together; a dead one counts as it last reported."""
        return sum(task.messages for task in self.tasks)

    @property
    def kept(self) -> int:
        """Of them, those that could not be done and are kept in the policy's topic."""
        return sum(task.kept for task in self.tasks)

    @property
    def lag(self) -> int:
        """Messages that the streams have which are held by the attempts that are alive, and are still to be done."""
        return sum(task.lag for task in self.tasks if task.alive)

    @property
    def streams(self) -> int:
        """Held by the attempts that are alive."""
        return sum(task.streams for task in self.tasks if task.alive)
