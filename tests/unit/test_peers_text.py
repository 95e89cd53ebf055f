"""Text that a peer sends and Postgres would refuse: malformed for its sender, whatever field it stands in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from sublet_protocol.messages import borrower_leader_codec as codec
from sublet_protocol.messages.field_checks import MalformedMessage, check_id
from sublet_protocol.pubsub import wire
from sublet_protocol.pubsub.model import Subscribe, UndecodableCommand
from sublet_protocol.pubsub.node_connection import SHOWN_CHARACTERS, truncate
from sublet_protocol.v1 import sublet_pb2 as pb

WANTED = pb.LeaderWanted(
    borrower_id="b", subscription="$share/g/a", weight=1.0, starting_position="latest", session="s", predecessor="p"
)
TO_LEADER = [
    pb.ToLeader(leader_wanted=WANTED),
    pb.ToLeader(ping=pb.Ping(borrower_ids=["b"])),
    pb.ToLeader(update_progress=pb.UpdateProgress(borrower_id="b")),
    pb.ToLeader(revoke_finished=pb.RevokeFinished(borrower_id="b")),
    pb.ToLeader(disconnect=pb.Disconnect(borrower_id="b")),
]
TO_BORROWER = [
    pb.ToBorrower(leader_connect_response=pb.LeaderConnectResponse(borrower_id="b", address="a:1")),
    pb.ToBorrower(ping_response=pb.PingResponse(borrower_id="b")),
    pb.ToBorrower(grant=pb.Grant(borrower_id="b", hash_last=1, filter="#", grant_key=bytes(16))),
    pb.ToBorrower(revoke=pb.Revoke(borrower_id="b")),
    pb.ToBorrower(revoked=pb.Revoked(borrower_id="b", reason=pb.REVOKED_SAVED)),
    pb.ToBorrower(progress_saved=pb.ProgressSaved(borrower_id="b")),
    pb.ToBorrower(invalidate=pb.Invalidate(borrower_id="b", reason=pb.END_RETRY, detail="why")),
]


def with_nul(message: Any) -> Iterator[tuple[str, Any]]:
    """(field, the message with a NUL in that field and no other change), for each text in it."""
    kind = message.WhichOneof("message")
    for field in getattr(message, kind).DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            hostile = type(message).FromString(message.SerializeToString())
            body = getattr(hostile, kind)
            if isinstance(getattr(body, field.name), str):
                setattr(body, field.name, "a\0b")
            else:
                getattr(body, field.name)[:] = ["a\0b"]
            yield field.name, hostile


def kinds(messages: list[Any]) -> set[str]:
    return {message.WhichOneof("message") for message in messages}


def test_every_message_is_tried() -> None:
    assert kinds(TO_LEADER) == {field.name for field in pb.ToLeader.DESCRIPTOR.oneofs[0].fields}
    assert kinds(TO_BORROWER) == {field.name for field in pb.ToBorrower.DESCRIPTOR.oneofs[0].fields}


@pytest.mark.conforms("X4")
@pytest.mark.parametrize("message", [*TO_LEADER, *TO_BORROWER], ids=lambda message: message.WhichOneof("message"))
def test_a_nul_in_a_text_is_malformed(message: Message) -> None:
    is_to_leader = isinstance(message, pb.ToLeader)
    decode = codec.decode_to_leader if is_to_leader else codec.decode_to_borrower
    decode(message)
    hostile = dict(with_nul(message))
    assert hostile
    for name, each in hostile.items():
        with pytest.raises(MalformedMessage, match=f"{name.removesuffix('s')}.*NUL"):
            decode(each)
        assert not is_to_leader or isinstance(wire.decode_command(pb.Command(message=each)), UndecodableCommand)


NO_STREAMS = ["x", "-1", "1" * 20, "007", "00", "\N{ARABIC-INDIC DIGIT ONE}", " 1", "1\n"]


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("channel", "good", "bad", "rule"),
    [
        ("group", ["k"], ["k\0"], "NUL"),
        ("stream", ["0", "9" * 19], NO_STREAMS, "1 to 19 decimal digits"),
        ("borrower", ["b" * 255], ["b" * 256, "\x07"], ""),
    ],
)
def test_a_key_that_is_none_is_malformed(channel: str, good: list[str], bad: list[str], rule: str) -> None:
    name = f"CHANNEL_{channel.upper()}"
    for key in good:
        command = pb.Command(subscribe=pb.Subject(channel=name, key=key))
        assert wire.decode_command(command) == Subscribe(channel, key)
    for key in bad:
        subject = pb.Subject(channel=name, key=key)
        for command in (pb.Command(subscribe=subject), pb.Command(unsubscribe=subject)):
            refused = wire.decode_command(command)
            assert isinstance(refused, UndecodableCommand), key
            assert rule in refused.text
    with pytest.raises(MalformedMessage, match="NUL"):
        check_id("subscriber_id", "a\0b")


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    "text", [b"\xed\xa0\x80", b"\xff", b"\xc0\x80"], ids=["surrogate", "not UTF-8", "overlong NUL"]
)
def test_what_is_not_utf_8_is_no_message_at_all(text: bytes) -> None:
    spelled = pb.Ping(borrower_ids=["abc"[: len(text)]]).SerializeToString().replace(b"abc"[: len(text)], text)
    with pytest.raises(DecodeError):
        pb.Ping.FromString(spelled)


def test_a_long_text_is_cut_where_it_is_shown() -> None:
    text = "x" * SHOWN_CHARACTERS
    assert truncate(text) == text
    assert truncate(text + "y") == f"{text}... ({SHOWN_CHARACTERS + 1} characters)"
