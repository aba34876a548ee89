"""Samples, evaluations, events, logs and checkpoints of a run, and that nothing outside its folder is reached."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi.testclient import TestClient
from support import queued_runs as runs
from support.reporting import body, evaluation_row, event_row, launch, metric_row, post, sample_row, send

from gxpo_client.client import _server_sent
from gxpo_client.errors import NotSignedIn
from gxpo_services.api.fields import encode_cursor
from gxpo_services.db.database import Database
from gxpo_services.outputs import checkpoints
from gxpo_services.run_states import RunState
from gxpo_services.settings import ServiceSettings


@pytest.fixture
def run_id(database: Database) -> str:
    return runs.add_run(database)


@pytest.fixture
def folder(settings: ServiceSettings, run_id: str) -> Path:
    made = settings.artifacts / run_id
    made.mkdir(parents=True)
    return made


def path(run_id: str, rest: str) -> str:
    return f"/api/v1/runs/{run_id}/{rest}"


def test_samples_come_in_pages_newest_step_first_by_step_and_verdict(client: TestClient, database: Database) -> None:
    launched = launch(database)
    run_id = launched.split()[0]
    rows = [
        sample_row(step, sample=n, verdict="correct" if n else "wrong", response=f"{step}.{n}", reward=float(n))
        for step in (1, 2, 3)
        for n in (0, 1)
    ]
    send(database, launched, body(1, metrics=[metric_row(1), metric_row(2), metric_row(3)], samples=rows))
    pages = [client.get(path(run_id, "samples"), params={"limit": 3}).json()]
    # A step that arrives between two pages belongs before the first one, and moves nothing.
    newer = {"metrics": [metric_row(4)], "samples": [sample_row(4, response="4.0")]}
    send(database, launched, body(2, offsets={"metrics": 3, "samples": 6}, **newer))
    while cursor := pages[-1]["next_cursor"]:
        pages.append(client.get(path(run_id, "samples"), params={"limit": 3, "cursor": cursor}).json())
    seen = [item["response"] for page in pages for item in page["items"]]
    assert seen == ["3.0", "3.1", "2.0", "2.1", "1.0", "1.1"]
    assert pages[-1]["steps"] == [1, 2, 3, 4]
    (only,) = client.get(path(run_id, "samples"), params={"step": 2, "verdict": "wrong"}).json()["items"]
    expected = sample_row(2, verdict="wrong", response="2.0", reward=0.0)
    extra = {name: expected.pop(name) for name in ("detail", "weights_version")}
    no_episode = dict.fromkeys(("turns", "end", "end_detail", "sampled_length"))
    assert only.pop("number")
    assert only == expected | no_episode | {"extra": extra}
    for cursor in ("x", "7", "3-1", encode_cursor("-samples", 2**31, 1), encode_cursor("-audit", 3, 1)):
        assert client.get(path(run_id, "samples"), params={"cursor": cursor}).status_code == 422
    assert client.get(path(run_id, "samples"), params={"cursor": encode_cursor("-samples", None, 1)}).is_success


def test_counts_are_of_whole_groups_on_every_page(client: TestClient, database: Database) -> None:
    launched = launch(database)
    rows = [
        sample_row(1, group=group, sample=sample, prompt_id=f"p{group}", verdict="wrong" if sample else "correct")
        for group in range(2)
        for sample in range(3)
    ]
    assert post(client, launched, body(1, samples=rows)).status_code == 200
    path = f"/api/v1/runs/{launched.split()[0]}/samples"

    def counts(**query: object) -> list[tuple[str, int, int]]:
        groups = client.get(path, params=query).raise_for_status().json()["groups"]
        assert {group["reward"] for group in groups} <= {1.0}
        return [(group["prompt_id"], group["correct"], group["responses"]) for group in groups]

    first = client.get(path, params={"limit": 2}).raise_for_status().json()
    assert counts(limit=2) == [("p0", 1, 3)]
    assert counts(limit=2, cursor=first["next_cursor"]) == [("p0", 1, 3), ("p1", 1, 3)]
    assert counts(verdict="correct") == [("p0", 1, 3), ("p1", 1, 3)]
    assert counts(verdict="error") == []
    assert counts(sample=0) == [("p0", 1, 3), ("p1", 1, 3)]
    assert counts(sample=0, limit=1) == counts(prompt_id="p0") == [("p0", 1, 3)]
    alone = client.get(path, params={"group": 1}).raise_for_status().json()["items"]
    assert [(item["group"], item["sample"]) for item in alone] == [(1, 0), (1, 1), (1, 2)]


@pytest.mark.each_database
@pytest.mark.parametrize(
    ("rewards", "mean"),
    [
        ([1e200, -1e200, 3e250], 1e250),
        ([1.5e308, 1.5e308, 0.0], 1e308),
        ([5e-324, 5e-324], 5e-324),
        ([0.1] * 6, 0.1),
        ([math.inf, 1.0], "Infinity"),
        ([math.inf, -math.inf], "NaN"),
        ([None, 0.25, 0.75], 0.5),
        ([None, None], None),
    ],
)
def test_the_mean_reward_is_right_for_all_numbers(
    client: TestClient, database: Database, rewards: list[float | None], mean: float | str | None
) -> None:
    launched = launch(database)
    rows = [sample_row(1, sample=number, reward=reward) for number, reward in enumerate(rewards)]
    send(database, launched, body(1, samples=rows))
    page = client.get(path(launched.split()[0], "samples"), params={"limit": 1}).raise_for_status().json()
    (group,) = page["groups"]
    assert (group["reward"], group["responses"]) == (mean, len(rewards))


def test_evaluations_are_records_by_step_and_benchmark(client: TestClient, database: Database) -> None:
    launched = launch(database)
    run_id = launched.split()[0]
    rows = [evaluation_row(step, benchmark=name) for step in (5, 0) for name in ("b", "a")]
    rows.append(evaluation_row(5, benchmark="a", scores={"pass@1": "NaN"}))
    send(database, launched, body(1, evaluations=rows))
    items = client.get(path(run_id, "evaluations")).json()["items"]
    assert [(item["step"], item["benchmark"]) for item in items] == [(0, "a"), (0, "b"), (5, "a"), (5, "b")]
    assert items[2]["scores"] == {"pass@1": "NaN"}, "the one written last"
    assert items[0] == evaluation_row(0, benchmark="a")
    few = client.get(path(run_id, "evaluations"), params={"benchmark": "a", "after": 0, "per_problem": False})
    assert [(item["step"], "per_problem" in item) for item in few.json()["items"]] == [(5, False)]


def test_events_continue_after_the_last_received(client: TestClient, database: Database) -> None:
    launched = launch(database)
    run_id = launched.split()[0]
    send(database, launched, body(1, events=[event_row("checkpoint", "step 5 saved", step=5)]))
    first = client.get(path(run_id, "events"), params={"limit": 1}).json()
    assert [item["kind"] for item in first["items"]] == ["state"]
    rest = client.get(path(run_id, "events"), params={"after": first["next_after"]}).json()
    (event,) = rest["items"]
    assert (event["actor"], event["time"], event["fields"]) == ("trainer", 3.25, {"step": 5})
    assert first["next_cursor"] is not None
    assert client.get(path(run_id, "events"), params={"cursor": first["next_cursor"]}).json() == rest
    assert rest["next_cursor"] is None
    nothing = client.get(path(run_id, "events"), params={"after": rest["next_after"]}).json()
    assert nothing == {"items": [], "next_cursor": None, "next_after": rest["next_after"]}


def test_a_timeline_has_the_last_steps_without_bad_lines(client: TestClient, run_id: str, folder: Path) -> None:
    good = '{"attempt": 1, "step": 7, "begin": 5.0, "spans": [["engine 0", "sampling", 0.0, 1.5]]}'
    bad = [good.replace("5.0", value) for value in ("NaN", '"NaN"', '"inf"', "1e999", "null", "9" * 400)]
    bad += [good.replace("1.5", '"NaN"'), "[" * 200_000, '{"a":' * 200_000, "", "\0", "\ud800", "9" * 5000]
    text = "\n".join([*bad, good.replace("7", "5"), good.replace("7", "6"), "null", good, ""])
    (folder / "timeline.jsonl").write_bytes(text.encode(errors="surrogatepass"))
    answer = client.get(path(run_id, "timeline"), params={"steps": 2})
    assert [item["step"] for item in answer.json()["items"]] == [6, 7]
    jsonschema.validate(answer.json(), resolved(client, "TimelineView"))


def test_a_log_is_read_in_parts_without_cutting_characters(client: TestClient, run_id: str, folder: Path) -> None:
    assert client.get(path(run_id, "logs")).json() == {"text": "", "offset": 0, "next_offset": 0, "size": 0}
    text = "größer 🙂\nzwei\n"
    data = text.encode()
    (folder / "train.log").write_bytes(data)
    for limit in range(4, len(data) + 1):
        offset, log = 0, ""
        while offset < len(data):
            part = client.get(path(run_id, "logs"), params={"offset": offset, "limit": limit}).json()
            assert part["next_offset"] > offset
            offset, log = part["next_offset"], log + part["text"]
        assert log == text
    end = client.get(path(run_id, "logs"), params={"offset": -7}).json()
    assert (end["text"], end["size"]) == ("\nzwei\n", len(data)), "begins at a whole character"
    (folder / "train.log").write_bytes(b"new")
    assert client.get(path(run_id, "logs"), params={"offset": 15}).json()["text"] == "new"
    (folder / "train.log").write_bytes(b"a\xff\xfeb\xe2")
    odd = client.get(path(run_id, "logs")).json()
    assert (odd["text"], odd["next_offset"]) == ("a\ufffd\ufffdb", 4), "the last byte may become a character yet"


def append(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def test_a_log_is_followed_to_its_end_or_that_of_the_token(
    url: str, database: Database, run_id: str, folder: Path, token_for: Any
) -> None:
    log, address = folder / "train.log", url + path(run_id, "logs/stream")
    append(log, "one\n")
    runs.change(database, run_id, state=RunState.RUNNING)
    headers = {"Authorization": f"Bearer {token_for('viewer')}"}
    with httpx.Client(timeout=30.0, trust_env=False, headers=headers) as http:
        with http.stream("GET", address) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            pieces = (piece for piece in response.iter_bytes() if not piece.startswith(b":"))
            assert next(pieces) == b'event: log\nid: 4\ndata: {"text": "one\\n", "offset": 0, "next_offset": 4}\n\n'
            append(log, "two\n")
            events = (event for event in _server_sent(pieces) if event is not None)
            assert next(events) == ("log", {"text": "two\n", "offset": 4, "next_offset": 8})
            log.write_text("again\n")  # restarted, and shorter
            assert next(events)[0] == "truncated"
            assert next(events)[1]["text"] == "again\n"
            append(log, "last\n")
            runs.change(database, run_id, state=RunState.SUCCEEDED)
            assert [event[1]["text"] for event in events] == ["last\n"], "and then the stream ends"
        with http.stream("GET", address, headers={"Last-Event-ID": "6"}) as response:
            (event,) = filter(None, _server_sent(response.iter_bytes()))
            assert event == ("log", {"text": "last\n", "offset": 6, "next_offset": 11})
        runs.change(database, run_id, state=RunState.RUNNING)
        with http.stream("GET", address) as response:
            events = (event for event in _server_sent(response.iter_bytes()) if event is not None)
            assert next(events)[0] == "log"
            mine = http.get(f"{url}/api/v1/tokens/me").json()["id"]
            admin = {"Authorization": f"Bearer {token_for('admin')}"}
            http.delete(f"{url}/api/v1/tokens/{mine}", headers=admin).raise_for_status()
            with pytest.raises(NotSignedIn, match="revoked"):
                next(events)


def add_checkpoint(folder: Path, step: int, score: Any = None, *, whole: bool = True) -> Path:
    made = folder / "checkpoints" / f"step-{step:08d}"
    (made / "policy").mkdir(parents=True)
    (made / "policy" / "config.json").write_text(f'{{"step": {step}}}')
    (made / "policy" / "model.safetensors").write_bytes(bytes(range(256)) * 3000)
    (made / "state.json").write_text(json.dumps({"step": step, "score": score}))
    if whole:
        (made / "manifest.json").write_text(json.dumps({"format": 1, "step": step, "sha256": {}}))
    return made


def resolved(client: TestClient, name: str) -> dict[str, Any]:
    """A schema of the API with the components that it refers to."""
    components = client.get("/openapi.json").json()["components"]
    return {**components["schemas"][name], "components": components}


TOO_LARGE = "[" + "{}," * 700_000 + "{}]"
UNREADABLE = [TOO_LARGE, "[" * 200_000, '{"score":' * 100_000, '{"score": 1e999}', '{"score": NaN}', "\0", "7" * 5000]
WITHOUT_SCORE = [f'{{"score": {score}}}' for score in ("9" * 400, "true", '"0.5"', "[]", "{}", "null")]


@pytest.mark.parametrize(
    ("state", "others"),
    [*((state, []) for state in UNREADABLE), *((state, [(20, None, False)]) for state in WITHOUT_SCORE)],
)
def test_a_state_without_a_number_hides_its_checkpoint_or_score_and_no_other(
    client: TestClient, run_id: str, folder: Path, state: str, others: list[tuple[int, None, bool]]
) -> None:
    add_checkpoint(folder, 10, 0.5)
    (add_checkpoint(folder, 20) / "state.json").write_text(state)
    answer = client.get(path(run_id, "checkpoints")).json()
    shown = [(item["step"], item["score"], item["best"]) for item in answer["items"]]
    assert shown == [(10, 0.5, True), *others]
    jsonschema.validate(answer, resolved(client, "CheckpointsView"))


def test_a_folder_full_of_checkpoints_is_not_read_whole(
    client: TestClient, run_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_MOST_LISTED", 2)
    for step in (999_999_999, 10, 100_000_000):
        add_checkpoint(folder, step)
    items = client.get(path(run_id, "checkpoints")).json()["items"]
    assert [item["step"] for item in items] == [100_000_000, 999_999_999]


def test_checkpoints_are_listed_with_the_best_and_the_newest(client: TestClient, run_id: str, folder: Path) -> None:
    assert client.get(path(run_id, "checkpoints")).json() == {"items": []}
    for step, score in ((10, 0.5), (20, 0.7), (30, 0.7), (40, None)):
        add_checkpoint(folder, step, score)
    add_checkpoint(folder, 50, whole=False)
    (folder / "checkpoints" / ".step-00000060.partial").mkdir()
    (folder / "checkpoints" / "step-00000070").symlink_to(folder / "checkpoints" / "step-00000010")
    (folder / "checkpoints" / "notes.txt").write_text("x")
    items = client.get(path(run_id, "checkpoints")).json()["items"]
    assert [(item["step"], item["score"]) for item in items] == [(10, 0.5), (20, 0.7), (30, 0.7), (40, None)]
    assert [[item["step"] for item in items if item[mark]] for mark in ("best", "newest")] == [[20], [40]]
    checkpoint = folder / "checkpoints" / "step-00000010"
    assert items[0]["size_bytes"] == sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    assert items[0]["created_at"] == (checkpoint / "manifest.json").stat().st_mtime


def test_an_interrupted_download_of_a_policy_continues(client: TestClient, run_id: str, folder: Path) -> None:
    add_checkpoint(folder, 10)
    address = path(run_id, "checkpoints/10/download")
    whole = client.get(address)
    size, tag = len(whole.content), whole.headers["etag"]
    assert (whole.headers["content-length"], whole.headers["accept-ranges"]) == (str(size), "bytes")

    def part(wanted: str, **headers: str) -> tuple[int, str | None, bytes]:
        answer = client.get(address, headers={"Range": wanted, **headers})
        return answer.status_code, answer.headers.get("content-range"), answer.content

    for begin in (0, 1, 300_000, size - 1):
        assert part(f"bytes={begin}-") == (206, f"bytes {begin}-{size - 1}/{size}", whole.content[begin:])
    assert part("bytes=100-299999", **{"If-Range": tag})[2] == whole.content[100:300_000]
    assert part("bytes=5-", **{"If-Range": '"another"'}) == (200, None, whole.content)
    assert part(f"bytes={size}-")[0] == 416
    (folder / "checkpoints" / "step-00000010" / "policy" / "config.json").write_text("{} ")
    assert client.get(address).headers["etag"] != tag
    assert num_open_files(folder) == 0


def num_open_files(folder: Path) -> int:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(str(link.readlink()).startswith(str(folder)) for link in links if link.exists())


def test_a_name_that_is_not_utf_8_is_replaced_in_the_archive(client: TestClient, run_id: str, folder: Path) -> None:
    policy = add_checkpoint(folder, 10) / "policy"
    (policy / os.fsdecode(b"caf\xe9.json")).write_text("1")
    whole = client.get(path(run_id, "checkpoints/10/download"))
    assert whole.headers["content-length"] == str(len(whole.content))
    with zipfile.ZipFile(io.BytesIO(whole.content)) as archive:
        assert archive.read("caf?.json") == b"1"


def test_links_in_a_folder_are_not_followed(client: TestClient, run_id: str, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "train.log").write_text("hidden")
    (folder / "train.log").symlink_to(secret / "train.log")
    assert client.get(path(run_id, "logs")).json()["text"] == ""
    made = add_checkpoint(folder, 10)
    (made / "policy" / "linked").symlink_to(secret)
    os.mkfifo(made / "policy" / "pipe")
    with zipfile.ZipFile(io.BytesIO(client.get(path(run_id, "checkpoints/10/download")).content)) as archive:
        assert archive.namelist() == ["config.json", "model.safetensors"]
    (made / "policy").rename(tmp_path / "moved")
    (made / "policy").symlink_to(secret)
    assert client.get(path(run_id, "checkpoints/10/download")).status_code == 404


def test_no_path_gets_out(caller: TestClient, role: str, run_id: str, folder: Path, settings: ServiceSettings) -> None:
    (settings.artifacts / "train.log").write_text("hidden")
    refused = 401 if role == "nobody" else 422
    for odd in ("..", "%2e%2e", f"{run_id}%2f..", "..%2f..%2fetc", "%00", f"{run_id}%5c.."):
        answer = caller.get(f"/api/v1/runs/{odd}/logs")
        assert answer.status_code in (404, 405, refused), odd
        assert "hidden" not in answer.text
    refused_all = {"nobody": [401], "viewer": [403, 422]}.get(role, [422])
    for odd in ("..", "%2e%2e", "..%2f..", "a%00b", "r0/../r1", "x" * 65, "é", "r0%20"):
        for method in ("DELETE", "PATCH"):
            answer = caller.request(method, f"/api/v1/runs/{odd}", json={} if method == "PATCH" else None)
            assert answer.status_code in (404, 405, *refused_all), (method, odd)
    for odd in ("..", "%2e%2e", "1%2f..", "0x1"):
        assert caller.get(path(run_id, f"checkpoints/{odd}/download")).status_code in (404, refused)
