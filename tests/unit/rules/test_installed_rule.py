"""A rule of an installed package (tests/support/workbench) is known everywhere without an edit of ours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from docs_build.settings import render_page, undescribed
from gxpo_dashboard.charts import steps as charts
from gxpo_dashboard.view_models import forms
from gxpo_dashboard.view_models.rules import Rules, rules_of
from gxpo_dashboard.view_models.series import Points
from gxpo_services.runs.configs import config_schema
from gxpo_services.runs.plan import expected_cost
from gxpo_services.settings import ServiceSettings
from gxpo_services.sweeps.grid import SweepRequest, plan
from gxpo_services.sweeps.groups import validate_sweep
from gxpo_trainer.cli import _comments
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import build
from gxpo_trainer.config.rules import RULE_CHOICE, RULES, GxpoRule, SfpoGateConfig, SfpoRule, rule_name, run_label
from gxpo_trainer.rules.contract import make_rule

pytestmark = pytest.mark.usefixtures("workbench")


def config(**rule: Any) -> RunConfig:
    return build({"learner": {"rule": {"name": "repeated", **rule}}, "budget": {"steps": 10}})


def dashboard_rules() -> Rules:
    """The rules as the dashboard reads them: from the JSON that `/schema` answers."""
    return rules_of(json.loads(json.dumps(config_schema())))


def test_the_schema_and_the_page_of_settings_have_it() -> None:
    assert config_schema()["$defs"]["RepeatedRule"]["x-rule"] == {
        "label": "Repeated",
        "family": "look-ahead",
        "passes_per_step": {"gate_open": {"constant": 0, "settings": ["repeats"]}, "gate_closed": 1},
        "gate_signal": {"metric": "grad/norm_g0", "label": "first gradient norm"},
        "symbols": [{"setting": "repeats", "symbol": "R"}, {"setting": "alpha", "symbol": "α"}],
    }
    assert '## learner.rule with name = "repeated"' in render_page()
    assert not undescribed()


def test_the_cost_preview_and_the_command_line_know_its_passes_and_its_label() -> None:
    cost = expected_cost(config(repeats=3))
    assert cost.backward_passes == 30
    assert cost.per_step_words == "Repeated: 3 backward passes per step (R), 1 after the gate has fired (upper bound)"
    assert _comments(config())[0] == "Repeated: 2 backward passes per step while the look-ahead is on, 1 after it."
    assert run_label(config(repeats=3).learner.rule.model_dump()) == "Repeated R=3"
    # A run of a version that had no such setting, and one of a version that is newer than this one.
    assert run_label({"name": "repeated"}) == "Repeated"
    assert run_label({"name": "unknown", "k": 3}) == "UNKNOWN K=3"


def test_the_sweep_of_rules_includes_it_with_its_control() -> None:
    body = {"name": "s", "base": {"preset": "demo"}, "preset": "rules", "seeds": [0, 1]}
    request = SweepRequest.model_validate(body)
    runs = [run.config for run in plan(request, ServiceSettings())[::2]]
    # Factors of 2.4e-4: SFPO and GXPO 0.5 · 5 + 1, Repeated 2.
    assert [(run.learner.rule.name, run.learner.optimizer.learning_rate) for run in runs] == [
        ("grpo", pytest.approx(2.4e-4)), ("sfpo", pytest.approx(2.4e-4)), ("gxpo", pytest.approx(2.4e-4)),
        ("repeated", pytest.approx(2.4e-4)), ("grpo", pytest.approx(8.4e-4)), ("grpo", pytest.approx(4.8e-4)),
    ]  # fmt: skip
    base, rule = runs[2].learner.rule, runs[3].learner.rule
    assert (rule.repeats, rule.alpha, rule.gate) == (2, base.alpha, base.gate)
    planned = validate_sweep(request, None, ServiceSettings())
    assert [run.rule_label for run in planned.runs[::2]][3] == "Repeated R=2"


def test_a_base_that_does_not_fit_it_is_an_error_of_the_sweep() -> None:
    base = {"preset": "demo", "overrides": ["learner.rule.alpha=1.0"]}
    request = SweepRequest.model_validate({"name": "s", "base": base, "preset": "rules"})
    planned = validate_sweep(request, None, ServiceSettings())
    (error,) = planned.errors
    assert error.field == "config.learner.rule"
    assert "does not fit rule repeated" in error.message
    assert "must be at most 0.9" in error.message


def test_the_dashboard_knows_its_label_gate_and_settings() -> None:
    rules = dashboard_rules()
    assert rules.names == ["grpo", "sfpo", "gxpo", "epochs", "extragradient", "repeated"]
    assert rules.baseline.label == "GRPO"
    assert len({rule.color for rule in rules.known}) == len(rules.known)
    rule = rules.of({"name": "repeated"})
    assert (rule.label, rule.family, rule.watched) == ("Repeated", "look-ahead", "first gradient norm")
    assert charts.value_chart({}, "step", rule.watched, rule.color).alt.startswith(
        "Gate: monitored value: first gradient norm, window"
    )
    first = forms.main_paths(rule)
    assert first[first.index("learner.rule.name") + 1 :][:2] == ["learner.rule.repeats", "learner.rule.alpha"]
    (choice,) = [s for s in forms.settings_of(config_schema(), {}) if s.path == "learner.rule.name"]
    assert set(choice.options) == set(rules.names)


def test_the_dashboard_compares_its_passes() -> None:
    values = {"update/backward_passes_total": [3.0, 6.0, 7.0], "gate/active": [1.0, 0.0, 0.0]}
    series = {name: Points([1, 2, 3], [1.0, 2.0, 3.0], y) for name, y in values.items()}
    own = charts.budget_chart(series, {"name": "repeated", "repeats": 3}, None, dashboard_rules())
    others = "Others: GRPO (1 per step): 3, SFPO K=3 (4 per step): 12, GXPO (3 per step): 9."
    assert own.summary == f"7 backward passes after 3 steps (6 in look-ahead on, 1 in fallback to GRPO). {others}"
    of_gxpo = charts.budget_chart(series, {"name": "gxpo", "k": 5}, None, dashboard_rules())
    assert "Repeated R=2 (2 per step): 6" in of_gxpo.summary


@pytest.mark.parametrize("place", range(len(RULES) + 1))
def test_declarations_agree_with_the_settings(place: int) -> None:
    settings = RULE_CHOICE.known()[place]
    example = settings.model_validate({})
    assert make_rule(example).name == rule_name(settings) == example.name
    assert re.fullmatch(r"[a-z][a-z0-9_]{0,19}", example.name)
    assert (settings.gate_signal is None) == (example.gate_config is None)
    assert set(settings.label_settings) <= settings.symbols.keys()
    for path in (*settings.symbols, *settings.passes.settings):
        assert forms.get(example.model_dump(), path) is not None, path
    assert example.passes_per_step(gate_open=True) >= example.passes_per_step(gate_open=False) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "grpo"}, {"name": "sfpo", "k": 9}, {"name": "gxpo"}, {"name": "repeated"},
        {"name": "gxpo", "predictor": "replay", "probes": 1},
    ],
)  # fmt: skip
def test_the_dashboard_counts_passes_as_the_trainer_does(settings: dict[str, Any]) -> None:
    rule = build({"learner": {"rule": settings}}).learner.rule
    assert dashboard_rules().of(settings).passes_per_step(settings) == rule.passes_per_step(gate_open=True)


def test_no_code_outside_a_rules_own_files_names_it() -> None:
    root = Path(__file__).parents[3]
    own = (*(f"rules/{name}.py" for name in ("grpo", "sfpo", "gxpo", "controls")), "config/rules.py")
    found = [
        f"{file.relative_to(root)}: {line.strip()}"
        for package in ("trainer", "services", "client", "dashboard")
        for file in (root / package).rglob("*.py")
        if not str(file).endswith(own)
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"""["'](grpo|sfpo|extragradient)["']|name == "gxpo"|isinstance\(.*(Grpo|Sfpo|Gxpo)Rule""", line)
    ]
    assert found == []


def test_a_rule_that_inherits_settings_is_compared_with_the_rule_itself() -> None:
    class Longer(GxpoRule):
        name: Literal["longer"] = "longer"  # type: ignore[assignment]

    class Slower(SfpoRule):
        name: Literal["slower"] = "slower"  # type: ignore[assignment]

    for own, rule in ((Longer(k=7, alpha=0.25), GxpoRule), (Slower(k=7, alpha=0.25), SfpoRule)):
        compared = rule.adapted_from(own)
        assert (compared.name, compared.k, compared.alpha) == (rule_name(rule), 7, 0.25)
        assert type(own).adapted_from(own) is own


def test_sfpo_has_the_paper_s_gate_only_where_gxpo_has_it() -> None:
    assert SfpoRule.adapted_from(GxpoRule()).gate == SfpoGateConfig(threshold=2.0)
    for gate in ({"mode": "never"}, {"mode": "rearm", "rearm_threshold": 0.25}, {"threshold": 0.75}):
        assert SfpoRule.adapted_from(GxpoRule(gate=gate)).gate == SfpoGateConfig(**{"threshold": 0.5, **gate})
