"""The base of settings: numbers from environment variables, checked each and against one another."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

from sublet_protocol.domain.errors import InvalidSetting

MAX_INT = 999_999_999
"""Of a whole number that has no bound of its own."""


class CrossSettingRule(NamedTuple):
    """A bound between settings. `names` are those the message shows; `text`, `reason` and `hint` are for people."""

    names: tuple[str, ...]
    text: str
    is_satisfied: Callable[[Any], bool]
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class SettingsBase:
    """The base of settings: numbers with defaults, the fields of a frozen dataclass, positive, or integers from 0 where
    the default is an integer.
    """

    PREFIX: ClassVar[str] = "SUBLET_"
    """Of the variables; the rest of a variable's name is its field's name in capitals."""
    RULES: ClassVar[tuple[CrossSettingRule, ...]] = ()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Return the defaults, overridden by the variables that are set; checked as by `check`."""
        source = os.environ if environ is None else environ
        overrides = {
            field.name: parse_number(variable, source[variable], field.default)
            for field in fields(cls)
            if (variable := cls.PREFIX + field.name.upper()) in source
        }
        return replace(cls(), **overrides).check()

    def check(self) -> Self:
        """Return itself. Raise `InvalidSetting`, which names the values, the rule they break and a hint."""
        for field in fields(self):
            check_number(field.name, getattr(self, field.name), field.default)
        for rule in self.RULES:
            if not rule.is_satisfied(self):
                values = " and ".join(f"{name} is {getattr(self, name)}" for name in rule.names)
                raise InvalidSetting(f"{values}: {rule.text}, because {rule.reason}. {rule.hint}.")
        return self

    def scaled(self, factor: float) -> Self:
        """Return the same proportions `factor` times as fast: times divided by it, rates multiplied."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(
            self, **{name: value * factor if name.endswith("_per_s") else value / factor for name, value in values}
        )


def parse_number(variable: str, text: str, default: Any, at_most: int = MAX_INT) -> Any:
    """Return a variable's value, of its default's type. Raise `InvalidSetting` if it is no number or out of bounds."""
    try:
        value = type(default)(text)
    except ValueError:
        raise _error(variable, repr(text[:40]), default, at_most) from None
    check_number(variable, value, default, at_most)
    return value


def check_number(name: str, value: float, default: Any, at_most: int = MAX_INT) -> None:
    """Raise `InvalidSetting` if a whole number is not from 0 to `at_most`, or another not positive and finite."""
    if not (0 <= value <= at_most if isinstance(default, int) else 0 < value < math.inf):
        raise _error(name, str(value), default, at_most)


def _error(name: str, value: str, default: Any, at_most: int) -> InvalidSetting:
    rule = f"a whole number from 0 to {at_most}" if isinstance(default, int) else "a positive number"
    return InvalidSetting(f"{name} is {value}: it must be {rule}. Leave it out for {default}.")
