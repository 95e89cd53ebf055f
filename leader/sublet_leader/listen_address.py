"""The address on which a node listens, checked."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from msgspec import Struct

from sublet_protocol.domain.address import split_address
from sublet_protocol.domain.errors import InvalidSetting


class ListenAddress(Struct, frozen=True):
    """A host and a port; port 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, insecure: bool, has_tls: bool = False) -> ListenAddress:
        """Parse `HOST:PORT` or `[::1]:PORT`. Beyond loopback only with TLS, or with `insecure`.

        Raise `InvalidSetting` naming the address, the rule and the hint.
        """
        parts = split_address(text)
        if parts is None:
            raise InvalidSetting(
                f"address {text!r}: give HOST:PORT, such as 127.0.0.1:7411 or [::1]:7411, with a port up to 65535."
            )
        host, port = parts
        if not (insecure or has_tls or is_loopback(host)):
            raise InvalidSetting(
                f"address {text!r} can be reached from other machines, and without TLS this node neither encrypts nor "
                "proves who it is: give it --tls-cert FILE and --tls-key FILE, listen on 127.0.0.1, or pass --insecure "
                "on a network where everybody may consume and disturb."
            )
        return cls(host, port)

    def is_free(self) -> bool:
        """Return whether the system would let a process listen there now.

        gRPC finds that out as well, but prints it to stderr in its own form.
        """
        try:
            infos = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return False
        return any(_is_bindable(family, address) for family, _, _, _, address in infos)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Return whether every address of the name is loopback: a name can have several."""
    return all(address.is_loopback for address in _resolve_addresses(host))


def is_wildcard(host: str) -> bool:
    """Return whether it means all addresses of this machine, such as 0.0.0.0, to which no client can connect."""
    return any(address.is_unspecified for address in _resolve_addresses(host))


def _resolve_addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidSetting(f"host {host!r} cannot be resolved ({error}). Give an address of this machine.") from None
    return [ipaddress.ip_address(str(info[4][0]).split("%")[0]) for info in infos]


def _is_bindable(family: int, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: a closed socket is no hindrance
            probe.bind(address)
    except OSError:
        return False
    return True
