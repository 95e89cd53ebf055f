"""Every public error, by name."""

from sublet_protocol.domain.errors import *  # noqa: F403 each of them, and functions that need no name here
