"""Systems that carry messages from a publisher to a consumer: ours under each notification driver, and its peers.

Each brings its server up in a private directory on a free port of this machine, publishes at a given pace and consumes;
`bench.latency` lets them take turns. A peer whose server or library is not installed says how to get it and is
left out.
"""
