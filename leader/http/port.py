"""The HTTP port of one node: its parts put together."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector

from leader.health import State
from leader.http.admin import Admin, checked_token
from leader.http.api_actions import GroupActions
from leader.http.api_drain import NodeActions
from leader.http.api_groups import GroupsApi
from leader.http.api_nodes import NodesApi
from leader.http.collector import NodeCollector
from leader.http.counted import Counted
from leader.http.curves import Curves
from leader.http.facts import Facts
from leader.http.metrics_page import MetricsPage
from leader.http.pages import Pages
from leader.http.probes import Probes
from leader.http.reading import Reading
from leader.http.request import Request
from leader.http.response import Response, as_json
from leader.http.routes import Route, Routes
from leader.http.server import HttpServer
from leader.http.settings import HttpOptions
from leader.listen import Listen, is_wildcard


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
