"""Names and prose are of words of the field: none that a reader of Kafka, etcd or Postgres could not guess."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("protocol", "storage", "leader", "borrower", "sublet")
FOLDERS = (*PRODUCT, "migrations", "tests", "tools", "bench", "examples", "deploy")
PRIVATE = re.compile(
    r"(un|over)?(tells?|told|telling|hears?|heard|hearing|lent)"
    r"|ears|teller|voices|lookout|news|newsroom|ways|obey|obedience|farewell|whole|kept"
)
"""A word of a name."""
VAGUE = re.compile(
    r"pen|obeyed|orders|patience|why|(un)?said|things?|places?|way|mine|curves?|wish|story|stories|troubles?|remedy"
    r"|seize|seizure|unled|hungry|goodbye|happened|(un)?promise[sd]?|bell|ringer|rung|struck|strike|apart|deposed"
)
"""Of names in the product, which have a noun of the glossary; tests may say it as they like."""
PROSE = re.compile(r'""".*?"""|"[^"\n]*"|#[^\n]*', re.DOTALL)
OPTIONS = {"whole_epochs", "wholeEpochs"}
"""Of a session and of Spark's source: what is given is whole epochs."""
PERSONAL = re.compile(
    r"\b(tells?|told|telling|hears?|heard|unheard|hearing|ears|tellers?|voices?|lookout|newsroom|farewell|obedience"
    r"|lends?|lent|last words?|keeps? house|house|ghosts?)\b",
    re.IGNORECASE,
)
"""In prose code does not speak, listen or keep house: it sends, receives, notifies, grants and runs maintenance."""
LISTS_OF_OLD_NAMES = {"test_names.py", "test_old_names.py", "test_schema_names.py", "old_names.toml"}
PAGES_AS_GIVEN = {"requirements.md", "conformance.md"}
"""The text of requirements comes from the designs."""
OLD_IN_SQL = re.compile(r"\b(whole|kept|says?|said|places?|li[vf]es?|remed(y|ies)|p_remedy)\b", re.IGNORECASE)
FOREIGN = {
    "storage/sublet_storage/log/block_encoder.py: tell",  # of a file
    "tools/import_contracts.py: kept",  # of a contract of import-linter
}
FIXED = {
    *(f"sublet/cli/groups/{file}.py: why" for file in ("why", "describe")),  # a command
    *(f"storage/sublet_storage/notify/drivers/zmq.py: curve_{name}" for name in (
        "keypair", "publickey", "secretkey", "serverkey", "server"
    )),
}  # fmt: skip
"""Of the command line, and of ZeroMQ."""

MAX_CHARS = 50
"""Of the name of a test."""
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
LOGGING = {**dict.fromkeys(LEVELS | {"log_warning"}, 0), "log": 1, "_log_failure": 1}
"""Functions that log: which argument is the text."""
LOG_LINE = re.compile(
    r"[^%:=]+"  # the event
    r"(: \w+=%[-.\d]*[sdrgf]( \w+=%[-.\d]*[sdrgf])*)?"
    r"(: [^%]*(%[.\d]*s)?[^%]*)?"  # an error's text, or a hint
    r"(%s)?"  # how many alike were suppressed
)
NO_LINES = {
    "leader/sublet_leader/observe/history_logging.py: '%s: %s'",  # of history: the event is a value
    "protocol/sublet_protocol/gate/audit.py: '%s'",  # JSON
    "sublet/cli/base/command.py: '%s'",  # what ends a command
    "sublet/cli/base/json_logging.py: '%s'",  # what a command reports
    "storage/sublet_storage/notify/publisher.py: text",  # of `_log_failure`
    "storage/sublet_storage/util/stoppable_thread.py: text + '%s'",  # of `log_warning`
}


def names_with(folders: Iterable[str], wanted: re.Pattern[str]) -> set[str]:
    """FILE: NAME of each identifier made of one of these words, but for tests."""
    return {
        f"{file.relative_to(ROOT)}: {name}"
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        for source in (file.read_text(),)
        if any(words_of(name, wanted) for name in names_outside_of_texts(source))
        for name in names(ast.parse(source))
        if words_of(name, wanted)
    }


def names_outside_of_texts(source: str) -> set[str]:
    """Return words that may be names: parsing all files takes seconds."""
    return set(re.findall(r"\w+", PROSE.sub('""', source)))


def names_of_tests(file: Path) -> set[str]:
    """Of a file of tests, its functions, and what their cases are called."""
    found = {file.stem}
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) if name.startswith("test_"):
                found.add(name)
            case ast.keyword(arg="ids" | "id", value=value):
                found |= {str(each.value) for each in ast.walk(value) if isinstance(each, ast.Constant)}
    return found


def lines_with(files: Iterable[Path], wanted: re.Pattern[str]) -> set[str]:
    return {
        f"{file.name}: {line.strip()}"
        for file in files
        for line in file.read_text().splitlines()
        if wanted.search(line)
    }


def names(tree: ast.AST) -> set[str]:
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(name) | ast.Attribute(attr=name) | ast.arg(name) | ast.keyword(str(name)):
                found.add(name)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                if not name.startswith("test_"):
                    found.add(name)
    return found


