"""The cluster's files as far as they can be judged without Docker; deploy/test/compose_test.py runs them."""

from __future__ import annotations

import argparse
import importlib
import json
import lzma
import re
import runpy
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import psutil
import pytest
import yaml
from support.recording_server import RecordingServer, Request
from support.service_processes import until

from gxpo_dashboard.session.visitor import service_url
from gxpo_services.local import ray_start
from gxpo_services.settings import ServiceSettings, need_roots, read_settings
from gxpo_trainer.cli import register_sandbox
from gxpo_trainer.config.base import STOP_WAIT_S

ROOT = Path(__file__).parents[2]


def script(name: str) -> Callable[..., int]:
    """The function `main` of a script of deploy/bin."""
    return runpy.run_path(str(ROOT / "deploy/bin" / f"{name}.py"))["main"]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def test_every_service_is_guarded_and_bounded_and_only_two_publish_a_port_on_loopback(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        # Docker's profiles forbid namespaces, in which the sandbox isolates code with a filter of its own.
        more = ["seccomp:unconfined", "apparmor:unconfined"] if name == "sandbox" else []
        assert service["security_opt"] == ["no-new-privileges:true", *more], name
        assert "privileged" not in service, name
        assert service["mem_limit"], name
        assert service["pids_limit"] > 0, name
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}, name
    ports = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert set(ports) == {"api", "dashboard"}
    assert all(port.startswith("${BIND_ADDRESS:-127.0.0.1}:") for published in ports.values() for port in published)


@pytest.mark.parametrize("name", ["ray-worker", "ray-worker-gpu"])
def test_a_worker_of_another_host_is_that_of_this_one_except_for_its_volumes(
    services: dict[str, Any], name: str
) -> None:
    here = {key: value for key, value in services[name].items() if key not in ("build", "depends_on")}
    there = yaml.safe_load((ROOT / "deploy/ray-cluster/worker.yml").read_text())["services"][name]
    targets = [[volume.partition(":/")[2] for volume in worker.pop("volumes")] for worker in (here, there)]
    assert here == there
    assert targets[0] == targets[1]


def test_a_ray_node_can_load_what_is_compiled_in_its_temporary_folders(services: dict[str, Any]) -> None:
    for name in ("ray-head", "ray-worker", "ray-worker-gpu"):
        for folder, options in (mount.split(":") for mount in services[name]["tmpfs"]):
            assert "exec" in options.split(","), f"{name}: Docker mounts {folder} noexec by default"


def test_a_stop_leaves_trainers_time_for_a_checkpoint_and_the_service_to_report_to(services: dict[str, Any]) -> None:
    """Compose stops a service after all that depend on it, and the others at the same time."""
    several = yaml.safe_load((ROOT / "deploy/ray-cluster/worker.yml").read_text())["services"]
    for node in (services["ray-head"], services["ray-worker"], services["ray-worker-gpu"], several["ray-worker"]):
        assert node["stop_grace_period"] == f"${{RAY_STOP_GRACE:-{STOP_WAIT_S + 30}s}}"
        assert node.get("environment", {})["GXPO_STOP_WAIT_S"] == "${GXPO_STOP_WAIT_S:-}"
    assert ServiceSettings().stop_wait_s == STOP_WAIT_S
    assert ray_start.TOLD_LATER_S < 30, "a worker waits so much longer than a trainer, and no longer than the grace"

    def stopped_after(name: str) -> set[str]:
        needed = services[name].get("depends_on", {})
        return {*needed}.union(*map(stopped_after, needed))

    assert {"ray-head", "api", "postgres"} <= stopped_after("scheduler"), "it would launch again what ends"
    for node in ("ray-head", "ray-worker", "ray-worker-gpu"):
        assert {"api", "postgres"} <= stopped_after(node)
        assert not {name for name in stopped_after(node) if name.startswith("ray")}, "all nodes together"
    starts = [line for line in (ROOT / "deploy/bin/ray.sh").read_text().splitlines() if line.strip().startswith("exec")]
    assert len(starts) == 2
    assert all(line.strip().startswith("exec python -m gxpo_services.local.ray_start start ") for line in starts)


