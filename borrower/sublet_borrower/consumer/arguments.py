"""Checks of a consumer's arguments before anything is opened (a node would reject them later)."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.address import split_node_address
from sublet_protocol.domain.errors import InvalidSetting, InvalidSubscription, UsageError
from sublet_protocol.domain.limits import MAX_ID_BYTES, MAX_WEIGHT, MIN_WEIGHT
from sublet_protocol.domain.subscriptions import StartingPosition

MAX_BATCH_BYTES = 1 << 40
MAX_SHOWN_CHARS = 60
"""Longer values are cut in error texts."""


def check_arguments(
    *,
    weight: float,
    starting_position: str,
    max_batch_bytes: int,
    nodes: Sequence[str] | None = None,
    name: str | None = None,
    subscription: str = "",
    auto_ack: bool = True,
    url: object = None,
    data_dir: object = None,
    transport: str = "database",
    whole_epochs: bool = False,
    on_epochs_consumed: object = None,
    settings: object = None,
) -> None:
    """Raise `InvalidSetting`, or `InvalidSubscription` for a subscription that is no text, for the first invalid
    argument.
    """
    if not isinstance(subscription, str):
        raise InvalidSubscription(
            f"subscription {_quote(subscription)}: it is a text, $share/GROUP/FILTER or $queue/GROUP/FILTER."
        )
    check_name(name)
    _check_weight(weight)
    _check_start(starting_position)
    _check_batch_bytes(max_batch_bytes)
    _check_nodes(nodes)
    for option, value in (("auto_ack", auto_ack), ("whole_epochs", whole_epochs)):
        if not isinstance(value, bool):
            raise InvalidSetting(f"{option} is {_quote(value)}: it is True or False.")
    if not (on_epochs_consumed is None or callable(on_epochs_consumed)):
        raise InvalidSetting(
            f"on_epochs_consumed is {_quote(on_epochs_consumed)}: it is called with how far the group has come."
            " Give a function."
        )
    if not (settings is None or isinstance(settings, BorrowerSettings)):
        raise InvalidSetting(
            f"settings is {_quote(settings)}: it is a BorrowerSettings. Leave it out for those of the environment."
        )
    _check_transport(transport, nodes, url, data_dir)


def check_name(name: str | None, longest: int = MAX_ID_BYTES) -> None:
    """Raise `InvalidSetting` unless it is a valid session name of at most `longest` bytes in UTF-8, which is less where
    a suffix is added.
    """
    if name is None:
        return
    hint = "Give a text such as billing-1, or leave the name out."
    if not isinstance(name, str):
        raise InvalidSetting(f"name is {_quote(name)}: a session's name is a text. {hint}")
    if not name:
        raise InvalidSetting(f"name is '': a session's name is not empty. {hint}")
    if not name.isprintable():
        raise InvalidSetting(f"name is {_quote(name)}: all of its characters must be printable. Remove the others.")
    if (size := len(name.encode())) > longest:
        raise InvalidSetting(
            f"name is {_quote(name)}: it has {size} bytes of UTF-8, and at most {longest} are allowed. Shorten it."
        )


def _check_transport(transport: object, nodes: object, url: object, data_dir: object) -> None:
    if transport not in ("database", "nodes"):
        raise InvalidSetting(f"transport is {_quote(transport)}: it is 'database' or 'nodes'.")
    if transport == "nodes" and not nodes:
        raise InvalidSetting(
            "transport 'nodes' without nodes: where they are is not looked up in a database. Give their addresses "
            "too, such"
            " as nodes=['127.0.0.1:7411']."
        )
    if transport == "nodes" and not (url is None and data_dir is None):
        argument = "url" if data_dir is None else "data_dir"
        raise InvalidSetting(f"transport 'nodes' and {argument}: one of them is enough. Leave one of them out.")


def _check_weight(weight: object) -> None:
    hint = "1 is what everybody has, 2 takes twice as many streams."
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise InvalidSetting(f"weight is {_quote(weight)}: it is a number. {hint}")
    if not MIN_WEIGHT <= float(weight) <= MAX_WEIGHT:
        raise InvalidSetting(f"weight is {weight}: it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}. {hint}")


def _check_start(start: object) -> None:
    if not isinstance(start, str):
        raise InvalidSetting(
            f"starting_position is {_quote(start)}: it is a text: latest, earliest, offset:N, or a time with its time"
            " zone such as "
            "2026-11-21T10:00:00Z."
        )
    try:
        StartingPosition.parse(start)
    except UsageError as problem:
        raise InvalidSetting(str(problem)) from None


def _check_batch_bytes(max_batch_bytes: object) -> None:
    hint = "A block is the least that is read; the default is 4194304."
    if not isinstance(max_batch_bytes, int) or isinstance(max_batch_bytes, bool):
        raise InvalidSetting(f"max_batch_bytes is {_quote(max_batch_bytes)}: it is a whole number of bytes. {hint}")
    if not 1 <= max_batch_bytes <= MAX_BATCH_BYTES:
        raise InvalidSetting(
            f"max_batch_bytes is {_quote(max_batch_bytes)}: it must be positive, and at most {MAX_BATCH_BYTES}. {hint}"
        )


def _check_nodes(nodes: object) -> None:
    if nodes is None:
        return
    if isinstance(nodes, str):
        raise InvalidSetting(f"nodes is the text {_quote(nodes)}: it must be a list of addresses, such as [{nodes!r}].")
    if not isinstance(nodes, Sequence) or isinstance(nodes, bytes):
        raise InvalidSetting(f"nodes is {_quote(nodes)}: it must be a list of addresses, such as ['127.0.0.1:7411'].")
    for node in nodes:
        check_node(node)


def check_node(node: object) -> None:
    """Raise `InvalidSetting` unless it is the address of a node."""
    address = split_node_address(node) if isinstance(node, str) else None
    if address is None or address[1] == 0:
        raise InvalidSetting(
            f"node {node!r}: a leader node's address is HOST:PORT, such as 127.0.0.1:7411 or [::1]:7411, with a port "
            "from 1 to 65535, and with tls:// before it where it speaks TLS. "
            "`sublet leader` says its own when it begins to serve; without addresses, nodes are "
            "looked up in the database."
        )


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
