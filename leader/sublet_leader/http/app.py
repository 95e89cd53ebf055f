"""The HTTP port of one node: which path is answered by what, and the files of the page.

The page is files of this package, as they are. Nothing of it comes from elsewhere, and nothing is built.
"""

from __future__ import annotations

from importlib.resources import files

from prometheus_client import CollectorRegistry, ProcessCollector

from sublet_leader.http.auth import Admin, checked_token
from sublet_leader.http.group_actions import GroupActions
from sublet_leader.http.groups import GroupsApi
from sublet_leader.http.nodes import NodeActions, NodesApi
from sublet_leader.http.probes import MetricsPage, Probes
from sublet_leader.http.responses import Request, Response, Route, Routes, as_json
from sublet_leader.http.server import HttpServer
from sublet_leader.http.settings import HttpOptions
from sublet_leader.listen_address import Listen, is_wildcard
from sublet_leader.observe.collector import NodeCollector
from sublet_leader.observe.connection_pool import Reading
from sublet_leader.observe.event_counters import Counted
from sublet_leader.observe.health import State
from sublet_leader.observe.lag_history import Curves
from sublet_leader.observe.node_view import Facts
from sublet_protocol.domain.errors import NotFound


class HttpPort:
    """Listens at once, and answers that the node is starting until `begin`. Raises `InvalidSetting`.

    `counted` is to be told what happens.
    """

    def __init__(self, options: HttpOptions, database_url: str) -> None:
        self._url, self._settings, self._token = database_url, options.settings, checked_token(options.admin_token)
        self._registry = CollectorRegistry()
        self.counted = Counted(self._registry, self._settings.metric_groups)
        self._curves: Curves | None = None
        self._routes: Routes | None = None
        self._reading: Reading | None = None
        self._server = HttpServer(options.listen, self._answer)

    @property
    def address(self) -> str:
        """Where it listens."""
        return str(self._server.where)

    def advertised(self, node: Listen) -> str | None:
        """Where others find it: at the host of the node's main port if it is on all addresses. None: nobody knows."""
        where = self._server.where
        host = node.host if is_wildcard(where.host) else where.host
        return None if is_wildcard(host) else str(Listen(host, where.port))

    def start(self) -> None:
        """Answer, be it that nothing is known yet."""
        self._server.start()

    def begin(self, facts: Facts) -> None:
        """There is a node to tell of."""
        self._reading = Reading(self._url, facts.health)
        self._registry.register(NodeCollector(facts, self._reading, self._settings))
        ProcessCollector(registry=self._registry)
        self._curves = Curves(self._reading, self._settings.curve_minutes, self._settings.curve_groups)
        self._curves.start()
        self._routes = self._table(facts, self._reading, self._curves)

    def _table(self, facts: Facts, reading: Reading, curves: Curves) -> Routes:
        probes, pages = Probes(facts.ref.name, facts.health), Pages()
        groups, nodes = GroupsApi(facts, reading, curves), NodesApi(facts, reading, self._token is not None)
        admin, acting = Admin(self._token), GroupActions(self._url)
        gets: dict[str, Route] = {
            "/": pages.root,
            "/static/*": pages.file,
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
            "/api/v1/group/create": admin.only(acting.create),
            "/api/v1/group/delete": admin.only(acting.delete),
            "/api/v1/group/pause": admin.only(acting.pause),
            "/api/v1/group/resume": admin.only(acting.resume),
            "/api/v1/group/weight": admin.only(acting.weight),
            "/api/v1/group/reset": admin.only(acting.reset),
            "/api/v1/group/step-down": admin.only(acting.step_down),
            "/api/v1/node/drain": admin.only(NodeActions(self._url).drain),
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
        told = {"state": State.STARTING, "why": "this node does not serve yet", "alive": True, "ready": False}
        return as_json(told, 200 if request.path == "/healthz" else 503)


_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_FRESH = {"Cache-Control": "no-cache"}


class Pages:
    """All files are read once, so that no path can lead elsewhere."""

    def __init__(self) -> None:
        self._files = {
            each.name: Response(200, each.read_bytes(), _TYPES[kind], _FRESH)
            for each in (files("sublet_leader.http") / "static").iterdir()
            if (kind := each.name.rpartition(".")[2]) in _TYPES
        }

    def root(self, request: Request) -> Response:
        """The page itself."""
        return self._files["index.html"]

    def file(self, request: Request) -> Response:
        """What the page needs. Raises `NotFound`."""
        name = request.path.rpartition("/")[2]
        if name not in self._files:
            raise NotFound(f"there is no file {name[:100]!r}.")
        return self._files[name]
