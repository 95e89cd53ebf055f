"""An agent's key proves its id, and is shown nowhere."""

from __future__ import annotations

import copy
import hashlib
import pickle
import subprocess
import sys

import pytest

from sublet_protocol.messages.agent_secret import (
    KEY_BYTES,
    AgentSecret,
    derive_agent_id,
    is_borrower_of,
    is_key_of,
    parse_agent_id,
)
from sublet_protocol.pubsub import wire
from sublet_protocol.pubsub.agent_side_events import CallPoll, SendCommands

pytestmark = pytest.mark.conforms("X5")


def test_an_id_is_the_hash_of_its_key() -> None:
    """As clients in any language make it: RFC 4648, in lower case."""
    assert derive_agent_id(bytes(32)) == "mzuhvlpymk6xo3epygfy5h4oea"
    key = AgentSecret("host:7")
    assert key.agent_id == f"host:7:{derive_agent_id(key.reveal())}"
    assert len(key.reveal()) == KEY_BYTES
    assert hashlib.sha256(key.reveal()).digest() != key.reveal()
    assert AgentSecret().agent_id.isalnum()


def test_no_two_agents_have_one_key() -> None:
    keys = [AgentSecret("host:7") for _ in range(100)]
    assert len({key.reveal() for key in keys}) == len({key.agent_id for key in keys}) == 100


def test_a_key_proves_its_own_id_only() -> None:
    mine, other = AgentSecret("host:7"), AgentSecret("host:7")
    assert all(is_key_of(mine.reveal(), f"{mine.agent_id}.{life}") for life in ("1", "2", ""))
    for claimed in (f"{other.agent_id}.1", mine.agent_id, "", ".", ".1", "agent", f"{mine.agent_id}:.1"):
        assert not is_key_of(mine.reveal(), claimed), claimed
    for key in (b"", mine.reveal()[:-1], mine.reveal() + b"x", other.reveal(), mine.agent_id.encode()):
        assert not is_key_of(key, f"{mine.agent_id}.1")
    assert not is_key_of(b"short", f"{derive_agent_id(b'short')}.1"), "one that could be guessed"


def test_a_label_makes_nobody_another() -> None:
    """Whatever stands before it, what counts is the last part."""
    mine, victim = AgentSecret(), AgentSecret("host:7")
    for label in (victim.agent_id, f"{victim.agent_id}.1", f"{victim.agent_id}/1", "é"):
        subscriber_id = f"{label}:{mine.agent_id}.1"
        assert is_key_of(mine.reveal(), subscriber_id)
        assert parse_agent_id(subscriber_id) != victim.agent_id
        assert not is_borrower_of(parse_agent_id(subscriber_id), f"{victim.agent_id}/1")
    assert not is_key_of(mine.reveal(), f"{mine.agent_id}:{victim.agent_id}.1")


def test_a_request_is_checked_and_loses_its_key() -> None:
    key, other = AgentSecret(), AgentSecret()
    for life in (f"{key.agent_id}.1", f"{other.agent_id}.1"):
        for request in (
            wire.encode_batch_request(SendCommands(life, 1, 1, ()), key),
            wire.encode_poll_request(CallPoll(life, 1, 0, "", 1.0), key),
        ):
            assert request.agent_key == key.reveal()
            assert wire.take_agent_key(request) == (parse_agent_id(life) == key.agent_id)
            assert request.agent_key == b""


def test_a_key_is_in_no_repr_and_no_pickle() -> None:
    key = AgentSecret("host:7")
    assert repr(key) == str(key) == f"{key}" == f"AgentSecret of {key.agent_id}"
    assert not hasattr(key, "__dict__")
    for dump in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in its process") as refusal:
            dump(key)
        assert key.reveal().hex() not in str(refusal.value)


FORKING = """
import os
from sublet_borrower.util.session_fork_guard import new_agent_key

before = new_agent_key()
if os.fork() == 0:
    print(before.agent_id, new_agent_key().agent_id, os.getpid(), flush=True)
    os._exit(0)
os.wait()
print(before.agent_id, new_agent_key().agent_id, os.getpid())
"""


def test_a_fork_is_another_agent() -> None:
    """And its id shows people in which process it runs."""
    output = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=True).stdout
    child, parent = (line.split() for line in output.splitlines())
    assert len({child[0], child[1], parent[1]}) == 3
    for agent_id, pid in (child[1:], parent[1:]):
        assert agent_id.split(":")[1] == pid
