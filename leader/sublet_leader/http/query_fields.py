"""Parses the fields of a query: each has its type, or an error names it."""

from __future__ import annotations

from starlette.requests import Request

from sublet_protocol.domain.errors import UsageError


def read_text(request: Request, name: str, default: str | None = None) -> str:
    """Return a text field. Raises `UsageError` if a required one is missing."""
    found = request.query_params.get(name, default)
    if found is None:
        raise UsageError(f"{request.scope['path']} needs {name}: add ?{name}=...")
    if "\0" in found:
        raise UsageError(f"{name} is {found[:40]!r}: the database takes no zero character. Leave it out.")
    return found


def read_integer(request: Request, name: str, default: int, most: int) -> int:
    """Return a number field, from 0 to `most`. Raises `UsageError`."""
    reported = request.query_params.get(name)
    if reported is None:
        return default
    number = int(reported) if reported.isascii() and reported.isdecimal() and len(reported) < 20 else -1
    if not 0 <= number <= most:
        raise UsageError(f"{name} is {reported[:40]!r}: it must be a whole number from 0 to {most}.")
    return number


def read_choice(request: Request, name: str, default: str, choices: tuple[str, ...]) -> str:
    """Return a field that is one of `choices`. Raises `UsageError`."""
    reported = request.query_params.get(name, default)
    if reported not in choices:
        raise UsageError(f"{name} is {reported[:40]!r}: it must be one of {', '.join(choices)}.")
    return reported
