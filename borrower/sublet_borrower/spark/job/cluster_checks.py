"""Checks Spark's settings before tasks start that are to run until they are drained."""

from __future__ import annotations

import importlib.util
import re
import warnings
from typing import Any

from sublet_borrower.consumer.runner import RetryPolicy
from sublet_protocol.domain.errors import InvalidSetting, Unavailable
from sublet_protocol.domain.subscriptions import Subscription

ENOUGH_FAILURES = 100
ADVISED_FAILURES = 1000
SPARK_DEFAULT_FAILURES = 4
_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\s*(\d+))?\])?$")


class SparkSettingsWarning(UserWarning):
    """A warning that Spark will run the tasks, but not for ever, or not all of them."""


def check_cluster(spark: Any, fn: object, tasks: int) -> None:
    """Raise `InvalidSetting` or `Unavailable` for what cannot work, warn about what works only for a while."""
    if not (hasattr(spark, "conf") and hasattr(spark, "range")):
        raise InvalidSetting(
            f"spark is {_format_type(spark)}: a SparkSession is needed. SparkSession.builder.getOrCreate() makes one."
        )
    if not callable(fn):
        raise InvalidSetting(f"fn is {_format_type(fn)}: a function of one batch is needed, def work(batch).")
    if not isinstance(tasks, int) or isinstance(tasks, bool) or tasks < 1:
        raise InvalidSetting(f"tasks is {tasks!r}: it must be a whole number, and at least one task must consume.")
    _check_installed()
    master = read_setting(spark, "spark.master", "")
    _check_failures(spark, master)
    _check_slots(spark, master, tasks)
    _check_idle_kill(spark)


def check_policy(subscription: Subscription, policy: RetryPolicy | None) -> None:
    """Raise `InvalidSetting` for what is no policy, or one whose dead letters would be consumed again."""
    if not (policy is None or isinstance(policy, RetryPolicy)):
        raise InvalidSetting(f"retry_policy is {_format_type(policy)}: give a RetryPolicy(max_attempts=3), or none.")
    if (
        policy is not None
        and policy.dead_letter_topic is not None
        and subscription.filter.matches(policy.dead_letter_topic)
    ):
        raise InvalidSetting(
            f"records that cannot be done are to be published to topic {policy.dead_letter_topic!r}, which "
            f"{subscription} matches: they "
            "would come again. Give a topic outside of it."
        )


def read_setting(spark: Any, key: str, default: str) -> str:
    """Return a setting in effect in Spark, also where there is no SparkContext (Spark Connect)."""
    return str(spark.conf.get(key, default) or default)


def is_local(master: str) -> bool:
    """Return whether driver and executors are one process."""
    return _LOCAL.match(master) is not None


def spark_context(spark: Any) -> Any | None:
    """Return the SparkContext; None on Spark Connect."""
    try:
        return spark.sparkContext
    except Exception:  # noqa: BLE001 Spark Connect has its own errors for its absence
        return None


def _format_type(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _check_installed() -> None:
    """Check that pandas is there: Spark's mapInArrow needs it, and reports that only when the job runs."""
    if importlib.util.find_spec("pandas") is None:
        raise Unavailable(
            "pandas is not installed, and Spark starts no Python tasks on Arrow without it. Run "
            "`pip install 'sublet[spark]'`, here and where the executors run."
        )


def _check_failures(spark: Any, master: str) -> None:
    local = _LOCAL.match(master)
    if local is not None:
        allowed = int(local[2] or 1)
        hint = f"start Spark with master local[{local[1] or 1},{ADVISED_FAILURES}]"
    else:
        allowed = int(read_setting(spark, "spark.task.maxFailures", str(SPARK_DEFAULT_FAILURES)))
        hint = f"set spark.task.maxFailures={ADVISED_FAILURES} when the application starts"
    if allowed < ENOUGH_FAILURES:
        often = "once" if allowed == 1 else f"{allowed} times"
        _warn(
            f"a task that dies {often} ends the whole job, as spark.task.maxFailures is {allowed} here, and tasks that "
            f"run for weeks do die now and then: {hint}."
        )


def _check_slots(spark: Any, master: str, tasks: int) -> None:
    slots = _count_cores(spark, master)
    per_task = int(read_setting(spark, "spark.task.cpus", "1"))
    if slots is not None and tasks > (usable := slots // per_task):
        _warn(
            f"{tasks} tasks and {usable} slots: a task holds its slot until it is drained, so {tasks - usable} of them "
            "wait for ever, and other jobs of this application too, unless more executors are still to come. Ask for "
            "fewer tasks, or give Spark more cores."
        )


def _count_cores(spark: Any, master: str) -> int | None:
    """Return the number of cores that Spark has now; None if it is unknown, as before its executors are there."""
    local = _LOCAL.match(master)
    if local is not None and local[1] != "*":
        return int(local[1] or 1)
    sc, may_grow = spark_context(spark), read_setting(spark, "spark.dynamicAllocation.enabled", "false") == "true"
    if sc is None or may_grow or read_setting(spark, "spark.default.parallelism", ""):
        return None
    cores = int(sc.defaultParallelism)
    return cores if cores > 2 or local is not None else None  # a cluster without executors yet says 2


def _check_idle_kill(spark: Any) -> None:
    """Raise `InvalidSetting` if Spark kills idle workers: it sees no rows of these, so all would count as idle."""
    key = "spark.sql.execution.pyspark.udf"
    idle = read_setting(spark, f"{key}.idleTimeoutSeconds", "0")
    kills = read_setting(spark, f"{key}.killOnIdleTimeout", "false")
    if idle != "0" and kills == "true":
        raise InvalidSetting(
            f"{key}.idleTimeoutSeconds is {idle} and {key}.killOnIdleTimeout is true: Spark would kill every task "
            "after that time, as it sees no rows while a session consumes. Turn one of them off."
        )


def _warn(text: str) -> None:
    warnings.warn(text, SparkSettingsWarning, stacklevel=5)
