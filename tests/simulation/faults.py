"""`python -m tests.simulation.faults`: plants each fault in a copy of the tree and reports the first seed that fails.

What it prints belongs into `caught` of `faults.toml`. Exit code 1 if a fault is not noticed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from tools.mutations.entries import SIMULATED, Mutant, load, planted
from tools.mutations.trial import Copy
from tools.source_path import source_path

_FOUND = re.compile(r"^SEED=(\d+): (.*)$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.faults", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these alone")
    parser.add_argument("--seeds", type=int, default=1000, help="how many at most")
    options = parser.parse_args()
    root = Path.cwd()
    here = (root / SIMULATED).read_text(encoding="utf-8")
    mutants = [m for m in load(root) if f'name = "{m.name}"' in here and (not options.only or m.name in options.only)]
    missed = 0
    with Copy(root) as copy:
        for mutant in mutants:
            found = _first(copy, mutant, options.seeds)
            missed += found is None
            sys.stdout.write(f"{mutant.name}\n    {found or 'NOT NOTICED'}\n")
            sys.stdout.flush()
    return 1 if missed else 0


def _first(copy: Copy, mutant: Mutant, seeds: int) -> str | None:
    """Return `seed 17: the checker's message`; None if no seed fails."""
    how = ["--start", "0", "--seeds", str(seeds), "--processes", "1", "--first"]
    command = [sys.executable, "-m", "tests.simulation", *how]
    environment = {**os.environ, "PYTHONPATH": source_path(copy.root), "PYTHONDONTWRITEBYTECODE": "1"}
    with copy.changed(mutant.file, planted(mutant, (copy.root / mutant.file).read_text(encoding="utf-8"))):
        done = subprocess.run(command, cwd=copy.root, env=environment, capture_output=True, text=True, check=False)
    if " seeds in " not in done.stdout:
        raise RuntimeError(f"the seeds did not run with {mutant.name!r} planted: {done.stderr or done.stdout}")
    found = sorted((int(seed), said) for seed, said in _FOUND.findall(done.stdout))
    return f"seed {found[0][0]}: {found[0][1]}" if found else None


if __name__ == "__main__":
    sys.exit(main())
