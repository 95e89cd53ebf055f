"""Commands that are loaded on demand: of forty, a process runs one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import typer
from typer.core import TyperCommand, TyperGroup

CommandFactory = Callable[[str], Any]
"""Returns the command of that name."""


def command(name: str, function: Callable[..., None], epilog: str) -> Any:
    """Return a command; the function's parameters are its options."""
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    alone.command(name, cls=_Command, epilog=epilog)(function)
    return typer.main.get_command(alone)


def group(name: str, help: str, commands: Mapping[str, CommandFactory], epilog: str) -> Any:
    """Return a command group."""
    app = typer.Typer(
        name=name, cls=lazy_group_class(commands), help=help, epilog=epilog, no_args_is_help=True, rich_markup_mode=None
    )
    return typer.main.get_group(app)


def lazy_group_class(commands: Mapping[str, CommandFactory]) -> type[TyperGroup]:
    """Return the class of a group with these commands, for `typer.Typer(cls=...)`."""

    class LazyCommandGroup(_LazyConversionMixin, TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**{**attributes, "commands": _CommandMapping(commands)})

    return LazyCommandGroup


class _CommandMapping(Mapping[str, Any]):
    """Commands by name, each created once."""

    def __init__(self, makers: Mapping[str, CommandFactory]) -> None:
        self._makers = makers
        self._commands: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._commands:
            self._commands[name] = self._makers[name](name)
        return self._commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class _LazyConversionMixin:
    """Mixin for commands: parameters load their converters, pydantic in newer typer, only for a value that needs
    them."""

    def get_params(self, context: Any) -> list[Any]:
        """Return typer's parameters, with lazy conversion."""
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]
        for each in parameters:
            make = getattr(each, "get_runtime_param", None)
            if make is not None and not isinstance(make, _LazyConversion):
                each.get_runtime_param = _LazyConversion(make)
        return parameters


class _Command(_LazyConversionMixin, TyperCommand):
    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """Parse the arguments, and return what remains of them; report a negative number where an argument belongs as
        that, not as an unknown option."""
        original_arguments = list(arguments)
        try:
            remaining: list[str] = super().parse_args(context, arguments)
            return remaining
        except Exception as error:  # its class depends on typer's version
            option = str(getattr(error, "option_name", None))
            value = next((each for each in original_arguments if each.startswith(option)), option)
            if re.fullmatch(r"-[0-9.]+[a-z]?", value):
                context.fail(f"{value!r} is negative, and no argument of this command may be. Correct it.")
            raise


class _LazyConversion:
    """Replaces typer's own conversion, which takes a tenth of a second to load and leaves None and texts as they
    are."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Self:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the converted value of the parameter."""
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        descriptor = getattr(param, "type_descriptor", None)  # None with other versions of typer
        info = getattr(descriptor, "parameter_info", None)
        is_text = getattr(descriptor, "annotation", None) is str and getattr(info, "parser", self) is None
        return value if is_text and isinstance(value, str) else self._make().coerce(value, param=param, ctx=ctx)
