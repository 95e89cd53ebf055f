"""`python -m bench [NAME ...]`: runs the named benches, or all of them, with their defaults.

`python -m bench NAME OPTION ...` runs one of them with options, which `--help` lists.
"""

from __future__ import annotations

import importlib
import pkgutil
import signal
import sys
from itertools import takewhile

import bench


def main(arguments: list[str]) -> int:
    """Run each bench: a module of this package with a function `main(arguments)`."""
    modules = [module for module in pkgutil.iter_modules(bench.__path__) if not module.ispkg]
    known = [module.name for module in modules if not module.name.startswith("_")]
    names = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    options = arguments[len(names) :]
    if unknown := set(names) - set(known):
        print(f"no such bench: {', '.join(sorted(unknown))}. There are: {', '.join(known)}.", file=sys.stderr)
        return 2
    if options and len(names) != 1:
        print(f"{' '.join(options)}: of which bench? Name one of {', '.join(known)} before.", file=sys.stderr)
        return 2
    # End like Ctrl-C, so that a bench's servers and directories are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name in names or known:
        print(f"== {name}", flush=True)
        importlib.import_module(f"bench.{name}").main(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
