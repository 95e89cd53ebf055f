"""`python -m tools.settings_doc`: writes docs/settings.md from the settings classes and a table of other settings.

`--check` writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import NamedTuple

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
from sublet_storage.objects import allowed_locations
from sublet_storage.producer import Publisher
from tools.generated import write_or_check

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"


class Setting(NamedTuple):
    """A row of the page."""

    name: str
    option: str
    default: str
    meaning: str


GENERAL = (
    Setting(
        "SUBLET_DATABASE_URL",
        "`--database-url`, `url=`",
        "none: the embedded server",
        "The Postgres to use, 15 or later: `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`. It is never migrated "
        "unasked: run `sublet migrate`, or `sublet leader --migrate`. The option takes none with a password, as other "
        "users of a machine can read a command's options; nor does Spark's option `url`.",
    ),
    Setting(
        "SUBLET_DATABASE_URL_FILE",
        "",
        "none",
        "A file with that URL alone. It is read anew for each connection, so that [a new password](deploy.md#secrets) "
        "takes effect without a restart. Setting both is refused, and so is a file that is missing, empty, or may be "
        "written by others.",
    ),
    Setting(
        "SUBLET_DATA_DIR",
        "`--data-dir`, `data_dir=`",
        "`.sublet`",
        "Directory of the embedded Postgres, used where no database is given; it starts when needed, is shared by "
        "all processes that name it, and migrates itself. Giving both a URL and a directory is refused; a directory "
        "given as option or argument wins over SUBLET_DATABASE_URL.",
    ),
    Setting(
        "SUBLET_SCHEMA",
        "`schema=`",
        "`sublet`",
        "Schema of sublet's tables: 1 to 63 of a-z, 0-9 and _. All processes need the same.",
    ),
    Setting(
        "SUBLET_HTTP",
        "`--http`",
        "none: no port",
        "Where `sublet leader` answers browsers, probes and Prometheus: `HOST:PORT`, such as 127.0.0.1:7480. See "
        "[the HTTP port](http.md).",
    ),
    Setting(
        "SUBLET_TLS_CERT",
        "`--tls-cert`",
        "none: no TLS",
        "A certificate in PEM, then those between it and the authority. `sublet leader` speaks TLS with it, on both "
        "ports; a client shows it to nodes that ask: its name is its principal there. Read again when it changes. See "
        "[TLS](security.md#names-of-certificates).",
    ),
    Setting(
        "SUBLET_TLS_KEY",
        "`--tls-key`",
        "none",
        "The key of that certificate, without a passphrase. One that others may read is refused.",
    ),
    Setting(
        "SUBLET_TLS_CLIENT_CA",
        "`--tls-client-ca`",
        "none: no client is asked",
        "Authorities, in PEM: `sublet leader` serves only clients with a certificate of theirs, whose name is the "
        "principal; no token is looked at.",
    ),
    Setting(
        "SUBLET_TLS_CA",
        "",
        "the system's",
        "Authorities, in PEM, whose nodes a client trusts.",
    ),
    Setting(
        "SUBLET_AUTH",
        "`--auth`",
        "`required` with TLS, else `off`",
        "`required`: a node asks everybody who calls for a token, or with `SUBLET_TLS_CLIENT_CA` for a certificate, "
        "and allows what [a rule](access.md) allows. `off`: "
        "whoever reaches it may do anything, but act over HTTP: that needs `SUBLET_ADMIN_TOKEN`.",
    ),
    Setting(
        "SUBLET_TOKEN",
        "",
        "none",
        "The access token that clients send to nodes that ask for no certificate: sessions, feeds, `sublet consume`, "
        "Spark tasks. "
        "[`sublet access token`](access.md#tokens) makes one.",
    ),
    Setting(
        "SUBLET_TOKEN_FILE",
        "",
        "none",
        "A file with that token alone, read anew for each call, so that a token can be replaced while its bearer runs.",
    ),
    Setting(
        "SUBLET_ADMIN_TOKEN",
        "",
        "none: read only",
        "On a node that does not ask who calls (`SUBLET_AUTH`): whoever sends it may act over the HTTP port: pause, "
        "resume, create, delete, weigh and reset groups, move their leaders, drain nodes "
        "([the API](http.md#the-api)). At least 16 printable characters. A node that asks does not use it, and warns. "
        "Or SUBLET_ADMIN_TOKEN_FILE: a file with the token, read anew for each request.",
    ),
    Setting(
        "SUBLET_LOG_FORMAT",
        "`--log-format`",
        "`text`",
        "How `sublet leader` logs: `text`, or `json` with [ids as fields](metrics.md#logs).",
    ),
    Setting(
        allowed_locations.LOCATIONS,
        "",
        "any location",
        "Where this process has [payloads](payloads.md#which-payload-locations-a-process-uses), as `file:///DIRECTORY` "
        "or `s3://BUCKET/PREFIX`, several separated by commas: there and below, and nowhere else.",
    ),
    Setting(
        allowed_locations.ENDPOINTS,
        "",
        "none",
        "Endpoints of S3-compatible stores that this process uses where a [payload location]"
        "(payloads.md#s3-and-its-like) names one, as `https://HOST:PORT`, several separated by commas. Those on this "
        "machine need not be named.",
    ),
)

PUBLISHER = {
    "space": "Refuse topics outside of this space.",
    "producer": "A name that outlives the process: a new publisher of the same name fences the older one.",
    "linger_ms": "How long a message waits for company, in milliseconds. 0 sends at once; load makes blocks large.",
    "block_messages": "Most messages in one block; 100 000 at most.",
    "block_bytes": "About the most bytes in one block, before compression; 16 MiB at most.",
    "max_buffered_bytes": "Most bytes that wait to be sent; beyond them `publish` blocks.",
    "max_message_bytes": "Largest message: topic, key, value and headers together; 16 MiB at most.",
    "delivery_timeout_s": "Seconds after which a published message fails, where the database is lost or silent.",
}

SESSION = {
    "nodes": "Addresses of leader nodes, `HOST:PORT`, instead of those listed in the database.",
    "transport": "`database`, or `nodes`: all comes through these, and [no database is "
    "used](feed.md#consuming-as-a-member-of-a-group).",
    "name": "A name for this consumer, shown to operators.",
    "weight": "How much this consumer takes, relative to the others.",
    "starting_position": "Where the group begins if this session is the first to name it: `latest`, `earliest`, a "
    "time such as "
    "`2026-11-21T10:00:00Z`, or `offset:N` of each stream.",
    "max_batch_bytes": "About the most bytes in one batch.",
    "whole_epochs": "Of an atomic group: a batch is as large as whole epochs of its stream are.",
    "on_epochs_consumed": "Of an atomic group: called with how far it has come, first and whenever it has consumed "
    "epochs.",
    "auto_ack": "Acknowledge a batch when the next one is asked for; else call `batch.ack()`.",
}

_INTRO = """# Settings

