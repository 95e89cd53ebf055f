"""Settings of a consumer: times in seconds, and the bounds between them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace

from sublet_protocol.domain.errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class BorrowerSettings:
    """Defaults fit the leader's; a deployment that changes one side must change the other."""

    ping_interval_s: float = 2.0
    """Between two pings of one borrower."""
    ping_timeout_s: float = 6.0
    """A leader that has answered no ping sent within this time is lost, and looked for anew."""
    leader_lookup_interval_s: float = 1.0
    """Between two requests for a leader."""
    resend_interval_s: float = 1.0
    """After which an unconfirmed progress or disconnect is sent again."""
    progress_interval_s: float = 0.05
    """Least time between two progress reports that are not final."""
    unsubscribe_timeout_s: float = 5.0
    """How long a leaving borrower waits for its session's last progress."""
    disconnect_timeout_s: float = 10.0
    """How long, after that, it waits for the leader to confirm: one lease."""

    read_timeout_s: float = 30.0
    """How long a read waits for Postgres while not a byte comes, or for the answer of a node; then it is tried again on
    another connection."""

    max_poll_interval_s: float = 1800.0
    """How long a session may take between two requests for a batch; after that it gives its streams up."""

    def check(self) -> BorrowerSettings:
        """Itself, or `InvalidSetting` naming both values and the rule they break."""
        for field in fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise InvalidSetting(
                    f"{field.name} is {getattr(self, field.name)}: it must be a positive number of seconds."
                )
        if self.ping_timeout_s <= self.ping_interval_s + self.resend_interval_s:
            raise InvalidSetting(
                f"ping_timeout_s is {self.ping_timeout_s} and ping_interval_s + resend_interval_s is "
                f"{self.ping_interval_s + self.resend_interval_s}: "
                "the timeout must be longer, or a single lost ping costs the leader. Raise ping_timeout_s."
            )
        return self

    def scaled(self, factor: float) -> BorrowerSettings:
        """The same proportions, all times divided by `factor`: for tests."""
        return BorrowerSettings(**{f.name: getattr(self, f.name) / factor for f in fields(self)})

    @classmethod
    def from_env(cls) -> BorrowerSettings:
        """Defaults, overridden by `SUBLET_PING_INTERVAL_S` and so on for each field's name in capitals."""
        found: dict[str, float] = {}
        for field in fields(cls):
            name = "SUBLET_" + field.name.upper()
            if (text := os.environ.get(name)) is None:
                continue
            try:
                found[field.name] = float(text)
            except ValueError:
                raise InvalidSetting(f"{name} is {text!r}: it must be a number of seconds, such as 2.5.") from None
        return replace(cls(), **found).check()