def prose(source: str) -> Iterator[str]:
    """Docstrings, messages and all other texts, and comments."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(str(text)):
                yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def words(name: str) -> set[str]:
    """The words that a name in any spelling is made of."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def words_of(name: str, wanted: re.Pattern[str]) -> set[str]:
    return {word for word in words(name) if wanted.fullmatch(word)}


def test_no_name_is_of_a_private_language() -> None:
    found = {each: each.partition(": ")[2] for each in names_with(FOLDERS, PRIVATE)}
    assert {each for each, name in found.items() if name.strip("_") not in OPTIONS} <= FOREIGN


def test_no_test_is_called_in_a_private_language() -> None:
    """Each is a short sentence, in words of the field."""
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for pattern in ("**/test_*.py", "scenarios/*.toml")
        for file in (ROOT / "tests").glob(pattern)
        for name in (names_of_tests(file) if file.suffix == ".py" else {file.stem})
        if words_of(name, PRIVATE) or (name.startswith("test_") and len(name) > MAX_CHARS)
    }
    assert found == set()


def test_no_name_of_the_product_is_vague() -> None:
    assert names_with(PRODUCT, VAGUE) == FIXED


def test_no_script_of_the_page_has_a_private_name() -> None:
    scripts = {file.name: file.read_text() for file in (ROOT / "leader/sublet_leader/http/static").glob("*.js")}
    assert len(scripts) > 5
    assert {name: found for name, text in scripts.items() if (found := words_of(text, PRIVATE))} == {}


def test_no_text_makes_code_a_person() -> None:
    found = {
        str(file.relative_to(ROOT)): sentences
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if file.name not in LISTS_OF_OLD_NAMES and PERSONAL.search(source := file.read_text())
        if (sentences := [text for text in prose(source) if PERSONAL.search(text)])
    }
    assert found == {}


def test_no_page_makes_code_a_person() -> None:
    """Of the documentation, and beside code: pages, scenarios, lists of mutants, and what deploys nodes."""
    beside_code = [file for folder in FOLDERS for kind in ("md", "toml") for file in (ROOT / folder).rglob(f"*.{kind}")]
    beside_code += [
        file for file in (ROOT / "deploy").rglob("*") if file.is_file() and file.suffix not in {".py", ".pyc"}
    ]
    assert len(beside_code) > 40
    pages = *(ROOT / "docs").glob("*.md"), ROOT / "README.md", *beside_code
    read = [file for file in pages if file.name not in PAGES_AS_GIVEN | LISTS_OF_OLD_NAMES]
    assert lines_with(read, PERSONAL) == set()


def test_no_text_of_sql_has_an_old_word() -> None:
    scripts = [*(ROOT / "migrations/sql").glob("*.sql")]
    assert lines_with(scripts, PERSONAL) | lines_with(scripts, OLD_IN_SQL) == set()


def log_texts(source: str) -> Iterator[str]:
    """The text of each line that is logged; where it is in a variable, what that is set to."""
    tree = ast.parse(source)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        names = {
            ast.unparse(name): value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for name, value in (
                zip(node.targets[0].elts, node.value.elts, strict=True)
                if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
                else [(node.targets[0], node.value)]
            )
        }
        for node in ast.walk(function):
            match node:
                case ast.Call(ast.Attribute(logger, name)) if name in LOGGING:
                    if name in LEVELS | {"log"} and ast.unparse(logger).rpartition(".")[2].strip("_") != "log":
                        continue
                    text = node.args[LOGGING[name]]
                    yield ast.unparse(names.get(ast.unparse(text), text))


def is_log_line(text: str) -> bool:
    return text[0] in "'\"" and LOG_LINE.fullmatch(ast.literal_eval(text)) is not None


def test_a_log_line_is_an_event_with_its_ids() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {text}"
        for folder in PRODUCT
        for file in (ROOT / folder).rglob("*.py")
        if "log" in (source := file.read_text())
        for text in log_texts(source)
        if not is_log_line(text)
    }
    assert found == NO_LINES


def test_what_is_looked_for_is_found() -> None:
    source = 'X = 1\n"""It was told."""\n\ndef f():\n    """Return it."""  # to whoever hears it\n'
    assert [bool(PERSONAL.search(text)) for text in prose(source)] == [True, False, True]
    found = [words_of(name, PRIVATE) for name in ("_is_told", "WholeLent", "TO_BE_LENT", "foretold", "silent")]
    assert found == [{"told"}, {"whole", "lent"}, {"lent"}, set(), set()]
    found = [words_of(name, PRIVATE) for name in ("_unheard_s", "UntoldNews", "overhearing", "finish_unlent")]
    assert found == [{"unheard"}, {"untold", "news"}, {"overhearing"}, {"unlent"}]


def test_what_is_no_log_line_is_found() -> None:
    source = """
def f(self):
    log.info("space rolled over: space=%s", name)
    self._log.warning("lease not renewed, retrying: producer_id=%s: %s%s", name, error, suppressed)
    text, name = "space %s has rolled over", "eu"
    log.log(level, text, name)
    self.log_warning("no connection to %s: %s", address, error)
    log.info("written: blocks=%d of %d", few, all)
    math.log(few)
"""
    assert [is_log_line(text) for text in log_texts(source)] == [True, True, False, False, False]
