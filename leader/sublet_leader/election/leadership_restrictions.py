"""Which leaderships a node must not hold because of its desired state; pure."""

from __future__ import annotations

from collections.abc import Mapping

from sublet_storage.groups.model.records import Group


class LeadershipRestrictions:
    """Tracks restrictions. A node that steps down from a group leaves it to others for `leave_s`: borrowers that
    request it from this node shall not find it leading again. A draining node leads nothing until it no longer
    drains."""

    def __init__(self, leave_s: float) -> None:
        self._leave_s = leave_s
        self.draining = False
        self._resigned_until: dict[int, float] = {}

    def apply(self, is_draining: bool, step_down: Mapping[int, int], led: Mapping[int, int], now: float) -> list[int]:
        """Return which of {leadership: term} to resign now. A command is repeated until it is done."""
        self.draining = is_draining
        self._resigned_until = {group_id: until for group_id, until in self._resigned_until.items() if now < until}
        if is_draining:
            return list(led)
        over = [group_id for group_id, term in led.items() if step_down.get(group_id) == term]
        self._resigned_until.update(dict.fromkeys(over, now + self._leave_s))
        return over

    def is_forbidden(self, group: Group | None, now: float) -> bool:
        """Return whether this node must not lead the group (None: an unknown one)."""
        return self.draining or (group is not None and now < self._resigned_until.get(group.group_id, now))
