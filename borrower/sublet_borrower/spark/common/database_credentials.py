"""The database of a query's processes: the address from the plan, the password from each process.

Spark pickles, logs, stores and shows what is in plans, options and closures. So these have the address alone, and
`credentials` names where a process finds what is missing: `env` (SUBLET_DATABASE_URL or SUBLET_DATABASE_URL_FILE of
that process), `file:PATH`, or `class:MODULE.NAME`, a function or class that is called without arguments. The latter two
give a URL, or a part of one such as password=...

Whoever writes a query's options may not be trusted with that login: it decides where its password goes, over what
connection, and the process's environment decides what may be called.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psycopg.conninfo import make_conninfo

from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.secret import ReloadingSecretFile, Secret, hide_secrets_in_records
from sublet_storage.db.database_url import as_secret, format_url, parse_url, resolve_database_url

FROM_ENVIRONMENT = "env"
ADVICE = (
    "Nothing secret goes into a query's options or a job's closure, which Spark logs, stores and shows. Have the "
    "processes of driver and executors find it themselves: in SUBLET_DATABASE_URL or SUBLET_DATABASE_URL_FILE, or by "
    "credentials file:PATH or class:MODULE.NAME (docs/spark-cluster.md)."
)
SECRET_WORDS = ("password", "token", "key")
"""An option whose name has one of them is refused."""

CALLED_SETTING = "SUBLET_CREDENTIALS_CLASSES"
"""What `class:` may name in a process: an option names no code by itself."""

_ADDRESS = ("host", "hostaddr", "port", "dbname", "service")
_HARMLESS = set(
    re.findall(
        r"\w+",
        """
    application_name client_encoding connect_timeout tcp_user_timeout keepalives keepalives_idle keepalives_interval
    keepalives_count target_session_attrs load_balance_hosts""",
    )
)
"""What a plan may say of the connection of a login that names its database: no server is another one by it, and nothing
is less protected."""
_PUBLIC = _HARMLESS | set(
    re.findall(
        r"\w+",
        """
    host hostaddr port dbname user service passfile sslmode sslnegotiation sslcert sslkey sslcertmode sslrootcert sslcrl
    sslcrldir sslsni ssl_min_protocol_version ssl_max_protocol_version channel_binding require_auth requirepeer
    gssencmode krbsrvname gsslib""",
    )
)
"""What of a URL may be in a plan: names, files' paths and times."""


def check_url(url: str | None, credentials: str) -> None:
    """Raise `InvalidSetting` for a URL with parts that are, or may be, secret, and for what are no credentials."""
    _parse_credentials(credentials)
    others = {} if url is None else {name: value for name, value in parse_url(url).items() if name not in _PUBLIC}
    if others:
        raise InvalidSetting(f"url has a part that does not belong there: {', '.join(sorted(others))}. {ADVICE}")


def driver_url(url: str | None, data_dir: object, credentials: str) -> Secret | None:
    """Return the database of a query, for the driver: that of `url`, else of the driver's environment, else of the
    credentials; None where it is an embedded one. Raise `InvalidSetting`.
    """
    check_url(url, credentials)
    if data_dir is not None:
        return None
    if url is not None:
        return task_url(url, credentials)
    return _read(FROM_ENVIRONMENT) or (None if credentials == FROM_ENVIRONMENT else _read(credentials))


def task_address(url: str) -> str:
    """Return the parts of a URL that may be in a plan."""
    return make_conninfo("", **{name: value for name, value in parse_url(url).items() if name in _PUBLIC})


def task_url(address: str, credentials: str) -> Secret:
    """Return the database of an address, with the credentials that this process finds now, and at each connection
    anew."""
    return as_secret(_TaskUrl(address, _read(credentials), credentials))


