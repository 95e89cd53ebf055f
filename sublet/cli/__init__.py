"""The command line `sublet`.

Answers go to stdout, as text for people or, with `--json`, as one object per command and one per line for messages.
Progress, prose and errors go to stderr. `base.command` gives every command the common options and endings (exit codes,
signals, one sentence per error); `base.output` writes; each other folder is one group of commands.

What a command needs is imported when it runs: `sublet --help` must not wait for Arrow and gRPC.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys

_MAX_YOUNG_OBJECTS = 10_000
"""Before garbage is collected: by Python's default it is 300 times while a command's libraries are loaded."""


def main() -> None:
    """Run `sublet`. Ctrl-C ends it cleanly from the beginning, also while libraries are loaded."""
    gc.set_threshold(_MAX_YOUNG_OBJECTS, *gc.get_threshold()[1:])
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # stderr has the command's own sentences
    if isinstance(sys.stdout, io.TextIOWrapper):  # whatever the locale is, no message is one that cannot be printed
        encoding = None if sys.stdout.isatty() else "utf-8"
        sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")
    try:
        _run_app()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as error:  # a help that cannot be written: commands end their errors themselves
        from sublet.cli.base.command import drop_unwritten

        drop_unwritten()
        sys.stderr.write(f"sublet: {error}.\n")
        sys.exit(1)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # at exit an exception would only be printed
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


def _run_app() -> None:
    try:
        from sublet.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich", "click"):
            raise
        sys.stderr.write(
            f"sublet: the command line needs the package {missing.name}. Run: pip install 'sublet[leader]'\n"
        )
        sys.exit(1)
    app(prog_name="sublet")
