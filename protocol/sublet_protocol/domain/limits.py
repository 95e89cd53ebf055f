"""The limits on what a peer controls, each in one place (table: docs/limits.md).

A value beyond its bound is refused before anything is built from it, with an error for its sender; what can be split is
split by its sender. A limit holds at every way in, so that nothing is stored that is refused later.
"""

from __future__ import annotations

import operator

MAX_PUBLISH_BYTES = 4 << 20
"""Largest request to publish, in bytes."""
MAX_REQUEST_BYTES = 1 << 20
"""Largest request to read, with its bookmark, in bytes. Those of other methods are smaller."""
MAX_SESSION_REQUEST_BYTES = 768 << 10
"""Largest batch of commands, in bytes: 2 bytes of it may take 100 in the node's memory."""
ENVELOPE_BYTES = 8 << 10
"""Left in a request for what stands around its content: ids, keys and numbers."""
MAX_COMMAND_BYTES = MAX_SESSION_REQUEST_BYTES - ENVELOPE_BYTES
"""Largest command, and all commands of a batch together, in bytes."""

MAX_TOPIC_BYTES = 4096
"""Longest topic, or filter, in bytes of UTF-8. A filter of a group or a space that does not compress is refused from
some 2 500 bytes on: Postgres takes no more in an index."""
MAX_TOPIC_LEVELS = 128
"""Most levels of a topic, or a filter."""
MAX_GROUP_CHARACTERS = 255
"""Longest name of a group, in characters."""
MAX_SUBSCRIPTION_BYTES = len("$share//") + 4 * MAX_GROUP_CHARACTERS + MAX_TOPIC_BYTES
"""Longest subscription, which is also the longest key of a channel, in bytes of UTF-8."""
MAX_ID_BYTES = 255
"""Longest name of a session, and id of an agent, a subscriber, a borrower or a producer, in bytes of UTF-8; all of its
characters are printable."""
MAX_START_BYTES = 64
"""Longest `starting_position`, in bytes."""
MAX_EXPLANATION_CHARACTERS = 2000
"""Longest text for people: a reason, a detail, a read error."""

MAX_COMMANDS = 1_000
"""Most commands in a batch."""
MAX_ITEMS = 10_000
"""Most items in all commands of a batch together: borrowers, streams, and 1 for a command without either."""
MAX_BORROWERS = 1_000
"""Most borrowers in a ping; each is in it once."""
MAX_STREAMS = 10_000
"""Most streams in a message; each is in it once."""
MAX_HEADS_BYTES = 12 * MAX_STREAMS + ENVELOPE_BYTES
"""Largest request for heads of streams, in bytes."""
MAX_BOOKMARK_STREAMS = 40_000
"""Most streams in a bookmark: as many as fit into a request."""

MAX_NUMBER = 2**53
"""Greatest number of a borrower, an incarnation or a batch."""
MAX_STEP = 2**32
"""The most by which a producer's incarnation, or its batch number, grows at a time."""
MIN_WEIGHT, MAX_WEIGHT = 0.001, 10_000.0
"""Least and greatest weight of a consumer."""
MAX_WEIGHTS = 1_000
"""Most sessions of a group whose weights operators have set."""
MAX_HOLD_S = 86_400.0
"""How long in seconds what is in doubt may be reserved for its session."""

MAX_DIMENSIONS = 8
"""Most numbers of an epoch."""
MIN_EPOCH, MAX_EPOCH = -(2**63), 2**63 - 2
"""Each of an epoch's numbers is a 64-bit integer, and none the largest: something must be left to come after it."""
MAX_ANTICHAIN = 1_000
"""Most epochs of a frontier, and where epochs have several numbers, most that all publishers of a space hold
together."""
MAX_HELD_EPOCHS = 10_000
"""Where epochs have several numbers, most that all publishers of a space hold, each counted for each that holds it."""
MAX_HELD_BACK_BYTES = 4 << 20
"""Of the streams of an atomic group in a space that are not read to their heads: what is consumed of their epochs, as
stored, in bytes. While it is more, the group's consumed frontier stays where it is, and messages are delivered as
ever."""
MAX_HEADERS = 100
"""Most headers of a message."""
MAX_HEADER_BYTES = 16 << 10
"""The headers of a message, names and values together, in bytes."""