*Which settings and options are there, and what are their defaults?*

*Generated by `python -m tools.settings_doc`: do not edit.*

Each setting is an environment variable, read when a process starts. Where there is an option of the command line or an
argument in Python too, that wins. A session's times can also be given as `Session(settings=BorrowerSettings(...))`.

## Where things are

| Variable | Option, argument | Default | Meaning |
| --- | --- | --- | --- |
"""

_LEADER = """
## Times of a leader node

In seconds. `sublet leader` reads them, checks them against each other, and refuses to start with a combination that
could grant a stream twice. Give all nodes of a database the same: they follow each other.

| Variable | Default | Meaning |
| --- | --- | --- |
"""

_RULES = """
The rules between them:

"""

_BORROWER = """
## Times of a consumer

In seconds; read by every `Session`, `sublet consume` and Spark task. Variables that leader nodes read too must have the
same value on both sides.

| Variable | Default | Meaning |
| --- | --- | --- |
"""

_HTTP = """
## Bounds of the HTTP port

Of `sublet leader --http`. See [the HTTP port](http.md) and [metrics](metrics.md).

| Variable | Default | Meaning |
| --- | --- | --- |
"""

_NOTIFY = """
## Times of notifications

In seconds, but for `MAX_SENDS_PER_S` and `DIRECT_LISTENERS`; read by nodes and by whoever publishes, who need
the same. What they mean is in [notifications](notifications.md).

| Variable | Default | Meaning |
| --- | --- | --- |
"""

_DIRECT_LISTENERS = f"""| `{VARIABLE}` | {DEFAULT_LISTENER_SLOTS} | How many processes with sessions listen at the \
database themselves, with the driver `postgres` ([direct listeners](notifications.md#direct-listeners)); 0: this \
process never does. |
"""

_ARGUMENTS = """
## Arguments of `{name}`

| Argument | Default | Meaning |
| --- | --- | --- |
"""


_SOURCE = """
## Options of `spark.readStream.format("sublet")`

Their names may be written in any case; one that is not here is refused. See [the streaming source](spark-source.md).

| Option | Default | Meaning |
| --- | --- | --- |
"""

_HISTORY = """
## Options of `spark.read.format("sublet")`

Likewise. See [history as a table](spark-batch.md).

| Option | Default | Meaning |
| --- | --- | --- |
"""

_SINK = """
## Options of writing to `format("sublet")`

Of `df.write` and `df.writeStream`. See [the sink](spark-sink.md).

| Option | Default | Meaning |
| --- | --- | --- |
"""


def page() -> str:
    """Return the text of the page."""
    general = "".join(f"| `{s.name}` | {s.option} | {s.default} | {s.meaning} |\n" for s in GENERAL)
    leader = _LEADER + times(LeaderSettings) + rules(LeaderSettings)
    borrower = _BORROWER + times(BorrowerSettings) + rules(BorrowerSettings)
    notify = _NOTIFY + times(NotifySettings) + _DIRECT_LISTENERS + rules(NotifySettings)
    spark = (
        _SOURCE + options(StreamingQueryOptions) + _HISTORY + options(BatchQueryOptions) + _SINK + options(WriteOptions)
    )
    bounds = _HTTP + times(MetricsSettings)
    called = arguments(Publisher, PUBLISHER) + arguments(Session, SESSION)
    return _INTRO + general + leader + borrower + bounds + notify + called + spark


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


def arguments(kind: type, reported: dict[str, str]) -> str:
    """Return the section of a class's arguments, with the defaults from its signature."""
    known = inspect.signature(kind).parameters
    lines = (f"| `{name}` | `{known[name].default!r}` | {meaning} |\n" for name, meaning in reported.items())
    return _ARGUMENTS.format(name=kind.__name__) + "".join(lines)


def rules(settings: type[SettingsBase]) -> str:
    """Return the constraints between the fields of one class."""
    return _RULES + "".join(f"- `{rule.text}`: {rule.reason}.\n" for rule in settings.RULES)


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
