"""News: that something in the database has changed, told to whoever would otherwise have found out by looking.

What is true is in Postgres, and only there. News makes looking earlier: if all of it is lost, everything is as correct
as before, only later. So nobody waits for news, nobody answers it, and nothing is stored for it.

A **change** (`changes`) says of one object, a stream or a group or a space or a node, that it is at this version now,
or was deleted at it. Versions only grow, so that changes may come late, twice or in another order: the newer one stays.

A **publisher** is a process that changes things and tells of it (`publisher`). It has a name of its own; each life of
it is an *incarnation*, unlike any other. What it says goes out on one channel per kind of object, numbered, each
message naming its predecessor. It begins with a *hello*, repeats it when it has been silent for `hello_interval_s`, and
says when it leaves. While news waits to be sent, the newest of each object is all that is kept (`publisher_machine`).

A **listener** (`subscriber`) knows from that what it has missed: a message whose predecessor it has not seen, a hello
that is ahead, another incarnation, a connection that was lost, a publisher that is silent for longer than it should be.
It does not ask for what was lost. It reads the present state from the database (`snapshot`) and that is that: a
*catch-up*. One read covers whatever was missed before it began; reads are limited in rate and spread in time, so that
many listeners that lose the same thing do not all come at once (`subscriber_machine`). What is known is kept by
version, with tombstones for what was deleted, so that an old story told late changes nothing (`change_cache`).

How bytes get from one to the other is a **driver's** business (`drivers.base`, `drivers.registry`): `drivers.poll`
moves nothing and leaves it all to regular catch-ups, `drivers.postgres` uses LISTEN and NOTIFY, `drivers.zmq` connects
processes directly. A driver may lose, repeat and reorder. Who listens where is in the directory of nodes.

`publisher_machine`, `subscriber_machine` and `change_cache` are pure: no clock, no randomness, no threads. `publisher`
and `subscriber` are the shells around them, with the threads and the connections.
"""
