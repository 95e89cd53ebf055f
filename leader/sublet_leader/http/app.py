"""The HTTP port of one node: which path is answered by what, and the files of the page.

The page is files of this package, as they are. Nothing of it comes from elsewhere, and nothing is built.
"""

from __future__ import annotations

from importlib.resources import files

from prometheus_client import CollectorRegistry, ProcessCollector

from sublet_leader.http.auth import AdminGuard, validate_token
from sublet_leader.http.group_actions import GroupActions
from sublet_leader.http.groups import GroupsApi
from sublet_leader.http.nodes import NodeActions, NodesApi
from sublet_leader.http.probes import MetricsPage, Probes
from sublet_leader.http.responses import Request, Response, Route, Routes, json_response
from sublet_leader.http.server import HttpServer
from sublet_leader.http.settings import HttpOptions
from sublet_leader.listen_address import ListenAddress, is_wildcard
from sublet_leader.observe.collector import NodeCollector
from sublet_leader.observe.connection_pool import ConnectionPool
from sublet_leader.observe.event_counters import NodeCounters
from sublet_leader.observe.health import HealthState
from sublet_leader.observe.lag_history import LagHistory
from sublet_leader.observe.node_view import NodeView
from sublet_protocol.domain.errors import NotFound


class HttpPort:
    """Listens at once, and answers that the node is starting until `attach_node`. Raises `InvalidSetting`.

    `counted` is to be told what happens.
    """

    def __init__(self, options: HttpOptions, database_url: str) -> None:
        self._url, self._settings, self._token = database_url, options.settings, validate_token(options.admin_token)
        self._registry = CollectorRegistry()
        self.counted = NodeCounters(self._registry, self._settings.max_group_series)
        self._curves: LagHistory | None = None
        self._routes: Routes | None = None
        self._reading: ConnectionPool | None = None
        self._server = HttpServer(options.listen, self._answer)

    @property
    def address(self) -> str:
        """Where it listens."""
        return str(self._server.where)

    def advertised(self, node: ListenAddress) -> str | None:
        """Where others find it: at the host of the node's main port if it is on all addresses. None: nobody knows."""
        where = self._server.where
        host = node.host if is_wildcard(where.host) else where.host
        return None if is_wildcard(host) else str(ListenAddress(host, where.port))

    def start(self) -> None:
        """Answer, be it that nothing is known yet."""
        self._server.start()

    def attach_node(self, facts: NodeView) -> None:
        """There is a node to tell of."""
        self._reading = ConnectionPool(self._url, facts.health)
        self._registry.register(NodeCollector(facts, self._reading, self._settings))
        ProcessCollector(registry=self._registry)
        self._curves = LagHistory(
            self._reading, self._settings.lag_history_minutes, self._settings.lag_history_max_groups
        )
        self._curves.start()
        self._routes = self._table(facts, self._reading, self._curves)

    def _table(self, facts: NodeView, reading: ConnectionPool, curves: LagHistory) -> Routes:
        probes, pages = Probes(facts.ref.name, facts.health), StaticFiles()
        groups, nodes = GroupsApi(facts, reading, curves), NodesApi(facts, reading, self._token is not None)
        admin, acting = AdminGuard(self._token), GroupActions(self._url)
        gets: dict[str, Route] = {
            "/": pages.serve_index,
            "/static/*": pages.serve_file,
            "/healthz": probes.live,
            "/readyz": probes.ready,
            "/readyz/*": probes.one,
            "/metrics": MetricsPage(self._registry),
            "/api/v1/node": nodes.node,
            "/api/v1/nodes": nodes.nodes,
            "/api/v1/groups": groups.groups,
            "/api/v1/group": groups.group,
            "/api/v1/group/history": groups.history,
        }
        posts: dict[str, Route] = {
            "/api/v1/group/create": admin.require_token(acting.create),
            "/api/v1/group/delete": admin.require_token(acting.delete),
            "/api/v1/group/pause": admin.require_token(acting.pause),
            "/api/v1/group/resume": admin.require_token(acting.resume),
            "/api/v1/group/weight": admin.require_token(acting.weight),
            "/api/v1/group/reset": admin.require_token(acting.reset),
            "/api/v1/group/step-down": admin.require_token(acting.step_down),
            "/api/v1/node/drain": admin.require_token(NodeActions(self._url).drain),
        }
        return Routes(gets, posts)

    def close(self) -> None:
        """Answer no more."""
        self._server.close()
        if self._curves is not None:
            self._curves.close()
        if self._reading is not None:
            self._reading.close()

    def _answer(self, request: Request) -> Response:
        if self._routes is not None:
            return self._routes(request)
        reported = {
            "state": HealthState.STARTING,
            "detail": "this node does not serve yet",
            "alive": True,
            "ready": False,
        }
        return json_response(reported, 200 if request.path == "/healthz" else 503)


_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_FRESH = {"Cache-Control": "no-cache"}


class StaticFiles:
    """All files are read once, so that no path can lead elsewhere."""

    def __init__(self) -> None:
        self._files = {
            each.name: Response(200, each.read_bytes(), _TYPES[kind], _FRESH)
            for each in (files("sublet_leader.http") / "static").iterdir()
            if (kind := each.name.rpartition(".")[2]) in _TYPES
        }

    def serve_index(self, request: Request) -> Response:
        """The page itself."""
        return self._files["index.html"]

    def serve_file(self, request: Request) -> Response:
        """What the page needs. Raises `NotFound`."""
        name = request.path.rpartition("/")[2]
        if name not in self._files:
            raise NotFound(f"there is no file {name[:100]!r}.")
        return self._files[name]
