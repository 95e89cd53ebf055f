"""Rights: which principal may do what, on which topics and groups; pure.

Rules only allow: what no rule allows is refused. A rule is one principal, one right, one filter, and for rights on
groups a pattern of their names. A request has to be covered by one rule: several do not add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.limits import MAX_GROUP_CHARACTERS
from sublet_protocol.domain.topics import FilterTree, TopicFilter, check_characters, text_error

MAX_PRINCIPAL_CHARACTERS = 255
ANYBODY = "*"
"""As a principal: any authenticated caller. As a pattern of groups: any group."""


class Right(StrEnum):
    """The rights that a rule can allow."""

    PUBLISH = "publish"  # append to the topics of the filter
    READ = "read"  # read what is stored, without a group
    JOIN = "join"  # be a member of a group, and read what it is granted
    WATCH = "watch"  # see a group, its lag and its history
    OPERATE = "operate"  # change a group; includes watch

    @property
    def is_on_groups(self) -> bool:
        """Return whether the group's name matters."""
        return self not in (Right.PUBLISH, Right.READ)

    @property
    def included_in(self) -> tuple[Right, ...]:
        """Return the rights that allow this one."""
        return (Right.WATCH, Right.OPERATE) if self is Right.WATCH else (self,)


ALL = TopicFilter("#")


class AccessRule(Struct, frozen=True):
    """A rule that allows a principal a right on what `filter` covers; `group` is a group's name, `team-*`, or `*` for
    any.

    Raises `UsageError`.
    """

    principal: str
    right: Right
    filter: TopicFilter
    group: str = ANYBODY

    def __post_init__(self) -> None:
        check_principal(self.principal, may_be_anybody=True)
        _check_group_pattern(self.right, self.group)

    def __str__(self) -> str:
        group = "" if self.group == ANYBODY else f" --group {self.group}"
        return f"{self.principal} {self.right} {self.filter}{group}"


class _RuleIndex:
    """The rules of one principal and right, by their patterns of groups and their filters: what is asked costs the same
    whether there is one rule or thousands."""

    def __init__(self) -> None:
        self._by_group: dict[str, FilterTree[tuple[int, AccessRule]]] = {}
        self._prefix_lengths: set[int] = set()
        self._count = 0

    def add(self, rule: AccessRule) -> None:
        self._by_group.setdefault(rule.group, FilterTree()).add(rule.filter, (self._count, rule))
        if rule.group.endswith("*"):
            self._prefix_lengths.add(len(rule.group) - 1)
        self._count += 1

    def find(self, filter: TopicFilter, group: str | None) -> AccessRule | None:
        """Return the first rule that covers all that the filter matches, in this group (None: in all groups)."""
        patterns = {ANYBODY}
        if group is not None:
            patterns |= {group, *(group[:length] + "*" for length in self._prefix_lengths)}
        trees = (self._by_group.get(pattern) for pattern in patterns)
        found = [each for tree in trees if tree is not None for each in tree.find_covering(filter)]
        return min(found)[1] if found else None


class AccessRules:
    """All rules, by principal and right."""

    def __init__(self, rules: Iterable[AccessRule] = ()) -> None:
        self._rules: dict[tuple[str, Right], _RuleIndex] = {}
        for rule in rules:
            self._rules.setdefault((rule.principal, rule.right), _RuleIndex()).add(rule)

    def find_rule(
        self, principal: str, right: Right, filter: TopicFilter = ALL, group: str | None = None
    ) -> AccessRule | None:
        """Return the rule that allows it; None: it is refused. `group`: of rights on groups; None: of all groups."""
        for each in right.included_in:
            for whose in (principal, ANYBODY):
                index = self._rules.get((whose, each))
                if index is not None and (rule := index.find(filter, group)) is not None:
                    return rule
        return None

    def has_right(self, principal: str, right: Right) -> bool:
        """Return whether any rule allows the principal this right, on any topic or group."""
        return any((whose, each) in self._rules for each in right.included_in for whose in (principal, ANYBODY))


class ValidToken(Struct, frozen=True):
    """A token that was valid when it was read, for `remaining_s` from then on."""

    digest: bytes
    principal: str
    remaining_s: float


class AccessSnapshot(Struct, frozen=True):
    """All rules and valid tokens (by id) at one moment. `version`: which changes it includes, as the database says."""

    version: str
    rights: AccessRules
    tokens: Mapping[str, ValidToken]


def parse_right(text: str) -> Right:
    """Return the right of that name. Raise `UsageError`."""
    try:
        return Right(text)
    except ValueError:
        rule = f"a right is one of {', '.join(Right)}"
        raise text_error(UsageError, "right", text, rule, "Write one of them") from None


def check_principal(text: str, *, may_be_anybody: bool = False) -> str:
    """Return the text if it names a principal. Raise `UsageError`."""
    if may_be_anybody and text == ANYBODY:
        return text
    check_characters(UsageError, "principal", text)
    if (rule := find_broken_rule(text)) is not None:
        is_name = ":" not in text and find_broken_rule(f"user:{text}") is None
        raise text_error(UsageError, "principal", text, rule, f"Write user:{text if is_name else 'NAME'}")
    return text


def find_broken_rule(principal: str) -> str | None:
    """Return the rule that this breaks as the name of a principal; None: it is one."""
    if not 0 < len(principal) <= MAX_PRINCIPAL_CHARACTERS or not principal.isprintable() or " " in principal:
        return f"a principal has 1 to {MAX_PRINCIPAL_CHARACTERS} printable characters without blanks"
    if ANYBODY in principal or (":" not in principal and "." not in principal) or principal == "user:":
        return "a principal is user:NAME, or the URI or DNS name of a certificate, without *"
    return None


def _check_group_pattern(right: Right, group: str) -> None:
    if not right.is_on_groups and group != ANYBODY:
        rule = f"the right {right} is on topics, whatever the group"
        raise text_error(UsageError, "group", group, rule, "Leave --group out")
    name = group.removesuffix("*")
    if not group or ANYBODY in name or any(character in name for character in "/+#"):
        rule = "a rule is for the group of that name, for those that begin like team-*, or for all: *"
        raise text_error(UsageError, "group", group, rule, "Write one of these")
    if len(name) > MAX_GROUP_CHARACTERS:
        rule = f"a group's name has at most {MAX_GROUP_CHARACTERS} characters, this one has {len(name)}"
        raise text_error(UsageError, "group", group, rule, "Shorten it")
    check_characters(UsageError, "group", group)
