"""A proxy before Postgres that can cut, delay and freeze connections, and lose a reply."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit, urlunsplit

PIECE_BYTES = 65536
KEY_DATA = b"K\0\0\0\x0c"
"""First bytes of the message with the process id of the server."""


class PostgresProxy:
    """A context manager; connect to `url`, a TCP address in front of the server's Unix socket or of any TCP server.
    `port`: of that address; `sent`: the bytes that clients have sent; `refused`: the number of connections refused.

    For the network as a whole: `hang_up`, `go_away`, `slow`, `hold`. At one moment: `cut`, `cut_commit`, `freeze`.
    """

    def __init__(self, server_url: str) -> None:
        parts = urlsplit(server_url)
        self.lead_to(server_url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.sent = self.refused = 0
        address = f"{parts.username}@127.0.0.1:{self.port}"
        self.url = urlunsplit(parts._replace(netloc=address, query=""))
        self._open, self._flowing = threading.Event(), threading.Event()
        self._refusing = False
        self._delay_s = 0.0
        self._pooling = False
        self._ends: set[socket.socket] = set()
        self.was_cut = threading.Event()
        self._cutting = self._cutting_commit = self._holding = False
        self._committing: socket.socket | None = None
        self._resuming, self._arriving, self._at_once = True, True, False
        self._stop: bytes | None = None
        self.frozen, self._thawed = threading.Event(), threading.Event()

    def lead_to(self, server_url: str) -> None:
        parts = urlsplit(server_url)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self._server = (
            f"{query['host']}/.s.PGSQL.{query.get('port', '5432')}"
            if "host" in query
            else (parts.hostname or "", parts.port or 0)
        )

    # --- the network ------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Close all connections; new ones are accepted at once."""
        for end in tuple(self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def go_away(self) -> None:
        """Close all connections, and refuse new ones until `resume()`."""
        self._refusing = True
        self.hang_up()

    def slow(self, round_trip_s: float) -> None:
        """Delay all data by half the round trip in each direction."""
        self._delay_s = round_trip_s / 2

    def hold(self) -> None:
        """Hold back all data in both directions, with connections open, until `resume()`; then pass it on."""
        self._flowing.clear()

    def resume(self) -> None:
        """Accept connections and pass on data again."""
        self._refusing = False
        self._open.set()
        self._flowing.set()

    def pool(self) -> None:
        """Report another process id to clients than the server's, as a connection pooler does."""
        self._pooling = True

    # --- one moment -------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Lose the server's next reply and its connection. New connections wait until `resume()`."""
        self._open.clear()
        self.was_cut.clear()
        self._cutting = True

    def cut_commit(self, *, resume: bool, arrives: bool = True, at_once: bool = False, holds: bool = False) -> None:
        """Lose the reply to a client's next COMMIT, and its connection; refuse new ones until `resume()`, unless
        `resume`, or let them wait (`holds`). Unless it `arrives` the COMMIT itself is lost. `at_once`: while the server
        still executes it."""
        self._cutting_commit, self._resuming, self._arriving, self._at_once = True, resume, arrives, at_once
        self._holding = holds

    def freeze(self, at: bytes = b"") -> None:
        """Hold back what a client sends from these bytes on, and from then on the data of all clients, until
        `thaw()`."""
        self._stop = at

    def thaw(self) -> None:
        """Close the frozen connections, and pass on all data again."""
        self._stop = None
        self._thawed.set()

    # --- inside -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.resume()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.resume()
        self._thawed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.wait()
                if self._refusing or not self._connect(client):
                    self.refused += 1
                    client.close()

    def _connect(self, client: socket.socket) -> bool:
        """Connect the client to the server; return False if there is none."""
        server = socket.socket(socket.AF_UNIX if isinstance(self._server, str) else socket.AF_INET)
        try:
            server.connect(self._server)
        except OSError:
            server.close()
            return False
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ends |= {client, server}
        for source, target, replies in ((client, server, False), (server, client, True)):
            threading.Thread(target=self._pump, args=(source, target, replies), daemon=True).start()
        return True

    def _pump(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                time.sleep(self._delay_s)
                self._flowing.wait()
                if not (self._reply(data, source, target) if replies else self._request(data, target)):
                    break
        for end in (source, target):
            self._ends.discard(end)
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _reply(self, data: bytes, server: socket.socket, client: socket.socket) -> bool:
        """Pass the reply on; return False if the connection is closed instead."""
        if self._cutting or server is self._committing:
            self._cutting, self._committing = False, None
            self.was_cut.set()
            return False
        if self._pooling and (found := data.find(KEY_DATA)) >= 0:
            place = found + len(KEY_DATA)
            data = data[:place] + bytes(4) + data[place + 4 :]
        client.sendall(data)
        return True

    def _request(self, data: bytes, server: socket.socket) -> bool:
        """Pass the request on as far as it is allowed; return False if the connection is closed after it."""
        self.sent += len(data)
        if self._stop is not None and (place := data.find(self._stop)) >= 0:
            self._stop = b""
            server.sendall(data[:place])
            self.frozen.set()
            self._thawed.wait()
            return False
        if self._cutting_commit and b"COMMIT" in data:
            self._cutting_commit = False
            self.was_cut.clear()
            self._refusing = not (self._resuming or self._holding)
            if self._holding:
                self._open.clear()
            if self._at_once or not self._arriving:
                if self._arriving:
                    server.sendall(data)
                self.was_cut.set()
                return False
            self._committing = server  # others may have replies meanwhile
        server.sendall(data)
        return True
