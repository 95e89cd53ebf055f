"""The files below deploy/ and the recipes about them: they parse; commands, options and settings in them exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from kubernetes_validate import latest_version, validate
from psycopg.conninfo import conninfo_to_dict

from sublet.cli.app import app
from sublet_leader.server import SHUTDOWN_S
from sublet_leader.settings import LeaderSettings
from tools.settings_doc import page

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNIT = DEPLOY / "systemd" / "sublet-leader@.service"
KUBERNETES = "1.31"
PAGES = [ROOT / "docs" / name for name in ("deploy.md", "backup.md", "operations.md", "scaling.md")]


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(pod spec, its container) of each manifest that has one."""
    for path in MANIFESTS:
        for document in documents(path):
            if document["kind"] in ("Deployment", "Job"):
                pod = document["spec"]["template"]["spec"]
                for container in pod["containers"]:
                    yield pod, container


def services() -> dict[str, dict[str, Any]]:
    return dict(documents(DEPLOY / "compose.yaml")[0]["services"])


def shell_commands(text: str) -> Iterator[list[str]]:
    """The commands of sublet in lines of a shell."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\||&&|;|\bdo\b", line):
            words = shlex.split(part, comments=True)
            while words and ("=" in words[0] or words[0] in ("sudo", "$")):
                words = words[1:]
            if words and Path(words[0]).name == "sublet":
                yield [word for word in words[1:] if word != "&" and not word.startswith((">", "2>"))]


def commands() -> Iterator[list[str]]:
    """Every command line, as the arguments of `sublet`: of the unit with each of the options that its settings show,
    of a transcript what was typed."""
    for _, container in pods():
        yield container["args"]
    for service in services().values():
        if service["image"] == "sublet" and "entrypoint" in service:
            for text in service["command"]:
                yield from shell_commands(text)
        elif service["image"] == "sublet":
            yield service["command"]
    (start,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    for options in re.findall(r"\bOPTIONS=(.*)$", (DEPLOY / "systemd" / "n1.env").read_text(), re.MULTILINE):
        yield from shell_commands(start.replace("$OPTIONS", options))
    for path in PAGES:
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
            typed = [line for line in block.splitlines() if kind != "console" or line.startswith("$ ")]
            yield from shell_commands("\n".join(typed))


def parsed(arguments: list[str]) -> None:
    """Raises what the command line would say of it; nothing runs."""
    command: Any = typer.main.get_command(app)
    context: Any = None
    while hasattr(command, "resolve_command"):
        context = command.make_context(command.name, list(arguments), parent=context)
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None, name
    command.make_context(command.name, list(arguments), parent=context)


@pytest.mark.parametrize("arguments", list(commands()), ids=" ".join)
def test_every_command_line_is_one_of_ours(arguments: list[str]) -> None:
    parsed(arguments)


@pytest.mark.parametrize("wrong", [["leader", "--lisen", "n1:7411"], ["groups", "lists"], ["consume"]], ids=" ".join)
def test_a_wrong_command_line_is_noticed(wrong: list[str]) -> None:
    with pytest.raises(Exception, match=r"No such|Missing"):
        parsed(wrong)


@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=lambda path: path.name)
def test_every_setting_exists(path: Path) -> None:
    known = set(re.findall(r"SUBLET_[A-Z_]+", page() + (ROOT / "sublet" / "cli" / "server" / "leader.py").read_text()))
    assert set(re.findall(r"\bSUBLET_[A-Z_]+\b", path.read_text())) <= known


@pytest.mark.parametrize(
    "path", [each for each in MANIFESTS if each.stem != "kustomization"], ids=lambda path: path.name
)
def test_manifests_are_what_kubernetes_takes(path: Path) -> None:
    for document in documents(path):
        for version in (KUBERNETES, latest_version()):
            validate(document, version, strict=True)
        assert "namespace" not in document["metadata"]


def test_the_kustomization_names_what_is_there() -> None:
    (kustomization,) = documents(DEPLOY / "kubernetes" / "kustomization.yaml")
    assert {*kustomization["resources"], "secret.yaml", "kustomization.yaml"} == {path.name for path in MANIFESTS}


def test_a_node_has_time_to_hand_over() -> None:
    needed_s = SHUTDOWN_S + LeaderSettings().lease_margin_s + 5
    (leader,) = [pod for pod, container in pods() if container["name"] == "leader"]
    assert leader["terminationGracePeriodSeconds"] >= needed_s
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert int(stop) >= needed_s
    for name in ("n1", "n2"):
        assert int(services()[name]["stop_grace_period"].removesuffix("s")) >= needed_s


def test_nobody_is_root_and_no_secret_an_argument() -> None:
    for pod, container in pods():
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    for stage in re.split(r"^FROM ", dockerfile, flags=re.MULTILINE):
        assert "ENTRYPOINT" not in stage or stage.index("USER 10001") < stage.index("ENTRYPOINT")
    assert not any("postgresql://" in word for arguments in commands() for word in arguments if "@" in word)


def test_every_node_has_a_page_and_logs_for_machines() -> None:
    (leader,) = [container for _, container in pods() if container["name"] == "leader"]
    assert {"--http=0.0.0.0:7480", "--log-format=json"} <= set(leader["args"])
    for name, port in (("n1", 7480), ("n2", 7481)):
        node = services()[name]
        assert node["command"][node["command"].index("--http") + 1] == f"{name}:7480"
        assert node["environment"]["SUBLET_LOG_FORMAT"] == "json"
        assert node["ports"] == [f"127.0.0.1:{port}:7480"], "nobody asks who comes: this machine only"
    settings = (DEPLOY / "systemd" / "n1.env").read_text().splitlines()
    assert {"SUBLET_HTTP=127.0.0.1:7480", "SUBLET_LOG_FORMAT=json"} <= set(settings)


def test_on_kubernetes_prometheus_is_let_in() -> None:
    """It finds the port, and nobody is restarted by it."""
    (deployment,) = documents(DEPLOY / "kubernetes" / "leader.yaml")
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"sublet": 7411, "http": 7480}
    reported = template["metadata"]["annotations"]
    assert (reported["prometheus.io/scrape"], reported["prometheus.io/port"]) == ("true", str(ports["http"]))
    (service,) = documents(DEPLOY / "kubernetes" / "service.yaml")
    assert {each["targetPort"]: each["port"] for each in service["spec"]["ports"]} == ports
    (policy,) = documents(DEPLOY / "kubernetes" / "network.yaml")
    let_in = {rule["ports"][0]["port"]: rule["from"] for rule in policy["spec"]["ingress"]}
    assert set(let_in) == set(ports.values())
    assert any(each.get("namespaceSelector") for each in let_in[7480]), "Prometheus has a namespace of its own"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == ports["sublet"]


def test_any_password_reaches_postgres_as_it_is() -> None:
    for name in ("migrate", "n1", "n2", "publisher", "spark"):
        environment = services()[name]["environment"]
        assert conninfo_to_dict(environment["SUBLET_DATABASE_URL"]).get("password") is None
        assert environment["PGPASSWORD"] == services()["postgres"]["environment"]["POSTGRES_PASSWORD"], name


def test_the_page_installs_before_it_migrates() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert page.index("pip install") < page.index("sublet migrate\n")


def test_the_image_is_built_of_what_is_there() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied: set[str] = set()
    for line in re.findall(r"^COPY (?!--from)(.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE):
        copied.update(line.split()[:-1])
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {path.partition("/")[0] for path in wheel["only-include"]} <= copied


def test_java_has_a_folder_for_its_man_pages() -> None:
    """The slim image has none, and there the links that Java's packages make to their pages fail the build."""
    (run,) = re.findall(r"^RUN .*?-jre.*?[^\\]$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE | re.DOTALL)
    assert 0 <= run.find("mkdir -p /usr/share/man/man1") < run.index("apt-get install")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/sublet/bin/sublet", "/bin/true"))
    command = ["systemd-analyze", "verify", str(tmp_path / "sublet-leader@n1.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