MAX_CALLS_OF_CONNECTION = 1_024
"""Most calls under way on one connection to a node; a client's next one waits."""
HANDSHAKE_TIMEOUT_S = 5.0
"""How long in seconds a new connection may take until HTTP/2 is spoken on it, TLS included; then it is closed."""
MAX_CERTIFICATE_BYTES = 16 << 10
"""Largest certificate of a client, in bytes of DER: its name is read in each call."""
IDLE_CONNECTION_S = 30.0
"""How long in seconds a connection without a call stays open; and after so long without a byte, with one, its other
side must answer a ping."""
MAX_PUBLIC_CALLS_OF_ADDRESS = 32
"""Most calls of gRPC's health service, which needs no token, under way from one address (IPv6: from a /64)."""
MAX_PUBLIC_REQUEST_BYTES = 1_024
"""Largest request of such a call, in bytes."""
PUBLIC_REQUEST_TIMEOUT_S = 5.0
"""How long in seconds the request of such a call may take to come."""
MAX_CALLS_OF_PRINCIPAL = 2_000
"""Most calls of `Session/Commands` under way for one principal at an authenticating node, of `Session/Poll`, and of
`Feed/Publish`."""
MAX_BATCHES_OF_PRINCIPAL = 32
"""Most batches of commands of one principal that such a node reads and executes at a time; its others wait unread."""
REQUEST_TIMEOUT_S = 10.0
"""How long in seconds the request of a call of these may take to come, once it is its turn."""
MAX_POLLS_OF_SUBSCRIBER = 4
"""Most polls of a subscriber id under way: held, or answered and not taken yet."""
MAX_SUBSCRIBERS_OF_CONNECTION = 1_000
"""Most subscriber ids on one connection to a node."""
MAX_SUBSCRIBERS_OF_PRINCIPAL = 1_000
"""Most subscriber ids of one principal at an authenticating node."""
MAX_WATCHERS_OF_PRINCIPAL = 16
"""Most subscriber ids of one principal at an authenticating node that watch the same group, and that watch all: each
event is queued for each of them."""
MAX_WATCHES_OF_PRINCIPAL = 1_000
"""Most subscriptions to events of groups that all subscriber ids of one principal at an authenticating node have
together: each is checked again after a change of a rule or token. One to all groups replaces many."""
MAX_FOLLOWERS_OF_PRINCIPAL = 256
"""Most subscriber ids of one principal at an authenticating node that are sent the heads of the same stream, and of all
streams. Sessions of more poll."""
MAX_UNREAD_BYTES_OF_PRINCIPAL = 64 << 20
"""What the subscriber ids of one principal at an authenticating node have not taken yet, together, in bytes of memory:
messages, and errors of batches. From half of it on a new batch is refused; beyond it messages turn into a gap."""
MAX_SUBSCRIBERS = 20_000
"""Most subscriber ids of a node."""
MAX_BORROWERS_OF_PRINCIPAL = 10_000
"""Most sessions of one principal at an authenticating node; at others, of one agent. A borrower that another one
replaces counts for a second more."""
MAX_BORROWERS_OF_NODE = 100_000
"""Most sessions at a node."""
MAX_GROUPS_PER_MINUTE = 60
"""Most groups that come into being in a minute for one principal, where nodes authenticate; the next waits."""
MAX_SESSION_NAMES_OF_PRINCIPAL = 10_000
"""Most names of sessions that are one principal's, where nodes authenticate."""
MAX_SESSION_NAMES_OF_USER = 100_000
"""Most names of sessions that one user of the database draws epochs for, those that are a principal's aside."""
MAX_SUBSCRIPTIONS = 10_000
"""Most subscriptions of an agent."""
MAX_KEY_BYTES = 64 << 20
"""The keys of all subscriptions at a node together, in bytes; those of one principal have as many as are left free."""
MAX_PARTIAL_BYTES_OF_NODE = 128 << 20
"""What a node keeps of reclaims and disconnects in parts whose last one has not come, in bytes of memory,
approximately: 320 for each stream, 64 for each of its epochs, 32 for each of their numbers. Those of one principal,
where callers are not known of one agent, have as many as are left free. What finds no room is dropped, and its sender
repeats it."""
MAX_PARTIAL_BYTES_OF_AGENT = 32 << 20
"""Of these, those of one agent. A message that is larger alone ends its sender, as denied."""
PARTIAL_TIMEOUT_S = 60.0
"""How long in seconds a node waits for the next part of a message; and no longer than the subscriber id of its agent is
served."""
MAX_CACHED_FILTERS = 256
"""Most compiled filters that a process keeps."""
MAX_CACHED_BYTES = 1 << 20
"""What a cache keeps of texts that peers send, in bytes of their UTF-8."""
MAX_NOTIFICATIONS_PER_S = 1_000
"""Most notifications that a node takes in in a second; after more it reads the database once instead."""
MAX_NOTIFIED_CHANGES_PER_S = 20_000
"""Most changes, of all notifications, that a node takes in in a second; after more it reads the database instead."""
MAX_NOTIFICATION_BYTES = 6_000
"""Longest notification, in bytes."""
MAX_QUEUED_NOTIFICATION_BYTES = 4 << 20
"""Most bytes of notifications that wait in a node; one more is dropped, and the node reads the database instead."""
MAX_NOTIFIED_CACHE_BYTES = 16 << 20
"""What a node keeps of changes that it was notified of and has not read yet, in bytes; of more, the newest."""
MAX_TOMBSTONE_BYTES = 8 << 20
"""What a node keeps of objects that were deleted, in bytes; of more, the newest."""
SLICE_ITEMS = 200
"""Most items of a batch of commands executed before other senders have their turn."""
SLICE_S = 0.005
"""Most seconds that a batch of commands is executed before other senders have their turn."""


def to_integer(value: object) -> int | None:
    """Return what a user gave for an integer, of any integral type, such as numpy's; None: it is none, or a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def parse_natural(text: str, maximum: int) -> int | None:
    """Return a whole number from 0 to `maximum` in ASCII digits; None if the text is none. A longer text is not parsed:
    Python refuses to, from 4301 digits on."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(maximum))):
        return None
    number = int(text)
    return number if number <= maximum else None
