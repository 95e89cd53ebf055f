"""The driver's side of the link to its tasks: receives reports, sends the drain request.

It is a server like a node's, for one job: a task sends its report as an event, again and again, and receives the
request to drain in its held poll, at once. A peer without the job's token is rejected. What travels is figures and a
task's failure, never messages or a database's address.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

import grpc.aio

from sublet_borrower.spark.job.driver_link import DRIVER_LOST_S
from sublet_borrower.spark.job.task_reports import TaskReport, decode_report, make_drain_event
from sublet_borrower.util.network_loop import network_loop
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.gate.gate import AccessGate
from sublet_protocol.gate.interceptor import GateInterceptor
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.pubsub.server import SERVER_OPTIONS, PubSubServer, make_node_side_machine

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
"""For the server to begin, and to end."""


class DriverReportServer:
    """The server on the driver, which runs from its construction until `close`. `on_failed` is called at the first
    failure, from the server's thread. `speculates`: whether Spark may have several attempts at a task at work.
    """

    def __init__(self, bind: str, advertised: str, on_failed: Callable[[], None], speculates: bool = False) -> None:
        self.token = secrets.token_hex(16)
        self._advertised, self._on_failed, self._speculates = advertised, on_failed, speculates
        self._reports: dict[str, tuple[TaskReport, float]] = {}
        self._subscribers: dict[str, str] = {}
        self._draining = False
        self._failed = False
        self._closed = False
        self._loop = network_loop()
        self._port = asyncio.run_coroutine_threadsafe(self._serve(bind), self._loop).result(START_TIMEOUT_S)
        if self._port == 0:
            raise InvalidSetting(
                f"cannot listen on {bind} for the tasks' reports. Give `driver_host`, an address of this machine that "
                "the executors can reach."
            )

    @property
    def address(self) -> str:
        """Return the endpoint's HOST:PORT, as tasks reach it."""
        return f"{_format_host(self._advertised)}:{self._port}"

    def drain(self) -> None:
        """Send the request to drain to every task, also to those that report later. From any thread."""
        self._loop.call_soon_threadsafe(self._send_drain_to_all)

    def last_reports(self) -> dict[str, tuple[TaskReport, float]]:
        """Return {session: (last report, seconds since)}, of every attempt so far. From any thread."""
        now = time.monotonic()
        return {name: (report, now - at) for name, (report, at) in tuple(self._reports.items())}

    def close(self) -> None:
        """End the server; a second call changes nothing."""
        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(START_TIMEOUT_S)

    # --- on the loop ------------------------------------------------------------------------------------------------

    async def _serve(self, bind: str) -> int:
        """Return the port; 0 where it cannot listen."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(GateInterceptor(AccessGate()),))
        self._sessions = PubSubServer(
            make_node_side_machine(secrets.token_hex(6)),
            self._on_report,
            on_expired=self._on_expired,
            clock=time.monotonic,
        )
        try:
            port: int = self._server.add_insecure_port(f"{_format_host(bind)}:0")
        except RuntimeError:
            return 0
        self._sessions.register(self._server)
        await self._server.start()
        return port

    async def _end(self) -> None:
        await self._sessions.close()
        await self._server.stop(grace=0.2)

    def _on_report(self, subscriber_id: str, message: object) -> None:
        report = decode_report(message, self.token)
        self._reports[report.session] = (report, time.monotonic())
        self._subscribers[subscriber_id] = report.session
        if self._draining:
            self._send_drain(subscriber_id)
        if report.failure is not None and not self._failed:
            self._failed = True
            log.error("task failed, draining the others: session=%s", report.session)
            self._send_drain_to_all()
            self._on_failed()

    def _send_drain_to_all(self) -> None:
        self._draining = True
        for subscriber_id in self._subscribers:
            self._send_drain(subscriber_id)

    def _send_drain(self, subscriber_id: str) -> None:
        drain = make_drain_event(is_alone=self._is_alone(self._subscribers[subscriber_id]))
        self._sessions.send(subscriber_id, Channel.GROUP, "command", drain)

    def _is_alone(self, session: str) -> bool:
        """Return whether no other attempt at the session's task is at work. Without speculation none is, though one
        that has died was not silent for long yet.
        """
        partition = self._reports[session][0].partition
        return not self._speculates or not any(
            report.partition == partition and report.state != "ended" and age_s < DRIVER_LOST_S
            for name, (report, age_s) in self.last_reports().items()
            if name != session
        )

    def _on_expired(self, subscriber_ids: object) -> None:
        for subscriber_id in subscriber_ids:  # type: ignore[attr-defined]
            self._subscribers.pop(subscriber_id, None)


def _format_host(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
