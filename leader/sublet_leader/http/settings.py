"""Bounds of the HTTP port."""

from __future__ import annotations

from msgspec import Struct, field

from sublet_leader.listen_address import ListenAddress
from sublet_leader.observe.metrics_settings import MetricsSettings
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.secret import Secret, read_secret_setting
from sublet_protocol.tls.files import TlsFiles

MAX_CONNECTIONS = 256
"""Maximum number at a time, connections in their TLS handshake included; further ones are rejected."""
MAX_CONNECTIONS_OF_ADDRESS = 32
"""Maximum number from one address; of IPv6, from one /64 network, as one machine has an entire one."""
HEAD_TIMEOUT_S = 3.0
"""Time limit of a request's line and headers: silent connections do not occupy the port for long."""
REQUEST_TIMEOUT_S = 10.0
"""Time limit of a request's body, and of taking the answer."""
MAX_HEAD_BYTES = 65_536
MAX_BODY_BYTES = 65_536
MAX_FIELDS = 20
GRACE_S = 1
"""Time limit of requests in progress when the port is closed."""
MIN_TOKEN_CHARACTERS = 16
CERTIFICATE = "certificate"
"""Key in a request's `state` of the client's certificate, in DER; None if none was requested."""


class HttpOptions(Struct, frozen=True):
    """A port: where it listens, its bounds, the token for actions (None: actions are off), and its certificate."""

    listen: ListenAddress
    settings: MetricsSettings = field(default_factory=MetricsSettings)
    admin_token: Secret | None = None
    tls: TlsFiles | None = None


def read_admin_token() -> Secret | None:
    """Return the token of SUBLET_ADMIN_TOKEN, or of SUBLET_ADMIN_TOKEN_FILE. Raise `InvalidSetting` without its
    value."""
    token = read_secret_setting("SUBLET_ADMIN_TOKEN", check=_check_token)
    if token is not None:
        _check_token(token.reveal())
    return token


def _check_token(token: str) -> None:
    if len(token) < MIN_TOKEN_CHARACTERS or not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidSetting(
            f"SUBLET_ADMIN_TOKEN has {len(token)} characters, or some that cannot be sent: give at least "
            f"{MIN_TOKEN_CHARACTERS} of ASCII without blanks, such as those of `openssl rand -hex 16`."
        )
