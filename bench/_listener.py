"""A process that hears itself what a database's publishers tell nodes: `python -m bench._listener URL`.

It ends with its standard input.
"""

from __future__ import annotations

import sys

from sublet_borrower.new_data.postgres_head_listener import subscribe_heads


def main(url: str) -> None:
    """Hear, and do nothing about it."""
    stop = subscribe_heads(url, lambda heads: None)
    sys.stdin.read()
    stop()


if __name__ == "__main__":
    main(sys.argv[1])
