"""What a config may name: no spelling of a path, link or name leads out of what the server allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gxpo_services.runs.configs import refusals
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """allowed/ with a model, a data file and links; and a sibling secret/."""
    for folder in ("allowed/model", "secret/model", "work"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "allowed" / "train.jsonl").write_text("{}\n")
    (tmp_path / "secret" / "train.jsonl").write_text("{}\n")
    (tmp_path / "allowed" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "allowed" / "file.jsonl").symlink_to(tmp_path / "secret" / "train.jsonl")
    (tmp_path / "allowed" / "within").symlink_to(tmp_path / "allowed" / "model")
    (tmp_path / "allowed" / "loop").symlink_to(tmp_path / "allowed" / "loop")
    (tmp_path / "way").symlink_to(tmp_path / "allowed")
    return tmp_path


def refused(body: dict[str, Any], settings: ServiceSettings) -> list[str]:
    return [path for path, _ in refusals(body, settings)]


def test_the_defaults_and_an_empty_config_are_allowed_on_the_strictest_server(tmp_path: Path) -> None:
    strict = ServiceSettings(model_roots=[tmp_path], data_roots=[tmp_path], allow_hub=False)
    assert refusals({}, strict) == []
    assert refusals(RunConfig().model_dump(), strict) == []


def test_models_inside_a_root_and_hub_names_are_allowed(places: Path) -> None:
    settings = ServiceSettings(model_roots=[places / "way"])
    below = (
        "allowed/model allowed/model/../model allowed/within way/model allowed/not-there-yet secret/../allowed/model"
    )
    for name in (*(f"{places}/{path}" for path in below.split()), "org/model", "model-of-the-hub"):
        assert refused({"model": {"path": name}}, settings) == [], name


ABSOLUTE = """secret/model allowed/../secret/model allowed/out/model allowed allowed/model/../../secret allowed-not
    allowed/../allowed-not/model %2e%2e/secret"""
RELATIVE = """/ /etc/passwd ~/model ~root/model ~nobody-of-that-name/model ./model ../secret/model secret/.. org/..
    .hidden a/b/c %2e%2e/secret ..%2fsecret file:///etc \\etc"""


