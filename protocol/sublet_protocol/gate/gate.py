"""Identifies callers and decides what they may do. Where authentication is off, every caller may do everything."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field

from sublet_protocol.domain.access.certificate import expired_error, parse_expiry, parse_principal
from sublet_protocol.domain.access.rights import ALL, Right
from sublet_protocol.domain.access.token import hash_token, parse_token_id
from sublet_protocol.domain.errors import PermissionDenied, Unauthenticated, Unavailable
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.gate.access_cache import AccessCache
from sublet_protocol.gate.audit import RefusalLog

UNKNOWN = (
    "the caller is not known: its access token is missing, or none that counts. Give one that has not expired in "
    "SUBLET_TOKEN, or in the file that SUBLET_TOKEN_FILE names; `sublet access token` makes one."
)
"""The text is the same for every reason."""
UNREAD = "this node does not know the caller's token, and cannot read the tokens now. Try again when it can."


@dataclass(slots=True)
class Caller:
    """The caller of one call. `principal` None: authentication is off. `is_checked`: a right was checked.

    A call may last long: each `check` also checks whether the token or certificate is still valid.
    """

    principal: str | None
    address: str
    action: str
    _access: AccessCache | None = field(repr=False)
    _refusals: RefusalLog = field(repr=False)
    _token: str | None = field(default=None, repr=False)
    _certificate_expiry: float | None = field(default=None, repr=False)
    is_checked: bool = False

    def may(self, right: Right, filter: TopicFilter = ALL, group: str | None = None) -> bool:
        """Return whether a rule allows it; `group` None: in all groups. Raise `Unavailable`."""
        self.is_checked = True
        if self._access is None:
            return True
        return self.principal is not None and (self._access.find_rule(self.principal, right, filter, group) is not None)

    def may_somewhere(self, right: Right) -> bool:
        """Return whether a rule allows it on any topic or group, however old the rules are."""
        if self._access is None:
            return True
        return self.principal is not None and self._access.has_right(self.principal, right)

    def check(self, right: Right, filter: TopicFilter = ALL, group: str | None = None) -> None:
        """Raise `PermissionDenied` unless a rule allows it, whether or not the object exists; `Unauthenticated` where
        the caller's token or certificate is no longer valid.
        """
        self.check_token()
        if not self.may(right, filter, group):
            raise self.denied_error(right, filter, group)

    def check_somewhere(self, right: Right) -> None:
        """Raise `PermissionDenied` unless a rule allows it on any topic or group, or the rules are too old to say."""
        if self._access is not None and not self._access.is_stale and not self.may_somewhere(right):
            self.note_refusal(f"{right} on anything")
            command = f"sublet access allow {shlex.quote(str(self.principal))} {right} FILTER"
            raise PermissionDenied(
                f"{self.principal} has no right to {right} on anything: no rule allows it. "
                f"An operator gives it with `{command}`."
            )

    def check_token(self) -> None:
        """Note that a right was checked where there was no object to check it on; raise `Unauthenticated` as `check`
        does.
        """
        self.is_checked = True
        self.check_identity()

    def check_identity(self) -> None:
        """Raise `Unauthenticated` where the token or certificate that the caller was identified by is no longer valid.
        That is no check of a right.
        """
        if self._certificate_expiry is not None and time.time() >= self._certificate_expiry:
            raise expired_error(self._certificate_expiry)
        if (
            self._access is not None
            and self._token is not None
            and self._access.authenticate(self._token) != self.principal
        ):
            raise Unauthenticated(UNKNOWN)

    def note_refusal(self, object: str) -> None:
        """Note in the audit log that this was refused."""
        self._refusals.record(self.principal, self.address, self.action, object)

    def denied_error(self, right: Right, filter: TopicFilter = ALL, group: str | None = None) -> PermissionDenied:
        """Note a refusal in the audit log, and return its error."""
        scope = "" if not right.is_on_groups else " in all groups" if group is None else f" in group {group!r}"
        option = f" --group {shlex.quote(group)}" if right.is_on_groups and group is not None else ""
        self.note_refusal(f"{right} {filter}{scope}")
        shown = str(filter)[:200]
        command = f"sublet access allow {shlex.quote(str(self.principal))} {right} {shlex.quote(shown)}{option}"
        # A rule for a group with an asterisk in its name would be one for others, too.
        hint = f" An operator gives it with `{command}`." if "*" not in option else ""
        return PermissionDenied(f"{self.principal} has no right to {right} {shown!r}{scope}: no rule allows it.{hint}")


_caller: ContextVar[Caller] = ContextVar("sublet_caller")


READ_TIMEOUT_S = 5.0
"""How long a caller with an unknown token waits at most until the tokens have been read once more."""
MAX_REFUSED = 1_000
"""Maximum number of refused tokens that are stored."""


class AccessGate:
    """The gate of a server. `access`: the rules and tokens; None: authentication is off. `read_anew` begins to read
    them again, and returns a future of whether they were read; None where too many callers wait for that.
    `by_certificate`: every client has shown a certificate, which must not have expired; its name is the principal, and
    no token is used.
    """

    def __init__(
        self,
        access: AccessCache | None = None,
        read_anew: Callable[[], Future[bool] | None] | None = None,
        by_certificate: bool = False,
    ) -> None:
        self.access, self._read_anew, self._refusals = access, read_anew, RefusalLog()
        self.by_certificate = by_certificate
        self._refused: set[bytes] = set()

    @property
    def is_on(self) -> bool:
        """Return whether callers have to authenticate."""
        return self.access is not None

    async def read_unknown(self, authorization: str | None) -> bool:
        """Return whether `identify` can find the caller's principal. Where its token is not known, wait until the
        tokens have been read once more: it may have been made a moment ago. Once it was not among them it never will
        be, as a token is stored before it is shown. Raise `Unavailable` where they could not be read."""
        if self.is_known(authorization):
            return True
        token = _parse_token(authorization)
        if self._read_anew is None or token is None or parse_token_id(token) is None:
            return False
        digest = hash_token(token)
        if digest in self._refused:
            return False
        if (reading := self._read_anew()) is not None:
            await asyncio.wait([asyncio.wrap_future(reading)], timeout=READ_TIMEOUT_S)
        if self.is_known(authorization):
            return True
        if reading is None or not reading.done() or not reading.result():
            raise Unavailable(UNREAD)
        if len(self._refused) >= MAX_REFUSED:
            self._refused.clear()
        self._refused.add(digest)
        return False

    def identify(
        self, authorization: str | None, address: str, action: str, certificate: bytes | None = None
    ) -> Caller:
        """Return the caller, by the value of a header `Authorization`, or by a certificate (DER) that was verified
        when a session of TLS was begun: it may have been resumed since, and the certificate have expired. Raise
        `Unauthenticated`.
        """
        if self.by_certificate:
            try:
                return self._identify_by_certificate(certificate or b"", address, action)
            except Unauthenticated as error:
                self._refusals.record(None, address, action, str(error))
                raise
        if self.access is None:
            return self._make_anonymous_caller(address, action)
        token = _parse_token(authorization)
        principal = None if token is None else self.access.authenticate(token)
        if principal is None:
            self._refusals.record(None, address, action, "unknown caller")
            raise Unauthenticated(UNKNOWN)
        return Caller(principal, address, action, self.access, self._refusals, token)

    def _identify_by_certificate(self, certificate: bytes, address: str, action: str) -> Caller:
        principal = None if self.access is None else parse_principal(certificate)
        expiry = parse_expiry(certificate)
        caller = Caller(
            principal, address, action, self.access, self._refusals, _token=None, _certificate_expiry=expiry
        )
        caller.check_identity()
        return caller

    def is_known(self, authorization: str | None) -> bool:
        """Return whether `identify` can find the caller's principal: the token is valid, or none is needed."""
        token = _parse_token(authorization)
        if self.access is None or self.by_certificate:
            return True
        return token is not None and self.access.authenticate(token) is not None

    def enter(self, caller: Caller) -> None:
        """Set the caller of what is done in this context from now on."""
        _caller.set(caller)

    def get_caller(self) -> Caller:
        """Return the caller of the present call. Raise `LookupError` where authentication is on and no caller was let
        in.
        """
        return self._make_anonymous_caller("", "") if self.access is None else _caller.get()

    def make_caller(self, principal: str, agent: str, action: str = "stay a member") -> Caller:
        """Return a caller that was let in before, to check its rights again."""
        return Caller(principal, agent, action, self.access, self._refusals)

    def _make_anonymous_caller(self, address: str, action: str) -> Caller:
        return Caller(None, address, action, None, self._refusals)


def _parse_token(authorization: str | None) -> str | None:
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None
