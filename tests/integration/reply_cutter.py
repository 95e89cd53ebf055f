"""A socket between a client and Postgres that can lose a reply, or freeze the client in the middle of a request."""

from __future__ import annotations

import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit


class ReplyCutter:
    """A context manager; connect to `url`. `cut()` loses the next reply, and lets nobody in until `resume()`;
    `freeze(n)` lets only n bytes more of what the clients send through."""

    def __init__(self, server_url: str) -> None:
        parts = urlsplit(server_url)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self._port = query.get("port", "5432")
        self._server = f"{query['host']}/.s.PGSQL.{self._port}"
        self._directory = tempfile.TemporaryDirectory(prefix="sublet-cutter-")
        self.url = urlunsplit(parts._replace(query=urlencode(query | {"host": self._directory.name})))
        self._open, self.was_cut = threading.Event(), threading.Event()
        self._cutting = self._cutting_commit = False
        self._resuming = True
        self._allowed: int | None = None
        self.frozen, self._thawed = threading.Event(), threading.Event()

    def freeze(self, after: int) -> None:
        """Hold back what clients send after so many more bytes, their connections open, until the end."""
        self._allowed = after

    def thaw(self) -> None:
        """End the frozen connections, and let everything through again."""
        self._allowed = None
        self._thawed.set()

    def cut(self) -> None:
        """The next reply of the server is lost with its connection."""
        self._open.clear()
        self.was_cut.clear()
        self._cutting = True

    def cut_commit(self, *, resume: bool) -> None:
        """Lose the reply to the next COMMIT of a client, and the connection with it; let others in only if `resume`."""
        self._cutting_commit, self._resuming = True, resume

    def resume(self) -> None:
        """Let connections in again."""
        self._open.set()

    def __enter__(self) -> ReplyCutter:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(Path(self._directory.name) / f".s.PGSQL.{self._port}"))
        self._listener.listen()
        self._open.set()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.set()
        self._thawed.set()
        self._listener.close()
        self._directory.cleanup()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.wait()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                for source, target, replies in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=(source, target, replies), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if replies and self._cutting:
                    self._cutting = False
                    self.was_cut.set()
                    break
                if not replies and self._allowed is not None:
                    target.sendall(data[: self._allowed])
                    self._allowed -= min(self._allowed, len(data))
                    if not self._allowed:
                        self.frozen.set()
                        self._thawed.wait()
                        break
                    continue
                if not replies and self._cutting_commit and b"COMMIT" in data:
                    self._cutting_commit = False
                    self.cut()
                    if self._resuming:
                        self.resume()
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
