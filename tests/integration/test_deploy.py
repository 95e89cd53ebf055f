"""What the image asks a node by, with a real one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.integration.cli_kit import Shell

SCRIPT = Path(__file__).parents[2] / "deploy" / "healthcheck.py"


def healthy(address: str) -> bool:
    return subprocess.run([sys.executable, SCRIPT, address], stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_a_node_is_healthy_as_long_as_it_serves(shell: Shell) -> None:
    node = shell.leader("n1")
    (address,) = re.findall(r"serves on (\S+)", node.err)
    assert healthy(address)
    node.kill()
    assert not healthy(address)
