"""The database of a write, the same on the driver, in tasks and in commits."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from sublet_borrower.spark.common.database_credentials import FROM_ENVIRONMENT, driver_url, task_address, task_url
from sublet_borrower.spark.common.database_reachability import check_database_exists, check_socket_reachable
from sublet_borrower.spark.sink.options import WriteOptions
from sublet_protocol.domain.errors import InvalidSetting

LOCK_TIMEOUT_S = 30.0
RECEIVE_TIMEOUT_S = 600.0
"""A statement that publishes a large batch takes its time; one that takes longer than this is given up."""


@dataclass(frozen=True)
class SinkDatabaseAddress:
    """The database of a write: address and credentials (see `task_url`), or the directory of an embedded server on the
    machine `driver_host`.
    """

    address: str | None
    data_dir: Path | None
    schema_name: str
    driver_host: str
    credentials: str = FROM_ENVIRONMENT

    @classmethod
    def of(cls, options: WriteOptions) -> SinkDatabaseAddress:
        """Return the database from the options and the driver's environment. Raise `InvalidSetting` where there is no
        database yet.
        """
        from sublet_storage.bootstrap.embedded import find_usable_data_dir
        from sublet_storage.db.connect import resolve_schema_name

        url = driver_url(options.url, options.data_dir, options.credentials)
        check_database_exists(url, options.data_dir)
        data_dir = None
        if url is None:
            data_dir = Path(options.data_dir).resolve() if options.data_dir else find_usable_data_dir()
        address = None if url is None else task_address(url)
        return cls(address, data_dir, resolve_schema_name(), socket.gethostname(), options.credentials)

    @contextmanager
    def open_connection(self) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
        """Yield the URL, and an autocommit connection to a database of this program's schema.

        Raise `InvalidSetting` on a machine that cannot reach it, `SchemaMismatch`, `DatabaseUnreachable`.
        """
        from sublet_storage.db.connect import check_schema, connect

        os.environ["SUBLET_SCHEMA"] = self.schema_name  # also the default: the worker may have had a job with another
        with ExitStack() as stack:
            url = self._open_url(stack)
            conn = connect(
                url,
                application_name="sublet spark sink",
                lock_timeout_s=LOCK_TIMEOUT_S,
                receive_timeout_s=RECEIVE_TIMEOUT_S,
            )
            stack.enter_context(conn)
            check_schema(conn)
            yield url, conn

    def _open_url(self, stack: ExitStack) -> str:
        from sublet_storage.bootstrap.given_or_embedded_database import open_database

        if self.address is not None:
            check_socket_reachable(self.address, self.driver_host)
            return task_url(self.address, self.credentials)
        if socket.gethostname() != self.driver_host:
            raise InvalidSetting(
                f"the executor on {socket.gethostname()} was given a database that only {self.driver_host} can "
                "reach: an "
                f"embedded server's, in {self.data_dir}. Run Postgres where all executors can reach it, and give its "
                "URL (option url, or SUBLET_DATABASE_URL on the driver)."
            )
        return stack.enter_context(open_database(None, self.data_dir)).url
