"""Functions of users that return their work instead of doing it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator

from sublet_protocol.domain.errors import UsageError


def check_has_run(returned: object, subject: str) -> None:
    """Raise `UsageError` if a user's function has returned its work instead of doing it, as `async def` does."""
    if (
        inspect.isawaitable(returned)
        or inspect.isgenerator(returned)
        or isinstance(returned, AsyncIterator | map | filter)
    ):
        if inspect.iscoroutine(returned):
            returned.close()  # else Python warns of it as well
        raise UsageError(
            f"{subject} returned a {type(returned).__name__}, which nobody runs: nothing was done, and nothing "
            "counts as done. Give a function that has done its work when it returns: no `async def`, unless called "
            "through asyncio.run, and no `yield`."
        )
