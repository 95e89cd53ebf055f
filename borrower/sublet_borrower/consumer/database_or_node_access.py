"""The two transports of a group's member to messages and leaders: the database, or nodes alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.fetch.stream_fetcher import GrantedStreamReader
from sublet_borrower.new_data.postgres_head_listener import HeadFeed, OnHeads, OnListening, subscribe_heads
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.bootstrap.given_or_embedded_database import open_database
from sublet_storage.db.connect import connect, map_loss
from sublet_storage.groups import consumer_progress
from sublet_storage.node_directory import list_live_nodes


class DatabaseOrNodeAccess(Struct, frozen=True):
    """A member's access to messages and nodes. `url`: of the database; None where nodes replace it. `subscribe_heads`
    takes a function to call with stream heads; None where nodes alone push.
    """

    reader: GrantedStreamReader
    discover_nodes: Callable[[], Sequence[str]]
    next_session_epoch: Callable[[Subscription, str], int]
    url: str | None = None
    subscribe_heads: Callable[[OnHeads, OnListening], HeadFeed] | None = None


def database_transport(
    opened: contextlib.ExitStack,
    url: str | None,
    data_dir: Path | str | None,
    nodes: Sequence[str] | None,
    max_batch_bytes: int,
    timeout_s: float,
    *,
    listens: bool,
) -> DatabaseOrNodeAccess:
    """Return a transport with messages from Postgres, and nodes as registered there unless given. `opened` closes what
    is opened here. `listens`: the member takes part in the process's direct listener.
    """
    database = opened.enter_context(open_database(url, data_dir))
    reader = DatabaseMessageReader(database.url, max_batch_bytes, timeout_s)
    opened.callback(reader.close)
    return DatabaseOrNodeAccess(
        reader,
        discover_nodes=lambda: nodes or _read_live_nodes(database.url, timeout_s),
        next_session_epoch=partial(_draw_session_epoch, database.url),
        url=database.url,
        subscribe_heads=partial(subscribe_heads, database.url) if listens else None,
    )


def node_transport(
    opened: contextlib.ExitStack, nodes: Sequence[str], max_batch_bytes: int, timeout_s: float
) -> DatabaseOrNodeAccess:
    """Return a transport with everything from these nodes, and from those whose addresses they send. `opened` closes
    what is opened here.
    """
    from sublet_borrower.fetch.node_reader import (
        NodeMessageReader,  # a member with a database needs no remote transport
    )

    reader = NodeMessageReader(nodes, max_batch_bytes, timeout_s)
    opened.callback(reader.close)
    return DatabaseOrNodeAccess(reader, lambda: nodes, reader.next_session_epoch)


def _draw_session_epoch(url: str, subscription: Subscription, session: str) -> int:
    with map_loss("opening a session"), connect(url, application_name="sublet session") as connection:
        return consumer_progress.next_session_epoch(connection, subscription, session)


def _read_live_nodes(url: str, receive_timeout_s: float) -> list[str]:
    with connect(url, application_name="sublet session", receive_timeout_s=receive_timeout_s) as connection:
        return [node.address for node in list_live_nodes(connection)]
