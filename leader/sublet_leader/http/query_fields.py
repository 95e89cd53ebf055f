"""Reads the fields of a query: each is there in its kind, or an error names it."""

from __future__ import annotations

from starlette.requests import Request

from sublet_protocol.domain.errors import UsageError


def read_text(request: Request, name: str, default: str | None = None) -> str:
    """Return a value of the query. Raises `UsageError` where it must be given."""
    found = request.query_params.get(name, default)
    if found is None:
        raise UsageError(f"{request.scope['path']} needs {name}: add ?{name}=...")
    if "\0" in found:
        raise UsageError(f"{name} is {found[:40]!r}: the database takes no zero character. Leave it out.")
    return found


def read_integer(request: Request, name: str, default: int, most: int) -> int:
    """Return a number of the query, from 0 to `most`. Raises `UsageError`."""
    reported = request.query_params.get(name)
    if reported is None:
        return default
    number = int(reported) if reported.isascii() and reported.isdecimal() and len(reported) < 20 else -1
    if not 0 <= number <= most:
        raise UsageError(f"{name} is {reported[:40]!r}: it must be a whole number from 0 to {most}.")
    return number


def read_choice(request: Request, name: str, default: str, choices: tuple[str, ...]) -> str:
    """Return one of several words of the query. Raises `UsageError`."""
    reported = request.query_params.get(name, default)
    if reported not in choices:
        raise UsageError(f"{name} is {reported[:40]!r}: it must be one of {', '.join(choices)}.")
    return reported
