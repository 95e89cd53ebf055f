"""A task's side of the link to its driver: sends reports, receives the drain request.

When the driver has been silent for `DRIVER_LOST_S`, perhaps nothing is left that could drain this task or use its
result: it drains itself, and fails, so that a driver that is there all the same does not take that for its end.

Spark kills the other attempts at a task when one has ended, also in the middle of a call. So one waits for `may_end`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Self

from sublet_borrower.spark.job.task_reports import TaskReport
from sublet_borrower.util.network_loop import network_loop
from sublet_protocol.messages.agent_secret import AgentSecret
from sublet_protocol.messages.head_and_group_events import GroupEventPayload
from sublet_protocol.pubsub.agent_side_events import ConnectionStatus
from sublet_protocol.pubsub.agent_side_machine import AgentConnectionSettings
from sublet_protocol.pubsub.model import SequencedMessage
from sublet_protocol.pubsub.node_connection import NodeConnection

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
DRIVER_LOST_S = 30.0
LAST_REPORT_TIMEOUT_S = 2.0
"""How long the last report is given to arrive."""


class SparkDriverLink:
    """The link to the driver, a context manager. `report()` and `drain(reason)` are called on the network thread and
    must not block. `silence`: why the task drains itself; None where it does not, or the driver asks for it.
    """

    def __init__(
        self,
        address: str,
        token: str,
        session: str,
        report: Callable[[], TaskReport],
        drain: Callable[[str], None],
        lost_after_s: float = DRIVER_LOST_S,
    ) -> None:
        self._address, self._token, self._session = address, token, session
        self._report, self._drain, self._lost_after_s = report, drain, lost_after_s
        self._loop = network_loop()
        self._wake = asyncio.Event()
        self._over = self._is_drain_requested = False
        self.silence: str | None = None
        self.may_end = threading.Event()
        self.may_end.set()

    def __enter__(self) -> Self:
        self._connection_task = asyncio.run_coroutine_threadsafe(self._talk(), self._loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self.report_now()
        try:
            self._connection_task.result(LAST_REPORT_TIMEOUT_S + 1.0)
        except Exception:
            log.exception("driver link failed: address=%s", self._address)

    def report_now(self) -> None:
        """Report now."""
        self._loop.call_soon_threadsafe(self._wake.set)

    async def _talk(self) -> None:
        connection = NodeConnection(
            self._address,
            AgentSecret(),
            self._on_delivery,
            settings=AgentConnectionSettings(hold_s=2 * REPORT_INTERVAL_S),
        )
        received_at, has_drained = time.monotonic(), False
        while not self._over:
            connection.send(self._report().encode(self._token))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), REPORT_INTERVAL_S)
            self._wake.clear()
            if connection.status is ConnectionStatus.CONNECTED:
                received_at = time.monotonic()
            elif time.monotonic() - received_at > self._lost_after_s and not has_drained:
                has_drained = True
                self.may_end.set()
                reason = f"the driver at {self._address} was silent for {self._lost_after_s:g} s"
                self.silence = None if self._is_drain_requested else reason
                self._drain(reason)
        connection.send(self._report().encode(self._token))
        await connection.close(LAST_REPORT_TIMEOUT_S)

    def _on_delivery(self, delivery: SequencedMessage) -> None:
        if not isinstance(delivery.body, GroupEventPayload):
            return
        content = json.loads(delivery.body.payload)
        command = content.get("command")
        if command == "drain":
            self._is_drain_requested, self.silence = True, None
            if content["is_alone"]:
                self.may_end.set()
            else:
                self.may_end.clear()
            self._drain("the driver asked for it")
        else:
            log.warning("unknown command of the driver ignored: command=%r", command)
