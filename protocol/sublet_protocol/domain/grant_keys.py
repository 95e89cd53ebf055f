"""Grant ids, and the secret keys with which a grant's holder proves its right.

An id has the timeline of the database on which it was drawn. A key is random bytes, which are shown nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NoReturn, Self

from sublet_protocol.domain.secret import MASK

TIMELINE_US = 1 << 52
"""How far each timeline of the database is ahead of the one before in terms and grant ids, regardless of its clock:
more than any clock has counted since 1970. The same as in the SQL function `timeline_ahead`."""


def timeline_number(drawn: int) -> int:
    """Return the number of the timeline, from 0, on which a term or grant id was drawn."""
    return drawn // TIMELINE_US


class SecretBytes:
    """A key that is `***` when it is printed or formatted; `reveal` returns its bytes. It stays in its process."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        """Return the value, to be put where it is proven or checked."""
        return self._value

    def __repr__(self) -> str:
        return MASK

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: a key stays in its process, and is not to be pickled")


class GrantSecret(SecretBytes):
    """The key of one grant, which authorizes moving the grant's progress. Drawn where the grant is written."""

    __slots__ = ()
    BYTES = 16

    @classmethod
    def draw(cls) -> Self:
        """Return a new one."""
        return cls(secrets.token_bytes(cls.BYTES))

    def digest(self) -> bytes:
        """Return its SHA-256, with which the key can be checked and not recovered."""
        return hashlib.sha256(self._value).digest()
