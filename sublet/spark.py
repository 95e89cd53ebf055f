"""sublet inside Spark: `sublet.spark.consume(spark, subscription, fn, tasks=8)`."""

from __future__ import annotations

from borrower.runner import Policy, Summary
from borrower.spark.checks import SparkSettingsWarning
from borrower.spark.executors import Consumption, consume
from borrower.spark.guard import Guard
from borrower.spark.status import Status, TaskStatus
from borrower.spark.task import Attempt, TaskSummary

__all__ = [
    "Attempt",
    "Consumption",
    "Guard",
    "Policy",
    "SparkSettingsWarning",
    "Status",
    "Summary",
    "TaskStatus",
    "TaskSummary",
    "consume",
]
