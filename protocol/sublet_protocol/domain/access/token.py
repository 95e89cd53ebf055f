"""Access tokens, which prove a client's principal. Only the hash is stored, never the token."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets

from msgspec import Struct

from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.secret import Secret

_FORM = re.compile(r"sub_([a-z2-7]{8})_[A-Za-z0-9_-]{43}", re.ASCII)


class NewToken(Struct, frozen=True):
    """A token that was just drawn. `token_id` may be shown to all, `token` to its bearer, once."""

    token_id: str
    token: Secret

    @classmethod
    def draw(cls) -> NewToken:
        """Return another one: 256 random bits, under an id of 40 others."""
        token_id = base64.b32encode(secrets.token_bytes(5)).decode().lower()
        return cls(token_id, Secret(f"sub_{token_id}_{secrets.token_urlsafe(32)}"))

    @property
    def digest(self) -> bytes:
        """Return the hash that is stored."""
        return hash_token(self.token.reveal())


def parse_token_id(token: str) -> str | None:
    """Return the id in a token; None for what is none."""
    match = _FORM.fullmatch(token)
    return None if match is None else match[1]


def hash_token(token: str) -> bytes:
    """Return the hash of a token. Of 256 random bits one of a fast function is as good as of a slow one."""
    return hashlib.sha256(token.encode()).digest()


def check_token(token: str) -> None:
    """Raise `InvalidSetting` for what is no token; the message does not show it."""
    if parse_token_id(token) is None:
        raise InvalidSetting(
            f"the access token, of {len(token)} characters, is none: it is sub_, 8 characters, _ and 43 more. Take it "
            "from `sublet access token PRINCIPAL`, which shows it once."
        )
