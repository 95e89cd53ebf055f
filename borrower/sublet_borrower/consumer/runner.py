"""The runner that calls a user's function with each batch, with retries and dead letters.

Progress moves only behind what the function has returned from. When it raises, the same batch is tried again after a
pause; when it keeps raising, the batch is halved until the one record is found that cannot be processed, and that ends
the run, or becomes a dead letter. A stream that was taken away meanwhile is no failure: the batch is dropped, and its
new holder gets it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import psycopg
from msgspec import Struct

from sublet_borrower.consumer.dead_letter import publish_dead_letter
from sublet_borrower.streams.batch import Batch
from sublet_borrower.util.unfinished_work import check_has_run
from sublet_protocol.domain.errors import (
    GrantLost,
    InvalidSetting,
    Unavailable,
    UserFunctionFailed,
    format_error,
)
from sublet_protocol.domain.topics import check_topic
from sublet_storage.util.retry import Backoff

log = logging.getLogger(__name__)

UserFunction = Callable[[Batch], Any]

SHOWN_KEY_BYTES = 60
"""A longer key is cut in error texts."""

TRUST_WAIT_S = 0.1
"""Between two checks whether this session still holds the stream."""


class PollableSession(Protocol):
    """The part of a `Session` that the runner uses; it must not acknowledge by itself."""

    @property
    def is_closed(self) -> bool: ...

    def poll(self, timeout_s: float | None = None) -> Batch | None: ...

    def wait(self, timeout_s: float) -> None: ...

    def may_continue(self, batch: Batch) -> bool: ...


class RetryPolicy(Struct, frozen=True):
    """Retries, backoff and dead letters for a user's function that raises.

    A batch is tried `max_attempts` times in all, and so is a single record before it counts as failed; where sublet's
    own database is away, without a limit. The pauses between tries begin near `backoff_s` and double up to
    `max_backoff_s`, each shortened at random by up to half so that many tasks that fail together do not come back
    together.

    `dead_letter_topic`: a topic. A single record that cannot be done is published there, with headers that have its
    origin and the error, and the run goes on behind it. None: it ends the run, with progress before it. In an atomic
    group it always does, since an epoch cannot be done in part.
    """

    max_attempts: int = 3
    backoff_s: float = 0.2
    max_backoff_s: float = 5.0
    dead_letter_topic: str | None = None

    def __post_init__(self) -> None:
        if self.dead_letter_topic is not None:
            check_topic(self.dead_letter_topic)
        attempts = self.max_attempts
        if not isinstance(attempts, int) or isinstance(attempts, bool) or attempts < 1:
            raise InvalidSetting(f"max_attempts is {attempts!r}: give a whole number of at least 1, such as 3.")
        if not 0 <= self.backoff_s <= self.max_backoff_s:
            raise InvalidSetting(
                f"backoff_s is {self.backoff_s} and max_backoff_s is {self.max_backoff_s}: "
                "neither may be negative, and the first must be at most the second."
            )

    def new_backoff(self) -> Backoff:
        """Return the pauses between the tries of one batch or record."""
        return Backoff(self.backoff_s, self.max_backoff_s)


class RunSummary(Struct):
    """The counts of one run so far; another thread may read them meanwhile.

    `messages` and `batches` are done, `failures` is how often the function raised, `lost_batches` how many batches were
    dropped because their stream was taken away, `dead_lettered` how many of the messages became dead letters.
    """

    batches: int = 0
    messages: int = 0
    failures: int = 0
    lost_batches: int = 0
    dead_lettered: int = 0


class _Lost(Exception):
    """An exception for a batch whose stream has another holder now."""


def run(
    session: PollableSession, fn: UserFunction, *, policy: RetryPolicy | None = None, summary: RunSummary | None = None
) -> RunSummary:
    """Call `fn` with each batch until the session is drained or closed. `summary` is filled as the run goes on.

    Raise `UserFunctionFailed` from what the function raised, `UsageError` where it returned what is still to be run
    (nothing of that batch is acknowledged), `SubscriptionEnded`, and what the session raises. What is not an
    `Exception` (SystemExit, KeyboardInterrupt) passes through at once.
    """
    runner = _Runner(session, fn, policy or RetryPolicy(), summary or RunSummary())
    while (batch := session.poll()) is not None:
        runner.work(batch)
    return runner.summary


class _Runner:
    def __init__(self, session: PollableSession, fn: UserFunction, policy: RetryPolicy, summary: RunSummary) -> None:
        self._session, self._fn, self._policy = session, fn, policy
        self.summary = summary

    def work(self, batch: Batch) -> None:
        """Process the batch from beginning to end."""
        try:
            self._await_valid_grant(batch)
            if (error := self._try(batch, batch, self._policy.max_attempts)) is not None:
                if batch.is_atomic:  # a part of it could not be done on its own
                    raise UserFunctionFailed(
                        batch.stream_id, batch.first, "", self._policy.max_attempts, _format_error(error), end=batch.end
                    ) from error
                self._narrow(batch, 0, len(batch), error)
        except _Lost:
            self.summary.lost_batches += 1
            log.warning("batch lost: stream_id=%d start_offset=%d end_offset=%d", *_get_range(batch))
            return
        batch.ack()
        self.summary.batches += 1
        self.summary.messages += len(batch)

    def _try(self, batch: Batch, part: Batch, tries: int) -> Exception | None:
        """Call the function on a part of the batch, or the rest of it that is not done in its transactions; return the
        last error if it raised every time."""
        tried, backoff = 0, self._policy.new_backoff()
        failure: Exception | None
        while (rows_done := part.count_rows_done()) < max(len(part), 1):
            try:
                returned = self._fn(part.slice(rows_done, len(part)) if rows_done else part)
            except GrantLost:
                raise _Lost from None
            except Unavailable as away:  # an error of sublet's, not of the record: retried without a limit
                failure = None
                text = "batch not processed, retrying: stream_id=%d start_offset=%d end_offset=%d: %s"
                log.warning(text, *_get_range(part), away)
            except Exception as error:  # noqa: BLE001 the user's code may raise anything
                failure = error
                self.summary.failures += 1
                tried += 1
                text = "user function failed: stream_id=%d start_offset=%d end_offset=%d attempt=%d max_attempts=%d: %s"
                log.warning(text, *_get_range(part), tried, tries, _format_error(error))
            else:
                check_has_run(returned, "the function")
                return None
            if part.committed or part.is_done or part.count_rows_done() == len(part):
                return None  # by its transactions; another call would process it twice
            if failure is not None and tried == tries:
                return failure
            self._session.wait(backoff.draw_pause_s())
            self._await_valid_grant(batch)
        return None

    def _await_valid_grant(self, batch: Batch) -> None:
        """Wait until no other session can have been granted the stream. Raise `_Lost` if one can."""
        while not (batch.is_lost or self._session.is_closed):
            if self._session.may_continue(batch):
                return
            self._session.wait(TRUST_WAIT_S)
        raise _Lost

    def _narrow(self, batch: Batch, first: int, last: int, error: Exception) -> None:
        """Process rows [first, last), which failed together, in order, up to the one record that fails by itself."""
        if last - first == 1:
            if self._policy.dead_letter_topic is None:
                raise _blame(batch, first, self._policy.max_attempts, _format_error(error)) from error
            self._keep(batch, batch.slice(first, 1), self._policy.dead_letter_topic, error)
            return
        middle = (first + last) // 2
        for start, end in ((first, middle), (middle, last)):
            part = batch.slice(start, end - start)
            self._session.wait(0.0)
            self._await_valid_grant(batch)
            failed = self._try(batch, part, self._policy.max_attempts if end - start == 1 else 1)
            if failed is not None:
                self._narrow(batch, start, end, failed)
            else:
                batch.ack(up_to_offset=part.end)

    def _keep(self, batch: Batch, record: Batch, topic: str, error: Exception) -> None:
        """Publish the record to the topic, and go on behind it; a database that is away is waited for."""
        backoff = self._policy.new_backoff()
        while not record.committed:
            self._await_valid_grant(batch)
            try:
                with record.transaction() as connection:
                    publish_dead_letter(connection, topic, record.table, record.stream_id, _format_error(error))
            except GrantLost:
                raise _Lost from None
            except Unavailable as away:
                text = "dead letter not published, retrying: stream_id=%d offset=%d topic=%s: %s"
                log.warning(text, record.stream_id, record.first, topic, away)
                self._session.wait(backoff.draw_pause_s())
            except psycopg.Error as refused:
                detail = f"{_format_error(error)}. Nor could it be published to topic {topic}: {format_error(refused)}"
                raise _blame(record, 0, self._policy.max_attempts, detail) from error
        self.summary.dead_lettered += 1
        text = "dead letter published: stream_id=%d offset=%d topic=%s: %s"
        log.warning(text, record.stream_id, record.first, topic, _format_error(error))


def _get_range(batch: Batch) -> tuple[int, int, int]:
    """Return what a log line names of a batch."""
    return batch.stream_id, batch.first, batch.end


def _blame(batch: Batch, row: int, tries: int, error_text: str) -> UserFunctionFailed:
    record = batch.table.slice(row, 1).select(["offset", "topic", "key"]).to_pylist()[0]
    location = f" (topic {record['topic']!r}, key {_format_key(record['key'])})"
    return UserFunctionFailed(batch.stream_id, record["offset"], location, tries, error_text)


def _format_key(key: bytes | None) -> str:
    if key is None:
        return "none"
    shown = key[:SHOWN_KEY_BYTES]
    try:
        text = repr(shown.decode())
    except UnicodeDecodeError:
        text = repr(shown)
    return text if len(key) <= SHOWN_KEY_BYTES else f"{text}... of {len(key)} bytes"


def _format_error(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as unfit:  # noqa: BLE001 a user's exception may raise anything
        text = f"(its text cannot be had: {type(unfit).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
