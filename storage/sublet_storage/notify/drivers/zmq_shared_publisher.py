"""The one outward publisher that all processes of a user share, for each database.

Many processes publish on a machine, and nodes shall not have a connection from each. So a process hands its messages
over a Unix socket to the one that holds a file lock, and only that one is connected to the nodes. The kernel drops the
lock of a process that dies; whoever finds it free takes over, at the same path. A holder says now and then that it is
awake; one that does not, frozen or suspended, is replaced, and makes way when it finds that out. What was under way
meanwhile is lost, and for a moment there may be two: that harms nobody.

The directory is the user's own and nobody else may enter it: no other user's messages come in this way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import Any

import zmq

from sublet_storage.notify.drivers.zmq_rendezvous import AWAKE_S, FileLock, Rendezvous, file_inode
from sublet_storage.util.log_throttle import LogThrottle
from sublet_storage.util.threads import DriverThread

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]

MAX_WAITING = 256
"""Messages that wait for one peer; when there are more, further ones are dropped."""
LINGER_MS = 250
"""What is on its way when somebody closes is given so long to leave."""
TAKE_OVER_S = 0.1
"""Between two looks whether the lock is free."""
PEER_TIMEOUT_MS = 5000
"""A peer that does not answer a greeting, or acknowledge a byte, for so long is taken for lost."""
LAST_S = 0.1
DRAIN_MS = 20
"""A publisher that ends passes on what comes in for the first at most, and for the second after the last message."""
IDLE_S = 60.0
"""A node that nothing was sent to for so long is disconnected."""
MAX_NODES = 512
KEY = "?key="
"""In an endpoint, between address and key."""


class _Nodes:
    """Sockets towards nodes, made when something is sent to one, closed when nothing is for long.

    An endpoint is an address and the key of whoever listens there: without it he does not let anybody in.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context, self._keys = context, zmq.curve_keypair()
        self._sockets: dict[bytes, tuple[Socket, float]] = {}
        self._quiet = LogThrottle()

    def send(self, endpoint: bytes, message: bytes) -> None:
        """Hand it to ZeroMQ, or drop it where too much waits already."""
        try:
            socket = self._sockets[endpoint][0] if endpoint in self._sockets else self._connect(endpoint)
            self._sockets[endpoint] = socket, time.monotonic()
            socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            log.debug("a notification is dropped: %d wait for the same node already", MAX_WAITING)
        except (zmq.ZMQError, ValueError) as error:
            if self._quiet.acquire(endpoint) is not None:
                log.warning("a notification cannot be sent to %r: %s", endpoint.split(KEY.encode())[0], error)

    def close_idle(self) -> None:
        """Disconnect those that nothing was sent to lately."""
        until = time.monotonic() - IDLE_S
        for endpoint in [endpoint for endpoint, (_, used) in self._sockets.items() if used < until]:
            self._sockets.pop(endpoint)[0].close()

    def _connect(self, endpoint: bytes) -> Socket:
        if len(self._sockets) >= MAX_NODES:
            oldest = min(self._sockets, key=lambda each: self._sockets[each][1])
            self._sockets.pop(oldest)[0].close()
        address, key = endpoint.decode().split(KEY, 1)
        socket = open_push_socket(self._context)
        try:
            socket.ipv6 = "[" in address
            socket.curve_publickey, socket.curve_secretkey = self._keys
            socket.curve_serverkey = bytes.fromhex(key)
            socket.connect(address)
        except (zmq.ZMQError, ValueError):
            socket.close()
            raise
        return socket


def open_push_socket(context: zmq.Context[Any]) -> Socket:
    """A socket that sends to one peer: bounded, and back by itself. Without ZeroMQ's heartbeats: with them, libzmq 4.3
    aborts the process when a peer hangs up at the wrong moment (its issues 3937, 4364 and 4767)."""
    socket: Socket = context.socket(zmq.PUSH)
    socket.sndhwm, socket.linger = MAX_WAITING, 0
    socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 500
    socket.handshake_ivl = socket.tcp_maxrt = PEER_TIMEOUT_MS
    return socket


