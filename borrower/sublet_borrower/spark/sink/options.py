"""The options of writing to `format("sublet")`, checked by name before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sublet_borrower.spark.common.database_credentials import FROM_ENVIRONMENT
from sublet_borrower.spark.common.source_options import check_database, check_option_name, parse_index, read_options
from sublet_protocol.domain.errors import InvalidSetting, InvalidTopic
from sublet_protocol.domain.limits import MAX_NUMBER
from sublet_protocol.domain.topics import check_topic

SPARKS_OWN = ("checkpointlocation", "queryname")
"""What Spark keeps among a streaming query's options."""


READERS = {"batchId": parse_index}


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of a write; the names in Spark are these in camel case, their case does not matter."""

    topic: str | None = None
    """The topic of rows that have none: where there is no column `topic`, it must be given."""
    url: str | None = None
    """The database, as postgresql://USER@HOST/DATABASE, without a password (default: SUBLET_DATABASE_URL, or what is in
    the file SUBLET_DATABASE_URL_FILE, as they were when Spark was started, else the embedded server of `dataDir`, which
    must have been made). Driver and executors have to reach it."""
    data_dir: str | None = None
    """The directory of the embedded server, on this machine."""
    space: str | None = None
    """Refuse topics outside of this space."""
    sink_name: str | None = None
    """Of `write` only, with `batchId`: a batch of that number is stored once under this name, however often it is
    written. A streaming query needs no name: its own id, which its checkpoint keeps, stands for it."""
    batch_id: int | None = None
    """The number of the batch, in `foreachBatch` that which Spark gives. Under one name they grow; a lower one than the
    last is refused."""
    credentials: str = FROM_ENVIRONMENT
    """Where driver and executors find what the URL has no place for, the password above all: `env`, which is
    SUBLET_DATABASE_URL or SUBLET_DATABASE_URL_FILE of their own environments, if it names the same user, host and
    database; `file:PATH`; or `class:MODULE.NAME` of something that is called there, if their environments'
    SUBLET_CREDENTIALS_CLASSES names it. The latter two have a URL, or `password=...` alone."""


def write_options(raw_options: Mapping[str, str]) -> WriteOptions:
    """Return the options of `write`. Raise `InvalidSetting`, or `InvalidTopic`, for the first that cannot be."""
    options = _check_options(WriteOptions(**read_options(raw_options, WriteOptions, "write", READERS)))
    if options.sink_name is not None:
        check_option_name("sinkName", options.sink_name)
    if (options.sink_name is None) != (options.batch_id is None):
        present, missing = ("batchId", "sinkName") if options.sink_name is None else ("sinkName", "batchId")
        raise InvalidSetting(
            f"option {present} without {missing}: together they say which batch this is, that it be stored once. "
            "Give both, or neither."
        )
    if (options.batch_id or 0) > MAX_NUMBER:
        raise InvalidSetting(f"option batchId is {options.batch_id}: it is at most {MAX_NUMBER}. Count the batches.")
    return options


def stream_write_options(raw_options: Mapping[str, str]) -> WriteOptions:
    """Return the options of `writeStream`. Raise as `write_options`."""
    sublet_options = {name: value for name, value in raw_options.items() if name.lower() not in SPARKS_OWN}
    options = _check_options(WriteOptions(**read_options(sublet_options, WriteOptions, "writeStream", READERS)))
    for name, value in (("sinkName", options.sink_name), ("batchId", options.batch_id)):
        if value is not None:
            raise InvalidSetting(
                f"option {name}: a streaming query is known by its own id, and its batches by their numbers, which its "
                "checkpoint keeps. Leave it out."
            )
    return options


def _check_options(options: WriteOptions) -> WriteOptions:
    check_database(options.url, options.data_dir, options.credentials)
    if options.topic is not None:
        try:
            check_topic(options.topic)
        except InvalidTopic as problem:
            raise InvalidTopic(f"option topic: {problem}") from None
    return options
