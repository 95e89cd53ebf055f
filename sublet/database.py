"""`connect`: a database, chosen and checked once, and the clients made with it.

A client's libraries are loaded when the first one is made: a program that only publishes loads none of a consumer's.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sublet_storage.bootstrap.given_or_embedded_database import open_database
from sublet_storage.db.connect import connect as connect_to
from sublet_storage.db.database_url import format_url
from sublet_storage.spaces.routing import Space
from sublet_storage.spaces.space_queries import list_spaces

if TYPE_CHECKING:
    from sublet_borrower.consumer.async_session import AsyncSession
    from sublet_borrower.consumer.session import Session
    from sublet_storage.producer import AsyncPublisher, Publisher


class Database:
    """A handle bound to one database; `connect` makes it. Thread-safe.

    It holds no connection: publishers and sessions have their own, and outlive the handle. An embedded server runs
    until the handle is closed or dropped, and all that was made with it is closed.
    """

    def __init__(self, url: str | None = None, data_dir: Path | str | None = None) -> None:
        with ExitStack() as opened:
            database = opened.enter_context(open_database(url, data_dir))
            self.url = database.url
            # Clients use an embedded server by themselves: it runs as long as they do, also without the handle.
            self._location: dict[str, Any] = {"url": database.url, "data_dir": database.data_dir}
            self._resources = opened.pop_all()

    def publisher(self, space: str | None = None, **settings: Any) -> Publisher:
        """Return a `Publisher` for this database; `settings` are its keyword arguments."""
        from sublet_storage.producer import Publisher

        return Publisher(space=space, **self._location, **settings)

    def async_publisher(self, space: str | None = None, **settings: Any) -> AsyncPublisher:
        """Return an `AsyncPublisher` for this database; `settings` are `Publisher`'s keyword arguments."""
        from sublet_storage.producer import AsyncPublisher

        return AsyncPublisher(space=space, **self._location, **settings)

    def session(self, subscription: str, **settings: Any) -> Session:
        """Return a `Session` that consumes from this database; `settings` are its keyword arguments."""
        from sublet_borrower.consumer.session import Session

        return Session(subscription, **self._location, **settings)

    def async_session(self, subscription: str, **settings: Any) -> AsyncSession:
        """Return an `AsyncSession` that consumes from this database; `settings` are `Session`'s keyword arguments."""
        from sublet_borrower.consumer.async_session import AsyncSession

        return AsyncSession(subscription, **self._location, **settings)

    def spaces(self) -> list[Space]:
        """Return the spaces by name: filter, number of streams, and retention of each."""
        with connect_to(self.url, application_name="sublet spaces") as connection:
            return list_spaces(connection)

    def close(self) -> None:
        """Stop using the embedded server, if it is one. A second call changes nothing."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Database({format_url(self.url)!r})"


def connect(url: str | None = None, data_dir: Path | str | None = None) -> Database:
    """Return a handle on the database of `url`, else of `data_dir`, else of SUBLET_DATABASE_URL, else an embedded one.

        with connect() as database, database.publisher() as publisher:
            publisher.publish("orders/eu", b"...")

    Raise `DatabaseUnreachable`, `SchemaMismatch`, `EmbeddedDirectoryUnusable`, `InvalidSetting`.
    """
    return Database(url, data_dir)
