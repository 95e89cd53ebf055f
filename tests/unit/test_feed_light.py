"""A client without access to the database needs neither the leader's libraries nor the command line's."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.test_light_imports import HEAVY, REPOSITORY


def test_the_feeds_client_is_light() -> None:
    story = (
        "import sys, sublet; sublet.Feed('127.0.0.1:1').close(); "
        f"loaded = [module for module in {(*HEAVY, 'leader')!r} if module in sys.modules]; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", story], cwd=REPOSITORY, check=True)
