"""Each limit of a field of a message counts among what is allowed, and what is beyond it is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.limits import (
    MAX_COMMAND_BYTES,
    MAX_COMMANDS,
    MAX_EXPLANATION_CHARACTERS,
    MAX_ITEMS,
    SLICE_ITEMS,
)
from sublet_protocol.messages.borrower_leader import Ping, StreamProgress, UpdateProgress
from sublet_protocol.messages.field_checks import (
    MalformedMessage,
    check_entries,
    check_explanation,
    check_natural,
    check_number,
    check_range,
    check_streams,
    check_text,
)
from sublet_protocol.messages.head_and_group_events import GroupEventPayload
from sublet_protocol.pubsub import wire
from sublet_protocol.pubsub.model import MessageToNode, Subscribe, UndecodableCommand
from sublet_protocol.v1 import sublet_pb2 as pb

Check = Callable[[], object]

BOUNDS: dict[str, tuple[list[Check], list[Check]]] = {
    "text": (
        [lambda: check_text("x", "a" * 8, 8), lambda: check_text("x", "\u00e9" * 4, 8)],
        [lambda: check_text("x", "a" * 9, 8), lambda: check_text("x", "\u00e9" * 4 + "a", 8)],
    ),
    "explanation": (
        [lambda: check_explanation("x", "\u00e9" * MAX_EXPLANATION_CHARACTERS)],
        [lambda: check_explanation("x", "a" * (MAX_EXPLANATION_CHARACTERS + 1))],
    ),
    "natural": ([lambda: check_natural("x", 0)], [lambda: check_natural("x", -1)]),
    "number": (
        [lambda: check_number("x", 3, 3, 5), lambda: check_number("x", 5, 3, 5)],
        [lambda: check_number("x", 2, 3, 5), lambda: check_number("x", 6, 3, 5)],
    ),
    "range": (
        [lambda: check_range("x", 0.5, 0.5, 1.5), lambda: check_range("x", 1.5, 0.5, 1.5)],
        [lambda: check_range("x", 0.25, 0.5, 1.5), lambda: check_range("x", 1.75, 0.5, 1.5)],
    ),
    "entries": ([lambda: check_entries("x", "ab", 2)], [lambda: check_entries("x", "abc", 2)]),
    "streams": ([lambda: check_streams("x", [1, 2], 2, 2)], [lambda: check_streams("x", [1, 2], 3, 2)]),
}


@pytest.mark.conforms("X4")
@pytest.mark.parametrize("what", BOUNDS)
def test_a_limit_is_allowed_and_no_more(what: str) -> None:
    allowed, refused = BOUNDS[what]
    for check in allowed:
        check()
    for check in refused:
        with pytest.raises(MalformedMessage):
            check()


@pytest.mark.conforms("X4")
def test_a_batch_has_so_many_commands_and_items() -> None:
    def ping(count: int) -> pb.Command:
        return pb.Command(message=pb.ToLeader(ping=pb.Ping(borrower_ids=["b"] * count)))

    def excess(*commands: pb.Command) -> str | None:
        return wire.find_excess(pb.CommandBatch(commands=commands))

    assert excess(*[ping(0)] * MAX_COMMANDS) is excess(ping(MAX_ITEMS - 1), ping(0)) is None
    assert f"{MAX_COMMANDS + 1} commands in a batch" in str(excess(*[ping(0)] * (MAX_COMMANDS + 1)))
    assert f"{MAX_ITEMS + 1} items in" in str(excess(ping(MAX_ITEMS), ping(0)))
    assert wire.decode_command(pb.Command(group_event=bytes(MAX_COMMAND_BYTES))) == MessageToNode(
        GroupEventPayload(bytes(MAX_COMMAND_BYTES))
    )
    large = wire.decode_command(pb.Command(group_event=bytes(MAX_COMMAND_BYTES + 1)))
    assert large == UndecodableCommand(f"an event of {MAX_COMMAND_BYTES + 1} bytes: at most {MAX_COMMAND_BYTES}")


def test_a_message_is_divided_where_it_is_too_long() -> None:
    """Into slices; one that is as long as a slice stays as it is."""
    for count, sizes in ((SLICE_ITEMS, [SLICE_ITEMS + 1]), (SLICE_ITEMS + 1, [SLICE_ITEMS, 1])):
        ids = tuple(map(str, range(count)))
        streams = tuple(StreamProgress(number, 1, 1) for number in range(count))
        for message in (Ping(ids, 1.0), UpdateProgress("b", 1, streams)):
            assert [size for _, size in wire.split_message(message)] == sizes


def test_a_channel_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="channel 'none': it is none of this session's"):
        wire.encode_command(Subscribe("none", None))
