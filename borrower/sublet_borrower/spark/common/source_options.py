"""The options of `readStream.format("sublet")`, checked by name before anything is opened."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sublet_borrower.consumer.arguments import check_arguments, check_name
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.common.database_credentials import ADVICE, FROM_ENVIRONMENT, SECRET_WORDS, check_url
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.limits import MAX_HOLD_S, parse_natural
from sublet_protocol.domain.subscriptions import Subscription

POLICIES = ("drop", "fail")
MAX_NUMBER = 2**62
MAX_SHOWN_CHARS = 100
"""How many characters of a wrong value are shown."""
_NAMES = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
_UNITS = {"": 1.0, "ms": 1e-3, **_NAMES, **{name[0]: seconds for name, seconds in _NAMES.items()}}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_YES = {"true": True, "false": False}

Reader = Callable[[str, str], Any]
"""What an option's name and text mean. Raises `InvalidSetting`."""


@dataclass(frozen=True, slots=True)
class StreamingQueryOptions:
    """The options of a streaming query; the names in Spark are these in camel case, their case does not matter."""

    subscription: str
    """`$share/GROUP/FILTER` or `$queue/GROUP/FILTER`. Queries and sessions of one group share its messages."""
    session_name: str
    """The name of this query in its group. It must be its own, and stay the same when the query is started again from
    its checkpoint: what was in doubt then comes back to it. A second query of that name takes the place of the
    first."""
    url: str | None = None
    """The database, as postgresql://USER@HOST/DATABASE, without a password (default: SUBLET_DATABASE_URL, or what is in
    the file SUBLET_DATABASE_URL_FILE, as they were when Spark was started, else the embedded server of `dataDir`, which
    must have been made)."""
    data_dir: str | None = None
    """The directory of the embedded server, on this machine."""
    nodes: tuple[str, ...] | None = None
    """Addresses HOST:PORT of leader nodes, with commas between (default: those listed in the database)."""
    starting_position: str = "latest"
    """Where a group begins that this query is the first to name: `latest`, `earliest`, a time with its zone such as
    2026-11-21T10:00:00Z, or `offset:N`. A group that exists goes on where it is."""
    weight: float = 1.0
    """How much of the group's streams this query takes, relative to others."""
    max_offsets_per_trigger: int | None = None
    """About how many messages a micro-batch has at most, with those that the filter leaves out (default: all there
    are)."""
    max_bytes_per_trigger: int | None = None
    """About how many bytes it has at most, as they are stored; a block of messages is the least."""
    min_partitions: int | None = None
    """Into how many tasks a micro-batch is divided at least, if it has as many messages (default: one per stream).
    In an atomic group streams are not divided."""
    max_partitions: int | None = None
    """Into how many it is divided at most: a task reads several streams one after the other then. Each task costs Spark
    some 40 ms, however little it reads, so that the number of cores is a good value where streams are more."""
    whole_epochs: bool = False
    """Insist on micro-batches of whole epochs: what the streams that this query has of a space have of an epoch is in
    one batch. That is so in each group that is atomic; of any other the query is refused."""
    in_doubt_timeout: float = 120.0
    """For how long messages that were in a micro-batch when this query was lost are reserved for its return: seconds,
    or with a unit as in `90 s`, `5 minutes`, and a day at most. After that another member of the group gets them, as
    soon as one is there, and if this query had written them to its sink they are there twice."""
    on_range_lost: str = "drop"
    """What happens to a micro-batch that was started, when this query comes back later than that: `drop` does it again
    without the messages that others have got by now, `fail` fails the query."""
    fail_on_data_loss: bool = True
    """Whether the query fails when a task finds that retention has taken messages of its micro-batch; else they are
    left out, with a warning. Of a batch that is planned again after a restart, `onRangeLost` decides."""
    available_now_wait: float = 120.0
    """With the trigger `availableNow`: how long the query waits, with nothing else to do, for streams with messages
    that were there when it began. Then it fails and names those that were not granted to it; what other members have by
    then is left to them. Seconds, or with a unit."""
    credentials: str = FROM_ENVIRONMENT
    """Where driver and executors find what the URL has no place for, the password above all: `env`, which is
    SUBLET_DATABASE_URL or SUBLET_DATABASE_URL_FILE of their own environments, if it names the same user, host and
    database; `file:PATH`; or `class:MODULE.NAME` of something that is called there, if their environments'
    SUBLET_CREDENTIALS_CLASSES names it. The latter two have a URL, or `password=...` alone."""

    def settings(self) -> BorrowerSettings:
        """Return the session's timers, from the driver's environment."""
        return BorrowerSettings.from_env()


def stream_options(raw_options: Mapping[str, str]) -> StreamingQueryOptions:
    """Return the options of `readStream`. Raise `InvalidSetting`, or `InvalidSubscription`, for the first that cannot
    be.
    """
    values = read_options(
        raw_options,
        StreamingQueryOptions,
        "readStream",
        {"inDoubtTimeout": _parse_duration, "availableNowWait": _parse_duration},
    )
    for name, hint in (
        ("subscription", "what to consume: $share/GROUP/FILTER, such as $share/billing/orders/#"),
        ("session_name", "a name for this query, which is its own and stays the same when the query is started again"),
    ):
        if name not in values:
            raise InvalidSetting(f"option {to_camel_case(name)} is missing. Give {hint}.")
    options = StreamingQueryOptions(**values)
    Subscription.parse(options.subscription)
    check_option_name("sessionName", options.session_name)
    check_database(options.url, options.data_dir, options.credentials)
    check_partitions(options.min_partitions, options.max_partitions)
    check_arguments(
        weight=options.weight, starting_position=options.starting_position, max_batch_bytes=1, nodes=options.nodes
    )
    if options.in_doubt_timeout > MAX_HOLD_S:
        raise InvalidSetting(
            f"option inDoubtTimeout is {options.in_doubt_timeout:g} s: it is at most {MAX_HOLD_S:g} s, a day."
        )
    if options.on_range_lost not in POLICIES:
        raise InvalidSetting(f"option onRangeLost is {options.on_range_lost!r}: it is {' or '.join(POLICIES)}.")
    return options


