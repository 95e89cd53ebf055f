"""The client's side: the access token of this process, sent with every call to a node."""

from __future__ import annotations

from sublet_protocol.domain.access.token import check_token
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.secret import Secret, read_secret_setting

SETTING = "SUBLET_TOKEN"


def load_access_token() -> Secret | None:
    """Return what SUBLET_TOKEN, or SUBLET_TOKEN_FILE, gives; None where neither is set. Raise `InvalidSetting`."""
    token = read_secret_setting(SETTING, check=check_token)
    if token is not None:
        check_token(token.reveal())
    return token


def call_metadata(token: Secret | None) -> tuple[tuple[str, str], ...]:
    """Return what goes with a call. A file is read anew, so that a token can be replaced while the process runs."""
    return () if token is None else (("authorization", f"Bearer {token.reveal()}"),)


def is_replaced(token: Secret | None, sent: tuple[tuple[str, str], ...]) -> bool:
    """Return whether the token is another by now than the one that went with a call: a call that was refused with it is
    made again.
    """
    try:
        return call_metadata(token) != sent
    except InvalidSetting:
        return False
