"""The options that all commands share, and their exit codes.

A command is a function whose first parameter is a `CliCommandContext`; `command` adds the options that every command
takes, and turns each way to end into an exit code: 0 ok, 1 failure, 2 usage, 3 not found, 4 conflict, 5 unavailable,
128 + number for a signal.
"""

from __future__ import annotations

import gc
import inspect
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base import lazy_commands
from sublet.cli.base.output import CliOutput, escape_control_characters
from sublet_protocol.domain.errors import SubletError, SubscriptionEnded, UsageError, format_error
from sublet_protocol.domain.secret import SecretFilter, hide_secrets

if TYPE_CHECKING:
    import psycopg

    from sublet_borrower.node_client.feed_client import Feed
    from sublet_storage.bootstrap.given_or_embedded_database import OpenedDatabase

NODE_TIMEOUT_S = 10.0
"""Time limit of a command for nodes that do not answer."""

BROKEN_PIPE = 128 + signal.SIGPIPE
EXIT_CODES = """\b
Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 conflict, 5 unavailable,
130 interrupted by Ctrl-C, 143 by SIGTERM."""
_ENDINGS = {"deleted": 3, "fenced": 4}
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _check_url(text: str | None) -> str | None:
    """Return the URL; raise `BadParameter` if it contains a password. A malformed one is rejected where it is used; an
    empty one means the environment's."""
    if not text:
        return text
    from sublet_storage.db.database_url import SETTING, as_secret, parse_secret_parts

    try:
        secret_fields = parse_secret_parts(text)
    except UsageError:
        return as_secret(text)
    if secret_fields:
        raise typer.BadParameter(
            f"it has a {', '.join(sorted(secret_fields))}, and other users of this machine can read a command's "
            f"options. Give the URL in {SETTING}, or in a file that {SETTING}_FILE names; or leave that part out, and "
            "give it in PGPASSWORD or in ~/.pgpass."
        )
    return text


DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        callback=_check_url,
        help="Postgres to use: postgresql://USER@HOST/DATABASE, without a password: other users of this machine can "
        "read options. Default: $SUBLET_DATABASE_URL, or what is in the file $SUBLET_DATABASE_URL_FILE, else the "
        "embedded server of --data-dir.",
    ),
]


def _parse_directory(text: str) -> Path:
    """Return the directory; raise `BadParameter` for an empty text, which would make a cluster in the working
    directory."""
    if not text:
        raise typer.BadParameter("'': it names no directory. Name one, or leave the option out.")
    return Path(text)


DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        parser=_parse_directory,
        help="Directory of an embedded Postgres, started when needed and shared by all that name it. "
        "Default: $SUBLET_DATA_DIR, else ./.sublet.",
    ),
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        metavar="HOST:PORT",
        help="A leader node to go through, instead of the database. Repeatable: the others stand in for the first.",
    ),
]
"""The option of commands that can work without access to the database."""
Json = Annotated[
    bool,
    typer.Option("--json", help="Answer in JSON, for programs."),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Log what happens, and show the traceback of an error."),
]
COMMON = {
    "database_url": (DatabaseUrl, None),
    "data_dir": (DataDir, None),
    "json": (Json, False),
    "debug": (Debug, False),
}


class EscapingLogFormatter(logging.Formatter):
    """Formats logs for people: characters that could move a cursor, such as in a group's name, are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record, in as many lines as it has."""
        return "\n".join(map(escape_control_characters, super().format(record).split("\n")))


