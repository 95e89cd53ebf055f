"""The systems that can be measured, in the order of the page."""

from __future__ import annotations

from bench.peers.limit import PostgresAlone
from bench.peers.nats import Nats
from bench.peers.ours import Sublet
from bench.peers.pgque import PgQue
from bench.peers.redis import Redis
from bench.peers.system import System

SYSTEMS: dict[str, System] = {
    system.key: system
    for system in (
        Sublet("poll"),
        Sublet("postgres"),
        Sublet("zmq"),
        Sublet("postgres", in_spark=True),
        PostgresAlone(),
        Redis("everysec"),
        Redis("always"),
        Nats(None),
        Nats(None, pulls=True),
        Nats("always"),
        Nats("always", pulls=True),
        PgQue(100),
        PgQue(10),
    )
}
"""By the name on the command line."""
