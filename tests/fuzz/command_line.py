"""Arguments of the command line, mutated: they are parsed, or refused with a sentence. No command is run."""

from __future__ import annotations

import contextlib
import io
import random
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from sublet.cli.app import app
from sublet_protocol.domain.errors import SubletError
from tests.fuzz.text import NASTY

PAGE = Path(__file__).parents[2] / "docs/cli.md"
_Refusal: Any = typer.BadParameter.__base__  # where it is to be imported from depends on typer's version


def execute(seed: int, number: int) -> bool:
    """Return whether the arguments of this execution were parsed; if not, they were refused as they should be. Raises
    whatever else happens."""
    dice = random.Random(f"{seed}/{number}")
    arguments = list(dice.choice(_examples()))
    if number % 100:
        _mutate(arguments, dice)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            _parse(arguments)
        except typer.Exit:
            return True  # it has shown a help text, or the version
        except (_Refusal, SubletError) as refused:
            str(refused).encode("utf-8", "surrogatepass")
            return False
    return True


@cache
def _examples() -> tuple[tuple[str, ...], ...]:
    """Return the arguments of each command in the manual."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("sublet ")]
    return tuple(tuple(shlex.split(line.partition(" | ")[0].partition(" > ")[0])[1:]) for line in lines)


@cache
def _sublet() -> Any:
    return typer.main.get_command(app)


def _mutate(arguments: list[str], dice: random.Random) -> None:
    for _ in range(dice.choice((1, 1, 2, 4))):
        place = dice.randrange(len(arguments) + 1)
        other = dice.choice(dice.choice(_examples()))
        match dice.randrange(6):
            case 0:
                del arguments[place : place + 1]
            case 1:
                arguments.insert(place, other)
            case 2:
                arguments[place : place + 1] = [other]
            case 3:
                arguments.insert(place, dice.choice(("", "-", "--", "-h", "--json", "-x", "--=", "--limit=")))
            case 4:
                arguments[place : place + 1] *= dice.choice((2, 3, 200))
            case _:
                word = arguments[place] if place < len(arguments) else ""
                at = dice.randrange(len(word) + 1)
                arguments[place : place + 1] = [word[:at] + dice.choice(NASTY) + word[at + dice.randrange(3) :]]


def _parse(arguments: list[str]) -> None:
    """Parse them down to the command that they name, as `sublet` does."""
    command, context = _sublet(), None
    while command is not None:
        context = command.make_context(command.name, list(arguments), parent=context)
        arguments = [*context._protected_args, *context.args]
        if not isinstance(command, TyperGroup) or not arguments:
            return
        _, command, arguments = command.resolve_command(context, arguments)
