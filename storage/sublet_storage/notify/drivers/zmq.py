"""The driver by ZeroMQ: each publishing process connects to a port of each node.

The port is opened where the node itself listens. Its endpoint ends in a key, CURVE's public key of the receiver, and
only clients with the key are let in, which is in the directory of nodes: others cannot make the node buffer anything.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.limits import MAX_NOTIFICATION_BYTES
from sublet_storage.notify.drivers.base import FLUSH_S, NotificationDriverCapabilities, OnConnected, OnLost, OnMessage
from sublet_storage.notify.drivers.no_push import NoPushSender
from sublet_storage.util.fork_guard import OwnerProcess
from sublet_storage.util.stoppable_thread import StoppableThread

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]

PAYLOAD_LIMIT = MAX_NOTIFICATION_BYTES
MAX_MESSAGE_BYTES = PAYLOAD_LIMIT + 64
"""ZeroMQ cuts off a peer that sends more in one part of a message; 64 bytes are for what encryption adds."""
MAX_WAITING = 256
"""Messages that wait for one node; when there are more, further ones are dropped."""
MAX_UNREAD = 64
"""Messages of one peer that a receiver has taken and not handed on; further ones wait on the way."""
PEER_TIMEOUT_MS = 5000
"""A peer that does not answer a greeting, or acknowledge a byte, for this time is treated as lost."""
BACK_MS = 1000
"""After a peer was lost, the port counts as connected again when one connects, or without that after this time."""

KEEPALIVE_S = 5
"""Between two keepalive probes of a silent peer."""

_ENDPOINT = re.compile(r"zmq:(tcp://(?:[\w.-]{1,253}|\[[\w:.%]{2,64}\]):[0-9]{1,5})\?key=([0-9a-f]{64})", re.ASCII)
_LOST = zmq.Event.DISCONNECTED
_FOUND = zmq.Event.HANDSHAKE_SUCCEEDED
_STRANGER = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH


class ZmqSender:
    """A sender with a connection to each node. In a fork of its process it sends nothing and closes nothing."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._owner, self._keys = OwnerProcess(), zmq.curve_keypair()
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets = [connected for each in endpoints if (connected := self._connect(each))]
        self.dropped = 0
        """Too long, too many waiting for one of the nodes, or sent by a copy or after the end."""

    def send(self, message: bytes) -> None:
        """Pass the message to ZeroMQ, which drops it if too many wait."""
        if len(message) > PAYLOAD_LIMIT or self._context.closed or self._owner.is_forked:
            self.dropped += 1
        else:
            self.dropped += False in [_try_send(each, message) for each in self._sockets]

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Wait so long at most for sent messages, and not longer than `FLUSH_S`: an unreachable node takes it all."""
        if not self._owner.is_forked:
            self._context.destroy(round(1000 * min(timeout_s, FLUSH_S)))

    def _connect(self, endpoint: str) -> Socket | None:
        """Return a socket connected to one node; None, after a log line, if the endpoint is malformed."""
        match = _ENDPOINT.fullmatch(endpoint)
        node: Socket = self._context.socket(zmq.PUSH)
        try:
            if match is None:
                raise ValueError("it is not one of the notification driver 'zmq'")
            # Without ZeroMQ's heartbeats: with them, libzmq 4.3 aborts the process when a peer hangs up at the wrong
            # moment (its issues 3937, 4364 and 4767).
            node.sndhwm, node.reconnect_ivl, node.reconnect_ivl_max = MAX_WAITING, 20, 500
            node.handshake_ivl = node.tcp_maxrt = PEER_TIMEOUT_MS
            node.ipv6 = "[" in match[1]
            node.curve_publickey, node.curve_secretkey = self._keys
            node.curve_serverkey = bytes.fromhex(match[2])
            node.connect(match[1])
        except (zmq.ZMQError, ValueError) as error:
            node.close(0)
            log.warning("notification endpoint invalid, skipped: endpoint=%.40r: %s", endpoint, error)
            return None
        return node


class ZmqReceiver(StoppableThread):
    """A receiver on a port."""

    def __init__(self, host: str, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost) -> None:
        super().__init__("sublet notify zmq receiver")
        self._on_message, self._on_connected, self._on_lost = on_message, on_connected, on_lost
        self._context: zmq.Context[Any] = zmq.Context()
        self._lost_at: float | None = None
        self._stranger = False
        self._incoming = self._context.socket(zmq.PULL)
        self._monitor: Socket = self._incoming.get_monitor_socket(_LOST | _FOUND | _STRANGER)
        try:
            self.endpoint = _listen(self._incoming, host)
        except (OSError, zmq.ZMQError) as error:
            self.stop()
            self._close_socket()
            raise InvalidSetting(
                f"host {host!r}: the notification driver 'zmq' cannot open a port there ({error}). Give an address of "
                "this machine."
            ) from error
        self.start()

    def close(self) -> None:
        """Close the port."""
        self.stop()

    def run(self) -> None:
        self.call_handler(self._on_connected)
        poller = zmq.Poller()
        for each in (self._incoming, self._monitor, self.wakeup_socket):
            poller.register(each, zmq.POLLIN)
        try:
            while not self.is_stopping:
                poller.poll(None if self._lost_at is None else BACK_MS)
                self._watch()
                self._receive()
        finally:
            self._close_socket()

    def _receive(self) -> None:
        """Pass on some of the received messages; ours have one part."""
        for _ in range(MAX_UNREAD):
            if not self._incoming.poll(0):
                return
            parts = self._incoming.recv_multipart()
            if len(parts) == 1:
                self.call_handler(self._on_message, parts[0])

    def _watch(self) -> None:
        """Process the events of peers that connect and disconnect, except those that were never let in."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == _FOUND:
                self._handle_return()
            elif event == _LOST and not self._stranger:
                self._handle_loss()
            self._stranger = bool(event & _STRANGER)
        if self._lost_at is not None and time.monotonic() >= self._lost_at + BACK_MS / 1000:
            self._handle_return()

    def _handle_loss(self) -> None:
        if self._lost_at is None:
            self.call_handler(self._on_lost)
        self._lost_at = time.monotonic()

    def _handle_return(self) -> None:
        if self._lost_at is not None:
            self._lost_at = None
            self.call_handler(self._on_connected)

    def _close_socket(self) -> None:
        self._incoming.disable_monitor()
        self._context.destroy(0)


