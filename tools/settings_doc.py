"""`python -m tools.settings_doc`: writes the tables of docs/settings.md from the settings classes.

`--check` writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.common.source_options import StreamingQueryOptions, to_camel_case
from sublet_borrower.spark.sink.options import WriteOptions
from sublet_borrower.spark.source.batch_options import BatchQueryOptions
from sublet_leader.observe.metrics_settings import MetricsSettings
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.settings_base import SettingsBase
from sublet_storage.notify.changes import NotifySettings
from sublet_storage.notify.drivers.listener_slots import DEFAULT_LISTENER_SLOTS, VARIABLE
from sublet_storage.producer import Publisher
from tools.generated import write_or_check

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

_DIRECT_LISTENERS = f"""| `{VARIABLE}` | {DEFAULT_LISTENER_SLOTS} | How many processes with sessions listen at the \
database themselves, with the driver `postgres` ([direct listeners](notifications.md#direct-listeners)); 0: this \
process never does. |
"""


def page() -> str:
    """Return the text of the page: its own, with the present rows of the tables, rules and defaults of arguments."""
    text = PAGE.read_text()
    for title, rows in {
        "Times of a leader node": times(LeaderSettings),
        "Times of a consumer": times(BorrowerSettings),
        "Bounds of the HTTP port": times(MetricsSettings),
        "Times of notifications": times(NotifySettings) + _DIRECT_LISTENERS,
        'Options of `spark.readStream.format("sublet")`': options(StreamingQueryOptions),
        'Options of `spark.read.format("sublet")`': options(BatchQueryOptions),
        'Options of writing to `format("sublet")`': options(WriteOptions),
    }.items():
        text = _replace(text, title, r"\| ---[^\n]*\n", r"\|[^\n]*\n", rows)
    for title, settings in (
        ("Times of a leader node", LeaderSettings),
        ("Times of a consumer", BorrowerSettings),
        ("Times of notifications", NotifySettings),
    ):
        rules = "".join(f"- `{rule.text}`: {rule.reason}.\n" for rule in settings.RULES)
        text = _replace(text, title, r"The rules between them:\n\n", r"- [^\n]*\n", rules)
    for kind in (Publisher, Session):
        for name, argument in inspect.signature(kind).parameters.items():
            row = rf"(## Arguments of `{kind.__name__}`\n.*?^\| `{name}` \| )`[^\n]*?`( \| )"
            text = re.sub(row, rf"\g<1>`{argument.default!r}`\g<2>", text, count=1, flags=_FLAGS)
    return text


_FLAGS = re.DOTALL | re.MULTILINE


def _replace(text: str, title: str, before: str, line: str, lines: str) -> str:
    """Return the text with other lines behind what is before them, in the section of that title."""
    section = rf"(^## {re.escape(title)}\n(?:(?!^## ).)*?^{before})(?:{line})*"
    found, count = re.subn(section, lambda match: match[1] + lines, text, count=1, flags=_FLAGS)
    assert count == 1, f"docs/settings.md has nothing to replace below {title!r}"
    return found


def options(kind: type[StreamingQueryOptions | BatchQueryOptions | WriteOptions]) -> str:
    """Return the table rows of a format's options."""
    reported = sentences(kind)
    return "".join(
        f"| `{to_camel_case(field.name)}` | {_default(field.default)} | {reported[field.name]} |\n"
        for field in fields(kind)
    )


def _default(value: object) -> str:
    if value is MISSING:
        return "*must be given*"
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def times(settings: type[SettingsBase]) -> str:
    """Return the table rows of one class: its fields, their defaults and the sentences below them."""
    reported = sentences(settings)
    return "".join(
        f"| `{settings.PREFIX}{field.name.upper()}` | {field.default:g} | {reported[field.name]} |\n"
        for field in fields(settings)
    )


def sentences(settings: type) -> dict[str, str]:
    """Return {field: the string after it in the source}; a field without one has no entry."""
    (body,) = [node for node in ast.parse(inspect.getsource(settings)).body if isinstance(node, ast.ClassDef)]
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with `--check` compare it; return 1 if it differs."""
    return write_or_check(__doc__, {PAGE: page()}, "settings_doc", arguments)


if __name__ == "__main__":
    sys.exit(main())
