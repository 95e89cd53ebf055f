"""A publisher to be killed: publishes counted messages and prints the number of each once it is acknowledged."""

from __future__ import annotations

import sys

from sublet_storage.producer import Publisher


def main(url: str) -> None:
    with Publisher(url, block_messages=20) as publisher:
        count = 0
        while True:
            deliveries = [publisher.publish(f"t/{each % 3}", b"%d" % each) for each in range(count, count + 50)]
            for delivery in deliveries:
                delivery.result()
                print(count, flush=True)  # noqa: T201
                count += 1


if __name__ == "__main__":
    main(sys.argv[1])
