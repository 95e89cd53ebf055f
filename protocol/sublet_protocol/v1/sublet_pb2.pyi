from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Channel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANNEL_UNSPECIFIED: _ClassVar[Channel]
    CHANNEL_BORROWER: _ClassVar[Channel]
    CHANNEL_STREAM: _ClassVar[Channel]
    CHANNEL_GROUP: _ClassVar[Channel]

class RevokedReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REVOKED_UNSPECIFIED: _ClassVar[RevokedReason]
    REVOKED_SAVED: _ClassVar[RevokedReason]
    REVOKED_FINISHED: _ClassVar[RevokedReason]
    REVOKED_LOST: _ClassVar[RevokedReason]

class EndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_UNSPECIFIED: _ClassVar[EndReason]
    END_RETRY: _ClassVar[EndReason]
    END_DELETED: _ClassVar[EndReason]
    END_FENCED: _ClassVar[EndReason]
    END_DENIED: _ClassVar[EndReason]
    END_DONE: _ClassVar[EndReason]
CHANNEL_UNSPECIFIED: Channel
CHANNEL_BORROWER: Channel
CHANNEL_STREAM: Channel
CHANNEL_GROUP: Channel
REVOKED_UNSPECIFIED: RevokedReason
REVOKED_SAVED: RevokedReason
REVOKED_FINISHED: RevokedReason
REVOKED_LOST: RevokedReason
END_UNSPECIFIED: EndReason
END_RETRY: EndReason
END_DELETED: EndReason
END_FENCED: EndReason
END_DENIED: EndReason
END_DONE: EndReason

class CommandBatch(_message.Message):
    __slots__ = ("protocol_version", "subscriber_id", "number", "commands", "agent_key")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    AGENT_KEY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    subscriber_id: str
    number: int
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    agent_key: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., subscriber_id: _Optional[str] = ..., number: _Optional[int] = ..., commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ..., agent_key: _Optional[bytes] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("subscribe", "unsubscribe", "message", "group_event")
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    UNSUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    GROUP_EVENT_FIELD_NUMBER: _ClassVar[int]
    subscribe: Subject
    unsubscribe: Subject
    message: ToLeader
    group_event: bytes
    def __init__(self, subscribe: _Optional[_Union[Subject, _Mapping]] = ..., unsubscribe: _Optional[_Union[Subject, _Mapping]] = ..., message: _Optional[_Union[ToLeader, _Mapping]] = ..., group_event: _Optional[bytes] = ...) -> None: ...

class Subject(_message.Message):
    __slots__ = ("channel", "key", "all")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    channel: Channel
    key: str
    all: bool
    def __init__(self, channel: _Optional[_Union[Channel, str]] = ..., key: _Optional[str] = ..., all: bool = ...) -> None: ...

class CommandReply(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "unknown_subscriber", "errors")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: str
    unknown_subscriber: bool
    errors: _containers.RepeatedCompositeFieldContainer[CommandRefusal]
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., unknown_subscriber: bool = ..., errors: _Optional[_Iterable[_Union[CommandRefusal, _Mapping]]] = ...) -> None: ...

class CommandRefusal(_message.Message):
    __slots__ = ("index", "text")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class PollRequest(_message.Message):
    __slots__ = ("protocol_version", "subscriber_id", "acknowledged", "incarnation", "hold_ms", "agent_key")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_ID_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    AGENT_KEY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    subscriber_id: str
    acknowledged: int
    incarnation: str
    hold_ms: int
    agent_key: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., subscriber_id: _Optional[str] = ..., acknowledged: _Optional[int] = ..., incarnation: _Optional[str] = ..., hold_ms: _Optional[int] = ..., agent_key: _Optional[bytes] = ...) -> None: ...

