"""What tests ask of a node's HTTP port, as a probe, Prometheus or a browser would."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.cli_kit import Running
from tests.integration.sharing_kit import Stage
from tests.kit import eventually
from tests.kit_nodes import Process

TIMEOUT_S = 15.0
_WHERE = re.compile(r"answers at http://(\S+)/")


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers in small letters, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def object(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Http:
    """One node's port. `tls`: what a client is made with to ask it by HTTPS."""

    address: str
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, node: Process | Running) -> Http:
        """Return the port of a node that was started with one, once it serves."""
        found = eventually(lambda: _WHERE.search(node.output()), 60.0, node.output)
        return cls(found[1])

    def ask(
        self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> Answer:
        """One request, one answer. An AssertionError, which is "not yet" to `eventually`, where there is none."""
        connection = (
            http.client.HTTPConnection(self.address, timeout=TIMEOUT_S)
            if self.tls is None
            else http.client.HTTPSConnection(self.address, timeout=TIMEOUT_S, context=self.tls)
        )
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            reported = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, reported, response.read())
        except OSError as error:
            raise AssertionError(f"{self.address} does not answer: {error}") from error
        finally:
            connection.close()

    def get(self, path: str, **query: object) -> Any:
        asked = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items())
        answer = self.ask(f"{path}?{asked}" if asked else path)
        assert answer.status == 200, answer.body
        return answer.object

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Return {(name, labels by name): value}."""
        answer = self.ask("/metrics")
        assert answer.status == 200, answer.body
        families = text_string_to_metric_families(answer.body.decode())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def metric(self, name: str, **labels: object) -> float | None:
        return self.metrics().get((name, tuple(sorted((label, str(value)) for label, value in labels.items()))))


def served(stage: Stage, name: str = "n1") -> Http:
    """Start a node with such a port; once it serves."""
    stage.serve(name)
    return Http.of(stage.fleet.nodes[name])
