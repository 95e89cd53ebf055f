"""sublet inside Spark: `sublet.spark.consume(spark, subscription, fn, tasks=8)`."""

from __future__ import annotations

from borrower.runner import Policy, Summary
from borrower.spark.checks import SparkSettingsWarning
from borrower.spark.executors import Consumption, consume
from borrower.spark.status import Status, TaskStatus
from borrower.spark.task import Attempt, TaskSummary

__all__ = [
    "Attempt",
    "Consumption",
    "Policy",
    "SparkSettingsWarning",
    "Status",
    "Summary",
    "TaskStatus",
    "TaskSummary",
    "consume",
]
