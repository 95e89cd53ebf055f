"""`python -m tests.fuzz --target arrow --executions N [--seed S] [--first F]`: N executions in child processes, of that
seed those from number F on: a run so goes on where another one ended.

It fails, with exit code 1, where a child is ended by a signal, raises what nobody should get, needs more memory than
`MEMORY_BYTES` beyond what it had, or is at one execution for longer than `HANGS_S`. Each failure is printed with how to
repeat it: `--only NUMBER` runs that execution alone, in this process.
"""

from __future__ import annotations

import argparse
import mmap
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import arrow, command_line, faults, text, wire

TARGETS: dict[str, Callable[[int, int], bool]] = {
    "arrow": arrow.execute,
    "command_line": command_line.execute,
    "text": text.execute,
    "wire": wire.execute,
    "faults": faults.execute,
}
ROOT = Path(__file__).parents[2]
MEMORY_BYTES = 512 << 20
"""Of address space: a block and what is made of it are a fraction of that."""

HANGS_S = 300
MAX_FAILURES = 10
NOTE = struct.Struct("<qq")
"""What a child notes: the execution it is at, and how many were decoded so far."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=sorted(TARGETS), default="arrow")
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="the first execution (default: 0)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this execution alone, in this process")
    parser.add_argument("--child", nargs=3, metavar=("FIRST", "END", "NOTES"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    execute = TARGETS[options.target]
    if options.only is not None:
        print("decoded" if execute(options.seed, options.only) else "refused")  # noqa: T201
        return 0
    if options.child:
        first, end, notes = options.child
        run_child(execute, options.seed, range(int(first), int(end)), Path(notes))
        return 0
    numbers = range(options.first, options.first + options.executions)
    begun = time.monotonic()
    decoded, failures = run(options.target, options.seed, numbers)
    for failure in failures:
        print(failure)  # noqa: T201
    print(  # noqa: T201
        f"{options.target}, seed {options.seed}, executions {numbers.start} to {numbers.stop}: {decoded} decoded, "
        f"{len(failures)} failures, {len(numbers) / (time.monotonic() - begun):.0f} a second"
    )
    return 1 if failures else 0


def run(target: str, seed: int, numbers: range) -> tuple[int, list[str]]:
    """Return how many of these executions were decoded, and the failures."""
    failures: list[str] = []
    first, decoded = numbers.start, 0
    with tempfile.TemporaryDirectory() as directory:
        notes = Path(directory) / "notes"
        while first < numbers.stop and len(failures) < MAX_FAILURES:
            notes.write_bytes(NOTE.pack(first, 0))
            own = ["--target", target, "--seed", str(seed)]
            child = subprocess.run(
                [sys.executable, "-m", "tests.fuzz", *own, "--child", str(first), str(numbers.stop), str(notes)],
                cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            at, done = NOTE.unpack(notes.read_bytes())
            decoded += done
            if child.returncode == 0:
                break
            how = signal.Signals(-child.returncode).name if child.returncode < 0 else child.stderr.strip()
            again = f"python -m tests.fuzz --target {target} --seed {seed} --only {at}"
            failures.append(f"execution {at}: {how}\n  again: {again}")
            first = at + 1
    return decoded, failures


def run_child(execute: Callable[[int, int], bool], seed: int, numbers: range, notes: Path) -> None:
    """Run these executions, and note which one it is at before each."""
    execute(seed, 0)  # all is loaded then
    limit_memory()
    decoded = 0
    with notes.open("r+b") as file, mmap.mmap(file.fileno(), NOTE.size) as shared:
        for number in numbers:
            shared[:] = NOTE.pack(number, decoded)
            signal.alarm(HANGS_S)
            decoded += execute(seed, number)
        signal.alarm(0)
        shared[:] = NOTE.pack(numbers.stop, decoded)


def limit_memory() -> None:
    """Let the process grow by so much and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