def test_a_node_without_a_trainer_waits_for_its_actors_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GXPO_STOP_WAIT_S", "60")
    commands = {"ray::LearnerRank.update": "cat", "ray::IDLE": "sleep 600", "ray::DashboardAgent": "sleep 600"}
    processes = {
        name: subprocess.Popen(["bash", "-c", f"exec -a {name} {does}"], stdin=subprocess.PIPE)
        for name, does in commands.items()
    }
    try:
        for name, process in processes.items():
            until(lambda process=process, name=name: psutil.Process(process.pid).cmdline()[:1] == [name], "its name")
        actor = processes["ray::LearnerRank.update"]
        wait_procs, waited_for = psutil.wait_procs, []

        def wait(awaited: list[psutil.Process], timeout: float) -> object:
            waited_for.extend(process.pid for process in awaited)
            assert actor.stdin is not None
            actor.stdin.close()
            return wait_procs(awaited, timeout)

        monkeypatch.setattr(psutil, "wait_procs", wait)
        ray_start.end_trainers()
        assert waited_for == [actor.pid]
        assert [process.poll() is None for process in processes.values()] == [False, True, True]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def test_a_node_with_a_trainer_ends_it_and_waits_until_it_has_saved(tmp_path: Path) -> None:
    program = """
        import pathlib, signal, sys, time
        def save(*_):
            time.sleep(0.2)
            pathlib.Path("saved").touch()
            sys.exit()
        signal.signal(signal.SIGTERM, save)
        pathlib.Path("listens").touch()
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), "gxpo_trainer.cli"]
    with subprocess.Popen(command, cwd=tmp_path) as trainer:
        try:
            until((tmp_path / "listens").exists, "its handler")
            ray_start.end_trainers()
            assert (tmp_path / "saved").exists()
        finally:
            trainer.kill()


def test_who_checks_or_reads_a_run_s_paths_has_the_folders_that_the_settings_allow(services: dict[str, Any]) -> None:
    allowed = {"/models", "/data"}
    for name in ("api", "scheduler", "ray-head", "ray-worker"):
        mounted = {volume.split(":")[1] for volume in services[name]["volumes"]}
        assert allowed <= mounted, name
    config = manifest("ConfigMap")["data"]
    assert {*json.loads(config["GXPO_MODEL_ROOTS"]), *json.loads(config["GXPO_DATA_ROOTS"])} == allowed
    deployments = {d["metadata"]["name"]: d["spec"] for d in manifests() if d["kind"] == "Deployment"}
    for spec in [deployments["gxpo-api"], deployments["gxpo-scheduler"], *groups()]:
        pod = spec["template"]["spec"]
        mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert allowed <= mounted
        named = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} <= named


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/ray-cluster/worker.yml"])
def test_shared_memory_of_a_ray_node_holds_the_buckets_of_two_runs_and_the_object_store(file: str) -> None:
    text = (ROOT / file).read_text()
    (size,) = re.findall(r"RAY_SHM_SIZE:-(\d+)gb", text)
    (store,) = re.findall(r"RAY_OBJECT_STORE_BYTES:-(\d+)", text)
    assert int(size) * 2**30 > 2 * 2 * 512 * 2**20 + int(store), "two buckets of weights each"


def test_secrets_are_files_that_only_those_mount_who_need_them(services: dict[str, Any]) -> None:
    mounts = {
        secret: {name for name, s in services.items() if any(v.startswith(f"{secret}:") for v in s.get("volumes", ()))}
        for secret in ("secret-database", "secret-ray", "secret-admin")
    }
    assert mounts["secret-database"] == {"init-secrets", "postgres", "migrate", "api", "scheduler"}
    assert mounts["secret-ray"] == {"init-secrets", "scheduler", "ray-head", "ray-worker", "ray-worker-gpu"}
    assert mounts["secret-admin"] == {"migrate"}
    for name, service in services.items():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|TOKEN|SECRET", variable):
                # A path is no secret.
                path = variable.endswith("_FILE") and value == f"${{{variable}:-}}"
                assert path or str(value).startswith("/secrets/"), f"{name}: {variable}"


FIXED = {"artifact_root", "host", "port", "log_json"}
"""Settings that the image sets (deploy/Dockerfile)."""
HERE = {"home", "database_url", "database_password_file", "public_url", "ray_address", "model_roots", "data_roots"}
"""Settings that follow from the other services and volumes."""


def test_the_sandbox_has_no_secret_no_volume_and_no_port_and_starts_only_when_it_is_asked_for(
    services: dict[str, Any],
) -> None:
    sandbox = services["sandbox"]
    assert sandbox["profiles"] == ["sandbox"]
    assert not {"volumes", "ports", "environment"} & sandbox.keys()
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    (port,) = re.findall(r"AS sandbox\n(?:.*\n)*?EXPOSE (\d+)", dockerfile)
    assert f"http://sandbox:{port}/" in (ROOT / "docs/sandbox.md").read_text()
    parser = argparse.ArgumentParser()
    register_sandbox(parser.add_subparsers())
    command = json.loads(re.findall(r'^CMD (\["gxpo", "sandbox".*\])$', dockerfile, re.MULTILINE)[0])
    assert str(parser.parse_args(command[1:]).port) == port


def test_an_administrator_can_set_every_other_setting(services: dict[str, Any]) -> None:
    for name in ("migrate", "api", "scheduler"):
        environment = services[name]["environment"]
        named = {variable.removeprefix("GXPO_").lower() for variable in environment if variable.startswith("GXPO_")}
        assert named == ServiceSettings.model_fields.keys() - FIXED, name
        for field in named - HERE:
            assert environment[f"GXPO_{field.upper()}"].startswith(f"${{GXPO_{field.upper()}:-")
    (line,) = re.findall(r"^ENV GXPO_HOST.*$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert {name.lower() for name in re.findall(r"GXPO_(\w+)=", line)} == FIXED


def test_every_image_ends_as_a_user_that_is_not_root(services: dict[str, Any]) -> None:
    users: dict[str, str | None] = {}
    stage = ""
    for line in (ROOT / "deploy/Dockerfile").read_text().splitlines():
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            stage = match[2]
            users[stage] = users.get(match[1])
        elif line.startswith("USER "):
            users[stage] = line.split()[1]
    targets = {service["build"]["target"] for service in services.values()}
    assert {target: users[target] for target in targets} == dict.fromkeys(targets, "10001:10001")


def test_curl_commands_of_the_dashboard_name_the_published_port_or_the_external_url(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert services["api"]["ports"] == ["${BIND_ADDRESS:-127.0.0.1}:${API_PORT:-8000}:8000"]
    for name, value in services["dashboard"]["environment"].items():
        # As Compose does when API_PORT=9000 is all that is set.
        monkeypatch.setenv(name, re.sub(r"\$\{(?:(API_PORT)|\w+):-(.*)\}", lambda m: "9000" if m[1] else m[2], value))
    assert (service_url(), service_url(external=True)) == ("http://api:8000", "http://127.0.0.1:9000")
    monkeypatch.setenv("GXPO_EXTERNAL_URL", "https://gxpo.example/")
    assert service_url(external=True) == "https://gxpo.example"


# The checks of deploy/test, with answers of their own in Docker's place.


@pytest.fixture
def docker_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A `Test` of deploy/test/compose_test.py, whose `compose` runs the program `docker-compose` of this folder."""
    monkeypatch.syspath_prepend(ROOT / "deploy/test")
    module = importlib.import_module("compose_test")
    test = module.Test(module.Report(None), tmp_path, {})
    test.cluster.command = [str(tmp_path / "docker-compose")]
    return test