class SignalReceived(KeyboardInterrupt):
    """SIGTERM, or SIGHUP when the terminal has gone: handled like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class CliCommandContext(CliOutput):
    """The context of a command: its database, and its output."""

    def __init__(self, database_url: str | None, data_dir: Path | None, json: bool, debug: bool) -> None:
        super().__init__(json)
        self.database_url, self.data_dir, self.debug = database_url, data_dir, debug
        self.log: logging.Logger | None = None
        """Where an error that ends the command is logged, if not printed to stderr as a sentence."""

    @contextmanager
    def open_database(self, migrate_embedded: bool = True) -> Iterator[OpenedDatabase]:
        """Provide the database of the options, else of the environment, checked."""
        from sublet_storage.bootstrap.given_or_embedded_database import open_database

        with open_database(self.database_url, self.data_dir, migrate_embedded) as database:
            yield database

    def check_single_source(self) -> None:
        """Raise `UsageError` if a database is named as well, for a command that goes through nodes."""
        if self.database_url is not None or self.data_dir is not None:
            raise UsageError("--node and --database-url or --data-dir: one way is enough. Leave one of them out.")

    def open_feed(self, nodes: list[str]) -> Feed:
        """Return a client of these nodes. Raise `UsageError` where a database is named as well."""
        from sublet_borrower.node_client.feed_client import Feed

        self.check_single_source()
        return Feed(nodes, delivery_timeout_s=NODE_TIMEOUT_S, node_timeout_s=NODE_TIMEOUT_S)

    @contextmanager
    def open_connection(self) -> Iterator[psycopg.Connection[Any]]:
        """Provide a connection to the database."""
        from sublet_storage.bootstrap.given_or_embedded_database import open_connection

        with open_connection(self.database_url, self.data_dir, "sublet cli") as connection:
            gc.freeze()  # loaded objects stay: collections need not traverse them while rows come by the thousand
            yield connection


def command_group(help: str, commands: Mapping[str, lazy_commands.CommandFactory]) -> lazy_commands.CommandFactory:
    """Return the factory of a command group, `sublet NAME ...`."""
    return lambda name: lazy_commands.group(name, help, commands, EXIT_CODES)


def command(function: Callable[..., int | None]) -> lazy_commands.CommandFactory:
    """Return the factory of a command. The function returns its exit code; None is 0."""
    return lambda name: lazy_commands.command(name, _add_common_options(function), EXIT_CODES)


def standalone_command(function: Callable[..., None]) -> lazy_commands.CommandFactory:
    """Return the factory of a command that declares all its options itself, and calls `run_command`."""
    return lambda name: lazy_commands.command(name, function, EXIT_CODES)


def _add_common_options(function: Callable[..., int | None]) -> Callable[..., None]:
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    common = [
        inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for option, (kind, default) in COMMON.items()
    ]

    def command(**arguments: Any) -> None:
        cli = CliCommandContext(**{option: arguments.pop(option) for option in COMMON})
        raise typer.Exit(run_command(cli, lambda: function(cli, **arguments)))

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + common
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def run_command(cli: CliCommandContext, command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; every error is one sentence on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EscapingLogFormatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(SecretFilter())
    logging.basicConfig(level=logging.INFO if cli.debug else logging.WARNING, handlers=[handler])
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _terminate)
    try:
        _prepare_stdout()
        return command() or 0
    except BrokenPipeError:
        drop_unwritten()
        return BROKEN_PIPE
    except KeyboardInterrupt as interrupt:
        return 128 + getattr(interrupt, "number", signal.SIGINT)
    except Exception as error:  # any error ends as one sentence
        text, code = explain_error(error)
        if isinstance(error, OSError):
            drop_unwritten()
        if cli.log is not None:
            cli.log.critical("%s", text, exc_info=cli.debug)
            return code
        if cli.debug:
            cli.print_info(hide_secrets(traceback.format_exc()).rstrip())
        cli.print_error(text, code)
        return code


def explain_error(error: Exception) -> tuple[str, int]:
    """Return an error as one sentence without secrets, and its exit code."""
    text, code = _explain(error)
    return hide_secrets(text), code


def _explain(error: Exception) -> tuple[str, int]:
    import psycopg

    if isinstance(error, SubscriptionEnded):
        return str(error), _ENDINGS.get(error.reason, error.exit_code)
    if isinstance(error, SubletError):
        return str(error), error.exit_code
    text = format_error(error)
    if isinstance(error, psycopg.OperationalError):
        return f"the database did not answer as it should: {text}. Try again; --debug shows where it happened.", 5
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return (
            f"{text}. Make the database's user a member of the role that may do this (docs/roles.md; `sublet roles` "
            "shows the members), or use another user.",
            1,
        )
    if isinstance(error, OSError):
        return f"{text}.", 1
    return (
        f"{type(error).__name__}: {text}. This should not happen; --debug shows where it did. Please report it.",
        1,
    )


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[int] = (signal.SIGINT, signal.SIGTERM)
) -> Iterator[None]:
    """Call `handler` for these signals within the block."""
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Finish this block before a signal ends the command; a second signal interrupts it.

    An exception during a call on a connection would leave the connection in an unknown state.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise SignalReceived(number)

    heeded = [each for each in _ENDING_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    try:
        with handle_signals(note, heeded):
            yield
    finally:
        if received:
            raise SignalReceived(received[0])


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SignalReceived(number)


def _prepare_stdout() -> None:
    """Raise `UsageError` if stdout is closed, before anything is opened that could get its file descriptor.

    Under PYTHONUNBUFFERED it gets a buffer, and is flushed by who writes: without one Python drops, in silence, what is
    left of a write that a signal, or a disk that is full, has cut short.
    """
    if sys.stdout is None:
        raise UsageError("stdout is closed, and answers go there. Send them to a file, or to /dev/null.")
    if isinstance(raw := getattr(sys.stdout, "buffer", None), io.RawIOBase):
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), sys.stdout.encoding, sys.stdout.errors)


def drop_unwritten() -> None:
    """Redirect stdout to /dev/null where what is in its buffer cannot be written, so that Python does not try it again
    at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
