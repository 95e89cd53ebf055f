"""What operators are shown of who uses a space."""

from __future__ import annotations

from sublet_storage.spaces.drop_check import MAX_LOSSES, DropAffectedGroup, SpaceDropImpact


def test_of_many_losses_the_first_are_named() -> None:
    """The others are counted."""
    groups = [
        DropAffectedGroup("$share/done/#", 1, 0, 0),
        *(DropAffectedGroup(f"$share/g{n}/#", 0, 2, n) for n in range(1, MAX_LOSSES + 6)),
    ]
    lines = SpaceDropImpact(100, tuple(groups), ()).describe_losses()
    assert lines[0] == "$share/g1/# loses 1 unread messages, in 2 streams"
    assert len(lines) == MAX_LOSSES + 1
    assert lines[-1] == "and 5 more groups lose some"
    assert SpaceDropImpact(100, tuple(groups[: MAX_LOSSES + 1]), ()).describe_losses() == lines[:-1]