def test_a_port_that_nobody_published_fails_the_exposure(docker_test: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {docker_test.api_port, docker_test.dashboard_port}
    bindings = {str(port): [{"HostPort": str(port), "HostIp": "127.0.0.1"}] for port in wanted}
    monkeypatch.setattr(docker_test.cluster, "containers", lambda: [{"NetworkSettings": {"Ports": bindings}}])
    docker_test.before = {22}
    module = sys.modules["compose_test"]
    for name in ("isolation", "users", "secrets"):
        monkeypatch.setattr(module.exposure, name, lambda *_: "")
    monkeypatch.setattr(module, "listening", lambda _: {22, *wanted})
    docker_test.exposure()
    monkeypatch.setattr(module, "listening", lambda _: {22, 6379, *wanted})
    with pytest.raises(module.Failed, match="6379"):
        docker_test.exposure()


def test_an_upgrade_needs_the_new_api_to_refuse_the_old_schema_and_to_say_so(
    docker_test: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = sys.modules["compose_test"]
    program = tmp_path / "docker-compose"

    def api(script: str) -> None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    api("echo 'gxpo: the database is not at this version'\\''s schema; run `gxpo migrate`' >&2; exit 2")
    docker_test.check_refusal()
    for other in ("true", "echo 'gxpo: cannot use the database' >&2; exit 2"):
        api(other)
        with pytest.raises(module.Failed):
            docker_test.check_refusal()
    monkeypatch.setattr(module, "REFUSAL_S", 0.1)
    api("exec sleep 600")
    with pytest.raises(module.Failed, match="not within"):
        docker_test.check_refusal()


KUBERNETES = "1.34"
RAY_CLUSTER_DEFINITION = ROOT / "tests/support/schemas/ray.io_rayclusters.yaml.xz"


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy/kuberay/gxpo.yaml").read_text()))


def manifest(kind: str) -> dict[str, Any]:
    """The only document of its kind."""
    (document,) = [document for document in manifests() if document["kind"] == kind]
    return document


def groups() -> list[dict[str, Any]]:
    spec = manifest("RayCluster")["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_the_manifests_fit_the_schemas_of_kubernetes_and_kuberay() -> None:
    plain = [document for document in manifests() if document["kind"] != "RayCluster"]
    # The operator makes pods of the templates, as a PodTemplate does.
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "ray"}, "template": group["template"]}
        for group in groups()
    ]
    assert len(plain) >= 10
    for document in [*plain, *pods]:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    pods[0]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate(pods[0], KUBERNETES, strict=True)
    definition = yaml.load(lzma.decompress(RAY_CLUSTER_DEFINITION.read_bytes()), Loader=yaml.CSafeLoader)
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"] if v["name"] == "v1"]
    schema = strict(schema)
    schema["properties"]["metadata"] = {}
    validator = jsonschema.Draft7Validator(schema)
    ray = manifest("RayCluster")
    assert [error.message for error in validator.iter_errors(ray)] == []
    ray["spec"]["autoscalerOptions"]["idleTimeout"] = 1
    assert "idleTimeout" in "".join(error.message for error in validator.iter_errors(ray))


