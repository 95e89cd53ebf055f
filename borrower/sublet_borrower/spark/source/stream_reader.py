"""A streaming query's side in Spark's driver: its next micro-batch, and the outcome of the last.

Spark calls from one thread of a process of its own. What it calls when, measured:

- the batch that `latestOffset(start)` names is in the sink and in the checkpoint: that is the acknowledgement.
  `commit` comes later, and after the last batch not at all;
- the first call after a restart shows how the last process ended. `partitions` of a range that this process has not
  planned: in the middle of a batch, which is to be done again. `latestOffset`: between two;
- when a query is stopped the process gets SIGTERM, and `stop` is called only if that is handled.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from sublet_borrower.planner.planned_ranges import PlanLimits, PlannedRange, RunnablePlannedRange
from sublet_borrower.spark.common.database_credentials import driver_url, task_address
from sublet_borrower.spark.common.database_reachability import check_database_exists
from sublet_borrower.spark.common.source_columns import to_arrow_schema
from sublet_borrower.spark.common.source_options import StreamingQueryOptions
from sublet_borrower.spark.source.offsets import (
    EMPTY_OFFSET,
    Offset,
    check_owner,
    decode_done_ranges,
    decode_ranges,
    encode_offset,
)
from sublet_borrower.spark.source.range_reader import RangePartition, plan_tasks, poison_in, read_task
from sublet_protocol.domain.errors import InDoubtRangeReassigned, InvalidSetting
from sublet_protocol.domain.grant_keys import timeline_number
from sublet_storage.db.connect import resolve_schema_name

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from sublet_borrower.planner.micro_batch_planner import MicroBatchPlanner

log = logging.getLogger(__name__)

IDLE_S = 0.05
"""How long a call waits for new messages where there is nothing to do: Spark calls again at once."""


class SubletStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a streaming query. Spark makes it twice, and sends the second to the executors: so it has nothing
    but the query's options, until its first call on the driver.
    """

    def __init__(self, options: StreamingQueryOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema
        self._planner: MicroBatchPlanner | None = None
        self._started: dict[PlannedRange, RunnablePlannedRange] = {}
        self._is_restored = False
        self._unchecked: Sequence[PlannedRange] = ()
        self._resumed: Offset | None = None
        self._finite = False

    # --- what Spark calls on the driver -----------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 Spark's name
        """Return the offset before the first batch: always the same."""
        return dict(EMPTY_OFFSET)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 Spark's name
        """Return what the query allows a micro-batch."""
        messages, size = self._options.max_offsets_per_trigger, self._options.max_bytes_per_trigger
        if messages is not None:
            return ReadMaxRows(messages)
        return ReadAllAvailable() if size is None else ReadMaxBytes(size)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 Spark's name
        """Have the query end when it has read what is there now."""
        self._finite = True

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 Spark's name
        """Return the offset of the next micro-batch; `start` where there is nothing. The one before is in the sink."""
        planner, previous_ranges = self._open_planner(), self._decode_own_ranges(start)
        if not self._is_restored:
            self._restore(done=[*decode_done_ranges(start), *previous_ranges])
            planner.await_join(granted=not self._finite)
            self._unchecked = previous_ranges
        if not self._check_is_newest():
            return start
        planner.acknowledge(previous_ranges)
        max_messages = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        max_bytes = None if isinstance(limit, ReadAllAvailable) else self._options.max_bytes_per_trigger
        started = planner.plan(PlanLimits(max_messages, max_bytes), IDLE_S, finite=self._finite)
        self._started = {each.planned: each for each in started}
        if not started:
            return start
        whose = {"session": planner.name, "subscription": planner.subscription}
        return encode_offset(self._started, planner.unsaved_ranges(), group_id=planner.group_id, **whose)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 Spark's name
        """Return, for the query's progress display, the heads of its streams and its lag."""
        if self._planner is None:
            return None
        lags = self._planner.lags()
        heads = {str(stream_id): head for stream_id, (_, head) in sorted(lags.items())}
        return {"heads": heads, "lag": sum(head - position for position, head in lags.values())}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the tasks of the micro-batch from one offset to the next."""
        ranges = self._decode_own_ranges(end)
        if end != self._resumed and any(planned not in self._started for planned in ranges):
            self._resume([*self._decode_own_ranges(start), *decode_done_ranges(end)], ranges)
            self._resumed = end
        tasks = list(self._make_partitions([self._started[planned] for planned in ranges if planned in self._started]))
        return plan_tasks(tasks, self._options.min_partitions, self._options.max_partitions)

    def commit(self, end: Offset) -> None:
        """Do nothing: it comes one batch late, and for the last one not at all; `latestOffset` acknowledges sooner."""

    def stop(self) -> None:
        """Leave the group. What is in doubt stays reserved for this query."""
        planner, self._planner = self._planner, None
        if planner is not None:
            planner.close()

    # --- what Spark calls on executors ------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the messages of a task."""
        return read_task(partition, to_arrow_schema(self._schema))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _open_planner(self) -> MicroBatchPlanner:
        if self._planner is None:
            from sublet_borrower.planner.micro_batch_planner import MicroBatchPlanner

            _end_at_sigterm()
            o = self._options
            url = driver_url(o.url, o.data_dir, o.credentials)
            check_database_exists(url, o.data_dir)
            self._planner = MicroBatchPlanner(
                o.subscription,
                url,
                name=o.session_name,
                hold_s=o.in_doubt_timeout,
                data_dir=o.data_dir,
                nodes=o.nodes,
                weight=o.weight,
                starting_position=o.starting_position,
                whole_epochs=o.whole_epochs,
                granted_within_s=o.available_now_wait,
                settings=o.settings(),
            )
        return self._planner

    def _decode_own_ranges(self, offset: Offset) -> list[PlannedRange]:
        """Return what a batch had. Raise `InvalidSetting` if it was not this query's."""
        ranges = decode_ranges(offset)
        check_owner(offset, self._options.session_name, self._open_planner().subscription)
        return ranges

    def _restore(self, done: Iterable[PlannedRange], started: Iterable[PlannedRange] = ()) -> None:
        self._is_restored = True
        self._open_planner().restore(done, started)

    def _resume(self, done: Sequence[PlannedRange], started: Sequence[PlannedRange]) -> None:
        """Find out what is to be done again of a batch that an earlier process planned."""
        self._restore(done, started)
        runnable, lost = self._open_planner().resolve_started(started)
        self._started = {each.planned: each for each in runnable}
        self._put_off(runnable)
        self._unchecked = started
        self._check_is_newest()
        if lost:
            problem = InDoubtRangeReassigned(self._options.session_name, [(p.stream_id, p.start, p.end) for p in lost])
            if self._options.on_range_lost == "fail":
                raise problem
            log.warning("ranges lost, dropped as onRangeLost is drop: %s", problem)

    def _check_is_newest(self) -> bool:
        """Warn of a checkpoint that is an old copy, or raise `InvalidSetting` as `onRangeLost` says: its next batches
        have numbers that a sink may have stored already, and would pass over. Return False where that is not known yet.
        """
        if not self._unchecked:
            return True
        superseded = self._open_planner().find_superseded(self._unchecked, IDLE_S, finite=self._finite)
        if superseded is None:
            return False
        if superseded:
            self._refuse_or_warn(superseded)
        self._unchecked = ()
        return True

    def _refuse_or_warn(self, superseded: Sequence[PlannedRange]) -> None:
        which = ", ".join(f"stream {each.stream_id}: {each.end}" for each in superseded[:5])
        text = (
            f"the checkpoint is older than what session {self._options.session_name!r} has done since: it ends at "
            f"{which}, and the group is further. A sink that knows batches by their numbers, as files and tables do, "
            "passes over the next ones as if it had them. Restore the newest checkpoint, or give the query a new "
            "checkpointLocation together with a new place for its output: it goes on where its group is."
        )
        if self._options.on_range_lost == "fail":
            raise InvalidSetting(text)
        log.warning("checkpoint outdated, continued as onRangeLost is drop: %s", text)

    def _put_off(self, runnable: Sequence[RunnablePlannedRange]) -> None:
        """Leave out of the batch what no task can read: a block that cannot be decoded, which may be why the last
        process failed."""
        poison_blocks = poison_in(list(self._make_partitions(runnable)))
        poison = {
            each.planned: poison_blocks[each.planned.stream_id]
            for each in runnable
            if each.planned.stream_id in poison_blocks
        }
        self._open_planner().put_off(poison)
        for planned, problem in poison.items():
            del self._started[planned]
            text = "block unreadable, batch repeated without its stream: subscription=%s stream_id=%d: %s"
            log.warning(text, self._options.subscription, planned.stream_id, problem)

    def _make_partitions(self, started: Sequence[RunnablePlannedRange]) -> Iterator[RangePartition]:
        planner, o = self._open_planner(), self._options
        spaces = planner.spaces((each.planned.stream_id, each.grant_id) for each in started)
        for each in started:
            yield RangePartition(
                stream_id=each.planned.stream_id,
                generation_id=each.generation_id,
                start=each.position,
                end=each.planned.end,
                filter=each.filter,
                space=spaces.get(each.planned.stream_id, ""),  # none: it is gone, and the read will raise that
                address=task_address(planner.url),
                credentials=o.credentials,
                schema_name=resolve_schema_name(),
                driver_host=socket.gethostname(),
                fail_on_data_loss=o.fail_on_data_loss,
                step=each.step,
                timeline_number=timeline_number(each.grant_id),
            )


def _end_at_sigterm() -> None:
    """Have the process end at SIGTERM as Python programs do, so that Spark's runner calls `stop`; only the first has
    effect.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(0)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)
