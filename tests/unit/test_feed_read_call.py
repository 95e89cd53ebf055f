"""A call that reads through a node, whose client takes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from sublet_leader.feed import history_and_follow as module
from sublet_leader.feed.history_and_follow import ClientStalled, FeedReadCall, split_table
from sublet_leader.feed.page_memory import PageMemory, ReaderMemory
from sublet_protocol.domain.errors import Unauthenticated, ValueTooLarge
from sublet_protocol.domain.subscriptions import StartingPosition
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.feed_messages import FeedReadRequest


class Pool:
    """In place of the database: a reader without streams."""

    async def run(self, work: Callable[..., Any]) -> Any:
        return SimpleNamespace(stream_count=0), None


def read(check_right: Callable[[], None], memory: PageMemory | None = None) -> None:
    async def never(page: object) -> None:
        await asyncio.Event().wait()

    read = FeedReadRequest(TopicFilter("#"), StartingPosition.parse("earliest"), "s")
    own = ReaderMemory(memory or PageMemory(1), None)
    call = FeedReadCall(Pool().run, cast(Any, None), read, never, check_right, lambda streams: None, own, hello_s=0.001)
    asyncio.run(asyncio.wait_for(call.history(), 60))


@pytest.mark.conforms("X4")
def test_rights_are_checked_while_nothing_is_taken() -> None:
    """So that a call ends whose token was revoked, and what it has read with it."""
    checks: list[None] = []

    def check_right() -> None:
        checks.append(None)
        if len(checks) > 3:
            raise Unauthenticated("the token was revoked")

    with pytest.raises(Unauthenticated):
        read(check_right)


def test_who_takes_nothing_for_long_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what was read for it would be kept for ever."""
    monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.0)
    with pytest.raises(ClientStalled):
        read(lambda: None)


class ShortMemory(PageMemory):
    """For which somebody always waits."""

    is_short = True


def test_who_takes_nothing_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sooner than without others that wait for its memory."""
    monkeypatch.setattr(module, "CONTENDED_WRITE_TIMEOUT_S", 0.0)
    with pytest.raises(ClientStalled):
        read(lambda: None, ShortMemory(1))


def test_a_table_is_split_into_what_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single message larger than a page is a page, up to the limit."""
    table = pa.table({"stream": [1, 1], "offset": [7, 8], "value": [b"x" * 99] * 2})
    one = table.slice(0, 1)
    for page_bytes, rows in ((table.nbytes, [2]), (table.nbytes - 1, [1, 1]), (1, [1, 1])):
        assert [part.num_rows for part in split_table(table, page_bytes)] == rows
    monkeypatch.setattr(module, "MAX_PAGE_BYTES", one.nbytes)
    assert list(split_table(one, 1)) == [one]
    monkeypatch.setattr(module, "MAX_PAGE_BYTES", one.nbytes - 1)
    with pytest.raises(ValueTooLarge, match="stream 1, offset 7"):
        list(split_table(one, 1))
