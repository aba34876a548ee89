"""The cluster as a new user sees it: built from a clean clone, used, broken, restarted, upgraded.

usage: compose_test.py [--report FILE] [--tree] [--keep] [--part NAME …]

Needs Docker and docker-compose (1.29 or the plugin), and debootstrap where the base image cannot be pulled. Takes half
an hour on two cores, most of it the build; 12 GB of disk. Everything it makes is named gxpo-test and is removed.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import exposure
from several_hosts import join, swarm
from stack import (
    Cluster,
    Failed,
    Service,
    base_image,
    clone,
    direct,
    free_port,
    health,
    listening,
    pip_settings,
    run,
    service_of,
    until,
)

ROOT = Path(__file__).resolve().parents[2]
TAG = "compose-test"
PROJECT = "gxpo-test"
STAYING = ("postgres", "api", "scheduler", "dashboard", "ray-head", "ray-worker")
REFUSAL_S = 120.0
OPEN = ("queued", "starting", "running", "recovering")
NEXT = """\"\"\"A change of the schema that no version has: for the test of an upgrade.\"\"\"

import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{present}"
branch_labels = depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("upgrade_test", sa.Integer, nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "upgrade_test")
"""


def config(name: str, steps: int) -> dict[str, Any]:
    """A GXPO run on the embedded policy; the learner on one worker, the sampler on another."""
    return {
        "name": name,
        "model": {"max_length": 192},
        "data": {"num_problems": 256},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 40, "max_num_seqs": 32},
        "evaluation": {"every_steps": 0, "samples_per_prompt": 1, "num_problems": 8},
        "checkpoint": {"every_steps": 2},
        "learner": {"rule": {"name": "gxpo"}, "optimizer": {"learning_rate": 1e-5}},
        "budget": {"steps": steps},
        "placement": {"device": "cpu", "strategy": "split", "learner_threads": 1, "sampler_threads": 1},
    }


class Report:
    """Print a line, and append it to the log file."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._begun = file, time.monotonic()
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        line = f"{time.monotonic() - self._begun:6.0f} s  {text}"
        print(line, flush=True)
        self.lines.append(line)
        if self._file is not None:
            self._file.write_text("\n".join(self.lines) + "\n", encoding="utf-8")