def strict(schema: Any) -> Any:
    """A schema of Kubernetes' dialect as JSON schema that allows no unknown member."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(part) for name, part in schema.items()}
    if made.get("x-kubernetes-int-or-string") is True:
        made["type"] = ["integer", "string"]
    if made.get("type") == "object" and "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def test_ray_on_kubernetes_is_authenticated_grows_with_what_runs_wait_for_and_serves_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = manifest("RayCluster")["spec"]
    assert spec["authOptions"]["mode"] == "token"
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["idleTimeoutSeconds"] > 0
    config = manifest("ConfigMap")["data"]
    largest = 0
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] < group["maxReplicas"]
        gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        largest += group["maxReplicas"] * int(gpus)
    # The scheduler admits what the cluster can grow to, not what it has.
    assert int(config["GXPO_QUOTA_GPUS"]) == largest
    for name, value in config.items():
        monkeypatch.setenv(name, value)
    settings = read_settings(host="0.0.0.0")
    need_roots(settings)
    assert settings.database_url is not None


def test_secrets_are_made_once_for_their_owner_alone(tmp_path: Path) -> None:
    make = script("init_secrets")
    for name in ("database", "ray"):
        (tmp_path / name).mkdir()
    assert make(tmp_path) == 0
    password, token = tmp_path / "database/password", tmp_path / "ray/token"
    first = password.read_text()
    # What a killed start has left is no secret.
    token.unlink()
    (tmp_path / "ray/token.part").write_text("half")
    assert make(tmp_path) == 0
    assert password.read_text() == first != token.read_text()
    for file in (password, token):
        assert re.fullmatch(r"[0-9a-f]{64}", file.read_text())
        assert file.stat().st_mode & 0o777 == 0o400


def test_healthy_means_that_every_address_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = script("healthy")

    def respond(request: Request) -> int:
        """200 at /fine, and at /ray with the token; else 503."""
        is_known = request.path == "/ray" and request.headers["Authorization"] == "Bearer a-token"
        return 200 if request.path == "/fine" or is_known else 503

    with RecordingServer(respond) as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert healthy([f"{server.url}/fine"]) == 0
        assert healthy([f"{server.url}/fine", f"{server.url}/sick"]) == 1
        assert healthy([f"http://127.0.0.1:{free.getsockname()[1]}/fine"]) == 1
        assert healthy([f"{server.url}/ray"]) == 1
        (tmp_path / "token").write_text("a-token\n")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
        assert healthy(["--ray", f"{server.url}/ray"]) == 0
