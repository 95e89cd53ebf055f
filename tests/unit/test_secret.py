"""`Secret`: whatever prints, formats, encodes, copies or pickles one has `***`; files are read anew."""

from __future__ import annotations

import ast
import copy
import dataclasses
import gc
import json
import logging
import os
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sublet.cli.base.json_logging import JsonFormatter
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.secret import (
    MAX_FILE_BYTES,
    ReloadingSecretFile,
    Secret,
    SecretFilter,
    hide_secrets,
    hide_secrets_in_records,
    read_secret_setting,
)
from tests.kit import WAIT_S, private_file

ROOT = Path(__file__).parents[2]
FOLDERS = ("protocol", "storage", "leader", "borrower", "sublet", "examples", "tools", "bench", "migrations")
VALUE = 'pl"nted\\ s3cret'
REVEALED = {
    "protocol/sublet_protocol/domain/secret.py": 1,  # a file, when the setting is read: it is there
    "storage/sublet_storage/db/database_url.py": 1,  # parsed
    "borrower/sublet_borrower/spark/common/database_credentials.py": 1,  # what a function has returned
    "leader/sublet_leader/http/auth.py": 1,  # compared
    "leader/sublet_leader/http/settings.py": 1,  # checked
    "protocol/sublet_protocol/domain/access/token.py": 1,  # hashed, when it is made
    "protocol/sublet_protocol/gate/client_access_token.py": 2,  # checked, and into the metadata of each call
    "sublet/cli/access/tokens.py": 1,  # shown, once
    "sublet/demo/runner.py": 1,  # into the environment of its processes: an embedded server's, which has no password
    "examples/_stage.py": 2,  # the same
    "bench/tls.py": 1,  # of a token that it has made, into its own environment
    "protocol/sublet_protocol/pubsub/wire.py": 2,  # of an agent's key, into the requests that it proves
    "protocol/sublet_protocol/messages/borrower_leader_codec.py": 1,  # of a grant's key, into the grant
    "storage/sublet_storage/groups/coordinator/lending_statements.py": 1,  # of a grant's key, into its row
    "storage/sublet_storage/groups/consumer_progress.py": 2,  # of a grant's key, into the calls that demand it
    "borrower/sublet_borrower/planner/grant_key_files.py": 1,  # of a grant's key, into a file of the same user
}
"""How often each file takes the value out of a secret: whoever adds one says here why."""


@dataclasses.dataclass
class Holder:
    secret: Secret


pytestmark = pytest.mark.conforms("X3")


def test_a_secret_shows_as_stars() -> None:
    secret, holder = Secret(VALUE), Holder(Secret(VALUE))
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r:>3}", "%s" % secret, "{}".format(secret)]  # noqa: UP031, UP032
    assert shown == ["***"] * 6
    assert json.dumps({"a": secret}) == '{"a": "***"}'
    assert json.dumps(dataclasses.asdict(holder)) == '{"secret": "***"}'
    assert repr(holder) == "Holder(secret=***)"
    assert os.fsencode(secret) == b"***" == secret.encode()
    assert str(copy.deepcopy(secret)) == "***" == str(copy.copy(secret))
    assert secret.reveal() == VALUE == copy.deepcopy(holder).secret.reveal()


def test_a_pickle_leaves_the_value_behind() -> None:
    data = pickle.dumps(Holder(Secret(VALUE)))
    assert b"s3cret" not in data
    found = pickle.loads(data).secret
    assert str(found) == "***"
    with pytest.raises(InvalidSetting, match="stays in the process"):
        found.reveal()


def test_secrets_are_equal_by_their_values() -> None:
    assert Secret("a") == Secret("a") != Secret("b")
    assert Secret("a") != "***"
    one, same, other = (Secret(ReloadingSecretFile(path, "A")) for path in ("a", "./a", "b"))
    assert one == same != other
    assert Secret("a") != one != Secret(str)
    assert len({Secret("a"), Secret("a"), Secret("b")}) == 2


