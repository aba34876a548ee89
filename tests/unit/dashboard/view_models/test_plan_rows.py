"""The plan panel: sentences and rows from an answer of `/runs/validate`, and the panel itself."""

from __future__ import annotations

from typing import Any

from streamlit.testing.v1 import AppTest

from gxpo_dashboard.view_models.tables import cache_words, memory_rows, time_rows, verdict

GIB = 2**30


def a_plan(**changes: Any) -> dict[str, Any]:
    seconds = {"sampling": 30.0, "verify": 0.5, "passes": 60.0, "look_ahead": 2.0, "sync": 1.5, "other": 1.0}
    rule = {
        "label": "GXPO K=5",
        "own": True,
        "backward_passes_per_step": 3,
        "seconds": seconds | {"step": 95.0},
        "steps": 300,
        "backward_passes": 900,
        "hours": 7.5,
        "gpu_hours": 30.0,
    }
    plan = {
        "device": "h100-80",
        "num_devices": 4,
        "devices_needed": 4,
        "shared_devices": False,
        "resident": True,
        "fits": True,
        "advice": None,
        "memory": [
            {
                "phase": "learner",
                "needed_bytes": 3 * GIB,
                "limit_bytes": 80 * GIB,
                "parts": [{"name": "weights", "bytes": GIB}, {"name": "optimizer", "bytes": 2 * GIB}],
            }
        ],
        "kv_cache_bytes": GIB,
        "kv_cache_sequences": 1234,
        "rules": [rule, rule | {"label": "GRPO", "own": False, "hours": None, "gpu_hours": None, "steps": None}],
        "assumptions": ["model: 7 parameters"],
    }
    return plan | changes


def test_the_verdict_names_the_devices_or_the_setting_to_change() -> None:
    assert verdict(a_plan()) == "Fits on 4 × h100-80."
    assert verdict(a_plan(shared_devices=True)) == "Fits on 4 × h100-80, shared by learner and sampler."
    assert verdict(a_plan(device="cpu")) == "Planned for a host without GPUs."
    refused = a_plan(fits=False, advice="learner: needs 90.0 GiB; set learner.zero_stage = 3")
    assert verdict(refused) == "Learner: needs 90.0 GiB; set learner.zero_stage = 3."


def test_rows_of_time_mark_the_runs_own_rule() -> None:
    own, other = time_rows(a_plan())
    assert own == ("GXPO K=5 (this run)", "30 s", "1 min 2 s", "1 min 35 s", "900", "7 h 30 min", "30")
    assert other[0] == "GRPO"
    assert other[-2:] == ("–", "–")


def test_rows_of_memory_are_by_phase_the_largest_part_first() -> None:
    assert memory_rows(a_plan()) == [
        ("learner", "total", "3.0 GiB of 80.0 GiB"),
        ("", "optimizer", "2.0 GiB"),
        ("", "weights", "1.0 GiB"),
    ]
    assert cache_words(a_plan()) == "The KV cache of a sampler holds 1,234 sequences of mean length."


def _panel(checked):  # type: ignore[no-untyped-def]  # run as a script without this module's imports
    from gxpo_dashboard.views import submit

    submit.show_plan(checked)


def rendered(checked: dict[str, Any]) -> AppTest:
    app = AppTest.from_function(_panel, kwargs={"checked": checked}).run(timeout=60)
    assert not app.exception
    return app


def test_the_panel_shows_a_plan_a_warning_or_why_there_is_none() -> None:
    app = rendered({"plan": a_plan()})
    assert "Fits on 4 × h100-80." in [element.value.replace("\\", "") for element in app.markdown]
    assert [expander.label for expander in app.expander] == ["3 rows", "Assumptions"]
    assert "model: 7 parameters" in [element.value for element in app.text]
    app = rendered({"plan": a_plan(fits=False, advice="learner: needs 90.0 GiB; set learner.zero_stage = 3")})
    assert "learner.zero" in app.warning[0].value.replace("\\", "")
    app = rendered({"plan": None, "plan_problem": "model.path has no config.json"})
    assert app.caption[0].value.startswith("No plan")
    assert not rendered({}).caption
