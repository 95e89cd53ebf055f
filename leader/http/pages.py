"""The page: files of this package, as they are. Nothing of it comes from elsewhere, and nothing is built."""

from __future__ import annotations

from importlib.resources import files

from leader.http.request import Request
from leader.http.response import Response
from protocol.errors import NotFound

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_FRESH = {"Cache-Control": "no-cache"}


class Pages:
    """All files are read once, so that no path can lead elsewhere."""

    def __init__(self) -> None:
        self._files = {
            each.name: Response(200, each.read_bytes(), _TYPES[kind], _FRESH)
            for each in (files("leader.http") / "static").iterdir()
            if (kind := each.name.rpartition(".")[2]) in _TYPES
        }

    def root(self, request: Request) -> Response:
        """The page itself."""
        return self._files["index.html"]

    def file(self, request: Request) -> Response:
        """What the page needs. Raises `NotFound`."""
        name = request.path.rpartition("/")[2]
        if name not in self._files:
            raise NotFound(f"there is no file {name[:100]!r}.")
        return self._files[name]
