"""What is known by notifications."""

from __future__ import annotations

from sublet_storage.notify.changes import ObjectChange
from sublet_storage.notify.version_cache import VersionCache


def list_objects(cache: VersionCache, kind: str) -> dict[str, ObjectChange]:
    """All living objects of a kind, by key."""
    return {key: entry.change for key, entry in cache.live.get(kind, {}).items()}
