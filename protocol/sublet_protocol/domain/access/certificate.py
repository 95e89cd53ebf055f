"""The principal that a client's certificate names, and until when it is valid; pure.

The names are read from the certificate's own bytes, which the handshake has verified: what gRPC passes on of them ends
at the first NUL, so that `spiffe://a/b<NUL>.other` would be `spiffe://a/b`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

from sublet_protocol.domain.access.rights import find_broken_rule
from sublet_protocol.domain.errors import Unauthenticated
from sublet_protocol.domain.limits import MAX_CERTIFICATE_BYTES

_SEQUENCE, _OBJECT_ID, _VERSION, _EXTENSIONS = 0x30, 0x06, 0xA0, 0xA3
_URI, _DNS = 0x86, 0x82
_TEXTS = {0x0C: "utf-8", 0x13: "ascii", 0x16: "ascii"}
"""How the strings that a common name may be are encoded: UTF8String, PrintableString, IA5String."""
_UTC_TIME = 0x17
_TIMES = {_UTC_TIME: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
"""How a certificate's times are written: UTCTime, whose years are 1950 to 2049, and GeneralizedTime."""
_COMMON_NAME, _ALTERNATIVE_NAMES = b"\x55\x04\x03", b"\x55\x1d\x11"

_FORMS = {
    "URI": (
        re.compile(r"(?!user:)[a-z][a-z0-9+.-]*:.+", re.ASCII | re.IGNORECASE),
        "a URI has a scheme, which is not user",
    ),
    "DNS name": (re.compile(r"[^:]+", re.ASCII), "a DNS name has no colon"),
    "CN": (re.compile(r"user:.+|[^:]+"), "a CN names a principal as user:NAME, or with a DNS name"),
}
"""Of each kind of name: its form, and that in words. No kind can have the names of another but for DNS names as CN."""
_USABLE = "Have a certificate issued with such a name, like spiffe://example/etl, etl.example or CN=user:etl"


def parse_principal(certificate: bytes) -> str:
    """Return the first URI among the subject alternative names, else the first DNS name, else the CN. `certificate` is
    DER. Raise `Unauthenticated` where that is no principal's name: another name is not looked for.
    """
    if len(certificate) > MAX_CERTIFICATE_BYTES:
        raise Unauthenticated(
            f"the caller's certificate has {len(certificate)} bytes, and the limit is {MAX_CERTIFICATE_BYTES}. Have "
            "one issued with fewer names."
        )
    try:
        kind, name = _find_name(certificate)
    except (ValueError, IndexError):
        raise Unauthenticated(
            "the caller's certificate has no name that can be read: neither a URI nor a DNS name among its subject "
            f"alternative names, nor one CN. {_USABLE}."
        ) from None
    form, its_rule = _FORMS[kind]
    rule = find_broken_rule(name) or (None if form.fullmatch(name) else its_rule)
    if rule is not None:
        raise Unauthenticated(f"the caller's certificate has the {kind} {name!r:.100}: {rule}. {_USABLE}.")
    return name


def parse_expiry(certificate: bytes) -> float:
    """Return when the certificate (DER) expires, in seconds since 1970. Raise `Unauthenticated` where that cannot be
    read.
    """
    try:
        _, (tag, content) = _parse_elements(_parse_fields(certificate)[3][1])
        expiry = datetime.strptime(content.decode("ascii"), _TIMES[tag]).replace(tzinfo=UTC)
    except (ValueError, LookupError):
        raise Unauthenticated(
            "the caller's certificate does not say until when it is valid in a form that can be read. Have one issued "
            "with a time as RFC 5280 writes it."
        ) from None
    is_of_last_century = tag == _UTC_TIME and expiry.year >= 2050
    return (expiry.replace(year=expiry.year - 100) if is_of_last_century else expiry).timestamp()


def expired_error(expiry: float) -> Unauthenticated:
    """Return the error of a certificate that expired then."""
    at = datetime.fromtimestamp(expiry, UTC).isoformat(timespec="seconds")
    return Unauthenticated(
        f"the caller's certificate expired at {at}: one counts until then only, also over a connection that was made "
        "before. Put a new one into the files that SUBLET_TLS_CERT and SUBLET_TLS_KEY name."
    )


def _parse_fields(certificate: bytes) -> list[tuple[int, bytes]]:
    """Return its fields from the serial number on. Raise `ValueError`, `IndexError` for what is no certificate."""
    fields = list(_parse_elements(next(_parse_elements(_parse_single(certificate, _SEQUENCE)), (0, b""))[1]))
    if fields[0][0] == _VERSION:
        del fields[0]
    return fields


def _find_name(certificate: bytes) -> tuple[str, str]:
    """Return the kind and the name. Raise `ValueError`, `IndexError` for what is no certificate, or has no name."""
    fields = _parse_fields(certificate)
    alternatives = list(_parse_alternative_names(fields[6:]))
    for kind, tag in (("URI", _URI), ("DNS name", _DNS)):
        for name_tag, content in alternatives:
            if name_tag == tag:
                return kind, content.decode("ascii")
    (common_name,) = _parse_common_names(fields[4][1])
    return "CN", common_name


def _parse_alternative_names(fields: list[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    extension_values = [
        extension[-1][1]
        for tag, content in fields
        if tag == _EXTENSIONS
        for _, each in _parse_elements(_parse_single(content, _SEQUENCE))
        if (extension := list(_parse_elements(each)))[0] == (_OBJECT_ID, _ALTERNATIVE_NAMES)
    ]
    if len(extension_values) > 1:
        raise ValueError("an extension is there twice")
    for names in extension_values:
        yield from _parse_elements(_parse_single(names, _SEQUENCE))


def _parse_common_names(subject: bytes) -> Iterator[str]:
    for _, attributes in _parse_elements(subject):
        for _, attribute in _parse_elements(attributes):
            (_, kind), (encoding, content) = _parse_elements(attribute)
            if kind == _COMMON_NAME:
                if encoding not in _TEXTS:
                    raise ValueError("a string of another kind")
                yield content.decode(_TEXTS[encoding])


def _parse_single(der: bytes, tag: int) -> bytes:
    """Return the content of the one element that this is."""
    ((element_tag, content),) = _parse_elements(der)
    if element_tag != tag:
        raise ValueError("another element")
    return content


def _parse_elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and the content of each element."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            end = at + (length & 0x7F)
            length, at = int.from_bytes(der[at:end]), end
        if at + length > len(der) or tag & 0x1F == 0x1F:
            raise ValueError("no DER")
        yield tag, der[at : at + length]
        at += length