class SharedPublisher(DriverThread):
    """A process's part in it: waits for the lock, and is the publisher while it has it."""

    def __init__(self, place: Rendezvous) -> None:
        super().__init__("sublet notify zmq host")
        self.place, self.users = place, 0
        self._context: zmq.Context[Any] = zmq.Context()
        self.number: int | None = None
        """Of the socket at the path, when last looked at: another means that there is another publisher."""
        self.start()

    def sender(self) -> Socket:
        """A socket to whoever is the publisher; takes pairs of endpoints, one a line, and message."""
        socket = open_push_socket(self._context)
        socket.connect(f"ipc://{self.place.socket}")
        return socket

    def close(self) -> None:
        """Let what was sent reach the publisher, then stop; where this process is it, another takes over."""
        self._context.destroy(LINGER_MS)
        self.stop()

    def run(self) -> None:
        lock = FileLock(self.place.lock)
        while not self.is_stopping:
            try:
                if lock.acquire():
                    self._publish(lock)
            except (OSError, zmq.ZMQError) as error:
                self.log_warning("notifications of this machine are not sent at present: %s", error)
                self.sleep(1.0)
            finally:
                lock.release()
            self.number = file_inode(self.place.socket)
            self.sleep(TAKE_OVER_S)

    def _publish(self, lock: FileLock) -> None:
        """Pass on what comes in, until asked to end or replaced. When it returns all is closed, the lock not yet."""
        context: zmq.Context[Any] = zmq.Context()
        try:
            self._pass_on(self._open(context), _Nodes(context), lock)
        finally:
            if lock.refresh():
                self.place.socket.unlink(missing_ok=True)
            context.destroy(LINGER_MS)

    def _open(self, context: zmq.Context[Any]) -> Socket:
        """Bound under another name first: at the path there is always a socket that somebody reads, or did."""
        incoming: Socket = context.socket(zmq.PULL)
        incoming.rcvhwm = MAX_WAITING
        new = self.place.socket.with_suffix(f".{os.getpid()}")
        incoming.bind(f"ipc://{new}")
        self.number = file_inode(new)
        new.rename(self.place.socket)
        return incoming

    def _pass_on(self, incoming: Socket, nodes: _Nodes, lock: FileLock) -> None:
        """Until another has the lock, or its socket at the path: two may replace a third at the same time."""
        poller = zmq.Poller()
        poller.register(incoming, zmq.POLLIN)
        poller.register(self.bell, zmq.POLLIN)
        while not self.is_stopping and lock.refresh() and self.number == file_inode(self.place.socket):
            poller.poll(round(AWAKE_S * 1000))
            _drain(incoming, nodes)
            nodes.close_idle()
        until = time.monotonic() + LAST_S
        while incoming.poll(DRAIN_MS) and time.monotonic() < until:
            _drain(incoming, nodes)


def _drain(incoming: Socket, nodes: _Nodes) -> None:
    """Some of what has come in."""
    with contextlib.suppress(zmq.Again):
        for _ in range(MAX_WAITING):
            parts = incoming.recv_multipart(zmq.NOBLOCK)
            if len(parts) == 2:
                for endpoint in parts[0].splitlines():
                    nodes.send(endpoint, parts[1])


_hosts: dict[Rendezvous, SharedPublisher] = {}
_guard = threading.Lock()


def acquire_shared_publisher(place: Rendezvous) -> SharedPublisher:
    """This process's part at that place; to be left by as many as have joined."""
    with _guard:
        host = _hosts.get(place)
        if host is None:
            host = _hosts[place] = SharedPublisher(place)
        host.users += 1
        return host


def release_shared_publisher(host: SharedPublisher) -> None:
    """The last one to leave stops it. In a fork of its process, nothing."""
    if not host.is_owner_process:
        return
    with _guard:
        host.users -= 1
        if host.users == 0:
            del _hosts[host.place]
            host.close()


def _forked() -> None:
    """A fork begins with none: its parent's threads did not come along, and the lock may be one's that did not."""
    global _guard
    _guard = threading.Lock()
    _hosts.clear()


os.register_at_fork(after_in_child=_forked)