class Test:
    """The parts in their order; each logs what it found."""

    def __init__(self, report: Report, folder: Path, env: dict[str, str]) -> None:
        self.log = report.log
        self.api_port, self.dashboard_port = free_port(), free_port()
        self.cluster = Cluster(
            folder,
            PROJECT,
            {
                **env,
                "GXPO_VERSION": TAG,
                "API_PORT": str(self.api_port),
                "DASHBOARD_PORT": str(self.dashboard_port),
                "RAY_WORKER_CPUS": "1",
                "GXPO_HEARTBEAT_S": "60",
            },
        )
        self.runs: list[str] = []

    @property
    def service(self) -> Service:
        return Service(f"http://127.0.0.1:{self.api_port}", self._token)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def build(self) -> None:
        self.cluster.compose("build")
        for image in run("docker", "images", "--format", "{{.Repository}} {{.Tag}} {{.Size}}").splitlines():
            name, tag, size = image.split()
            if name.startswith("gxpo/") and tag == TAG:
                self.log(f"image {name}: {size}")

    def up(self) -> None:
        self.before = listening(range(1, 65536))
        self.cluster.compose("up", "-d", "--scale", "ray-worker=2")
        self.cluster.wait_healthy(300)
        self._token = self.cluster.once("migrate", "cat", "/secrets/admin/token").strip()
        states = ", ".join(f"{service_of(c)} {health(c)}" for c in self.cluster.containers())
        self.log(f"up: {states}")

    def first_run(self) -> None:
        run_id = self.submit("a first run", 5)
        self.wait_for_end(run_id, 600)
        self.check_complete(run_id, 5)
        page = direct().open(f"http://127.0.0.1:{self.dashboard_port}/", timeout=20).read()
        if b"<title>" not in page:
            raise Failed("the dashboard's page has no title")
        self.log(f"the dashboard answers with {len(page)} bytes")
        places = self.places(run_id)
        self.log(f"learner and sampler were on two Ray nodes in two containers: {places}")
        gaps = self.series(run_id, "rollout/logprob_gap_mean")
        if not gaps or not max(gaps.values()) < 1e-5:
            raise Failed(f"the gap between sampler and learner is {gaps}")
        self.log(f"weights went over the network: mean log-probability gap at most {max(gaps.values()):.1e} in 5 steps")

    def exposure(self) -> None:
        """What can be reached from outside, as whom everything runs, and where secrets are."""
        now = listening(range(1, 65536))
        published = {
            int(binding["HostPort"]): binding["HostIp"]
            for container in self.cluster.containers()
            for bindings in container["NetworkSettings"]["Ports"].values()
            for binding in bindings or []
        }
        wanted = {self.api_port, self.dashboard_port}
        opened = now - self.before
        if set(published) != wanted or set(published.values()) != {"127.0.0.1"} or opened != wanted:
            raise Failed(f"published: {published}; opened on loopback since before the start: {sorted(opened)}")
        self.log(f"port scan of the host, 1 to 65535: Docker opened {len(opened)} ports, the API's and the dashboard's")
        self.log(exposure.isolation(self.cluster, f"gxpo/migrate:{TAG}"))
        self.log(exposure.users(self.cluster))
        self.log(exposure.secrets(self.cluster, TAG))

    def crashes(self) -> None:
        """Everything in each container is killed in turn while a run executes; each comes back by itself."""
        for service in STAYING:
            # Both workers: one has the learner, the other the sampler.
            for container in self.cluster.containers(service):
                self.crash(container)
        self.finish_all()

    def crash(self, container: dict[str, Any]) -> None:
        run_id = self.executing(120)
        step = self.step(run_id)
        began = time.monotonic()
        restarts = container["RestartCount"]

        def is_back() -> bool:
            found = [c for c in self.cluster.containers(service_of(container)) if c["Id"] == container["Id"]]
            return any(c["RestartCount"] > restarts and health(c) == "healthy" for c in found)

        run("docker", "exec", container["Id"], "sh", "-c", "kill -9 -1", check=False)
        until(f"{container['Name']} is back", is_back, 300)
        back = time.monotonic() - began
        until(f"{run_id} continues", lambda: self.moved(run_id, step + 2), 600)
        gone = time.monotonic() - began
        name = container["Name"].removeprefix(f"/{PROJECT}").strip("-_")
        self.log(f"killed {name} at step {step}: healthy after {back:.0f} s, the run past it after {gone:.0f} s")

    def docker_kill(self) -> None:
        """Docker does not restart containers stopped with `docker kill`; `up -d` does."""
        for service in STAYING:
            run_id = self.executing(120)
            step = self.step(run_id)
            (first, *_) = self.cluster.containers(service)
            run("docker", "kill", first["Id"])
            self.cluster.compose("up", "-d", "--no-recreate", "--scale", "ray-worker=2")
            self.cluster.wait_healthy(300)
            until(f"{run_id} continues", lambda r=run_id, n=step: self.moved(r, n + 2), 600)
            self.log(f"docker kill {service} at step {step}, then up -d: healthy, and the run has continued")
        self.finish_all()

    def restart(self) -> None:
        before = self.everything()
        self.cluster.compose("down")
        self.cluster.compose("up", "-d", "--scale", "ray-worker=2")
        self.cluster.wait_healthy(300)
        if self.everything() != before:
            raise Failed("runs, metrics, samples or checkpoints differ after a restart")
        self.log(f"down and up: {len(before)} runs with metrics, samples and checkpoints are as they were")

    def upgrade(self) -> None:
        """Images of a version with one more migration, on the volume of this one."""
        before = self.everything()
        present = str(self.service.ask("GET", "/health/ready")["revision"])
        self.next_images(present)
        self.cluster.env["GXPO_VERSION"] = f"{TAG}-next"
        self.check_refusal()
        self.cluster.compose("up", "-d", "--scale", "ray-worker=2")
        self.cluster.wait_healthy(300)
        ready = self.service.ask("GET", "/health/ready")
        if ready["revision"] != "9999" or self.everything() != before:
            raise Failed(f"after the upgrade: {ready}")
        run_id = self.submit("after the upgrade", 3)
        self.wait_for_end(run_id, 600)
        self.log(f"upgrade {present} → 9999: runs kept, a new run executed")

    def check_refusal(self) -> None:
        """The new API must not serve an old schema, but say what to do."""
        try:
            self.cluster.compose("run", "--rm", "--no-deps", "-T", "api", timeout=REFUSAL_S)
        except Failed as refusal:
            if "run `gxpo migrate`" not in str(refusal):
                raise
        else:
            raise Failed("the new API ends on an old schema without an error")

    def several_hosts(self) -> None:
        """A worker of another project joins over an encrypted overlay network, as one on another host would."""
        self.cluster.compose("down", "--volumes")
        with swarm(self.cluster, self.log) as other:
            self.cluster.compose("up", "-d")
            self.cluster.wait_healthy(300)
            self._token = self.cluster.once("migrate", "cat", "/secrets/admin/token").strip()
            self.log(join(self.cluster, other))
            run_id = self.submit("over an overlay network", 3)
            self.wait_for_end(run_id, 600)
            self.log(f"learner and sampler were on two Ray nodes in two projects: {self.places(run_id)}")
            self.cluster.compose("down", "--volumes")

    # ---- looks ------------------------------------------------------------------------------------------------------

    def submit(self, name: str, steps: int) -> str:
        run_id = self.service.submit(config(name, steps))
        self.runs.append(run_id)
        return run_id

    def executing(self, steps: int) -> str:
        """A run that is executing and has more than a few steps to go; the last one, or a new one."""
        view = self.service.run(self.runs[-1])
        if view is None or view["state"] not in OPEN or view["progress"]["steps"] > steps - 15:
            self.submit("runs through crashes", steps)
        run_id = self.runs[-1]
        until(f"{run_id} executes", lambda: self.moved(run_id, 2), 600)
        return run_id

    def step(self, run_id: str) -> int:
        view = self.service.run(run_id)
        return int(view["progress"]["steps"]) if view else 0

    def moved(self, run_id: str, step: int) -> bool:
        """Whether the run has come to a step, or to its end. Raises Failed when it has failed."""
        view = self.service.run(run_id)
        if view is not None and view["state"] in ("failed", "cancelled"):
            raise Failed(f"{run_id} {view['state']}: {view['reason']} {view['detail']}")
        return view is not None and (view["state"] == "succeeded" or int(view["progress"]["steps"]) >= step)

    def wait_for_end(self, run_id: str, limit_s: float) -> None:
        begun = time.monotonic()
        until(f"{run_id} succeeds", lambda: self.moved(run_id, sys.maxsize), limit_s, 2.0)
        self.log(f"run {run_id} succeeded after {time.monotonic() - begun:.0f} s")

    def finish_all(self) -> None:
        for run_id in self.runs:
            view = self.service.run(run_id)
            if view is not None and view["state"] != "succeeded":
                self.wait_for_end(run_id, 900)
            self.check_complete(run_id, int(self.service.ask("GET", f"/api/v1/runs/{run_id}")["progress"]["steps"]))
        self.cluster.wait_healthy(120)

    def series(self, run_id: str, name: str) -> dict[int, float]:
        found = self.service.ask("GET", f"/api/v1/runs/{run_id}/metrics?names={name}&max_points=5000")["series"][name]
        return dict(zip(found["steps"], found["y"], strict=True))

    def check_complete(self, run_id: str, steps: int) -> None:
        """Every step once, with what the trainer wrote to its own file in its last attempt at the step."""
        stored = self.series(run_id, "reward/mean")
        if sorted(stored) != list(range(1, steps + 1)):
            raise Failed(f"{run_id} has the steps {sorted(stored)}, not 1 to {steps}")
        text = self.cluster.compose("exec", "-T", "api", "cat", f"/artifacts/{run_id}/metrics.jsonl")
        rows = [json.loads(line) for line in text.splitlines()]
        written = {row["step"]: row["metrics"]["reward/mean"] for row in rows if "reward/mean" in row["metrics"]}
        if written != stored:
            raise Failed(f"{run_id}: the service's metrics are not the trainer's")
        attempts = {row["attempt"] for row in rows}
        self.log(f"run {run_id}: steps 1 to {steps} once each, as its trainer wrote them, in {len(attempts)} attempts")

    def places(self, run_id: str) -> str:
        text = self.cluster.compose("exec", "-T", "api", "cat", f"/artifacts/{run_id}/events.jsonl")
        events = [json.loads(line) for line in text.splitlines()]
        found = [event for event in events if event["kind"] == "several_nodes"]
        if not found:
            raise Failed("learner and sampler were on one node")
        return str(found[-1]["message"])

    def everything(self) -> dict[str, Any]:
        """What must survive: per run its state, every reward, its samples and the bytes of its newest checkpoint."""
        found = {}
        for run_id in self.runs:
            view = self.service.ask("GET", f"/api/v1/runs/{run_id}")
            points = self.service.ask("GET", f"/api/v1/runs/{run_id}/checkpoints")["items"]
            newest = max(point["step"] for point in points)
            archive = self.service.read("GET", f"/api/v1/runs/{run_id}/checkpoints/{newest}/download")
            files = {entry.filename: entry.CRC for entry in zipfile.ZipFile(io.BytesIO(archive)).infolist()}
            samples = self.service.ask("GET", f"/api/v1/runs/{run_id}/samples?limit=50")["items"]
            found[run_id] = (view["state"], self.series(run_id, "reward/mean"), len(samples), newest, files)
        return found

    def next_images(self, present: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            context = Path(folder)
            (context / "9999_next.py").write_text(NEXT.format(present=present), encoding="utf-8")
            target = "/opt/app/gxpo_services/db/migrations/versions/"
            for name in ("migrate", "api", "scheduler"):
                (context / "Dockerfile").write_text(f"FROM gxpo/{name}:{TAG}\nCOPY 9999_next.py {target}\n")
                run("docker", "build", "--quiet", "-t", f"gxpo/{name}:{TAG}-next", str(context))
        for name in ("init-secrets", "postgres", "dashboard", "ray-head", "ray-worker"):
            run("docker", "tag", f"gxpo/{name}:{TAG}", f"gxpo/{name}:{TAG}-next")


PARTS = ("build", "up", "first_run", "exposure", "crashes", "docker_kill", "restart", "upgrade", "several_hosts")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, help="file that gets the lines too")
    parser.add_argument("--tree", action="store_true", help="build the working tree, not a clone of the last commit")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--part", action="append", choices=PARTS, help="only these parts, in their order")
    args = parser.parse_args()
    report = Report(args.report.resolve() if args.report else None)
    env, servers = pip_settings()
    with tempfile.TemporaryDirectory(prefix="gxpo-clone-") as folder:
        source = Path(folder)
        clone(ROOT, source, tree=args.tree)
        report.log("cloned")
        env["BASE_IMAGE"] = base_image(report.log)
        report.log(f"base image {env['BASE_IMAGE']}")
        test = Test(report, source, env)
        try:
            for part in PARTS:
                if args.part is None or part in args.part:
                    report.log(f"== {part.replace('_', ' ')}")
                    getattr(test, part)()
            report.log("passed")
            return 0
        except Failed as error:
            report.log(f"FAILED: {error}")
            print(test.cluster.compose("logs", "--no-color", "--tail", "60", check=False)[-20000:], file=sys.stderr)
            return 1
        finally:
            if not args.keep:
                test.cluster.compose("down", "--volumes", "--remove-orphans", check=False)
            for server in servers:
                server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
