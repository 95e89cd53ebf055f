"""Runs the command line as `python -m sublet.cli`, where no `sublet` is installed."""

from __future__ import annotations

from sublet.cli import main

if __name__ == "__main__":
    main()