def check_option_name(option: str, name: str) -> None:
    """Raise `InvalidSetting` for what cannot be a name."""
    try:
        check_name(name)
    except InvalidSetting as problem:
        raise InvalidSetting(f"option {option}: {problem}") from None


def check_database(url: str | None, data_dir: str | None, credentials: str) -> None:
    """Raise `InvalidSetting` for two of them, and for a URL that has a secret."""
    try:
        check_url(url, credentials)
    except InvalidSetting as problem:
        raise InvalidSetting(f"option {problem}") from None
    if url is not None and data_dir is not None:
        raise InvalidSetting("options url and dataDir: they are two databases. Give one of them.")


def check_partitions(min_partitions: int | None, max_partitions: int | None) -> None:
    """Raise `InvalidSetting` where no number is both."""
    if min_partitions is not None and max_partitions is not None and min_partitions > max_partitions:
        raise InvalidSetting(
            f"options minPartitions {min_partitions} and maxPartitions {max_partitions}: no number of tasks is both. "
            "Leave out one of them, or give them the same value."
        )


KAFKA_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "kafka.bootstrap.servers": ("url",),
    "subscribe": ("subscription", "filter"),
    "subscribepattern": ("subscription", "filter"),
    "startingoffsets": ("startingposition",),
    "startingtimestamp": ("startingposition",),
    "endingoffsets": ("endingposition",),
    "endingtimestamp": ("endingposition",),
}
"""Options of Spark's Kafka source, with what has their place here: the first that the method has."""


def read_options(
    raw_options: Mapping[str, str], kind: type[Any], method: str, readers: Mapping[str, Reader] | None = None
) -> dict[str, Any]:
    """Return {field: value} of the options given. `readers`: for options that are not parsed by their type."""
    names = {to_camel_case(field.name).lower(): field for field in fields(kind)}
    values = {}
    for name, text in raw_options.items():
        field = names.get(name.lower())
        if field is None:
            raise _unknown_option_error(name, kind, method)
        read = (readers or {}).get(to_camel_case(field.name)) or _KINDS[str(field.type)]
        values[field.name] = read(to_camel_case(field.name), str(text))
    return values


def _unknown_option_error(name: str, kind: type[Any], method: str) -> InvalidSetting:
    """Return the error for an option that the method does not have. It never shows the value."""
    if any(word in name.lower() for word in SECRET_WORDS):
        return InvalidSetting(f"option {name!r} is refused. {ADVICE}")
    known = {to_camel_case(field.name).lower(): to_camel_case(field.name) for field in fields(kind)}
    ours = next((known[each] for each in KAFKA_OPTIONS.get(name.lower(), ()) if each in known), None)
    if ours is not None:
        return InvalidSetting(f"option {name!r} is one of Spark's Kafka source: {method} has {ours}.")
    return InvalidSetting(f"option {name!r}: {method} has none of that name. It has: {', '.join(known.values())}.")


def _parse_text(name: str, text: str) -> str:
    if not text:
        raise InvalidSetting(f"option {name} is empty. Give a value, or leave the option out.")
    return text


def _parse_nodes(name: str, text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in _parse_text(name, text).split(","))


def _parse_count(name: str, text: str) -> int:
    return parse_index(name, text, minimum=1)


def parse_index(name: str, text: str, minimum: int = 0) -> int:
    """Return a whole number of at least `minimum`. Raise `InvalidSetting`."""
    number = parse_natural(text, MAX_NUMBER)
    if number is None or number < minimum:
        raise InvalidSetting(
            f"option {name} is {text[:MAX_SHOWN_CHARS]!r}: it is a whole number from {minimum} to {MAX_NUMBER}."
        )
    return number


def _parse_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidSetting(f"option {name} is {text!r}: it is a number, such as 1 or 0.5.") from None


def _parse_flag(name: str, text: str) -> bool:
    if text.lower() not in _YES:
        raise InvalidSetting(f"option {name} is {text!r}: it is true or false.")
    return _YES[text.lower()]


def _parse_duration(name: str, text: str) -> float:
    match = _DURATION.fullmatch(text.strip().lower())
    unit = None if match is None else _UNITS.get(match[2], _UNITS.get(match[2].removesuffix("s")))
    if match is None or unit is None:
        raise InvalidSetting(f"option {name} is {text!r}: it is a time, such as 90, 90 s, 5 minutes or 1 h.")
    return float(match[1]) * unit


def to_camel_case(name: str) -> str:
    """Return the name as Spark spells options, in camel case."""
    first, *words = name.split("_")
    return first + "".join(word.capitalize() for word in words)


_KINDS: dict[str, Reader] = {
    "str": _parse_text,
    "str | None": _parse_text,
    "int | None": _parse_count,
    "float": _parse_number,
    "bool": _parse_flag,
    "tuple[str, ...] | None": _parse_nodes,
}
