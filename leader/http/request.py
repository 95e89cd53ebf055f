"""What somebody asks for: a path, its query, and where something is to be done a token and a body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import UsageError


@dataclass(frozen=True, slots=True)
class Request:
    """`query` has the last value of each name. `bearer`: the token that was sent; None: none was. `client`: the address
    it came from, which is a proxy's where one stands before the port."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = ""
    bearer: str | None = None
    content_type: str = ""
    body: bytes = b""
    client: str = ""

    def text(self, name: str, default: str | None = None) -> str:
        """A value of the query. Raises `UsageError` where it must be given."""
        found = self.query.get(name, default)
        if found is None:
            raise UsageError(f"{self.path} needs {name}: add ?{name}=...")
        if "\0" in found:
            raise UsageError(f"{name} is {found[:40]!r}: the database takes no zero character. Leave it out.")
        return found

    def whole(self, name: str, default: int, most: int) -> int:
        """A number of the query, from 0 to `most`. Raises `UsageError`."""
        told = self.query.get(name)
        if told is None:
            return default
        number = int(told) if told.isascii() and told.isdecimal() and len(told) < 20 else -1
        if not 0 <= number <= most:
            raise UsageError(f"{name} is {told[:40]!r}: it must be a whole number from 0 to {most}.")
        return number

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """One of several words of the query. Raises `UsageError`."""
        told = self.query.get(name, default)
        if told not in choices:
            raise UsageError(f"{name} is {told[:40]!r}: it must be one of {', '.join(choices)}.")
        return told

    def object(self) -> dict[str, Any]:
        """The body, an object of JSON. Raises `UsageError`."""
        if self.content_type.partition(";")[0].strip().lower() != "application/json":
            raise UsageError("the body must be JSON: send it with Content-Type: application/json.")
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the body is no JSON: {error}.") from None
        if not isinstance(found, dict):
            raise UsageError("the body must be an object of JSON, such as {}.")
        return found
