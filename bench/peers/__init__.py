"""Message systems under measurement: sublet under each notification driver, and its peers.

Each starts its server in a private directory on a free port of this machine, publishes at a given pace and consumes;
`bench.latency` lets them take turns. A peer whose server or library is not installed reports how to get it and is left
out.
"""
