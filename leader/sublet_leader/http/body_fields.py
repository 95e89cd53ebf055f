"""Parses the fields of a JSON body: an error names a field of the wrong type."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from datetime import datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from sublet_leader.http.settings import REQUEST_TIMEOUT_S
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.limits import parse_natural
from sublet_protocol.domain.subscriptions import MAX_OFFSET, Subscription
from sublet_storage.groups.admin.reset_target import ResetTarget

JsonBody = dict[str, Any]

_TARGETS = "earliest, latest, current, or one of offset, time, shift, epoch and offsets with its value"


async def read_json_object(request: Request) -> JsonBody:
    """Return the body, a JSON object. Raise `UsageError`, and `HTTPException` for one that takes too long."""
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        raise UsageError("the body must be JSON: send it with Content-Type: application/json.")
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            body = json.loads(await request.body())
    except TimeoutError:
        raise HTTPException(408, f"the request's body took longer than {REQUEST_TIMEOUT_S:g} s.") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is no JSON: {error}.") from None
    if not isinstance(body, dict):
        raise UsageError("the body must be an object of JSON, such as {}.")
    return body


def reject_unknown_fields(body: JsonBody, *names: str) -> None:
    """Raise `UsageError` for an unknown field: a mistyped name must not be ignored."""
    if unknown := set(body) - set(names):
        raise UsageError(f"the body has {min(unknown)!r:.60}: it takes {', '.join(names)}.")


def read_subscription(body: JsonBody) -> Subscription:
    """Return the group's subscription. Raise `UsageError`."""
    return Subscription.parse(read_text(body, "subscription"))


def read_text(body: JsonBody, name: str, default: str | None = None) -> str:
    """Return a text field. Raise `UsageError`."""
    value = body.get(name, default)
    if not isinstance(value, str):
        raise UsageError(f"the body must have {name!r}, a text.")
    return value


def read_bool(body: JsonBody, name: str, default: bool = False) -> bool:
    """Return a boolean field. Raise `UsageError`."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise UsageError(f"{name!r} is {value!r:.60}: it must be true or false.")
    return value


def read_number(body: JsonBody, name: str, default: float | None = None) -> float:
    """Return a number field. Raise `UsageError`."""
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name!r} is {value!r:.60}: it must be a number.")
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"{name!r} is a number of more than 300 digits: give a smaller one.") from None


def read_stream_ids(body: JsonBody) -> Collection[int]:
    """Return the listed stream ids, empty for all. Raise `UsageError`."""
    stream_ids = body.get("streams", [])
    if not isinstance(stream_ids, list) or not all(_is_integer(each) and 0 < each <= MAX_OFFSET for each in stream_ids):
        raise UsageError(f"'streams' must be a list of ids of streams, whole numbers from 1 to {MAX_OFFSET}.")
    return frozenset(stream_ids)


def read_reset_target(body: JsonBody) -> ResetTarget:
    """Return the reset target of `to`: a word, or an object of one field. Raise `UsageError`."""
    match body.get("to"):
        case "earliest":
            return ResetTarget.earliest()
        case "latest":
            return ResetTarget.latest()
        case "current":
            return ResetTarget.current()
        case {"offset": int(offset), **rest} if not rest and _is_integer(offset):
            return ResetTarget.offset(offset)
        case {"shift": int(count), **rest} if not rest and _is_integer(count):
            return ResetTarget.shift(count)
        case {"time": str(moment), **rest} if not rest:
            return ResetTarget.time(_parse_time(moment))
        case {"epoch": epoch, **rest} if not rest:
            return ResetTarget.at_epoch(tuple(epoch) if isinstance(epoch, list) else epoch)
        case {"offsets": dict(offsets), **rest} if not rest:
            return ResetTarget.offsets(
                {_parse_stream_id(stream): _check_offset(offset) for stream, offset in offsets.items()}
            )
        case target:
            raise UsageError(f"'to' is {target!r:.80}: give {_TARGETS}.")


def _parse_time(value: str) -> datetime:
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        raise UsageError(f"time {value!r:.60}: write it as 2026-01-31T12:00:00Z.") from None


def _parse_stream_id(value: str) -> int:
    stream_id = parse_natural(value, MAX_OFFSET)
    if stream_id is None:
        raise UsageError(f"stream {value!r:.60}: it is a number.")
    return stream_id


def _check_offset(value: object) -> int:
    if not _is_integer(value):
        raise UsageError(f"offset {value!r:.60}: it is a number.")
    assert isinstance(value, int)
    return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
