"""The HTTP port of one node: its routes, and the files of the page.

The page's files are part of this package and served unchanged. There are no external resources, and no build step.
"""

from __future__ import annotations

from importlib.resources import files

from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sublet_leader.http.auth import RequestGuard
from sublet_leader.http.group_actions import GroupActionsApi
from sublet_leader.http.groups import GroupsApi
from sublet_leader.http.nodes import NodeActionsApi, NodesApi
from sublet_leader.http.probes_and_metrics import HealthProbes, MetricsPage
from sublet_leader.http.responses import build_app, json_response
from sublet_leader.http.server import UvicornThread
from sublet_leader.http.settings import HttpOptions
from sublet_leader.listen_address import ListenAddress, is_wildcard
from sublet_leader.observe.collector import NodeCollector
from sublet_leader.observe.event_counters import NodeCounters
from sublet_leader.observe.health import HealthState
from sublet_leader.observe.http_database_pool import HttpDatabasePool
from sublet_leader.observe.lag_history import LagHistory
from sublet_leader.observe.node_view import NodeView
from sublet_protocol.domain.errors import NotFound
from sublet_protocol.gate.gate import AccessGate


class NodeHttpService:
    """Listens at once, and answers that the node is starting until `attach_node`. Raises `InvalidSetting`.

    `counters` is to be called with the node's events.
    """

    def __init__(self, options: HttpOptions, database_url: str) -> None:
        self._url, self._settings, self._token = database_url, options.settings, options.admin_token
        self._registry = CollectorRegistry()
        self.counters = NodeCounters(self._registry, self._settings.max_group_series)
        self._lag_history: LagHistory | None = None
        self._has_tls = options.tls is not None
        self._app: ASGIApp = _answer_starting
        self._pool: HttpDatabasePool | None = None
        self._server = UvicornThread(options.listen, self._serve_request, options.tls)

    @property
    def url(self) -> str:
        """Return the URL of the port."""
        return f"http{'s' if self._has_tls else ''}://{self._server.address}/"

    def resolve_advertised_url(self, node: ListenAddress) -> str | None:
        """Return the URL for others: at the host of the node's main port if it listens on all addresses, `https://` if
        it has TLS; None if that host is unknown."""
        address = self._server.address
        host = node.host if is_wildcard(address.host) else address.host
        scheme = "https://" if self._has_tls else ""
        return None if is_wildcard(host) else f"{scheme}{ListenAddress(host, address.port)}"

    def start(self) -> None:
        """Start to answer; until `attach_node`, that the node is starting."""
        self._server.start()

    def attach_node(self, node_view: NodeView, gate: AccessGate) -> None:
        """Answer for this node from now on, for callers that the gate admits."""
        self._pool = HttpDatabasePool(self._url, node_view.health)
        self._registry.register(NodeCollector(node_view, self._pool, self._settings))
        ProcessCollector(registry=self._registry)
        self._lag_history = LagHistory(
            self._pool, self._settings.lag_history_minutes, self._settings.lag_history_max_groups
        )
        self._lag_history.start()
        self._app = build_app(self.build_routes(node_view, gate, self._pool, self._lag_history))

    def build_routes(
        self, node_view: NodeView, gate: AccessGate, pool: HttpDatabasePool, lag_history: LagHistory
    ) -> list[BaseRoute]:
        """Return all routes of the port, each with who may ask it."""
        probes, pages = HealthProbes(node_view.ref.name, node_view.health, is_brief=gate.is_on), StaticFiles()
        may_act = gate.is_on or self._token is not None
        groups, nodes = GroupsApi(node_view, pool, lag_history), NodesApi(node_view, pool, may_act)
        acting, guard = GroupActionsApi(self._url, gate), RequestGuard(gate, self._token)
        actions = {
            "/api/v1/group/create": acting.create,
            "/api/v1/group/delete": acting.delete,
            "/api/v1/group/pause": acting.pause,
            "/api/v1/group/resume": acting.resume,
            "/api/v1/group/weight": acting.weight,
            "/api/v1/group/reset": acting.reset,
            "/api/v1/group/step-down": acting.step_down,
            "/api/v1/node/drain": NodeActionsApi(self._url).drain,
        }
        return [
            Route("/", pages.serve_index),
            Route("/static/{name}", pages.serve_file),
            Route("/healthz", probes.answer_live),
            Route("/readyz", probes.answer_ready),
            Route("/readyz/{name}", probes.answer_check),
            Route("/metrics", guard.require_watch_all(MetricsPage(self._registry).render)),
            Route("/api/v1/node", guard.require_watch(nodes.describe_node)),
            Route("/api/v1/nodes", guard.require_watch_all(nodes.list_nodes)),
            Route("/api/v1/groups", guard.require_known(groups.list_groups)),
            Route("/api/v1/group", guard.require_known(groups.describe_group)),
            Route("/api/v1/group/history", guard.require_known(groups.list_history)),
            *(Route(path, guard.require_operate(act), methods=["POST"]) for path, act in actions.items()),
        ]

    def close(self) -> None:
        """Stop answering."""
        self._server.close()
        if self._lag_history is not None:
            self._lag_history.stop()
        if self._pool is not None:
            self._pool.close()

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _answer_starting(scope: Scope, receive: Receive, send: Send) -> None:
    body = {
        "state": HealthState.STARTING,
        "detail": "this node does not serve yet",
        "alive": True,
        "ready": False,
    }
    await json_response(body, 200 if scope["path"] == "/healthz" else 503)(scope, receive, send)


_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


class StaticFiles:
    """Serves the page's files. All are read once, so that no path can lead elsewhere."""

    def __init__(self) -> None:
        self._files = {
            file.name: (file.read_bytes(), _TYPES[kind])
            for file in (files("sublet_leader.http") / "static").iterdir()
            if (kind := file.name.rpartition(".")[2]) in _TYPES
        }

    async def serve_index(self, request: Request) -> Response:
        """Return the page itself."""
        return self._serve("index.html")

    async def serve_file(self, request: Request) -> Response:
        """Return a file of the page. Raise `NotFound`."""
        return self._serve(request.path_params["name"])

    def _serve(self, name: str) -> Response:
        if name not in self._files:
            raise NotFound(f"there is no file {name[:100]!r}.")
        content, kind = self._files[name]
        return Response(content, headers={"Cache-Control": "no-cache"}, media_type=kind)
