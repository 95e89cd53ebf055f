"""Messages between a task and its driver, as JSON in events of a connection."""

from __future__ import annotations

import hmac
import json
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.messages.head_and_group_events import GroupEventPayload


def make_drain_event(*, is_alone: bool) -> GroupEventPayload:
    """Return the request to drain; `is_alone`: no other attempt at the same task is at work."""
    return GroupEventPayload(json.dumps({"command": "drain", "is_alone": is_alone}).encode())


class TaskReport(Struct, frozen=True):
    """The progress of one attempt of one task. `streams`: how many it holds. `lag`: how many messages of them are still
    to be processed. `failure`: see `exception_transport.pack`.
    """

    session: str
    partition: int
    attempt: int
    state: str
    messages: int = 0
    batches: int = 0
    failures: int = 0
    lost_batches: int = 0
    dead_lettered: int = 0
    streams: int = 0
    lag: int = 0
    failure: str | None = None

    def encode(self, token: str) -> GroupEventPayload:
        """Return the report as an event with the job's token."""
        return GroupEventPayload(json.dumps({"token": token, "report": asdict(self)}).encode())


def decode_report(message: object, token: str) -> TaskReport:
    """Return a report. Raise `UsageError` for anything but a report of this job."""
    try:
        if not isinstance(message, GroupEventPayload):
            raise TypeError(type(message).__name__)
        content: dict[str, Any] = json.loads(message.payload)
        shown, fields = str(content["token"]), dict(content["report"])
        report = TaskReport(**fields)
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise UsageError(f"not a task's report ({error}): only tasks of this job speak here.") from None
    if not hmac.compare_digest(shown.encode(errors="surrogatepass"), token.encode()):
        raise UsageError("the token is not this job's: only its own tasks speak here.")
    return report
