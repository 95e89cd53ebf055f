"""`sublet leader`: runs a node."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from sublet.cli.base.command import CliCommandContext, command
from sublet.cli.base.json_logging import LogFormat, configure_json_logging
from sublet.cli.server.migrate import bring_up_to_date
from sublet_protocol.domain.errors import InvalidSetting

if TYPE_CHECKING:
    from sublet_leader.listen_address import ListenAddress
    from sublet_leader.server import NodeServer

log = logging.getLogger(__name__)


class AuthMode(StrEnum):
    """Whether a node authenticates callers."""

    OFF = "off"
    REQUIRED = "required"


def leader(
    cli: CliCommandContext,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="This node's name; no other running node may have it. Default: the host's."),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where consumers reach it; port 0: any free one.")
    ] = "127.0.0.1:7411",
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="SUBLET_HTTP",
            help="Where it answers browsers, probes and Prometheus, such as 127.0.0.1:7480. Default: nowhere.",
        ),
    ] = None,
    tls_cert: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar="SUBLET_TLS_CERT",
            help="Its certificate in PEM, then those up to the authority: it speaks TLS, on both ports.",
        ),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar="SUBLET_TLS_KEY",
            help="The key of it, which nobody else may read.",
        ),
    ] = None,
    tls_client_ca: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar="SUBLET_TLS_CLIENT_CA",
            help="Serve only clients with a certificate of these authorities, whose name is their principal.",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Listen beyond this machine without TLS: all who reach it may consume."),
    ] = False,
    auth: Annotated[
        AuthMode | None,
        typer.Option(
            envvar="SUBLET_AUTH",
            help="required: callers prove with a token, or a certificate where --tls-client-ca asks for one, who they "
            "are, and may do what `sublet access` allows them. "
            "Default: required with TLS, else off.",
        ),
    ] = None,
    notify: Annotated[
        str,
        typer.Option(
            metavar="DRIVER",
            envvar="SUBLET_NOTIFY",
            help="How this node receives notifications: postgres (LISTEN), zmq, or poll (not at all: consumers poll).",
        ),
    ] = "postgres",
    log_format: Annotated[
        LogFormat,
        typer.Option(
            envvar="SUBLET_LOG_FORMAT", help="json: a line of JSON each, with ids as fields, and all that happens."
        ),
    ] = LogFormat.TEXT,
    migrate_first: Annotated[
        bool, typer.Option("--migrate", help="Bring the database to this program's version first.")
    ] = False,
) -> int:
    """Run a leader node, which grants streams to consumers.

    It stores how far they are. Run one or several, anywhere near the database: each group is led by one of them, and
    when that one stops or dies another takes over. Ctrl-C and SIGTERM hand over first; after SIGTERM the exit code is
    0. Times are settings, such as SUBLET_LEASE_DURATION_S: see docs/settings.md.

    Examples:

    \b
      sublet leader
      sublet leader --name n2 --listen 127.0.0.1:7412
      sublet leader --http 127.0.0.1:7480
      SUBLET_DATABASE_URL=postgresql://db/app sublet leader --migrate --listen 10.0.0.5:7411 \\
        --tls-cert node.crt --tls-key node.key
    """
    from sublet_leader.http.settings import HttpOptions, read_admin_token
    from sublet_leader.observe.metrics_settings import MetricsSettings
    from sublet_leader.server import NodeServer
    from sublet_leader.settings import LeaderSettings
    from sublet_protocol.gate import audit
    from sublet_protocol.tls.files import TlsFiles

    called = socket.gethostname().split(".")[0] if name is None else name
    announce = _make_announcer(cli, called)
    if log_format is LogFormat.JSON:
        announce = configure_json_logging(called)
        cli.log = logging.getLogger("sublet")
    _check_name(called)
    tls = TlsFiles.of_server(tls_cert, tls_key, tls_client_ca)
    listen_address, http_address = parse_addresses(listen, http, insecure, tls is not None)
    required = is_auth_required(auth, listen_address, http_address, insecure=insecure, has_tls=tls is not None)
    settings, bounds = LeaderSettings.from_env(), MetricsSettings.from_env()
    acting = read_admin_token()
    if required and acting is not None:
        log.warning(
            "SUBLET_ADMIN_TOKEN ignored, as every caller is authenticated: to act over HTTP takes a token of "
            "`sublet access token` and the right to operate"
        )
    port = None if http_address is None else HttpOptions(http_address, bounds, acting, tls)
    for logger in ("sublet_leader", audit.AUDIT):
        logging.getLogger(logger).setLevel(logging.INFO)
    if insecure:
        audit.record(None, str(listen_address), "start", "--insecure", "done")
    if migrate_first:
        bring_up_to_date(cli)
    with cli.open_database() as database:
        return _serve(NodeServer(database.url, called, listen_address, settings, announce, notify, port, tls, required))


def parse_addresses(
    listen: str, http: str | None, insecure: bool, has_tls: bool
) -> tuple[ListenAddress, ListenAddress | None]:
    """Return both addresses, parsed; None for `http` if it is None. Raise `InvalidSetting` for one that others reach
    without TLS; with `insecure` only warn of it."""
    from sublet_leader.listen_address import ListenAddress, is_loopback

    def parse(text: str) -> ListenAddress:
        address = ListenAddress.parse(text, insecure=insecure, has_tls=has_tls)
        if not has_tls and not is_loopback(address.host):
            log.warning(
                "connections not encrypted: address=%s: all who reach it may consume and publish; give it --tls-cert "
                "and --tls-key",
                address,
            )
        return address

    return parse(listen), None if http is None else parse(http)


def is_auth_required(
    auth: AuthMode | None, listen: ListenAddress, http: ListenAddress | None, *, insecure: bool, has_tls: bool
) -> bool:
    """Return whether callers must authenticate: with TLS, unless that is turned off. Raise `InvalidSetting` if it is
    turned off and other machines reach the node."""
    from sublet_leader.listen_address import is_loopback

    if auth is AuthMode.OFF and has_tls and not insecure:
        for address in (listen, http):
            if address is not None and not is_loopback(address.host):
                raise InvalidSetting(
                    f"--auth off at {address}: other machines reach it, and whoever does could consume and publish. "
                    "Leave it out and give rights and tokens with `sublet access`, or pass --insecure as well."
                )
    return has_tls if auth is None else auth is AuthMode.REQUIRED


def _make_announcer(cli: CliCommandContext, name: str) -> Callable[[str], None]:
    def announce(text: str) -> None:
        if cli.json:
            cli.print_json({"node": name, "message": text})
        else:
            cli.print_info(text)

    return announce


def _check_name(name: str) -> None:
    if not name.isprintable() or not 0 < len(name) <= 63 or " " in name:
        raise InvalidSetting(
            f"--name {name!r}: a node is named with 1 to 63 printable characters and no blanks. Choose such a name; "
            "without --name it is the host's."
        )


def _serve(node: NodeServer) -> int:
    """Run until a signal, and return the exit code: 0 after SIGTERM, which stops a service; that of Ctrl-C after
    SIGINT."""
    asyncio.run(node.run())
    return 128 + signal.SIGINT if node.stopped_by is signal.SIGINT else 0


COMMANDS = {"leader": command(leader)}
