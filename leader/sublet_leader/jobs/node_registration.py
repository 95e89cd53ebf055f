"""Registers a node, renews the registration, and removes nodes that have stopped.

It reads the desired state of the node as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import psycopg
from msgspec.structs import replace

from sublet_leader.observe.health_signals import HealthSignals
from sublet_protocol.domain.errors import NodeNameTaken, SubletError
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage import node_directory
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect
from sublet_storage.db.reconnecting_connection import ReconnectingConnection
from sublet_storage.doctor.checks import find_leaderless_groups
from sublet_storage.groups.admin import node_desired_state
from sublet_storage.groups.admin.node_desired_state import NodeDesiredState
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.notify import catch_up_reads
from sublet_storage.notify.publisher import shared_publisher
from sublet_storage.util.stoppable_thread import StoppableThread

log = logging.getLogger(__name__)


POLL_INTERVAL_S = 1.0
"""Maximum time between two reads of the desired state."""


class NodeRegistration(StoppableThread):
    """One node's registration. `lease_s`: how long borrowers still find a node that died.

    `notify_endpoint`: for notifications of publishers. `on_desired_state` is called, on a thread of its own, with the
    desired state of the node, `on_failure` with the error that ended that thread early.
    """

    def __init__(
        self,
        url: str,
        ref: NodeIncarnation,
        lease_s: float,
        notify_endpoint: str | None = None,
        on_desired_state: Callable[[NodeDesiredState], None] = lambda desired_state: None,
        http_address: str | None = None,
        health_signals: HealthSignals | None = None,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        super().__init__("sublet-directory")
        self._url, self._ref, self._lease_s, self._on_desired_state = url, ref, lease_s, on_desired_state
        self._notify_endpoint, self._http_address, self._on_failure = notify_endpoint, http_address, on_failure
        self._receive_timeout_s = max(lease_s / 3, POLL_INTERVAL_S)
        self._health_signals = HealthSignals(time.monotonic) if health_signals is None else health_signals
        self._reconnecting = ReconnectingConnection(self._open_connection)

    def register(self, announce: Callable[[str], None]) -> None:
        """Register the name, waiting once for the lease of a former incarnation to run out; then renew it. Do nothing
        if requested to end meanwhile.

        Raise `NodeNameTaken` if the other has renewed meanwhile: it is alive.
        """
        with self._open_connection() as connection:
            try:
                self._register(connection)
            except NodeNameTaken as error:
                announce(f"{error} Waiting for its lease to end.")
                if self.sleep(error.remaining_s + 0.1):
                    return
                self._register(connection)
            shared_publisher(self._url).publish(catch_up_reads.read_nodes(connection))
        self.start()

    def deregister(self) -> None:
        """Remove this node's registration, if it has any."""
        self.stop(self._lease_s)
        if self.ident is None:
            return
        try:
            with self._open_connection() as connection:
                own_changes = [
                    change for change in catch_up_reads.read_nodes(connection) if change.key == self._ref.name
                ]
                node_directory.deregister(connection, self._ref)
            shared_publisher(self._url).publish([replace(change, is_deleted=True, data=None) for change in own_changes])
        except (SubletError, psycopg.Error) as error:
            log.warning("node not deregistered, lease expires instead: %s", error)

    def _register(self, connection: psycopg.Connection[Any]) -> None:
        node_directory.register(
            connection,
            self._ref,
            self._lease_s,
            PROTOCOL_VERSION,
            http_address=self._http_address,
            notify_endpoint=self._notify_endpoint,
            is_draining=self._health_signals.is_draining,
        )

    def run(self) -> None:
        """Renew the registration in time."""
        try:
            self._renew_in_time()
        except Exception as error:  # noqa: BLE001 a node that cannot be found is none
            self._on_failure(error)

    def _renew_in_time(self) -> None:
        health_signals, renew_at = self._health_signals, time.monotonic() + self._lease_s / 3
        while not self.sleep(min(POLL_INTERVAL_S, self._lease_s / 3)):
            health_signals.directory.on_request(health_signals.clock())
            problem: Exception | None = None
            try:
                with self._reconnecting as connection:
                    if time.monotonic() >= renew_at:
                        renew_at = time.monotonic() + self._lease_s / 3
                        self._renew(connection)
                    desired_state = node_desired_state.read_desired_state(connection, self._ref)
                if desired_state is not None:  # else the last one holds, until it is registered again
                    health_signals.is_draining = desired_state.is_draining
                    self._on_desired_state(desired_state)
            except (SubletError, psycopg.Error) as error:
                problem = error
                log.warning("node registration not renewed, retrying: %s", error)
            health_signals.directory.on_answer(health_signals.clock(), problem)
        self._reconnecting.close()

    def _open_connection(self) -> BoundedConnection:
        return connect(self._url, application_name="sublet node", receive_timeout_s=self._receive_timeout_s)

    def _renew(self, connection: psycopg.Connection[Any]) -> None:
        try:
            if not node_directory.renew(connection, self._ref, self._lease_s):
                self._register(connection)
        except NodeNameTaken as error:
            self._health_signals.name_conflict = str(error)
            raise
        self._health_signals.name_conflict = None
        node_directory.delete_expired(connection)
        self._health_signals.leaderless_group_count = find_leaderless_groups(connection).total