def test_each_use_of_a_value_is_listed() -> None:
    found = Counter(
        str(file.relative_to(ROOT))
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if "reveal" in (source := file.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == "reveal"
    )
    assert dict(found) == REVEALED


def test_text_is_without_known_secrets() -> None:
    one, other = Secret("s3cret"), Secret("s3cret and more")
    assert hide_secrets("a s3cret and more, and s3cret") == "a ***, and ***"
    del one
    gc.collect()
    assert hide_secrets("a s3cret and more, and s3cret") == "a ***, and s3cret"
    assert other.reveal() == "s3cret and more"
    short = Secret("abc"), Secret("four")
    assert hide_secrets("abc, four") == "abc, ***", short


def log_line(formatter: logging.Formatter) -> str:
    """What a handler writes of a record that has a secret wherever a record can have one."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(formatter.format(record))  # type: ignore[method-assign]
    handler.addFilter(SecretFilter())
    log = logging.getLogger("sublet_protocol.test")
    log.addHandler(handler)
    log.warning("harmless")
    try:
        raise ValueError(VALUE)
    except ValueError:
        log.exception("it is %s", VALUE, extra={"fields": {"found": VALUE, "count": 1}})
    finally:
        log.removeHandler(handler)
    return lines[1]


@pytest.mark.parametrize("in_records", [False, True], ids=["handler", "records"])
@pytest.mark.parametrize("formatter", [logging.Formatter("%(message)s"), JsonFormatter("n1")])
def test_a_log_line_is_without_known_secrets(formatter: logging.Formatter, in_records: bool) -> None:
    secret, before = Secret(VALUE), logging.getLogRecordFactory()
    if in_records:
        hide_secrets_in_records()
    try:
        line = log_line(formatter)
    finally:
        logging.setLogRecordFactory(before)
    assert "s3cret" not in line, secret
    assert "it is ***" in line
    assert "ValueError: ***" in line


def test_records_are_without_secrets_for_all_handlers(capsys: pytest.CaptureFixture[str]) -> None:
    """Also for Python's own, which writes where nobody has made one. Others' records stay as they are."""
    secret, log = Secret(VALUE), logging.getLogger("elsewhere")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    before = logging.getLogRecordFactory()
    try:
        hide_secrets_in_records()
        made = logging.getLogRecordFactory()
        hide_secrets_in_records()
        assert logging.getLogRecordFactory() is made, "again is harmless"
        log.addHandler(handler)
        log.propagate = False
        for text in (VALUE, "harmless"):
            try:
                raise ValueError(text)
            except ValueError:
                log.exception("it is %s", text)
        log.error("%d", "does not fit")
        logging.lastResort.handle(records[0])  # type: ignore[union-attr]
    finally:
        logging.setLogRecordFactory(before)
        log.removeHandler(handler)
        log.propagate = True
    hidden, harmless, unfit = records
    assert (hidden.getMessage(), hidden.exc_info) == ("it is ***", None), secret
    assert "ValueError: ***" in capsys.readouterr().err
    assert harmless.exc_info, "a handler may look at it"
    assert (harmless.args, harmless.exc_info[0]) == (("harmless",), ValueError)
    assert unfit.args == ("does not fit",)


def test_a_setting_is_a_variable_or_a_file(tmp_path: Path) -> None:
    file = private_file(tmp_path / "token", f"{VALUE}\n")
    assert read_secret_setting("TOKEN", environ={}) is None
    assert read_secret_setting("TOKEN", environ={"TOKEN": "", "TOKEN_FILE": ""}) is None
    for environ in ({"TOKEN": VALUE}, {"TOKEN_FILE": str(file)}):
        found = read_secret_setting("TOKEN", environ=environ)
        assert found is not None
        assert (found.reveal(), str(found)) == (VALUE, "***")
    with pytest.raises(InvalidSetting, match="TOKEN and TOKEN_FILE are both set") as raised:
        read_secret_setting("TOKEN", environ={"TOKEN": VALUE, "TOKEN_FILE": str(file)})
    assert "s3cret" not in str(raised.value)


def test_a_file_is_read_anew_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def check(text: str) -> None:
        if len(text) < 5:
            raise InvalidSetting("too short")

    file = private_file(tmp_path / "token", "first")
    found = read_secret_setting("TOKEN", check=check, environ={"TOKEN_FILE": str(file)})
    assert found is not None
    private_file(file, "second")
    assert found.reveal() == "second"
    assert hide_secrets("the second") == "the ***"
    for broken in ("", "3rd"):
        private_file(file, broken)
        assert found.reveal() == "second"
    file.unlink()
    assert found.reveal() == "second"
    assert [each.partition(": ")[0] for each in caplog.messages] == ["secret invalid, previous value used"] * 3
    private_file(file, "third")
    assert found.reveal() == "third"


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (b"", 0o600, "it is empty"),
        (b" \n", 0o600, "it is empty"),
        (b"\xff\xfe", 0o600, "it is not text"),
        (b"x" * (MAX_FILE_BYTES + 1), 0o600, "it has more than 65536 bytes"),
        (b"x", 0o620, "other users may write to it. Run `chmod 600"),
        (b"x", 0o602, "other users may write to it"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: bytes, mode: int, problem: str) -> None:
    file = private_file(tmp_path / "token", content)
    file.chmod(mode)
    with pytest.raises(InvalidSetting, match=f"TOKEN_FILE names {file}: {problem}"):
        read_secret_setting("TOKEN", environ={"TOKEN_FILE": str(file)})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InvalidSetting, match=rf"TOKEN_FILE names {path}: it cannot be read \({problem}"):
            read_secret_setting("TOKEN", environ={"TOKEN_FILE": str(path)})


def test_the_largest_file_is_read(tmp_path: Path) -> None:
    file = private_file(tmp_path / "token", "x" * MAX_FILE_BYTES)
    found = read_secret_setting("TOKEN", environ={"TOKEN_FILE": str(file)})
    assert found is not None
    assert len(found.reveal()) == MAX_FILE_BYTES


def test_the_mode_of_a_pipe_does_not_matter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A shell makes one for the output of a command; who could write to it is no question of its mode."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    path.chmod(0o666)
    with ThreadPoolExecutor() as threads:
        written = threads.submit(path.write_text, VALUE)
        assert read_secret_setting("TOKEN", environ={"TOKEN_FILE": str(path)}) is not None
        written.result(WAIT_S)
    assert caplog.messages == []


def test_a_file_that_all_may_read_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = private_file(tmp_path / "token", VALUE)
    file.chmod(0o644)
    for _ in range(2):
        read_secret_setting("TOKEN", environ={"TOKEN_FILE": str(file)})
    text = f"secret file readable by every user: setting=TOKEN_FILE path={file}: run `chmod 600 {file}`"
    assert caplog.messages == [text]
