"""`python -m bench [NAME ...]`: run the named benches, or all, with their defaults."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import bench


def main(names: list[str]) -> int:
    """Run each; a bench is a module of this package with a `main(arguments)`."""
    known = [module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_")]
    if unknown := set(names) - set(known):
        print(f"no such bench: {', '.join(sorted(unknown))}. There are: {', '.join(known)}.", file=sys.stderr)
        return 2
    for name in names or known:
        module = importlib.import_module(f"bench.{name}")
        if hasattr(module, "main"):
            print(f"== {name}", flush=True)
            module.main([])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
