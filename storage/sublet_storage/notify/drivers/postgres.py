"""The driver by LISTEN and NOTIFY, which needs nothing but the database.

NOTIFY goes over a connection of its own, never in an append's transaction, where its commit lock would cost the
publishers; or in a transaction behind an append (`NOTIFY_HEAD`). What waits is sent in one statement, so that the rate
is that of round trips and not of messages. LISTEN needs a connection of its own too, without a pooler in the way that
would share it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import psycopg
import xxhash
from psycopg import sql
from psycopg.pq import TransactionStatus

from sublet_protocol.domain.errors import InvalidSetting, SubletError
from sublet_storage.db.bounded_connection import BoundedConnection, is_direct
from sublet_storage.db.connect import connect, newest_stream, resolve_schema_name
from sublet_storage.notify.codec import HEAD_MARK, VERSION_MARK
from sublet_storage.notify.drivers.base import FLUSH_S, NotificationDriverCapabilities, OnConnected, OnLost, OnMessage
from sublet_storage.notify.drivers.no_push import NoPushSender
from sublet_storage.util.retry import Backoff
from sublet_storage.util.stoppable_thread import JOIN_TIMEOUT_S, StoppableThread

log = logging.getLogger(__name__)

DRIVER = "postgres"
ENDPOINT = f"{DRIVER}:"
MAX_CHANNEL = 63
PER_STATEMENT = 64
MAX_WAITING = 1024
PAYLOAD_LIMIT = 5997
"""Postgres takes 7999 bytes of text: two for the header leave this number of bytes before base64."""

RECEIVE_TIMEOUT_S = 5.0
"""How long a server may not answer before it is treated as lost."""
QUIET_S = 10.0
"""The silence after which the server is queried to see whether it is still there."""

_POOLED = (
    "a pooler shares the connection, and no notification would arrive through it. Give the node a URL that leads to "
    "the server itself, or --notify poll"
)

_CONNECTION_ERRORS = (SubletError, psycopg.Error, OSError)
"""The last where there are no more files."""

NOTIFY_HEAD: Final = f"""
select set_config('synchronous_commit', 'off', true),
       pg_notify($1, replace(
         replace($2, chr({ord(VERSION_MARK)}), (2 * head)::text), chr({ord(HEAD_MARK)}), head::text))
  from {newest_stream("$3::bigint", "head")} s"""
"""Sends a message on a stream's head, which it reads. Nothing is stored, so there is nothing to wait for on a disk."""

_NOTIFY = "select pg_notify(%s, payload) from unnest(%s::text[]) payload"
_PREPARE_ONE = "prepare sublet_notify (text, text) as select pg_notify($1, $2)"


def channel_name(schema: str) -> str:
    """Return the channel's name: the schema's, as a database may have several; a long one's is hashed."""
    name = f"sublet_{schema}"
    return name if len(name) <= MAX_CHANNEL else f"{name[:46]}_{xxhash.xxh3_64_hexdigest(name.encode())}"


def encode_payload(message: bytes, index: int) -> str:
    """Return the message as text. `index`: its number in the statement, 0 to 63.

    Postgres drops a payload that equals another of its transaction: with the number in it no two are equal.
    """
    if message.isascii() and b"\0" not in message:
        return f"t{chr(48 + index)}{message.decode('ascii')}"
    return f"b{chr(48 + index)}{base64.b64encode(message).decode('ascii')}"


def encode_head_parameters(channel: str, message: bytes, stream_id: int) -> list[bytes]:
    """Return the parameters of `NOTIFY_HEAD`, in text, for a message with the marks of `encode_head_change`."""
    return [channel.encode(), encode_payload(message, 0).encode(), b"%d" % stream_id]


def decode_payload(payload: bytes) -> bytes | None:
    """Return the message; None if this is not one of `encode_payload`."""
    kind, body = payload[:1], payload[2:]
    if kind == b"t" and len(payload) > 1:
        return body
    try:
        return base64.b64decode(body, validate=True) if kind == b"b" and len(payload) > 1 else None
    except binascii.Error:
        return None


def start_listening(connection: psycopg.Connection[Any], channel: str) -> None:
    """Receive what is sent on the channel from now on."""
    # A client that is stopped while it listens would hold up the notifications of the entire server (over TCP).
    connection.execute("set tcp_user_timeout = '60s'")
    connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))


