"""Notifications that something in the database has changed, from publishing processes to nodes.

The state is in Postgres, and only there. A notification makes a node read it earlier: if all are lost, everything is as
correct as before, only later. So nothing waits for notifications, answers them or stores them.

A **change** (`changes`) states that one object (a stream, group, space or node) is at this version now, or was deleted
at it. Versions only grow, so changes may come late, twice or in another order: the newer one stays.

A **publisher** is a process that makes changes and notifies of them (`publisher`). It has a name of its own; each
process of that name is an *incarnation*. Its messages go out on one channel per kind of object, numbered, each naming
its predecessor. It begins with a *hello*, repeats it when it has been silent for `hello_interval_s`, and sends when it
leaves. Of changes that wait to be sent, only the newest of each object is kept (`publisher_machine`).

A **subscriber** (`subscriber`) sees from that what it has missed: a message whose predecessor it has not seen, a hello
that is ahead, another incarnation, a lost connection, a publisher that is silent for too long. It does not request what
was lost but reads the present state from the database (`catch_up_reads`): a *catch-up*. One read covers whatever was
missed before it began; reads are limited in rate and spread in time, so that many subscribers that miss the same
message do not all read at once (`subscriber_machine`). What is known is stored by version, with tombstones for what was
deleted, so that an old message that arrives late changes nothing (`version_cache`).

A **driver** moves the bytes (`drivers.base`, `drivers.registry`): `drivers.no_push` moves nothing and leaves it all to
regular catch-ups, `drivers.postgres` uses LISTEN and NOTIFY, `drivers.zmq` connects processes directly. A driver may
lose, repeat and reorder. The directory of nodes has every subscriber's endpoint.

`publisher_machine`, `subscriber_machine` and `version_cache` are pure: no clock, no randomness, no threads. `publisher`
and `subscriber` are the shells around them, with the threads and the connections.
"""