class PollReply(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "unknown_subscriber", "messages")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: str
    unknown_subscriber: bool
    messages: _containers.RepeatedCompositeFieldContainer[Delivery]
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., unknown_subscriber: bool = ..., messages: _Optional[_Iterable[_Union[Delivery, _Mapping]]] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("sequence", "channel", "key", "predecessor", "version", "to_borrower", "stream_head", "group_event", "gap")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TO_BORROWER_FIELD_NUMBER: _ClassVar[int]
    STREAM_HEAD_FIELD_NUMBER: _ClassVar[int]
    GROUP_EVENT_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    channel: Channel
    key: str
    predecessor: int
    version: int
    to_borrower: ToBorrower
    stream_head: StreamHead
    group_event: bytes
    gap: Gap
    def __init__(self, sequence: _Optional[int] = ..., channel: _Optional[_Union[Channel, str]] = ..., key: _Optional[str] = ..., predecessor: _Optional[int] = ..., version: _Optional[int] = ..., to_borrower: _Optional[_Union[ToBorrower, _Mapping]] = ..., stream_head: _Optional[_Union[StreamHead, _Mapping]] = ..., group_event: _Optional[bytes] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("dropped", "channels")
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    channels: _containers.RepeatedScalarFieldContainer[Channel]
    def __init__(self, dropped: _Optional[int] = ..., channels: _Optional[_Iterable[_Union[Channel, str]]] = ...) -> None: ...

class StreamHead(_message.Message):
    __slots__ = ("stream_id", "head", "closed")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    head: int
    closed: bool
    def __init__(self, stream_id: _Optional[int] = ..., head: _Optional[int] = ..., closed: bool = ...) -> None: ...

class ToLeader(_message.Message):
    __slots__ = ("leader_wanted", "ping", "update_progress", "revoke_finished", "disconnect")
    LEADER_WANTED_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    UPDATE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FINISHED_FIELD_NUMBER: _ClassVar[int]
    DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    leader_wanted: LeaderWanted
    ping: Ping
    update_progress: UpdateProgress
    revoke_finished: RevokeFinished
    disconnect: Disconnect
    def __init__(self, leader_wanted: _Optional[_Union[LeaderWanted, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., update_progress: _Optional[_Union[UpdateProgress, _Mapping]] = ..., revoke_finished: _Optional[_Union[RevokeFinished, _Mapping]] = ..., disconnect: _Optional[_Union[Disconnect, _Mapping]] = ...) -> None: ...

class ConsumedFrontier(_message.Message):
    __slots__ = ("upto", "lower")
    UPTO_FIELD_NUMBER: _ClassVar[int]
    LOWER_FIELD_NUMBER: _ClassVar[int]
    upto: int
    lower: Frontier
    def __init__(self, upto: _Optional[int] = ..., lower: _Optional[_Union[Frontier, _Mapping]] = ...) -> None: ...

class Frontier(_message.Message):
    __slots__ = ("least",)
    LEAST_FIELD_NUMBER: _ClassVar[int]
    least: _containers.RepeatedCompositeFieldContainer[Epoch]
    def __init__(self, least: _Optional[_Iterable[_Union[Epoch, _Mapping]]] = ...) -> None: ...

class Epoch(_message.Message):
    __slots__ = ("dimensions",)
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    dimensions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dimensions: _Optional[_Iterable[int]] = ...) -> None: ...

class InDoubt(_message.Message):
    __slots__ = ("grant_id", "start", "end", "hold_s", "consumed")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    grant_id: int
    start: int
    end: int
    hold_s: float
    consumed: ConsumedFrontier
    def __init__(self, grant_id: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., hold_s: _Optional[float] = ..., consumed: _Optional[_Union[ConsumedFrontier, _Mapping]] = ...) -> None: ...

class HeldGrant(_message.Message):
    __slots__ = ("stream_id", "grant_id", "position", "consumed")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    grant_id: int
    position: int
    consumed: ConsumedFrontier
    def __init__(self, stream_id: _Optional[int] = ..., grant_id: _Optional[int] = ..., position: _Optional[int] = ..., consumed: _Optional[_Union[ConsumedFrontier, _Mapping]] = ...) -> None: ...

class StreamProgress(_message.Message):
    __slots__ = ("stream_id", "grant_id", "position", "final", "size", "lag", "delivered_end", "consumed", "in_doubt", "read_error", "poison", "beyond_head")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_END_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    IN_DOUBT_FIELD_NUMBER: _ClassVar[int]
    READ_ERROR_FIELD_NUMBER: _ClassVar[int]
    POISON_FIELD_NUMBER: _ClassVar[int]
    BEYOND_HEAD_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    grant_id: int
    position: int
    final: bool
    size: int
    lag: int
    delivered_end: int
    consumed: ConsumedFrontier
    in_doubt: InDoubt
    read_error: str
    poison: int
    beyond_head: bool
    def __init__(self, stream_id: _Optional[int] = ..., grant_id: _Optional[int] = ..., position: _Optional[int] = ..., final: bool = ..., size: _Optional[int] = ..., lag: _Optional[int] = ..., delivered_end: _Optional[int] = ..., consumed: _Optional[_Union[ConsumedFrontier, _Mapping]] = ..., in_doubt: _Optional[_Union[InDoubt, _Mapping]] = ..., read_error: _Optional[str] = ..., poison: _Optional[int] = ..., beyond_head: bool = ...) -> None: ...

class LeaderWanted(_message.Message):
    __slots__ = ("borrower_id", "subscription", "group_id", "weight", "session", "leaving", "reclaim", "starting_position", "predecessor", "session_epoch", "borrower_number", "more", "lock_valid_s")
    BORROWER_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    RECLAIM_FIELD_NUMBER: _ClassVar[int]
    STARTING_POSITION_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BORROWER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    LOCK_VALID_S_FIELD_NUMBER: _ClassVar[int]
    borrower_id: str
    subscription: str
    group_id: int
    weight: float
    session: str
    leaving: bool
    reclaim: _containers.RepeatedCompositeFieldContainer[HeldGrant]
    starting_position: str
    predecessor: str
    session_epoch: int
    borrower_number: int
    more: bool
    lock_valid_s: float
    def __init__(self, borrower_id: _Optional[str] = ..., subscription: _Optional[str] = ..., group_id: _Optional[int] = ..., weight: _Optional[float] = ..., session: _Optional[str] = ..., leaving: bool = ..., reclaim: _Optional[_Iterable[_Union[HeldGrant, _Mapping]]] = ..., starting_position: _Optional[str] = ..., predecessor: _Optional[str] = ..., session_epoch: _Optional[int] = ..., borrower_number: _Optional[int] = ..., more: bool = ..., lock_valid_s: _Optional[float] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("borrower_ids", "sent_at")
    BORROWER_IDS_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    borrower_ids: _containers.RepeatedScalarFieldContainer[str]
    sent_at: float
    def __init__(self, borrower_ids: _Optional[_Iterable[str]] = ..., sent_at: _Optional[float] = ...) -> None: ...

class UpdateProgress(_message.Message):
    __slots__ = ("borrower_id", "term", "streams")
    BORROWER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    borrower_id: str
    term: int
    streams: _containers.RepeatedCompositeFieldContainer[StreamProgress]
    def __init__(self, borrower_id: _Optional[str] = ..., term: _Optional[int] = ..., streams: _Optional[_Iterable[_Union[StreamProgress, _Mapping]]] = ...) -> None: ...

class RevokeFinished(_message.Message):
    __slots__ = ("borrower_id", "term", "stream_id", "grant_id")
    BORROWER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    borrower_id: str
    term: int
    stream_id: int
    grant_id: int
    def __init__(self, borrower_id: _Optional[str] = ..., term: _Optional[int] = ..., stream_id: _Optional[int] = ..., grant_id: _Optional[int] = ...) -> None: ...

class Disconnect(_message.Message):
    __slots__ = ("borrower_id", "term", "streams", "reason", "more")
    BORROWER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    borrower_id: str
    term: int
    streams: _containers.RepeatedCompositeFieldContainer[StreamProgress]
    reason: str
    more: bool
    def __init__(self, borrower_id: _Optional[str] = ..., term: _Optional[int] = ..., streams: _Optional[_Iterable[_Union[StreamProgress, _Mapping]]] = ..., reason: _Optional[str] = ..., more: bool = ...) -> None: ...

class ToBorrower(_message.Message):
    __slots__ = ("leader_connect_response", "ping_response", "grant", "revoke", "revoked", "progress_saved", "invalidate")
    LEADER_CONNECT_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    PING_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_SAVED_FIELD_NUMBER: _ClassVar[int]
    INVALIDATE_FIELD_NUMBER: _ClassVar[int]
    leader_connect_response: LeaderConnectResponse
    ping_response: PingResponse
    grant: Grant
    revoke: Revoke
    revoked: Revoked
    progress_saved: ProgressSaved
    invalidate: Invalidate
    def __init__(self, leader_connect_response: _Optional[_Union[LeaderConnectResponse, _Mapping]] = ..., ping_response: _Optional[_Union[PingResponse, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., progress_saved: _Optional[_Union[ProgressSaved, _Mapping]] = ..., invalidate: _Optional[_Union[Invalidate, _Mapping]] = ...) -> None: ...

class LeaderConnectResponse(_message.Message):
    __slots__ = ("borrower_id", "term", "group_id", "address")
    BORROWER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    borrower_id: str
    term: int
    group_id: int
    address: str
    def __init__(self, borrower_id: _Optional[str] = ..., term: _Optional[int] = ..., group_id: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ("borrower_id", "term", "sent_at", "valid_for_s", "epochs", "without")
    BORROWER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    VALID_FOR_S_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_FIELD_NUMBER: _ClassVar[int]
    borrower_id: str
    term: int
    sent_at: float
    valid_for_s: float
    epochs: _containers.RepeatedCompositeFieldContainer[GroupFrontier]
    without: _containers.RepeatedCompositeFieldContainer[StreamGrant]
    def __init__(self, borrower_id: _Optional[str] = ..., term: _Optional[int] = ..., sent_at: _Optional[float] = ..., valid_for_s: _Optional[float] = ..., epochs: _Optional[_Iterable[_Union[GroupFrontier, _Mapping]]] = ..., without: _Optional[_Iterable[_Union[StreamGrant, _Mapping]]] = ...) -> None: ...

class StreamGrant(_message.Message):
    __slots__ = ("stream_id", "grant_id")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    grant_id: int
    def __init__(self, stream_id: _Optional[int] = ..., grant_id: _Optional[int] = ...) -> None: ...

class GroupFrontier(_message.Message):
    __slots__ = ("space", "consumed", "lower", "space_id")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    LOWER_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    space: str
    consumed: Frontier
    lower: Frontier
    space_id: int
    def __init__(self, space: _Optional[str] = ..., consumed: _Optional[_Union[Frontier, _Mapping]] = ..., lower: _Optional[_Union[Frontier, _Mapping]] = ..., space_id: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("borrower_id", "term", "stream_id", "grant_id", "position", "generation_id", "hash_from", "hash_last", "filter", "end_offset", "consumed", "in_doubt", "grant_key")
    BORROWER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    HASH_FROM_FIELD_NUMBER: _ClassVar[int]
    HASH_LAST_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    IN_DOUBT_FIELD_NUMBER: _ClassVar[int]
    GRANT_KEY_FIELD_NUMBER: _ClassVar[int]
    borrower_id: str
    term: int
    stream_id: int
    grant_id: int
    position: int
    generation_id: int
    hash_from: int
    hash_last: int
    filter: str
    end_offset: int
    consumed: ConsumedFrontier
    in_doubt: InDoubt
    grant_key: bytes
    def __init__(self, borrower_id: _Optional[str] = ..., term: _Optional[int] = ..., stream_id: _Optional[int] = ..., grant_id: _Optional[int] = ..., position: _Optional[int] = ..., generation_id: _Optional[int] = ..., hash_from: _Optional[int] = ..., hash_last: _Optional[int] = ..., filter: _Optional[str] = ..., end_offset: _Optional[int] = ..., consumed: _Optional[_Union[ConsumedFrontier, _Mapping]] = ..., in_doubt: _Optional[_Union[InDoubt, _Mapping]] = ..., grant_key: _Optional[bytes] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("borrower_id", "term", "stream_id", "grant_id")
    BORROWER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    borrower_id: str
    term: int
    stream_id: int
    grant_id: int
    def __init__(self, borrower_id: _Optional[str] = ..., term: _Optional[int] = ..., stream_id: _Optional[int] = ..., grant_id: _Optional[int] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ("borrower_id", "term", "stream_id", "grant_id", "reason")
    BORROWER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    borrower_id: str
    term: int
    stream_id: int
    grant_id: int
    reason: RevokedReason
    def __init__(self, borrower_id: _Optional[str] = ..., term: _Optional[int] = ..., stream_id: _Optional[int] = ..., grant_id: _Optional[int] = ..., reason: _Optional[_Union[RevokedReason, str]] = ...) -> None: ...

class ProgressSaved(_message.Message):
    __slots__ = ("borrower_id", "term", "stream_id", "grant_id", "position", "consumed", "in_doubt")
    BORROWER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    IN_DOUBT_FIELD_NUMBER: _ClassVar[int]
    borrower_id: str
    term: int
    stream_id: int
    grant_id: int
    position: int
    consumed: ConsumedFrontier
    in_doubt: InDoubt
    def __init__(self, borrower_id: _Optional[str] = ..., term: _Optional[int] = ..., stream_id: _Optional[int] = ..., grant_id: _Optional[int] = ..., position: _Optional[int] = ..., consumed: _Optional[_Union[ConsumedFrontier, _Mapping]] = ..., in_doubt: _Optional[_Union[InDoubt, _Mapping]] = ...) -> None: ...

class Invalidate(_message.Message):
    __slots__ = ("borrower_id", "term", "reason", "detail")
    BORROWER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    borrower_id: str
    term: int
    reason: EndReason
    detail: str
    def __init__(self, borrower_id: _Optional[str] = ..., term: _Optional[int] = ..., reason: _Optional[_Union[EndReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("protocol_version", "producer", "incarnation", "number", "messages")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    producer: str
    incarnation: int
    number: int
    messages: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., producer: _Optional[str] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., messages: _Optional[bytes] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("is_duplicate", "parts")
    IS_DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    is_duplicate: bool
    parts: _containers.RepeatedCompositeFieldContainer[PublishedPart]
    def __init__(self, is_duplicate: bool = ..., parts: _Optional[_Iterable[_Union[PublishedPart, _Mapping]]] = ...) -> None: ...

class PublishedPart(_message.Message):
    __slots__ = ("stream_id", "first_offset", "count", "rows")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    first_offset: int
    count: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stream_id: _Optional[int] = ..., first_offset: _Optional[int] = ..., count: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class FeedBookmark(_message.Message):
    __slots__ = ("known", "positions", "timeline")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    known: int
    positions: _containers.RepeatedCompositeFieldContainer[FeedPosition]
    timeline: str
    def __init__(self, known: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[FeedPosition, _Mapping]]] = ..., timeline: _Optional[str] = ...) -> None: ...

class FeedPosition(_message.Message):
    __slots__ = ("stream_id", "offset")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    offset: int
    def __init__(self, stream_id: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class HistoryRequest(_message.Message):
    __slots__ = ("protocol_version", "filter", "starting_position", "bookmark", "subscription_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    STARTING_POSITION_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    filter: str
    starting_position: str
    bookmark: FeedBookmark
    subscription_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., filter: _Optional[str] = ..., starting_position: _Optional[str] = ..., bookmark: _Optional[_Union[FeedBookmark, _Mapping]] = ..., subscription_id: _Optional[str] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("protocol_version", "filter", "starting_position", "bookmark", "subscription_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    STARTING_POSITION_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    filter: str
    starting_position: str
    bookmark: FeedBookmark
    subscription_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., filter: _Optional[str] = ..., starting_position: _Optional[str] = ..., bookmark: _Optional[_Union[FeedBookmark, _Mapping]] = ..., subscription_id: _Optional[str] = ...) -> None: ...

class FeedPage(_message.Message):
    __slots__ = ("subscription_id", "bookmark", "stream_id", "start", "position", "messages", "gone")
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    subscription_id: str
    bookmark: FeedBookmark
    stream_id: int
    start: int
    position: int
    messages: bytes
    gone: FeedGone
    def __init__(self, subscription_id: _Optional[str] = ..., bookmark: _Optional[_Union[FeedBookmark, _Mapping]] = ..., stream_id: _Optional[int] = ..., start: _Optional[int] = ..., position: _Optional[int] = ..., messages: _Optional[bytes] = ..., gone: _Optional[_Union[FeedGone, _Mapping]] = ...) -> None: ...

class FeedGone(_message.Message):
    __slots__ = ("oldest",)
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    oldest: int
    def __init__(self, oldest: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("protocol_version", "stream_id", "position", "filter", "generation_id", "limit_bytes", "grant_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    stream_id: int
    position: int
    filter: str
    generation_id: int
    limit_bytes: int
    grant_id: int
    def __init__(self, protocol_version: _Optional[int] = ..., stream_id: _Optional[int] = ..., position: _Optional[int] = ..., filter: _Optional[str] = ..., generation_id: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., grant_id: _Optional[int] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("start", "position", "head", "closed", "messages", "gone")
    START_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    start: int
    position: int
    head: int
    closed: bool
    messages: bytes
    gone: FeedGone
    def __init__(self, start: _Optional[int] = ..., position: _Optional[int] = ..., head: _Optional[int] = ..., closed: bool = ..., messages: _Optional[bytes] = ..., gone: _Optional[_Union[FeedGone, _Mapping]] = ...) -> None: ...

class HeadsRequest(_message.Message):
    __slots__ = ("protocol_version", "stream_ids")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    stream_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol_version: _Optional[int] = ..., stream_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class HeadsReply(_message.Message):
    __slots__ = ("heads",)
    HEADS_FIELD_NUMBER: _ClassVar[int]
    heads: _containers.RepeatedCompositeFieldContainer[StreamHead]
    def __init__(self, heads: _Optional[_Iterable[_Union[StreamHead, _Mapping]]] = ...) -> None: ...

class SessionEpochRequest(_message.Message):
    __slots__ = ("protocol_version", "subscription", "session")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    subscription: str
    session: str
    def __init__(self, protocol_version: _Optional[int] = ..., subscription: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class SessionEpochReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...