class PayloadReceiver:
    """Receives the payloads of a listening connection, for one thread at a time."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._received_at = time.monotonic()

    def receive(self, wakeup: socket.socket, timeout_s: float = math.inf) -> list[bytes]:
        """Return the payloads that have come. Where there are none, wait for them, until `wakeup` is readable or the
        time is over. Raise `psycopg.OperationalError`, also if the server does not answer an empty query, which is sent
        after a silence."""
        if payloads := self._take():
            return payloads
        server, waiting = self._connection.pgconn, select.poll()
        is_asked = server.transaction_status == TransactionStatus.ACTIVE
        quiet_s = self._received_at + (RECEIVE_TIMEOUT_S if is_asked else QUIET_S) - time.monotonic()
        connection_fd = self._connection.fileno()
        for file in (connection_fd, wakeup.fileno()):
            waiting.register(file, select.POLLIN)
        ready = waiting.poll(1000 * max(0.0, min(quiet_s, timeout_s)))
        if any(file == connection_fd for file, _ in ready):
            server.consume_input()
            self._received_at = time.monotonic()
        elif not ready and quiet_s <= timeout_s:
            if is_asked:
                raise psycopg.OperationalError(f"not a byte has come from Postgres for {RECEIVE_TIMEOUT_S:g} s")
            server.send_query(b"")
            self._received_at = time.monotonic()
        return self._take()

    def _take(self) -> list[bytes]:
        server, payloads = self._connection.pgconn, list[bytes]()
        while (notification := server.notifies()) is not None:
            payloads.append(notification.extra)
        while not server.is_busy() and server.get_result() is not None:
            pass
        return payloads


class PostgresNotifySender:
    """Queues messages for the thread that executes NOTIFY; when too many wait, the oldest is dropped."""

    def __init__(self, url: str, channel: str) -> None:
        self._sender = _Sender(url, channel)
        self._too_long = 0
        self._sender.start()

    @property
    def dropped(self) -> int:
        """Return the number of messages that were too long, too many, rejected by the server, or left over when it was
        closed."""
        return self._too_long + self._sender.dropped

    def send(self, message: bytes) -> None:
        """Queue it, unless it is longer than the limit."""
        if len(message) > PAYLOAD_LIMIT:
            self._too_long += 1
        else:
            self._sender.add(message)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Wait so long at most for queued messages, then close the connection."""
        self._sender.flush(timeout_s)
        self._sender.stop()


