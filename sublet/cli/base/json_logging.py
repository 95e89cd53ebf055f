"""JSON logging: a line for each record, with its ids as fields (docs/metrics.md)."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum

from sublet.cli.base.output import escape_json
from sublet_protocol.domain.secret import SecretFilter


class LogFormat(StrEnum):
    """The log format of a node."""

    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """One object per line; `node` is in each."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """Return time, level, logger and message; then the record's own fields, which cannot replace these."""
        fields: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "node": self._node,
            "message": record.getMessage(),
        }
        traceback = record.exc_text or (record.exc_info and self.formatException(record.exc_info))
        if traceback:
            fields["traceback"] = traceback
        return escape_json(json.dumps({**getattr(record, "fields", {}), **fields}, ensure_ascii=False, default=str))


def configure_json_logging(node: str) -> Callable[[str], None]:
    """Send all logs to stderr in JSON from now on, with group events; return a function that logs messages to the
    operator in the same form."""
    from sublet_leader.observe.history_logging import LOGGER

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(node))
    handler.addFilter(SecretFilter())
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger(LOGGER).setLevel(logging.INFO)
    log = logging.getLogger("sublet_leader.server")
    return lambda text: log.info("%s", text)
