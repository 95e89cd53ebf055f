"""Lines of a node's log for machines."""

from __future__ import annotations

import json
import logging

from sublet.cli.base.json_logging import JsonFormatter


def test_a_line_for_machines_moves_no_cursor() -> None:
    said = "group a\u202eb\u2028\x9b2J \u00e9"
    line = JsonFormatter("n1").format(logging.makeLogRecord({"msg": "%s", "args": (said,)}))
    assert line.isprintable()
    assert json.loads(line)["message"] == said