@dataclass(frozen=True)
class _TaskUrl:
    """A callable that builds a URL at each call. `found`: that of the credentials, if there is one."""

    address: str
    found: Secret | None
    credentials: str

    def __call__(self) -> str:
        address = parse_url(self.address)
        if self.found is None:
            return self.address
        login, is_env = parse_url(self.found), self.credentials == FROM_ENVIRONMENT
        is_for_any = not is_env and not any(login.get(name) for name in _ADDRESS)
        if not is_for_any and _identify(address, is_env) != _identify(login, is_env):
            if is_env:
                return self.address
            raise InvalidSetting(
                f"credentials {self.credentials!r} are for {format_url(self.found)}, and the database is "
                f"{format_url(self.address)}. Correct one of them, or leave host, port and database out of the "
                "credentials."
            )
        harmless = {name: value for name, value in address.items() if name in _HARMLESS}
        others = {name: value for name, value in address.items() if name not in (*harmless, "user", "port")}
        different = [
            f"{name}={value}"
            for name, value in others.items()
            if value != login.get(name, value if is_for_any else None)
        ]
        if different:
            raise InvalidSetting(
                f"the database's URL has {' '.join(different)}, and that of credentials {self.credentials!r} has not: "
                "where their password goes, and how the server proves itself, they alone decide. Leave it out of the "
                "first URL, or write it into the second."
            )
        user = login.get("user") or address.get("user")
        merged = {**(address if is_for_any else {}), **login, **harmless, **({"user": user} if user else {})}
        return make_conninfo("", **merged)


def _identify(parts: dict[str, Any], with_user: bool) -> list[str]:
    """Return which database, and as which user, a URL names."""
    host, user = parts.get("host") or parts.get("hostaddr"), parts.get("user") if with_user else None
    return [str(value or "") for value in (host, parts.get("port") or 5432, parts.get("dbname"), user)]


def _read(credentials: str) -> Secret | None:
    """Return what the credentials are in this process, whose logs hide them from then on: handlers are Spark's."""
    hide_secrets_in_records()
    kind, value = _parse_credentials(credentials)
    if kind == FROM_ENVIRONMENT:
        return resolve_database_url(None)
    if kind == "file":
        return as_secret(ReloadingSecretFile(value, f"credentials {credentials!r}", parse_url))
    return as_secret(_import_function(credentials, value))


def _parse_credentials(credentials: str) -> tuple[str, str]:
    kind, _, value = credentials.partition(":") if isinstance(credentials, str) else ("", "", "")
    if (
        credentials == FROM_ENVIRONMENT
        or (kind == "file" and Path(value).is_absolute())
        or (kind == "class" and all(part.isidentifier() for part in value.split(".")) and "." in value)
    ):
        return kind, value
    shown = f"{kind}:..." if kind in ("file", "class") else "none of these"  # it may be a password itself
    raise InvalidSetting(
        f"credentials are {shown}: they are env, file:PATH with an absolute path, or class:MODULE.NAME of something to "
        "call. Correct them."
    )


def _import_function(credentials: str, path: str) -> Callable[[], str]:
    if path not in re.split(r"[,\s]+", os.environ.get(CALLED_SETTING, "")):
        raise InvalidSetting(
            f"credentials {credentials!r}: {CALLED_SETTING} of process {os.getpid()} does not name {path}, and nothing "
            f"else is called. Correct the name, or set {CALLED_SETTING} to it where driver and executors run."
        )
    module, _, name = path.rpartition(".")
    try:
        function: Callable[[], str] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidSetting(
            f"credentials {credentials!r}: {error}, in process {os.getpid()}. Correct the name, or install the module "
            "where driver and executors run."
        ) from None
    return _Called(function, credentials)


@dataclass(frozen=True)
class _Called:
    function: Callable[[], Any]
    credentials: str

    def __call__(self) -> str:
        result = self.function()
        if not isinstance(result, str):
            raise InvalidSetting(
                f"credentials {self.credentials!r}: the call returned a {type(result).__name__}. Return a URL such as "
                "postgresql://USER:PASSWORD@HOST/DATABASE, or password=... alone."
            )
        return result.reveal() if isinstance(result, Secret) else result
