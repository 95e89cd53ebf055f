"""`python -m bench [NAME ...]`: run the named benches, or all, with their defaults; `python -m bench NAME OPTION ...`:
run one of them with options of its own, of which `--help` tells."""

from __future__ import annotations

import importlib
import pkgutil
import signal
import sys
from itertools import takewhile

import bench


def main(arguments: list[str]) -> int:
    """Run each; a bench is a module of this package with a `main(arguments)`."""
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
    # So that servers and directories of a bench go with it, as they do at Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name in names or known:
        print(f"== {name}", flush=True)
        importlib.import_module(f"bench.{name}").main(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
