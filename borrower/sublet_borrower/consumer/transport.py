"""How a session reaches messages and leaders: through the database, or through nodes alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from sublet_borrower.consumer.transaction import ProgressTransactions
from sublet_borrower.fetch.database import LogReader
from sublet_borrower.fetch.nodes import NodeReader
from sublet_borrower.new_data.direct_listener import OnHeads, subscribe_heads
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.atomic_stream import AtomicGrantedStream
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_storage.bootstrap.database import open_database
from sublet_storage.db.connect import connect
from sublet_storage.groups import fencing
from sublet_storage.log.log import LogPage
from sublet_storage.nodes import live_nodes
from sublet_storage.readers.epoch_steps import BlockSummaries


class PageReader(Protocol):
    """Reads granted streams. Implemented by `LogReader` and `NodeReader`; `tests/contract/test_readers.py` is its
    suite."""

    def warm_up(self) -> None: ...

    def fetch(self, granted: GrantedStream, allowed: Callable[[GrantedStream], bool]) -> LogPage | None: ...

    def fetch_block_summaries(self, granted: AtomicGrantedStream) -> BlockSummaries | None: ...

    def fetch_frontiers(self, stream_ids: Iterable[int]) -> Mapping[int, BlockSummaries]: ...

    def fetch_heads(self, stream_ids: Iterable[int]) -> list[tuple[int, int]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionTransport:
    """What a session uses of others. `transactions` is None where there is no database, and `subscribe_heads` where no
    direct listening is possible: it begins to report heads, and returns a function that ends that."""

    reader: PageReader
    discover_nodes: Callable[[], Sequence[str]]
    next_session_epoch: Callable[[], int]
    transactions: ProgressTransactions | None
    subscribe_heads: Callable[[OnHeads], Callable[[], None]] | None


def database_transport(
    opened: contextlib.ExitStack,
    url: str | None,
    data_dir: Path | str | None,
    nodes: Sequence[str] | None,
    max_batch_bytes: int,
    settings: BorrowerSettings,
    group_id: Callable[[], int],
) -> SessionTransport:
    """Messages from Postgres; nodes as listed there, if none are given. What is opened here is closed by `opened`."""
    timeout_s = settings.read_timeout_s
    database = opened.enter_context(open_database(url, data_dir))
    reader = LogReader(database.url, max_batch_bytes, timeout_s)
    opened.callback(reader.close)
    reader.warm_up()
    transactions = ProgressTransactions(database.url, group_id, settings.max_poll_interval_s)
    opened.callback(transactions.close)
    return SessionTransport(
        reader,
        discover_nodes=lambda: nodes or _listed(database.url, timeout_s),
        next_session_epoch=lambda: _newest(database.url),
        transactions=transactions,
        subscribe_heads=partial(subscribe_heads, database.url),
    )


def node_transport(
    opened: contextlib.ExitStack, nodes: Sequence[str], max_batch_bytes: int, timeout_s: float
) -> SessionTransport:
    """Open a transport over these nodes, and those that they know. `opened` closes what is opened here."""
    reader = NodeReader(nodes, max_batch_bytes, timeout_s)
    opened.callback(reader.close)
    reader.warm_up()
    return SessionTransport(reader, lambda: nodes, reader.next_session_epoch, None, None)


def _newest(url: str) -> int:
    with connect(url, application_name="sublet session") as connection:
        return fencing.next_session_epoch(connection)


def _listed(url: str, silence_s: float) -> list[str]:
    with connect(url, application_name="sublet session", silence_s=silence_s) as connection:
        return [node.address for node in live_nodes(connection)]