@pytest.mark.parametrize(
    "spelling", [*(f"{{root}}/{path}" for path in (*ABSOLUTE.split(), "x" * 5000)), *RELATIVE.split(), ""]
)
def test_no_spelling_leads_out_of_the_model_roots(places: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(places / "work")
    monkeypatch.setenv("HOME", str(places / "secret"))
    settings = ServiceSettings(model_roots=[places / "allowed" / "model"])
    chosen = {"path": spelling.format(root=places)}
    faults = refusals({"model": chosen, "teacher": chosen}, settings)
    assert [path for path, _ in faults] == ["model.path", "teacher.path"]
    assert str(places / "allowed" / "model") in faults[0][1] or "not a valid path" in faults[0][1]


def test_a_name_that_is_a_folder_here_is_a_path_no_hub_name(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(places)
    settings = ServiceSettings(model_roots=[places / "allowed"])
    assert refused({"model": {"path": "secret/model"}}, settings) == ["model.path"]
    assert refused({"model": {"path": "secret2/model"}}, settings) == []


def test_data_files_folders_and_benchmarks_are_held_to_the_data_roots(places: Path) -> None:
    settings = ServiceSettings(data_roots=[places / "allowed"])
    body = {
        "data": {"source": str(places / "secret" / "train.jsonl")},
        "warm_start": {"steps": 1, "data": {"source": str(places / "secret" / "rows.jsonl"), "split": "../rows"}},
        "evaluation": {
            "benchmarks": ["word_problems", "gsm8k", str(places / "allowed" / "file.jsonl"), "train.jsonl"],
            "data_root": str(places / "allowed" / "out"),
        },
    }
    assert refused(body, settings) == [
        "data.source",
        "warm_start.data.source",
        "warm_start.data.split",
        "evaluation.data_root",
        "evaluation.benchmarks[2]",
        "evaluation.benchmarks[3]",
    ]
    listed = [
        {"path": str(places / "allowed" / "a.jsonl")},
        {"path": str(places / "secret" / "b.jsonl"), "split": "../b"},
    ]
    body = {"data": {"sources": listed}, "warm_start": {"steps": 1, "data": {"sources": listed[1:]}}}
    assert refused(body, settings) == [
        "data.sources[1].path",
        "data.sources[1].split",
        "warm_start.data.sources[0].path",
        "warm_start.data.sources[0].split",
    ]
    body = {
        "data": {"source": str(places / "allowed" / "train.jsonl")},
        "evaluation": {"benchmarks": ["math500"], "data_root": str(places / "allowed")},
    }
    assert refused(body, settings) == []


@pytest.mark.parametrize("name", ["../../secret", "/etc", "a/../../b", "~root", "..", "a\\..\\b"])
@pytest.mark.parametrize("setting", ["split", "subset"])
def test_parts_of_file_names_below_the_data_source_stay_below_it(setting: str, name: str) -> None:
    assert refused({"data": {setting: name}}, ServiceSettings()) == [f"data.{setting}"]
    assert refused({"data": {setting: "main"}}, ServiceSettings()) == []


@pytest.mark.parametrize("name", ["org/model", "org/.model", "org/..", "mödel/x", "model"])
def test_without_the_hub_only_what_is_here_has_a_name(name: str, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(places / "work")
    settings = ServiceSettings(allow_hub=False)
    body = {"model": {"path": name}, "data": {"source": name}, "evaluation": {"benchmarks": ["gsm8k"]}}
    assert refused(body, settings) == ["model.path", "data.source", "evaluation.benchmarks[0]"]
    local = {"model": {"path": str(places / "secret" / "model")}, "evaluation": {"benchmarks": ["gsm8k"]}}
    assert refused(local | {"evaluation": {"benchmarks": ["gsm8k"], "data_root": str(places)}}, settings) == []


def test_code_and_rays_of_the_clients_choice_are_refused() -> None:
    body = {
        "model": {"trust_remote_code": True},
        "verifier": {"rewards": [{"name": "correctness"}, {"name": "os:system"}, {"name": "team.rewards:Brevity"}]},
        "placement": {"ray_address": "ray://elsewhere:10001"},
    }
    assert refused(body, ServiceSettings()) == [
        "model.trust_remote_code",
        "verifier.rewards[1].name",
        "verifier.rewards[2].name",
        "placement.ray_address",
    ]
    lenient = ServiceSettings(allow_remote_code=True, allowed_rewards=["team.rewards:Brevity"])
    assert refused(body, lenient) == ["verifier.rewards[1].name", "placement.ray_address"]


ADDRESS, NAME = "is not an allowed address on this server; choose from ", "is not allowed on this server; choose from "
HTTP = {"verifier": {"rewards": [{"name": "http", "url": "given:A"}]}}
CLASS = {"environment": {"name": "given:A"}}
TRACKER = {"logging": {"trackers": ["tensorboard", {"name": "mlflow", "address": "given:A"}]}}
OPENENV = {"environment": {"name": "openenv", "url": "given:A"}}
FUNCTION = {"environment": {"name": "agent", "function": "given:A"}}
COMMAND = {"environment": {"name": "agent", "command": ["given:A"]}}


@pytest.mark.parametrize(
    ("body", "place", "setting", "reason"),
    [
        (HTTP, "verifier.rewards[0].url", "allowed_reward_urls", ADDRESS),
        (CLASS, "environment.name", "allowed_environments", "is not allowed on this server; choose from single_turn, "),
        (TRACKER, "logging.trackers[1].address", "allowed_tracker_urls", ADDRESS),
        ({"logging": {"trackers": ["given:A"]}}, "logging.trackers[0].name", "allowed_plugins", NAME),
        (OPENENV, "environment.url", "allowed_environment_urls", ADDRESS),
        (FUNCTION, "environment.function", "allowed_environments", NAME),
        (COMMAND, "environment.command", "allowed_environments", NAME),
    ],
)
def test_addresses_and_classes_must_be_listed(body: dict[str, Any], place: str, setting: str, reason: str) -> None:
    assert refused(body, ServiceSettings()) == [place]
    assert refused(body, ServiceSettings(**{setting: ["given:A"]})) == []
    ((_, stated),) = refusals(body, ServiceSettings(**{setting: ["given:B"]}))
    assert stated.startswith(reason)
    assert "given:B" in stated
