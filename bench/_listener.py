"""A direct listener of a database's notifications: `python -m bench._listener URL`.

It ends when its standard input is closed.
"""

from __future__ import annotations

import sys

from sublet_borrower.new_data.postgres_head_listener import subscribe_heads


def main(url: str) -> None:
    """Listen, and ignore what is received."""
    feed = subscribe_heads(url, lambda heads: None, lambda is_listening: None)
    sys.stdin.read()
    feed.stop()


if __name__ == "__main__":
    main(sys.argv[1])
