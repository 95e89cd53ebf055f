"""The options of `spark.read.format("sublet")`: which part of the history is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from sublet_borrower.spark.common.database_credentials import FROM_ENVIRONMENT
from sublet_borrower.spark.common.source_options import (
    StreamingQueryOptions,
    check_database,
    check_partitions,
    read_options,
    to_camel_case,
)
from sublet_protocol.domain.errors import InvalidSetting, UsageError
from sublet_protocol.domain.limits import MAX_EPOCH, MIN_EPOCH
from sublet_protocol.domain.subscriptions import StartingPosition
from sublet_protocol.domain.topics import TopicFilter

_BOUNDS = "a time with its zone such as 2026-11-21T10:00:00Z, or offset:N"
_LEAVE_OUT = "Leave it out"
_INSTEAD = {
    "subscription": "Give filter, such as orders/#",
    "maxOffsetsPerTrigger": "endingPosition says how far to read, and minPartitions into how many tasks",
    "wholeEpochs": "startingEpoch and endingEpoch choose epochs",
    "maxBytesPerTrigger": "endingPosition says how far to read, and minPartitions into how many tasks",
}


@dataclass(frozen=True, slots=True)
class BatchQueryOptions:
    """The options of a batch query; the names in Spark are these in camel case, their case does not matter."""

    filter: str = "#"
    """A topic filter, such as orders/#: which messages are read."""
    url: str | None = None
    """The database, as postgresql://USER@HOST/DATABASE, without a password (default: SUBLET_DATABASE_URL, or what is in
    the file SUBLET_DATABASE_URL_FILE, as they were when Spark was started, else the embedded server of `dataDir`, which
    must have been made)."""
    data_dir: str | None = None
    """The directory of the embedded server, on this machine."""
    space: str | None = None
    """Only messages of the space of this name; also of one that was dropped, as far as they are kept."""
    starting_position: str = "earliest"
    """From where in each stream: `earliest`, a time with its zone such as 2026-11-21T10:00:00Z, or `offset:N`. A time
    is that of storing, by the database's clock, and decides over whole blocks: each belongs where its last message
    does."""
    ending_position: str = "latest"
    """Up to where in each stream, not included: `latest`, which is its end when the query is planned, a time, or
    `offset:N`."""
    starting_epoch: int | None = None
    """The first epoch to read. With this option or the next, messages in no epoch are left out; epochs must be of one
    number."""
    ending_epoch: int | None = None
    """The first epoch not to read any more."""
    min_partitions: int | None = None
    """Into how many tasks the query is divided at least, if it has as many messages (default: one per stream)."""
    max_partitions: int | None = None
    """Into how many it is divided at most: a task reads several streams one after the other then."""
    fail_on_data_loss: bool = True
    """Whether the query fails when retention takes messages after it was planned; else they are left out, with a
    warning."""
    push_down_predicate: bool = False
    """Whether a `where` on topic, space, stream, offset or timestamp decides what is read at all. Needs
    `spark.sql.python.filterPushdown.enabled`, and a `load()` of its own for each set of filters."""
    credentials: str = FROM_ENVIRONMENT
    """Where driver and executors find what the URL has no place for, the password above all: `env`, which is
    SUBLET_DATABASE_URL or SUBLET_DATABASE_URL_FILE of their own environments, if it names the same user, host and
    database; `file:PATH`; or `class:MODULE.NAME` of something that is called there, if their environments'
    SUBLET_CREDENTIALS_CLASSES names it. The latter two have a URL, or `password=...` alone."""

    @property
    def start(self) -> StartingPosition:
        """Return the position at which reading starts."""
        return StartingPosition.parse(self.starting_position)

    @property
    def end(self) -> StartingPosition:
        """Return the position up to which is read."""
        return StartingPosition.parse(self.ending_position)

    @property
    def epochs(self) -> tuple[int, int] | None:
        """Return the first epoch to read and the first after those; None: all messages, also those in no epoch."""
        if self.starting_epoch is None and self.ending_epoch is None:
            return None
        first = MIN_EPOCH if self.starting_epoch is None else self.starting_epoch
        return first, MAX_EPOCH + 1 if self.ending_epoch is None else self.ending_epoch


def batch_options(raw_options: Mapping[str, str]) -> BatchQueryOptions:
    """Return the options of `read`. Raise `InvalidSetting`, or `InvalidFilter`, for the first that cannot be."""
    _check_no_stream(raw_options)
    epoch = {"startingEpoch": _parse_epoch, "endingEpoch": _parse_epoch}
    options = BatchQueryOptions(**read_options(raw_options, BatchQueryOptions, "read", epoch))
    TopicFilter.parse(options.filter)
    check_database(options.url, options.data_dir, options.credentials)
    check_partitions(options.min_partitions, options.max_partitions)
    _check_position("startingPosition", options.starting_position, "earliest")
    _check_position("endingPosition", options.ending_position, "latest")
    _check_order(options)
    return options


def _check_no_stream(raw_options: Mapping[str, str]) -> None:
    """Reject options of `readStream`, with the option that means the same here."""
    only_there = {to_camel_case(field.name) for field in fields(StreamingQueryOptions)} - {
        to_camel_case(f.name) for f in fields(BatchQueryOptions)
    }
    for name in sorted(only_there):
        if name.lower() in {option.lower() for option in raw_options}:
            hint = _INSTEAD.get(name, _LEAVE_OUT)
            raise InvalidSetting(f"option {name}: it is readStream's. History is read without a group. {hint}.")


def _check_position(name: str, text: str, allowed_policy: str) -> None:
    try:
        policy = StartingPosition.parse(text).policy
    except UsageError:
        policy = None
    if policy not in (allowed_policy, "time", "offset"):
        raise InvalidSetting(f"option {name} is {text!r}: it is {allowed_policy}, {_BOUNDS}.")


def _check_order(options: BatchQueryOptions) -> None:
    start, end = options.start, options.end
    if start.policy == end.policy and start.value >= end.value:
        raise _empty_range_error("Position", options.starting_position, options.ending_position)
    first, beyond = options.starting_epoch, options.ending_epoch
    if first is not None and beyond is not None and first >= beyond:
        raise _empty_range_error("Epoch", first, beyond)


def _empty_range_error(suffix: str, start: object, end: object) -> InvalidSetting:
    return InvalidSetting(
        f"options starting{suffix} {start} and ending{suffix} {end}: nothing lies between them, as the end is not "
        "included. Give a later end."
    )


def _parse_epoch(name: str, text: str) -> int:
    try:
        epoch = int(text)
    except ValueError:
        epoch = MAX_EPOCH + 1
    if not MIN_EPOCH <= epoch <= MAX_EPOCH:
        raise InvalidSetting(f"option {name} is {text!r}: it is an epoch of one number, a 64-bit integer.")
    return epoch
