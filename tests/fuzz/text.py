"""Text that people, peers and files give, mutated: it is read, or refused by one of our own errors."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from sublet.cli.base import text_conversion
from sublet.cli.groups import progress_transfer, reset
from sublet.cli.groups.names import parse_typed, unescape
from sublet_borrower.spark.job import exception_transport
from sublet_borrower.spark.job.task import decode_summary
from sublet_borrower.spark.job.task_reports import TaskReport, decode_report
from sublet_leader.listen_address import ListenAddress
from sublet_protocol.domain.access.rights import AccessRules, AccessSnapshot, ValidToken, parse_right
from sublet_protocol.domain.address import split_node_address
from sublet_protocol.domain.errors import SubletError
from sublet_protocol.domain.subscriptions import Bookmark, StartingPosition, Subscription
from sublet_protocol.domain.topics import TopicFilter, check_topic
from sublet_protocol.gate.access_cache import AccessCache
from sublet_protocol.gate.gate import AccessGate
from sublet_protocol.messages.head_and_group_events import GroupEventPayload
from sublet_storage.db.database_url import format_url, parse_url
from sublet_storage.notify import codec

GROUP = "$share/billing/orders/+/#"
FILE = {
    "subscription": GROUP,
    "timeline": "1-17",
    "exported_at": "2026-01-31T12:00:00Z",
    "options": {"starting_position": "earliest", "on_data_loss": "fail", "strategy": "even"},
    "streams": [{"stream_id": 1, "position": 7}, {"stream_id": 2, "after": 0}],
}
URL = "postgresql://me:p%40ss@db.example:5432/app?sslmode=require&options=-c%20x%3D1"
FAILURE = [{"class": "builtins.ValueError", "message": "m", "traceback": "t", "attributes": {"stream_id": 1}}]
SUMMARY = {"attempt": {"partition": 0, "number": 1, "session": "s"}, "summary": {"messages": 1}, "failure": None}
NOTIFICATION = b'{"e":["p",1,"stream"],"s":2,"b":1,"c":[["7",3,0,{"head":5}],["8",1,1,null]]}'

NASTY = (
    *"/+#$\\\"'{}[]:,%@?=&;. -_e0\0\n\r\t\x1b\x7f",
    *("\u202e", "\ud800", "\udcff", "\U0010ffff", "\u0663", "e\u0301", "\ufeff"),
    *("9" * 20, "9" * 5000, "-1", "1e999", "NaN", "null", "true", "[" * 3000, "\\ud800", "://", "..", "\\u0000", "Z"),
)
"""What is put in."""


def execute(seed: int, number: int) -> bool:
    """Return whether what came of this execution was read; if not, it was refused as it should be. Raises whatever
    else happens."""
    dice = random.Random(f"{seed}/{number}")
    read, examples = dice.choice(_READERS)
    text = dice.choice(examples)
    if number % 100:
        text = _mutated(text, dice)
    try:
        read(text)
    except SubletError as refused:
        str(refused).encode("utf-8", "surrogatepass")
        return False
    return True


def _mutated(text: str, dice: random.Random) -> str:
    for _ in range(dice.choice((1, 1, 2, 4))):
        place, length = dice.randrange(len(text) + 1), dice.randrange(1, 9)
        match dice.randrange(5):
            case 0:
                text = text[:place] + text[place + length :]
            case 1:
                text = text[:place] + dice.choice(NASTY) + text[place:]
            case 2:
                text = text[:place] + dice.choice(NASTY) + text[place + length :]
            case 3:
                text = text[:place] + text[place : place + length] * dice.choice((2, 3, 200)) + text[place:]
            case _:
                _, others = dice.choice(_READERS)
                text = text[:place] + dice.choice(others)[:length] + text[place:]
    return text


# --- readers ----------------------------------------------------------------------------------------------------------


def _filter(text: str) -> None:
    found = TopicFilter.parse(text)
    found.matches("orders/eu/created")
    assert TopicFilter.parse(found.text) == found
    assert len(found.regex) >= 1


def _subscription(text: str) -> None:
    found = Subscription.parse(text)
    assert Subscription.parse(str(found)) == found


def _again(kind: Any, text: str) -> None:
    found = kind.parse(text)
    assert kind.parse(str(found)) == found


def _url(text: str) -> None:
    parse_url(text)
    format_url(text)


@cache
def _gate() -> AccessGate:
    """One that knows a token by its id, and nobody can have it."""
    known = {"aaaaaaaa": ValidToken(bytes(32), "user:a", 1e9)}
    return AccessGate(AccessCache(AccessSnapshot("1", AccessRules([]), known), lambda: 0.0))


def _token(text: str) -> None:
    _gate().identify(text, "127.0.0.1", "fuzz")


def _report(text: str) -> None:
    decode_report(GroupEventPayload(text.encode("utf-8", "surrogatepass")), "token")


def _notification(text: str) -> None:
    codec.decode(text.encode("utf-8", "surrogatepass"))


@cache
def _file(_process: int) -> Path:
    return Path(tempfile.mkstemp(prefix="sublet-fuzz-")[1])


def _in_file(read: Callable[[Path], object], text: str) -> None:
    file = _file(os.getpid())
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    read(file)


_READERS: tuple[tuple[Callable[[str], object], tuple[str, ...]], ...] = (
    (_filter, ("orders/+/created", "#", "a/b/#", "+/+")),
    (check_topic, ("orders/eu/created", "a")),
    (_subscription, (GROUP, "$queue/jobs/a/#")),
    (Subscription.parse_stored, (GROUP,)),
    (parse_typed, (GROUP, "$share/caf\\xe9/\\u202e/#")),
    (unescape, ("\\x00\\u202e\\U0010ffff",)),
    (partial(_again, StartingPosition), ("earliest", "offset:7", "2026-01-31T12:00:00+01:00")),
    (partial(_again, Bookmark), ('{"known": 7, "offsets": {"1": 5}, "timeline": "1-17"}',)),
    (parse_right, ("publish", "operate")),
    (split_node_address, ("tls://n1.example:7411", "127.0.0.1:7411", "[::1]:7411")),
    (partial(ListenAddress.parse, insecure=False), ("127.0.0.1:7411", "[::1]:0", "localhost:1")),
    (_url, (URL, "host=db user=me password='p ss' dbname=app")),
    (_token, ("Bearer sub_aaaaaaaa_" + "x" * 43, "Basic eA==")),
    (_report, (TaskReport("s", 0, 1, "running", 1, 1, 0, 0, 0, 1, 7).encode("token").payload.decode(),)),
    (decode_summary, (json.dumps(SUMMARY),)),
    (exception_transport.unpack, (json.dumps(FAILURE),)),
    (_notification, (NOTIFICATION.decode(), '{"p":"p","i":1,"h":{"stream":4},"l":false}')),
    (text_conversion.parse_seconds, ("90s", "1.5h", "0", "2w")),
    (partial(text_conversion.parse_int, "--limit"), ("7", "0")),
    (partial(text_conversion.parse_number, "--weight"), ("2", "0.5")),
    (partial(text_conversion.parse_time, "--to-time"), ("2026-01-31T12:00:00Z",)),
    (text_conversion.parse_starting_position, ("earliest", "1000", "15m", "2026-01-31T12:00")),
    (reset.parse_epoch, ("7", "3,1", "(3,1)")),
    (partial(_in_file, lambda file: reset.read_reset_file(file, Subscription.parse(GROUP))), (json.dumps(FILE),)),
    (partial(_in_file, progress_transfer.read_export_file), (json.dumps(FILE),)),
)
