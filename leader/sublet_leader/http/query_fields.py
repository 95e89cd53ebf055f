"""Parses the fields of a query: each has its type, or an error names it."""

from __future__ import annotations

from starlette.requests import Request

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.limits import parse_natural


def read_text(request: Request, name: str, default: str | None = None) -> str:
    """Return a text field. Raise `UsageError` if a required one is missing."""
    text = request.query_params.get(name, default)
    if text is None:
        raise UsageError(f"{request.scope['path']} needs {name}: add ?{name}=...")
    if "\0" in text:
        raise UsageError(f"{name} is {text[:40]!r}: the database takes no zero character. Leave it out.")
    return text


def read_integer(request: Request, name: str, default: int, maximum: int) -> int:
    """Return a number field, from 0 to `maximum`. Raise `UsageError`."""
    text = request.query_params.get(name)
    if text is None:
        return default
    number = parse_natural(text, maximum)
    if number is None:
        raise UsageError(f"{name} is {text[:40]!r}: it must be a whole number from 0 to {maximum}.")
    return number


def read_choice(request: Request, name: str, default: str, choices: tuple[str, ...]) -> str:
    """Return a field that is one of `choices`. Raise `UsageError`."""
    text = request.query_params.get(name, default)
    if text not in choices:
        raise UsageError(f"{name} is {text[:40]!r}: it must be one of {', '.join(choices)}.")
    return text
