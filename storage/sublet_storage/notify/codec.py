"""Encodes notification messages as JSON in ASCII, so that every driver can carry them.

Whatever arrives is checked here: what is returned is well-formed, else `MalformedNotification` is raised.
"""

from __future__ import annotations

import json
from typing import Any

from sublet_protocol.domain.limits import MAX_NOTIFICATION_BYTES
from sublet_storage.notify.changes import (
    ChangeNotification,
    MalformedNotification,
    Message,
    NotificationHeartbeat,
    ObjectChange,
)

MAX_NUMBER = 1 << 64
MAX_NAME = 200
MAX_KEY = MAX_NOTIFICATION_BYTES
MAX_CHANNELS = 64

VERSION_MARK, HEAD_MARK = "\x01", "\x02"
"""In place of numbers that are not known yet; JSON has no control characters."""

_compact = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encode(message: Message) -> bytes:
    """Return the message as bytes that `decode` reads."""
    if isinstance(message, NotificationHeartbeat):
        return _compact(
            {
                "p": message.publisher,
                "i": message.incarnation,
                "h": dict(message.sequences),
                "l": message.is_leaving,
            }
        ).encode()
    return encode_parts(message, [encode_change(change) for change in message.changes])


def encode_change(change: ObjectChange) -> str:
    """Return one encoded change, which `encode_parts` puts together."""
    data = None if change.data is None else dict(change.data)
    return _compact([change.key, change.version, int(change.is_deleted), data])


def encode_head_change(stream_id: int) -> str:
    """Return the change of a stream that has grown, with marks in place of its version and its head."""
    return f'["{stream_id}",{VERSION_MARK},0,{{"head":{HEAD_MARK},"closed":false}}]'


def encode_parts(envelope: ChangeNotification, changes: list[str]) -> bytes:
    """Return the envelope around changes that are encoded already; its own are ignored."""
    head = _compact([envelope.publisher, envelope.incarnation, envelope.channel])
    return f'{{"e":{head},"s":{envelope.sequence},"b":{envelope.predecessor},"c":[{",".join(changes)}]}}'.encode()


def decode(raw: bytes) -> Message:
    """Decode a message. Raise `MalformedNotification`, with what is wrong with it."""
    if len(raw) > MAX_NOTIFICATION_BYTES:
        raise MalformedNotification(f"a message of {len(raw)} bytes: the longest is {MAX_NOTIFICATION_BYTES}.")
    try:
        document = json.loads(raw)
        return _decode_notification(document) if "e" in document else _decode_heartbeat(document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedNotification(f"not a message of sublet's ({type(error).__name__}): {raw[:60]!a}") from None


def _decode_notification(fields: dict[str, Any]) -> ChangeNotification:
    publisher, incarnation, channel = fields["e"]
    name = _check_text(channel, MAX_NAME)
    sequence, predecessor = _check_integer(fields["s"]), _check_integer(fields["b"])
    if predecessor >= sequence:
        raise ValueError("a message cannot come before its predecessor")
    changes = tuple(_decode_change(name, *each) for each in fields["c"])
    return ChangeNotification(
        _check_text(publisher, MAX_NAME), _check_text(incarnation, MAX_NAME), name, sequence, predecessor, changes
    )


def _decode_heartbeat(fields: dict[str, Any]) -> NotificationHeartbeat:
    sequences = {_check_text(channel, MAX_NAME): _check_integer(number) for channel, number in fields["h"].items()}
    if len(sequences) > MAX_CHANNELS:
        raise ValueError("too many channels")
    publisher, incarnation = _check_text(fields["p"], MAX_NAME), _check_text(fields["i"], MAX_NAME)
    return NotificationHeartbeat(publisher, incarnation, sequences, bool(fields["l"]))


def _decode_change(kind: str, key: object, version: object, deleted: object, data: object) -> ObjectChange:
    if not (data is None or (isinstance(data, dict) and all(_is_scalar(value) for value in data.values()))):
        raise TypeError("data is an object of texts and numbers, or null")
    return ObjectChange(kind, _check_text(key, MAX_KEY), _check_integer(version), bool(_check_integer(deleted)), data)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _check_text(value: object, longest: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise TypeError("a name is text")
    return value


def _check_integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_NUMBER:
        raise TypeError("a number is whole, and not negative")
    return value
