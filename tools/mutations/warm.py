"""Runs pytest in forks of a process that has imported the libraries, which are most of the time before the first test.

A request is a line of JSON on stdin: the file for the output, variables of the environment, and pytest's arguments. Its
answer is two lines: the pid, which is also that of a process group, and the exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys

LIBRARIES = ("pytest", "hypothesis", "numpy", "pyarrow.compute", "grpc", "psycopg", "psutil", "alembic.command")
"""What most tests import, and nothing of ours: a fault may be planted there."""


def main() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            sys.exit(_run(*json.loads(line)))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(output: str, environment: dict[str, str], arguments: list[str]) -> int:
    os.setpgid(0, 0)
    os.environ |= environment
    for stream, path in enumerate((os.devnull, output, output)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
    return int(importlib.import_module("pytest").main(arguments))


if __name__ == "__main__":
    main()
