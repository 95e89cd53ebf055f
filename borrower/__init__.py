"""What a consumer runs.

A **session** is the thing that consumes: a plain Python process, a Spark executor task. It embeds an **agent**, which
keeps one **borrower** per subscription. A borrower is one subscription's counterpart to one leader: it looks for the
leader, keeps in touch, receives streams, gives them back, and passes progress on. It is never repaired: on any doubt
it is destroyed and the agent makes another under a new id, which asks the next leader to confirm what its predecessor
held. The session's running calls go on meanwhile.

`machine` holds the pure part (borrower and agent), `agent` the thread that moves their messages over gRPC, `reader`
reads blocks straight from Postgres (and `node_reader` by way of nodes, for those who cannot), `session` joins the two
for Python users, `spark` hosts sessions inside Spark.
This package never imports `leader`.
"""
