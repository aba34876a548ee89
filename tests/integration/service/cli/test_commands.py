"""The commands against a real API over HTTP: what they print, where, and with which exit code."""

from __future__ import annotations

import json
import socket
import stat
import threading
import time
import tomllib
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import select
from support import queued_runs as runs
from support.command_line import Gxpo
from support.reported_runs import finish
from support.scheduling import Cluster
from support.service_processes import until

from gxpo_client.client import Client, Json
from gxpo_client.errors import ServiceUnavailable
from gxpo_services.api.principals import Principal, Role, hash_token
from gxpo_services.cli.common import connect
from gxpo_services.db.database import Database, note_change
from gxpo_services.db.tables import AccessToken, Group, Run
from gxpo_services.run_states import RunState
from gxpo_services.runs.service import new_run
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig

# The commands use HTTP only, so one database is enough.
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

LONG_S = 60


@pytest.fixture
def gxpo(
    url: str,
    token_for: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Gxpo:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name in ("GXPO_HOME", "GXPO_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GXPO_URL", url)
    monkeypatch.setenv("GXPO_TOKEN", token_for("admin"))
    return Gxpo(capsys)


def test_a_submitted_run_prints_its_id_and_shows_as_it_was_sent(gxpo: Gxpo) -> None:
    about = ("--tags", "a, b", "--notes", "n", "--priority", 3)
    code = gxpo("submit", "--preset", "demo", "--set", "learner.rule.k=7", *about)
    out, err = gxpo.printed()
    run_id = out.strip()
    assert code == 0
    assert err == f"demo is queued; `gxpo watch {run_id}` follows it\n"
    run = gxpo.json("show", run_id)
    assert (run["tags"], run["notes"], run["priority"]) == (["a", "b"], "n", 3)
    assert run["config"]["learner"]["rule"]["k"] == 7
    assert tomllib.loads(gxpo.out("show", run_id, "--config"))["learner"]["rule"]["k"] == 7
    assert gxpo.json("show", run_id, "--config") == run["config"]
    details = gxpo.out("show", run_id)
    assert all(words in details for words in (run_id, "GXPO K=7", "0/40", "cancel"))


def test_an_argument_that_is_not_utf_8_is_one_message_and_no_traceback(gxpo: Gxpo) -> None:
    for command in (("submit", "--preset", "demo", "--tags", "caf\udce9"), ("show", "caf\udce9")):
        assert "caf\\udce9" in (message := gxpo.error(2, *command)), command
        assert "is not UTF-8" in message, command


def test_files_that_are_here_travel_as_absolute_paths_and_one_key_makes_one_run(gxpo: Gxpo, tmp_path: Path) -> None:
    Path("mine.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    Path("run.toml").write_text('[data]\nsource = "mine.jsonl"\n[evaluation]\nbenchmarks = ["mine.jsonl"]\n')
    once, again = (gxpo.json("submit", "run.toml", "--key", "mine") for _ in range(2))
    here, config = str(tmp_path / "work" / "mine.jsonl"), once["config"]
    assert (config["data"]["source"], config["evaluation"]["benchmarks"]) == (here, [here])
    assert config["model"]["path"] == "starter"
    assert once["id"] == again["id"]
    Path("other.jsonl").write_text('{"problem": "2+2", "answer": "4"}\n')
    (cloned,) = gxpo.json("clone", once["id"], "--set", "data.source=other.jsonl", "--set", "name=other")
    assert (cloned["config"]["data"]["source"], cloned["name"]) == (str(tmp_path / "work" / "other.jsonl"), "other")
    assert gxpo("sweep", "run.toml", "--grid", "data.source=mine.jsonl,other.jsonl", "--yes") == 0
    swept = gxpo.json("runs", "--group", gxpo.printed().out.split()[-1])
    assert {run["group_values"]["data.source"] for run in swept} == {here, cloned["config"]["data"]["source"]}
    assert "mine" in gxpo.error(1, "submit", "--preset", "demo-grpo", "--key", "mine")


def test_a_check_prints_the_cost_or_what_only_the_server_refuses_and_creates_nothing(gxpo: Gxpo) -> None:
    cost = gxpo.out("submit", "--preset", "demo", "--check")
    assert cost.startswith("valid; 40 steps, at most 120 backward passes (GXPO: 3 backward passes")
    for words in ((), ("--check",)):
        assert gxpo("submit", "--preset", "demo", "--set", "model.trust_remote_code=true", *words) == 2
        out, err = gxpo.printed()
        assert ("model.trust_remote_code: is not allowed on this server" in err, out) == (True, "")
    assert gxpo.json("runs") == []


def test_a_sweep_shows_its_cost_before_it_is_made(gxpo: Gxpo) -> None:
    grid = ("sweep", "--preset", "demo", "--grid", "learner.rule.k=3,5", "--seeds", "0-2")
    assert gxpo(*grid, "--check") == 0
    # 2 values × 3 seeds, 40 steps of 3 passes each
    assert "6 runs: 240 steps, at most 720 backward passes" in gxpo.printed().out
    assert "Submit 6 runs? No terminal to confirm on; add --yes" in gxpo.error(2, *grid)
    group = gxpo.out(*grid, "--yes", "--tags", "k").splitlines()[-1]
    swept = gxpo.json("runs", "--group", group)
    assert sorted((run["group_values"]["learner.rule.k"], run["seed"]) for run in swept) == [
        (k, seed) for k in (3, 5) for seed in (0, 1, 2)
    ]
    assert {tag for run in swept for tag in run["tags"]} == {"k"}
    assert "learner.rule.k" in gxpo.error(2, "sweep", "--preset", "demo", "--grid", "learner.rule.k=1", "--yes")
    assert gxpo("sweep", "--preset", "demo", "--grid", "nonsense") == 2
    assert gxpo("sweep") == 2


STUDY = """
name = "mine"
title = "GRPO or GXPO?"
overrides = ['evaluation.benchmarks=["mine.jsonl"]', "budget.hours=1"]
baseline = "grpo"
seeds = [0, 1]
backward_passes = 60
evaluate_every = 6

[ladder]
learning_rates = [1.2e-4, 2.4e-4]
seeds = [100]
backward_passes = 30

[arms.grpo]
label = "GRPO"
overrides = ["learner.rule.name=grpo", "data.source=./mine.jsonl"]

[arms.gxpo]
label = "GXPO K=5"
overrides = ['data.sources=[{path = "mine.jsonl", weight = 2.5}]']
"""


def write_study() -> None:
    rows = (json.dumps({"problem": f"{number} + 1?", "answer": str(number + 1)}) for number in range(64))
    Path("mine.jsonl").write_text("\n".join(rows))
    Path("study.toml").write_text(STUDY)


def test_a_study_is_submitted_with_the_paths_that_the_files_have_here(gxpo: Gxpo, tmp_path: Path) -> None:
    write_study()
    cost = gxpo.json("sweep", "--study", "study.toml", "--check")
    # 2 arms, each with 2 rates of 30 passes on a tuning seed and 2 seeds of 60
    assert cost == {"runs": 8, "backward_passes": 360}
    assert gxpo.out("sweep", "--study", "study.toml", "--check") == (
        "GRPO or GXPO?: 2 arms, at most 8 runs and 360 backward passes\n"
    )
    for words in (("--name", "x"), ("--grid", "seed=1,2"), ("--seeds", "0-2"), ("--predefined", "k"), ("--control",)):
        refusal = gxpo.error(2, "sweep", "--study", "study.toml", "--set", "seed=1", *words)
        assert refusal.startswith("gxpo: the study file determines all runs; remove ")
        assert {"--set", words[0]} == set(refusal.partition("remove ")[2].strip().split(", "))
    assert gxpo.json("runs") == []

    submitted = gxpo.json("sweep", "--study", "study.toml", "--yes", "--tags", "t")
    here = str(tmp_path / "work" / "mine.jsonl")
    assert submitted["study"]["overrides"][1] == "budget.hours=1"
    by_rule = {run["rule"]: gxpo.json("show", run["id"]) for run in gxpo.json("runs")}
    configs = {rule: run["config"] for rule, run in by_rule.items()}
    assert [config["evaluation"]["benchmarks"] for config in configs.values()] == [[here]] * len(configs)
    assert configs["grpo"]["data"]["source"] == here
    assert [(source["path"], source["weight"]) for source in configs["gxpo"]["data"]["sources"]] == [(here, 2.5)]


def test_runs_are_listed_filtered_and_sorted_and_do_not_steer_the_terminal(gxpo: Gxpo) -> None:
    names = {"one": "x", "two": "y", "three\x1b[2Jx\x07": "x"}
    ids = [gxpo.submit(name, "--tags", tag) for name, tag in names.items()]
    sorted_runs = gxpo.json("runs", "--tag", "x", "--sort", "name", "--order", "asc")
    assert [run["id"] for run in sorted_runs] == [ids[0], ids[2]]
    table = gxpo.out("runs", "--limit", 2)
    assert [run_id in table for run_id in ids] == [False, True, True]
    assert ("queued #3" in table, "\x1b" in table, "threex�" in table) == (True, False, True)
    assert gxpo("runs", "--state", "failed") == 0
    out, err = gxpo.printed()
    assert (out, err) == ("", "no matching runs; submit one with `gxpo submit --preset demo`\n")
    assert gxpo("runs", "--sort", "nonsense") == 2
    grpo = gxpo.submit("of another rule", "--set", "learner.rule.name=grpo")
    for words in (("--rule", "grpo"), ("--text", "other r"), ("--owner", "admin", "--rule", "grpo")):
        assert [run["id"] for run in gxpo.json("runs", *words)] == [grpo]
    assert gxpo.json("runs", "--owner", "nobody") == []


def test_a_run_is_meant_by_its_id_its_end_or_its_name(gxpo: Gxpo) -> None:
    first, second = gxpo.submit("first"), gxpo.submit("second")
    for word in (first, "first", first[-8:]):
        assert gxpo.json("show", word)["id"] == first
    same = [gxpo.submit("same") for _ in range(2)]
    err = gxpo.error(2, "show", "same")
    assert "matches 2 runs" in err
    assert all(run_id in err for run_id in same)
    assert gxpo.error(1, "show", "nowhere") == "gxpo: there is no run 'nowhere'; `gxpo runs` lists them\n"
    named_like_an_id = gxpo.submit(second[-8:])
    assert gxpo.json("show", second[-8:])["id"] == named_like_an_id


def test_runs_are_cancelled_and_each_refusal_is_named(gxpo: Gxpo, database: Database) -> None:
    done, waiting = gxpo.submit("done"), gxpo.submit("waiting")
    runs.change(database, done, state=RunState.SUCCEEDED)
    assert gxpo("cancel", "done", "waiting") == 1
    out, err = gxpo.printed()
    assert out == f"{waiting} waiting: cancelled\n"
    assert err.startswith(f"gxpo: {done}: ")
    assert gxpo("pause", "waiting") == 1
    assert gxpo("retry", "waiting", "--json") == 0
    gxpo.printed()


def test_what_was_done_before_the_service_went_away_is_printed(gxpo: Gxpo, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = gxpo.submit("first"), gxpo.submit("second")
    act = Client.act

    def interrupted(client: Client, run_id: str, action: str) -> Json:
        if run_id == second:
            raise ServiceUnavailable("no service")
        return act(client, run_id, action)

    monkeypatch.setattr(Client, "act", interrupted)
    assert gxpo("cancel", first, second) == 1
    out, err = gxpo.printed()
    assert out == f"{first} first: cancelled\n"
    assert err.startswith("gxpo: no service")


def test_a_run_is_cloned_edited_archived_and_after_a_question_deleted_once_it_has_ended(gxpo: Gxpo) -> None:
    run_id = gxpo.submit("mine", "--tags", "a")
    (made,) = gxpo.json("clone", "mine", "--set", "learner.rule.k=9", "--name", "other")
    assert (made["name"], made["parent_id"], made["config"]["learner"]["rule"]["k"]) == ("other", run_id, 9)
    changed = gxpo.out("edit", "mine", "--name", "yours", "--tags", "", "--archive")
    assert changed == f"{run_id} yours: changed name, tags, archived\n"
    assert [run["name"] for run in gxpo.json("runs")] == ["other"]
    assert [(run["name"], run["tags"]) for run in gxpo.json("runs", "--archived")] == [("yours", [])]
    assert "nothing to change" in gxpo.error(2, "edit", "yours")
    for word, archived in {"--unarchive": False, "--archive": True}.items():
        gxpo.out("edit", "yours", word)
        assert gxpo.json("show", "yours")["archived"] is archived
    assert "No terminal to confirm on; add --yes" in gxpo.error(2, "delete", "yours")
    assert gxpo("delete", "yours", "--yes") == 1
    gxpo.out("cancel", "yours")
    assert gxpo("delete", "yours", "other", "--yes", "--json") == 1
    out, err = gxpo.printed()
    assert (json.loads(out), f"gxpo: {made['id']}: " in err) == ([run_id], True), (
        "what was deleted, and why the rest not"
    )
    gxpo.out("cancel", "other")
    assert f"{made['id']} deleted" in gxpo.out("delete", "other", "--yes")
    assert gxpo("show", run_id) == 1


def test_watching_ends_with_the_run_and_its_exit_code_is_the_outcome(gxpo: Gxpo, database: Database) -> None:
    good, bad = gxpo.submit("good"), gxpo.submit("bad")
    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(gxpo, "watch", good)
        printed = ""

        def shows(state: str) -> bool:
            nonlocal printed
            printed += gxpo.printed().err
            return f"good: {state}" in printed or watcher.done()

        until(lambda: shows("queued"), "the run as it is")
        runs.change(database, good, state=RunState.RUNNING)
        until(lambda: shows("running"), "a change")
        runs.change(database, good, state=RunState.SUCCEEDED)
        assert watcher.result(LONG_S) == 0
    lines = (printed + gxpo.printed().err).splitlines()
    assert [line.split()[1] for line in lines] == ["queued", "running", "succeeded"]
    runs.change(database, bad, state=RunState.FAILED, reason="out_of_memory")
    assert "bad: failed (out_of_memory)" in gxpo.error(1, "watch", "good", "bad")
    assert gxpo("watch", "bad", "--json") == 1
    assert json.loads(gxpo.printed().out)["reason"] == "out_of_memory"
    assert gxpo("watch") == 2


def test_watching_a_study_goes_on_with_the_runs_that_it_queues(
    gxpo: Gxpo, database: Database, settings: ServiceSettings
) -> None:
    write_study()
    group = gxpo.json("sweep", "--study", "study.toml", "--yes")["group"]["id"]
    scheduler = Cluster(database, settings).scheduler(max_concurrent_runs=0)
    printed = ""

    def shows(num: int, state: str) -> bool:
        nonlocal printed
        printed += gxpo.printed().err
        return len({line.split(":")[0] for line in printed.splitlines() if f": {state}" in line}) == num

    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(gxpo, "watch", "--group", group)
        for num in (2, 4, 8):  # two rates and two seeds of two arms
            until(lambda num=num: shows(num, "queued") or watcher.done(), "the next runs")
            with database.writing() as session:
                for run in session.scalars(select(Run).where(Run.state == RunState.QUEUED)):
                    run.state, run.score, run.ended_at = RunState.SUCCEEDED, 0.5, float(num)
                note_change(session)
            until(lambda num=num: shows(num, "succeeded") or watcher.done(), "their ends")
            assert num == 8 or not watcher.done()
            scheduler.tick()
        assert watcher.result(LONG_S) == 0
    assert shows(8, "succeeded")


def test_a_group_of_more_runs_than_a_stream_takes_is_watched(gxpo: Gxpo, database: Database) -> None:
    group = Group(id="g00000000000000000000", name="many", created_at=1.0, created_by="tests")
    principal = Principal("t1", "tests", Role.SUBMITTER)
    with database.writing() as session:
        for _ in range(501):
            run = new_run(RunConfig(name="one"), principal)
            run.group, run.state, run.cpus, run.gpus = group, RunState.SUCCEEDED, 1.0, 0.0
            session.add(run)
    assert gxpo("watch", "--group", group.id) == 0
    assert gxpo.printed().err.count("one: succeeded\n") == 501


def test_logs_are_printed_and_followed(
    gxpo: Gxpo, database: Database, settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = gxpo.submit("mine")
    log = settings.artifacts / run_id / "train.log"
    log.parent.mkdir(parents=True)
    text = "".join(f"line {number} π\n" for number in range(20_000)) + "half"
    log.write_text(text)
    assert gxpo.out("logs", "mine") == text
    sections = [json.loads(line) for line in gxpo.out("logs", "mine", "--json").splitlines()]
    assert "".join(section["text"] for section in sections) == text
    assert sections[-1]["next_offset"] == log.stat().st_size
    runs.change(database, run_id, state=RunState.RUNNING)
    at_the_end = threading.Event()

    def wait_for_more(_: float) -> None:
        at_the_end.set()
        time.sleep(0.01)

    monkeypatch.setattr("gxpo_services.cli.commands.time", SimpleNamespace(sleep=wait_for_more))
    with ThreadPoolExecutor(1) as pool, log.open("a") as file:
        reader = pool.submit(gxpo, "logs", "mine", "-f")
        until(lambda: at_the_end.is_set() or reader.done(), "all that is there has been printed")
        print(" and half", file=file, flush=True)
        runs.change(database, run_id, state=RunState.SUCCEEDED)
        assert reader.result(LONG_S) == 0
    assert gxpo.printed().out == f"{text} and half\n"


def test_runs_are_compared_with_tables_and_the_sentence(gxpo: Gxpo, database: Database, url: str) -> None:
    grpo, plain = gxpo.submit("plain", "--set", "learner.rule.name=grpo"), gxpo.submit("unfinished")
    finish(database, grpo, [0.0, 0.25, 0.5])
    out = gxpo.out("compare", "plain", "unfinished")
    assert "50.0%" in out
    assert "GRPO" in out
    assert f"excluded: unfinished ({plain}): it has no evaluation (yet)\n" in out
    assert "{'" not in out, "no member is printed as in the response"
    assert gxpo.json("compare", "plain")["target"]["steps"] == 2
    assert "no step has maj@4" in gxpo.error(2, "compare", "plain", "--metric", "maj@4")
    assert gxpo("compare") == 2


def test_an_export_is_a_whole_file_or_none(gxpo: Gxpo, database: Database, url: str) -> None:
    finish(database, gxpo.submit("mine"), [0.0, 0.5])
    file = Path(gxpo.out("export", "mine").strip())
    assert file.read_bytes()[:2] == b"PK", "several tables travel as one zip file"
    exported = gxpo.json("export", "mine", "--format", "jsonl", "--out", "numbers.zip")
    assert exported["bytes"] == Path("numbers.zip").stat().st_size
    assert "samples.jsonl" not in zipfile.ZipFile("numbers.zip").namelist()
    assert gxpo("export", "mine", "--format", "jsonl", "--samples", "--out", "numbers.zip") == 0
    assert "samples.jsonl" in zipfile.ZipFile("numbers.zip").namelist()
    assert "cannot write --out nowhere/numbers.zip" in gxpo.error(2, "export", "mine", "--out", "nowhere/numbers.zip")
    for folder in ("/", ".", f"{file}/x"):
        assert f"cannot write --out {folder}: " in gxpo.error(2, "export", "mine", "--out", folder)
    assert gxpo("export", "r00000000000000000000") == 1
    assert sorted(entry.name for entry in Path().iterdir()) == sorted({file.name, "numbers.zip"})


def test_tokens_are_made_listed_and_revoked(gxpo: Gxpo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert gxpo("token", "create", "ci", "--role", "viewer", "--days", "2") == 0
    out, err = gxpo.printed()
    secret = out.strip()
    assert secret.startswith("gxpo_")
    assert "shown only once" in err
    listed = {token["name"]: token for token in gxpo.json("token", "list")}
    assert secret not in json.dumps(listed)
    file = tmp_path / "token"
    file.write_text(secret + "\n")
    assert gxpo("runs", "--token-file", file) == 0
    assert "role submitter is needed" in gxpo.error(1, "submit", "--preset", "demo", "--token-file", file)
    assert listed["ci"]["id"] in gxpo.out("token", "list")
    assert gxpo("token", "revoke", "t0", listed["ci"]["id"]) == 1
    out, err = gxpo.printed()
    assert (out, err) == (f"{listed['ci']['id']} (ci) is revoked\n", "gxpo: t0: there is no token t0\n")
    assert "--token-file" in gxpo.error(1, "runs", "--token-file", file)


def test_the_first_token_of_a_service_is_made_in_its_database_once_it_is_migrated(
    gxpo: Gxpo, monkeypatch: pytest.MonkeyPatch, database: Database, database_url: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("GXPO_DATABASE_URL", database_url)
    made = gxpo.json("token", "create", "first", "--role", "admin", "--database")
    with database.reading() as session:
        assert session.get_one(AccessToken, made["id"]).sha256 == hash_token(made["token"])
    for days in ("99999", "0", "inf", "nan", "x"):
        with pytest.raises(SystemExit, match="2"):
            gxpo("token", "create", "ada", "--days", days)
        assert gxpo.printed().err.endswith(f"--days: {days}: must be a number above 0, at most 36500\n")
    assert "name: must not be empty" in gxpo.error(2, "token", "create", "", "--database")
    monkeypatch.setenv("GXPO_DATABASE_URL", f"sqlite:///{tmp_path / 'empty.sqlite'}")
    assert "gxpo migrate" in gxpo.error(2, "token", "create", "first", "--database")
    monkeypatch.delenv("GXPO_DATABASE_URL")
    home = tmp_path / "work" / "gxpo-home"
    assert gxpo("migrate", "--check") == 1
    assert sorted(path.name for path in (*tmp_path.glob("*.sqlite"), home) if path.exists()) == ["gxpo.sqlite"]
    assert gxpo("migrate") == 0
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert gxpo("migrate", "--check") == 0
    monkeypatch.setenv("GXPO_PORT", "many")
    assert "GXPO_PORT: " in gxpo.error(2, "migrate")


def test_the_local_token_is_used_on_loopback_and_nowhere_else(
    gxpo: Gxpo, url: str, token_for: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (home / "token").write_text(token_for("admin"))
    (home / "up.json").write_text(json.dumps({"url": url}))
    monkeypatch.delenv("GXPO_TOKEN")
    monkeypatch.delenv("GXPO_URL")
    monkeypatch.setenv("GXPO_HOME", str(home))
    assert gxpo("token", "list") == 0
    with connect("http://192.0.2.1:8000") as client:
        assert "Authorization" not in client._headers()


def test_a_database_or_its_password_file_that_cannot_be_used_is_one_message_and_no_traceback(
    gxpo: Gxpo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the commands that work on the database itself."""
    commands = [("migrate",), ("migrate", "--check"), ("scheduler",), ("token", "create", "ada", "--database")]
    monkeypatch.setenv("GXPO_HOME", "/dev/null/x")
    assert gxpo("migrate", "--check") == 1
    assert "cannot create the home /dev/null/x (Not a directory)" in gxpo.error(2, "migrate")
    monkeypatch.setenv("GXPO_DATABASE_URL", "sqlite:////dev/null/x/y.sqlite")
    monkeypatch.setenv("GXPO_HOME", str(tmp_path / "home"))
    assert "cannot use the database (unable to open database file); " in gxpo.error(2, "migrate")
    with socket.socket() as taken:  # a port that is taken and does not listen
        taken.bind(("127.0.0.1", 0))
        url = f"postgresql+psycopg://gxpo:s3cret@127.0.0.1:{taken.getsockname()[1]}/gxpo"
        monkeypatch.setenv("GXPO_DATABASE_URL", url)
        for command in commands:
            message = gxpo.error(2, *command)
            assert message.startswith("gxpo: cannot use the database (connection failed: "), command
            assert message.endswith("; check GXPO_DATABASE_URL and its server\n"), command
            assert "s3cret" not in message, command
    for file, reason in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        monkeypatch.setenv("GXPO_DATABASE_PASSWORD_FILE", str(file))
        expected = f"cannot read the database password from {file} ({reason}); check GXPO_DATABASE_PASSWORD_FILE"
        for command in commands:
            assert gxpo.error(2, *command) == f"gxpo: {expected}\n", command
