"""Publish-subscribe between one agent and one node over a long poll (after Ray's).

A node is a *publisher* to its agents; an agent is a *subscriber* of each node it is connected to. Between one agent and
one node there is at most one held poll, however many keys are subscribed, and at most one batch of commands in flight.

Up go **commands** (subscribe, unsubscribe, a message), first in, first out, in numbered batches: a batch repeated under
its number is answered again and not executed again. Down come **deliveries**, numbered, out of a bounded **mailbox**:
they stay there until the next poll acknowledges them, so a lost reply is simply given again, and the subscriber sees
each once. A mailbox that overflows drops what waits on its fullest channel and reports it in one `MailboxOverflow`.

There are two kinds of channels. On a **log** channel every message matters: each names its predecessor, the message
before it on this channel to this subscriber. On a **state** channel only the newest value per key matters: it bears a
version, a subscribe is answered with the current value, and a value that still waits is replaced by a newer one.

Each process of a node is an **incarnation**, and each incarnation of a subscriber has a **subscriber id**. A node that
does not know a subscriber id reports that, and never answers with an empty success. Doubt on either side ends the
incarnation of the subscriber: the agent is notified of one lost connection, and the machine begins again under a new
subscriber id and subscribes again.

`model` has the values; `node_side_machine` (with `subscriber_mailbox`, `channel_subscribers`, `node_side_replies`) and
`agent_side_machine` (with `agent_side_events`) are the pure machines; `server` and `node_connection` (with
`callback_registry`) the shells with sockets, time and randomness. Bodies, of any kind, are opaque to all but `wire`.
Both sides count (`counters`) and can list leaks (`find_leaks`). `docs/pubsub.md` is the page for users.
"""
