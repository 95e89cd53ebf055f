"""The public API inside Spark: `sublet.spark.consume(spark, subscription, fn, tasks=8)`."""

from __future__ import annotations

from sublet_borrower.consumer.runner import RetryPolicy, RunSummary
from sublet_borrower.spark.job.cluster_checks import SparkSettingsWarning
from sublet_borrower.spark.job.consumption import Consumption, consume
from sublet_borrower.spark.job.exception_transport import TaskFailed
from sublet_borrower.spark.job.status import ConsumptionStatus, TaskStatus
from sublet_borrower.spark.job.task import TaskAttempt, TaskSummary
from sublet_borrower.spark.source.micro_batch_transaction import Guard

__all__ = [
    "Consumption",
    "ConsumptionStatus",
    "Guard",
    "RetryPolicy",
    "RunSummary",
    "SparkSettingsWarning",
    "TaskAttempt",
    "TaskFailed",
    "TaskStatus",
    "TaskSummary",
    "consume",
]
