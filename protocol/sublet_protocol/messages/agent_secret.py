"""Agent keys, with which an agent proves its id to any node in every request.

An agent draws random bits, its key, and its id ends in their hash. So the id need not be secret, and a node
needs neither a registry nor stored state to check whether a request is from that agent.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

from sublet_protocol.domain.grant_keys import SecretBytes

KEY_BYTES = 32
ID_CHARACTERS = 26
"""Of the hash: 130 bits of it."""


class AgentSecret(SecretBytes):
    """The key of one agent, for one incarnation of its process. `label` is for people: where the agent runs.

    It is drawn and never stored: a process that is forked or started again makes another, and is another agent.
    """

    __slots__ = ("agent_id",)

    def __init__(self, label: str = "") -> None:
        super().__init__(secrets.token_bytes(KEY_BYTES))
        proven = derive_agent_id(self._value)
        self.agent_id = f"{label}:{proven}" if label else proven

    def __repr__(self) -> str:
        return f"AgentSecret of {self.agent_id}"


def derive_agent_id(key: bytes) -> str:
    """Return what an agent's id ends in: the hash of its key, in lower case base32."""
    return base64.b32encode(hashlib.sha256(key).digest()).decode().lower()[:ID_CHARACTERS]


def parse_agent_id(subscriber_id: str) -> str:
    """Return the id of the agent that has this subscriber id, of one incarnation of its connection to a node."""
    return subscriber_id.rpartition(".")[0]


def is_key_of(key: bytes, subscriber_id: str) -> bool:
    """Return whether the subscriber id is that of the agent with this key."""
    claimed = parse_agent_id(subscriber_id).rpartition(":")[2]
    return len(key) == KEY_BYTES and hmac.compare_digest(derive_agent_id(key).encode(), claimed.encode())


def is_borrower_of(agent_id: str, borrower_id: str) -> bool:
    """Return whether only this agent may name the borrower so."""
    return borrower_id.startswith(f"{agent_id}/")
