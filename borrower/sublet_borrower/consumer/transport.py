"""The two ways of a session to messages and leaders: the database, or nodes alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from sublet_borrower.consumer.transaction import Transactions
from sublet_borrower.fetch.database import Reader
from sublet_borrower.fetch.nodes import NodeReader
from sublet_borrower.new_data.direct_listener import OnHeads, hear
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.atomic_stream import WholeLent
from sublet_borrower.streams.granted_stream import Lent
from sublet_storage.bootstrap.database import open_database
from sublet_storage.db.connect import connect
from sublet_storage.groups import fencing
from sublet_storage.log.log import Page
from sublet_storage.nodes import live_nodes
from sublet_storage.readers.epoch_steps import Marks


class PageReader(Protocol):
    """Reads what was lent. `Reader` and `NodeReader` keep it, and `tests/contract/test_readers.py` is its suite."""

    def prepare(self) -> None: ...

    def page(self, lent: Lent, allowed: Callable[[Lent], bool]) -> Page | None: ...

    def marks(self, lent: WholeLent) -> Marks | None: ...

    def completed(self, stream_ids: Iterable[int]) -> Mapping[int, Marks]: ...

    def heads(self, stream_ids: Iterable[int]) -> list[tuple[int, int]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Way:
    """What a session needs of others. `transactions` is None where there is no database to have them on, and `hear`
    where there is none to hear from: it begins to tell where streams end, and returns what ends that."""

    reader: PageReader
    find_nodes: Callable[[], Sequence[str]]
    draw_epoch: Callable[[], int]
    transactions: Transactions | None
    hear: Callable[[OnHeads], Callable[[], None]] | None


def by_database(
    opened: contextlib.ExitStack,
    url: str | None,
    data_dir: Path | str | None,
    nodes: Sequence[str] | None,
    batch_bytes: int,
    settings: BorrowerSettings,
    group_id: Callable[[], int],
) -> Way:
    """Messages from Postgres; nodes as listed there, if none are given. What is opened here is closed by `opened`."""
    timeout_s = settings.read_timeout_s
    database = opened.enter_context(open_database(url, data_dir))
    reader = Reader(database.url, batch_bytes, timeout_s)
    opened.callback(reader.close)
    reader.prepare()
    transactions = Transactions(database.url, group_id, settings.max_poll_interval_s)
    opened.callback(transactions.close)
    return Way(
        reader,
        find_nodes=lambda: nodes or _listed(database.url, timeout_s),
        draw_epoch=lambda: _newest(database.url),
        transactions=transactions,
        hear=partial(hear, database.url),
    )


def by_nodes(opened: contextlib.ExitStack, nodes: Sequence[str], batch_bytes: int, timeout_s: float) -> Way:
    """All from these nodes, and from those whose addresses they tell. What is opened here is closed by `opened`."""
    reader = NodeReader(nodes, batch_bytes, timeout_s)
    opened.callback(reader.close)
    reader.prepare()
    return Way(reader, lambda: nodes, reader.session_epoch, None, None)


def _newest(url: str) -> int:
    with connect(url, application_name="sublet session") as connection:
        return fencing.draw_session_epoch(connection)


def _listed(url: str, silence_s: float) -> list[str]:
    with connect(url, application_name="sublet session", silence_s=silence_s) as connection:
        return [node.address for node in live_nodes(connection)]