class ZmqDriver:
    """A driver that is not lossless (messages in transit are lost when a process or a node ends), and not ordered after
    a reconnect."""

    name = "zmq"
    capabilities = NotificationDriverCapabilities(
        is_ordered=False, is_lossless=False, payload_limit=PAYLOAD_LIMIT, is_push=True
    )

    def __init__(self, url: str, *, host: str = "127.0.0.1") -> None:
        if not zmq.has("curve"):
            raise InvalidSetting(
                "the notification driver 'zmq' needs a pyzmq with CURVE, and this one was built without. Install a "
                "wheel of it: `pip install --force-reinstall --only-binary :all: pyzmq`."
            )
        self._host = host

    def open_sender(self, endpoints: Sequence[str]) -> ZmqSender | NoPushSender:
        """Return the sender of this process, towards those endpoints."""
        return ZmqSender(endpoints) if endpoints else NoPushSender()

    def open_receiver(self, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost) -> ZmqReceiver:
        """Return the receiver, on a free port."""
        return ZmqReceiver(self._host, on_message, on_connected, on_lost)


def _try_send(node: Socket, message: bytes) -> bool:
    """Return whether ZeroMQ accepts the message for that node."""
    try:
        node.send(message, zmq.NOBLOCK)
    except zmq.ZMQError:
        return False
    return True


def _listen(incoming: Socket, host: str) -> str:
    """Bind to a free port of the host; return the endpoint, with the address and the key."""
    family, *_, socket_address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    public, secret = zmq.curve_keypair()
    incoming.curve_server, incoming.curve_secretkey = True, secret
    incoming.rcvhwm, incoming.maxmsgsize, incoming.linger = MAX_UNREAD, MAX_MESSAGE_BYTES, 0
    incoming.handshake_ivl = PEER_TIMEOUT_MS
    incoming.tcp_keepalive, incoming.tcp_keepalive_idle = 1, KEEPALIVE_S
    incoming.tcp_keepalive_intvl, incoming.tcp_keepalive_cnt = KEEPALIVE_S, 3
    incoming.ipv6 = family == socket.AF_INET6
    incoming.bind(f"tcp://[{socket_address[0]}]:*" if incoming.ipv6 else f"tcp://{socket_address[0]}:*")
    address = incoming.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    return f"zmq:{address}?key={z85.decode(public).hex()}"