class _Sender(StoppableThread):
    """Executes NOTIFY, and retries while the database is away.

    Where nothing else is under way, who adds a message sends it, and the thread receives the answer: a thread that is
    woken for it begins later.
    """

    def __init__(self, url: str, channel: str) -> None:
        super().__init__("sublet notify postgres sender")
        self._url, self._channel = url, channel
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._in_hand: list[bytes] = []
        self._idle: psycopg.Connection[Any] | None = None
        self._pauses = Backoff()
        self.dropped = 0

    def add(self, message: bytes) -> None:
        """Queue a message; if the thread has ended or is another process's, it is dropped at once."""
        if self.is_stopping or self.owner.is_forked:
            self.dropped += 1
            return
        with self._changed:
            if len(self._waiting) == MAX_WAITING:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(message)
            if self._idle is not None:
                self._send_at_once(self._idle)
            self._changed.notify_all()

    def _send_at_once(self, connection: psycopg.Connection[Any]) -> None:
        """Send the message that waits, as far as the socket takes it. What prevents it comes to the thread, too."""
        self._idle, self._in_hand = None, [self._waiting.popleft()]
        parameters = [self._channel.encode(), encode_payload(self._in_hand[0], 0).encode()]
        with contextlib.suppress(psycopg.Error):
            connection.pgconn.send_query_prepared(b"sublet_notify", parameters)
            connection.pgconn.flush()

    def flush(self, timeout_s: float) -> None:
        """Wait until nothing waits, for so long at most."""
        if not self.owner.is_forked and not self.is_stopping:
            with self._changed:
                self._changed.wait_for(lambda: not (self._waiting or self._in_hand), timeout_s)

    def stop(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Stop as every driver's thread does; waiting messages are dropped."""
        if self.owner.is_forked:
            return
        self._is_stop_requested.set()
        with self._changed:
            self.dropped += len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        super().stop(timeout_s)

    def run(self) -> None:
        while not self.is_stopping:
            try:
                with self._connect() as connection:
                    while self._take(connection):
                        self._send(connection)
            except _CONNECTION_ERRORS as error:
                # The publisher itself reports a database that is away; one that was stopped at the end of a program
                # is no news.
                log.info("notifications not sent, retrying: %s", error)
                self.sleep(self._pauses.draw_pause_s())
        with self._changed:
            self.dropped += len(self._in_hand)
            self._in_hand = []

    def _connect(self) -> BoundedConnection:
        connection = connect(self._url, application_name="sublet notify", receive_timeout_s=RECEIVE_TIMEOUT_S)
        connection.execute("set synchronous_commit = off")
        connection.execute(_PREPARE_ONE)
        self._pauses.reset()
        return connection

    def _take(self, connection: psycopg.Connection[Any]) -> bool:
        """Wait for messages and take some; those of a lost connection come first. Return False when it is over."""
        with self._changed:
            if not (self._waiting or self._in_hand):
                self._idle = connection
            self._changed.wait_for(lambda: self._waiting or self._in_hand or self.is_stopping)
            self._idle = None
            while self._waiting and len(self._in_hand) < PER_STATEMENT and not _awaits_answer(connection):
                self._in_hand.append(self._waiting.popleft())
        return not self.is_stopping

    def _send(self, connection: BoundedConnection) -> None:
        refused = 0
        try:
            if _awaits_answer(connection):
                connection.receive_result()
            else:
                payloads = [encode_payload(message, index) for index, message in enumerate(self._in_hand)]
                connection.execute(_NOTIFY, (self._channel, payloads), prepare=True)
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            refused = len(self._in_hand)
            self.log_warning("notifications rejected by Postgres: message_count=%d: %s", refused, error)
        with self._changed:
            self.dropped += refused
            self._in_hand = []
            self._changed.notify_all()


def _awaits_answer(connection: psycopg.Connection[Any]) -> bool:
    """Return whether what is in hand was sent, and its answer is to be received."""
    return connection.info.transaction_status == TransactionStatus.ACTIVE


class PostgresReceiver(StoppableThread):
    """Listens, and listens again after the connection was lost."""

    endpoint = ENDPOINT

    def __init__(
        self, url: str, channel: str, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost
    ) -> None:
        super().__init__("sublet notify postgres receiver")
        self._url, self._channel = url, channel
        self._on_message, self._on_connected, self._on_lost = on_message, on_connected, on_lost
        self._pauses = Backoff()
        self.start()

    def close(self) -> None:
        """End the connection and the thread."""
        self.stop()

    def run(self) -> None:
        while not self.is_stopping:
            connected = False
            try:
                with connect(
                    self._url, application_name="sublet listen", receive_timeout_s=RECEIVE_TIMEOUT_S
                ) as connection:
                    if not is_direct(connection):
                        raise InvalidSetting(_POOLED)
                    start_listening(connection, self._channel)
                    connected = True
                    self.call_handler(self._on_connected)
                    self._pauses.reset()
                    receiver = PayloadReceiver(connection)
                    while not self.is_stopping:
                        for payload in receiver.receive(self.wakeup_socket):
                            if (message := decode_payload(payload)) is not None:
                                self.call_handler(self._on_message, message)
            except _CONNECTION_ERRORS as error:
                self.log_warning("notification listener disconnected, reconnecting: %s", error)
            if connected:
                self.call_handler(self._on_lost)
            self.sleep(self._pauses.draw_pause_s())


class PostgresNotificationDriver:
    """The lossless driver: a connection that lives receives every notification. `url` must lead past any pooler."""

    name = "postgres"

    def __init__(self, url: str, *, host: str = "127.0.0.1") -> None:
        self._url, self._channel = url, channel_name(resolve_schema_name(opened=url))
        self.capabilities = NotificationDriverCapabilities(
            is_ordered=True,
            is_lossless=True,
            payload_limit=PAYLOAD_LIMIT,
            is_push=True,
            notify_channel=self._channel,
        )

    def open_sender(self, endpoints: Sequence[str]) -> PostgresNotifySender | NoPushSender:
        """Return the sender, with one connection for any number of listeners; one without a connection if there are
        none."""
        return PostgresNotifySender(self._url, self._channel) if ENDPOINT in endpoints else NoPushSender()

    def open_receiver(self, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost) -> PostgresReceiver:
        """Return the receiver, with one connection."""
        return PostgresReceiver(self._url, self._channel, on_message, on_connected, on_lost)
