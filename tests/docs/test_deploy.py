"""The files in deploy/: what they name exists, and their commands parse; no container or cluster is started."""

from __future__ import annotations

import configparser
import functools
import http.server
import json
import re
import runpy
import shlex
import ssl
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.ray_nodes import ray_python
from tests.unit.transport.tls import Certificates, certificates
from tinkex._wire.endpoints import ENDPOINTS
from tinkex.cli import tinkex
from tinkex.cli.server_settings import SETTINGS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKER_INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER", "VOLUME", "WORKDIR"
}  # fmt: skip
HEALTH = ENDPOINTS["healthz"].path
PORT = SETTINGS["port"].default
COMMAND = re.compile(r"\b(?P<program>tinkex serve|ray start)\b(?P<arguments>[^;&\"|\n]*)")


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its arguments on one line."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def of(instruction: str) -> list[str]:
    return [rest for name, rest in dockerfile() if name == instruction]


@functools.cache
def manifests() -> dict[str, Any]:
    """The documents of the Kubernetes manifest by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())}


def groups() -> list[dict[str, Any]]:
    """The head's group and those of workers."""
    spec = manifests()["RayCluster"]["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def pods() -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in groups()]


def commands(program: str) -> Iterator[list[str]]:
    """The arguments of a program's commands in the files for clusters."""
    for name in ("ray-cluster.yaml", "kuberay.yaml"):
        for document in yaml.safe_load_all((DEPLOY / name).read_text()):
            for text in texts(document):
                for found in COMMAND.finditer(text):
                    if found["program"] == program:
                        yield shlex.split(found["arguments"])


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


def parse(arguments: Sequence[str]) -> None:
    """Parses arguments of tinkex, as it does itself."""
    command: click.Command = tinkex
    left = list(arguments)
    context = click.Context(command)
    while isinstance(command, click.Group):
        found = command.get_command(context, left.pop(0))
        assert found is not None, arguments
        command = found
    command.make_context("tinkex", left)


def test_every_instruction_of_the_dockerfile_exists_and_has_arguments() -> None:
    assert {name for name, _ in dockerfile()} <= DOCKER_INSTRUCTIONS
    assert all(rest for _, rest in dockerfile())
    assert dockerfile()[0][0] in {"ARG", "FROM"}
    assert len(of("FROM")) == 2, "what builds is not in the image"


def test_what_is_copied_into_the_image_exists_and_is_not_ignored() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    stages = {stage for line in of("FROM") for stage in re.findall(r" AS (\w+)$", line)}
    copied: set[str] = set()
    for line in of("COPY"):
        *sources, _ = line.split()
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in stages
        else:
            copied |= set(sources)
    assert all((ROOT / source).exists() for source in copied)
    assert copied == allowed


def test_the_image_is_built_with_extras_that_exist_and_the_pinned_torch() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (chosen,) = (line.removeprefix("EXTRAS=") for line in of("ARG") if line.startswith("EXTRAS="))
    assert {"engine", "ray"} <= set(chosen.split(",")) <= extras.keys()
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_the_image_runs_as_a_user_and_keeps_its_data_in_a_volume() -> None:
    assert of("USER") == ["tinkex"]
    (home,) = re.findall(r"TINKEX_HOME=(\S+)", " ".join(of("ENV")))
    assert of("VOLUME") == [home]
    assert of("EXPOSE") == [str(PORT)]


def test_the_commands_of_the_image_parse() -> None:
    (program,) = json.loads(of("ENTRYPOINT")[0])
    assert program == "tinkex"
    parse(json.loads(of("CMD")[0]))
    (check,) = of("HEALTHCHECK")
    options, _, command = check.partition(" CMD ")
    assert re.fullmatch(r"(--(interval|timeout|start-period|retries)=\w+ ?)+", options)
    assert any(line.endswith(f" {json.loads(command)[1]}") for line in of("COPY"))


@contextmanager
def answering(status: int, tls: Certificates | None = None) -> Iterator[int]:
    """A server that answers the health check with a status; yields its port."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == HEALTH else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls.server, tls.key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_the_health_check_of_the_image_tells_ready_from_starting_and_gone(tmp_path: Path) -> None:
    is_ready: Callable[[int], bool] = runpy.run_path(str(DEPLOY / "healthcheck.py"))["is_ready"]
    with answering(200, certificates(tmp_path)) as port:
        assert is_ready(port)
    for status, expected in ((200, True), (503, False)):
        with answering(status) as port:
            assert is_ready(port) is expected
    assert not is_ready(port)


def test_the_unit_of_systemd_starts_a_server_that_stops_in_time() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "tinkex.service").read_text())
    assert unit.sections() == ["Unit", "Service", "Install"]
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "tinkex"
    parse(arguments)
    shutdown_s = SETTINGS["shutdown_after_s"].default
    assert isinstance(shutdown_s, float)
    assert float(unit["Service"]["TimeoutStopSec"]) > shutdown_s


def test_every_server_command_of_the_cluster_files_parses() -> None:
    assert [*commands("tinkex serve")]
    for arguments in commands("tinkex serve"):
        parse(["serve", *arguments])
    header = (DEPLOY / "ray-cluster.yaml").read_text()
    (executed,) = re.findall(r'bash -lc "tinkex (serve [^"]*)"', header)
    parse(shlex.split(executed))


PARSE_STARTS = "import json, sys; from ray.scripts.scripts import start; [start.make_context('start', each) for each in json.load(sys.stdin)]"
VALIDATE = """
import sys, yaml
from ray.autoscaler._private.util import prepare_config, validate_config
validate_config(prepare_config(yaml.safe_load(sys.stdin)))
"""

KNOWS = """
import json, pathlib, ray, sys
files = [*pathlib.Path(ray.__file__).parent.rglob("*.py"), pathlib.Path(ray._raylet.__file__)]
code = b"".join(path.read_bytes() for path in files)
unknown = [name for name in json.load(sys.stdin) if name.removeprefix("RAY_").encode() not in code]
sys.exit(f"Ray does not know {unknown}" if unknown else 0)
"""


def run_with_ray(program: str, standard_input: str) -> None:
    command = [ray_python(), "-c", program]
    done = subprocess.run(
        command, input=standard_input, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_ray_command_of_the_cluster_files_parses() -> None:
    starts = list(commands("ray start"))
    assert len(starts) == 3
    parameters = [group["rayStartParams"] for group in groups()[1:]]  # KubeRay makes commands of them
    starts += [[f"--{name}={value}" for name, value in each.items()] for each in parameters]
    run_with_ray(PARSE_STARTS, json.dumps(starts))


def test_the_cluster_file_is_one_that_ray_up_accepts() -> None:
    run_with_ray(VALIDATE, (DEPLOY / "ray-cluster.yaml").read_text())


def test_every_variable_of_the_manifests_is_one_that_ray_or_tinkex_reads() -> None:
    names = {
        variable["name"]
        for pod in pods()
        for container in pod["containers"]
        for variable in container.get("env", [])
    }
    names |= set(re.findall(r"\b(RAY_\w+)=", (DEPLOY / "ray-cluster.yaml").read_text()))
    assert names
    run_with_ray(KNOWS, json.dumps(sorted(names)))


def test_the_manifest_names_only_what_it_defines_or_says_how_to_make() -> None:
    text = (DEPLOY / "kuberay.yaml").read_text()
    made = set(re.findall(r"kubectl create secret (?:generic|tls) (\S+)", text))
    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        containers = [*pod["initContainers"], *pod["containers"]]
        mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
        assert mounted == volumes.keys()
        named = {volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume}
        for each in containers:
            for variable in each["env"]:
                source = variable.get("valueFrom", {}).get("secretKeyRef")
                named |= {source["name"]} if source else set()
        assert named <= made
        maps = {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume}
        assert maps == {manifests()["ConfigMap"]["metadata"]["name"]}
        claims = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
        assert claims <= {manifests()["PersistentVolumeClaim"]["metadata"]["name"]}
    assert manifests()["ConfigMap"]["data"] == {
        "ray-certificate.sh": (DEPLOY / "ray-certificate.sh").read_text()
    }


def test_probes_and_services_use_ports_and_paths_that_are_served() -> None:
    for pod in pods():
        (container,) = pod["containers"]
        ports = {port["containerPort"] for port in container["ports"]}
        for name in ("readinessProbe", "livenessProbe"):
            (check,) = (container[name][kind] for kind in ("httpGet", "tcpSocket") if kind in container[name])
            assert check["port"] in ports
            assert check.get("path", HEALTH) == HEALTH
    (port,) = manifests()["Service"]["spec"]["ports"]
    assert port["targetPort"] == PORT
    cluster = manifests()["RayCluster"]["metadata"]["name"]
    assert manifests()["Service"]["spec"]["selector"]["ray.io/cluster"] == cluster
    assert f"{cluster}-head-svc" in pods()[0]["initContainers"][0]["args"][1], "as KubeRay names it"
    workers = groups()[1]
    assert workers["rayStartParams"]["node-manager-port"] == str(
        workers["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
    )


RAY_CLUSTER_FIELDS = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
WORKER_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def test_the_manifest_has_fields_of_kuberay() -> None:
    cluster = manifests()["RayCluster"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert cluster["spec"].keys() == RAY_CLUSTER_FIELDS
    head, *workers = groups()
    assert head.keys() == {"rayStartParams", "template"}
    for group in workers:
        assert group.keys() == WORKER_FIELDS
    for group in groups():
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert 'ray.io/overwrite-container-cmd: "true"' in (DEPLOY / "kuberay.yaml").read_text()
