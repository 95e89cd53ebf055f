"""gRPC's standard health service, from the HTTP probes' checks; and the loop's heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from sublet_leader.observe.health import CHECKS, Health

BEAT_INTERVAL_S = 0.5
LIVE = "live"

_SERVING_STATUS = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}


class HealthService:
    """Serves the checks. `on_beat` is called at each beat, and `get_health` right after it."""

    def __init__(self, server: grpc.aio.Server, on_beat: Callable[[], None], get_health: Callable[[], Health]) -> None:
        self._turn, self._get_health = on_beat, get_health
        self._service = health.aio.HealthServicer()
        self._statuses: dict[str, bool] = {}
        self._task: asyncio.Task[None] | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._service, server)

    async def start(self) -> None:
        """Set the present state, and update it as it changes."""
        await self._beat()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Set all services to not serving, for good."""
        if self._task is not None:
            self._task.cancel()
        await self._service.enter_graceful_shutdown()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(BEAT_INTERVAL_S)
            await self._beat()

    async def _beat(self) -> None:
        self._turn()
        node_health = self._get_health()
        statuses = {
            "": node_health.is_ready,
            LIVE: node_health.is_alive,
            **{name: node_health.check_named(name).is_ok for name in CHECKS},
        }
        for name, is_ok in statuses.items():
            if self._statuses.get(name) != is_ok:
                await self._service.set(name, _SERVING_STATUS[is_ok])
        self._statuses = statuses
