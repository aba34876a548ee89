"""Submit view: configure, plan and submit a run or a sweep."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pandas as pd
import streamlit as st

from gxpo_client.errors import Refused
from gxpo_client.formats import count, number_of
from gxpo_dashboard.labels import NO_RIGHT, plain
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.session.permalinks import go
from gxpo_dashboard.view_models import forms
from gxpo_dashboard.view_models.tables import sweep_words, time_table, verdict
from gxpo_dashboard.views import actions
from gxpo_dashboard.widgets import focus, grid, text_table

Json = dict[str, Any]

GRIDS = {
    "": ("values with commas", "Several values in a field, as 1e-5, 2e-5, make a sweep of every combination."),
    "rules": ("every rule", "Every rule with the settings below. Take three seeds: one shows no difference."),
    "k": ("K ablation", "The paper's values of the virtual depth K."),
    "alpha": ("α ablation", "The paper's values of the reposition strength α, for each of its K."),
    "tau": ("τ ablation", "The paper's values of the gate's threshold τ."),
}


def show() -> None:
    header = st.container(horizontal=True, vertical_alignment="bottom")
    header.title("Submit", width="content")
    with visitor.guarded():
        schema, presets = visitor.catalogue(visitor.service_url(), visitor.client())
        by_name = {preset["name"]: preset for preset in presets}
        first = "demo" if "demo" in by_name else next(iter(by_name))
        labels = {name: name for name in by_name}
        if (original := st.query_params.get("preset", first)) not in by_name:
            with suppress(Refused):
                run = visitor.client().run(original)
                config = run["config"] | {"name": f"{run['name'][:190]} clone"}  # of at most 200 characters
                words = f"Settings of the run {run['name']}."
                clone = {"clone_of": original, "tags": run["tags"]}
                by_name[original] = {"name": original, "summary": words, "config": config, **clone}
                labels[original] = f"Clone of {run['name']}"
        if original not in by_name:
            words = f"There is no run or preset {original}; these are the settings of {first}."
            st.warning(plain(words), icon=":material/content_copy:")
        with header:
            preset = permalinks.select("Preset", "preset", labels, first, width=340)
            titles = {name: title for name, (title, _) in GRIDS.items()}
            grid = permalinks.select("Sweep", "sweep", titles, "", width=220)
        chosen = by_name[preset]
        st.caption(plain(f"{chosen['summary']} {GRIDS[grid][1]}"))
        focus("input[aria-label='Name']")
        form, outcome = st.columns([3, 2], gap="large")
        with form:
            config, axes, problems, places = _form(schema, chosen)
        with outcome:
            if visitor.may_change():
                problems |= _outcome(config, axes, grid, problems, chosen)
                for field, message in problems.items():
                    for path in places:
                        if re.match(rf"{re.escape(path)}\b", field):  # or of one of its members
                            places[path].markdown(f":red[:material/error: {plain(message)}]")
            else:
                st.info(NO_RIGHT, icon=":material/lock:")


Problems = dict[str, str]
"""Setting → what is wrong with it."""


def _form(schema: Json, preset: Json) -> tuple[Json, dict[str, list[Any]], Problems, dict[str, Any]]:
    """The config from the widgets with the first of several values, the settings that have several, the parse errors,
    and a place below each widget for what is wrong with it."""
    base = preset["config"]
    choices = {setting.path: setting for setting in forms.settings_of(schema, base) if setting.variants}
    rules = choices.pop("learner.rule.name")
    parameter = f"rule-{preset['name']}"
    # What differs from the preset, by widget key: also in sections that are collapsed, whose widgets are not drawn.
    entered: Json = st.session_state.setdefault("entered", {})
    words = permalinks.received()  # of a link or a reload
    linked = forms.of_link(words or [], {rules.path: rules, **choices})[0]
    if rules.path in linked:
        st.query_params[parameter] = linked[rules.path]
    chosen = {rules.path: permalinks.selected(parameter, rules.options, rules.value)}
    for path, choice in choices.items():
        if words is not None:
            chosen[path] = linked.get(path, choice.value)
            continue
        key, original = forms.key(preset["name"], choice), forms.widget_value(choice, choice.value)
        now = st.session_state.get(key, entered.get(key, original))
        chosen[path] = choice.value
        with suppress(forms.BadValue):  # which its field says
            chosen[path] = choice.value if now == original else forms.parse(choice, now)
    config = forms.changed(base, chosen, {rules.path: rules, **choices})
    # The choices with the preset's values: what differs from these was changed.
    settings = {setting.path: setting for setting in forms.settings_of(schema, config)} | choices
    keys = {path: forms.key(preset["name"], setting) for path, setting in settings.items() if path != rules.path}
    rule = visitor.rules().of(forms.get(config, "learner.rule") or {})
    symbols = forms.rule_symbols(rule)
    places: dict[str, Any] = {}
    if words is not None:
        linked, others = forms.of_link(words, settings)
        for path, key in keys.items():
            st.session_state.pop(key, None)
            entered.pop(key, None)
            if path in linked:
                entered[key] = forms.widget_value(settings[path], linked[path])
        if others:
            st.warning(f"The link has settings that this form does not have: {plain(', '.join(others))}")

    def ask(path: str) -> None:
        setting = settings[path]
        label, words = forms.label(path, symbols), f"`{path}` {setting.help}"
        if path == rules.path:
            permalinks.select(label, parameter, rules.options, rules.value, help=words)
            return
        key, original = keys[path], forms.widget_value(setting, setting.value)
        entered[key] = _widget(setting, entered.get(key, original), key, label, words)
        if entered[key] == original:
            del entered[key]
        places[path] = st.empty()

    main = [path for path in forms.main_paths(rule) if path in settings]
    with st.container(border=True):
        grid(main, ask)
    for section in dict.fromkeys(setting.section for setting in settings.values()):
        rest = [path for path, setting in settings.items() if setting.section == section and path not in main]
        if rest:
            drawer = st.expander(
                f"{forms.label(section)} ({number_of(len(rest), 'setting')})",
                key=f"section-{section}",
                on_change="rerun",
            )
            if drawer.open:
                with drawer:
                    grid(rest, ask)
    changed: Json = {}
    problems: Problems = {}
    for path, key in keys.items():
        setting = settings[path]
        try:
            value = forms.parse(setting, entered[key]) if key in entered else setting.value
        except forms.BadValue as error:
            problems[path] = str(error)
            continue
        if value != setting.value:
            changed[path] = value
    permalinks.send(forms.in_link(changed))
    axes = forms.axes(changed, settings)
    first = changed | {path: axis[0] for path, axis in axes.items()}
    return forms.changed(config, first, settings), axes, problems, places


def _widget(setting: forms.Setting, shown: Any, key: str, label: str, words: str) -> Any:
    """The input of a setting; returns what is entered."""
    if key not in st.session_state:
        st.session_state[key] = shown
    if setting.kind == "boolean":
        return st.checkbox(label, key=key, help=words)
    if setting.kind == "choice":
        names = {option: "none" if option is None else str(option) for option in setting.options}
        return st.selectbox(label, setting.options, key=key, help=words, format_func=names.__getitem__)
    if setting.kind == "choices":
        return st.multiselect(label, setting.options, key=key, help=words)
    return st.text_input(label, key=key, help=words, placeholder="none" if setting.optional else None)


def _outcome(config: Json, axes: Json, grid: str, problems: Problems, preset: Json) -> Problems:
    """Cost, plan and button of what is configured; returns what the service refuses.

    axes: settings with several values. grid: of GRIDS.
    """
    tags = actions.tags_of(permalinks.text("Tags", "tags", placeholder="comma-separated"), preset.get("tags", []))
    if problems:
        return _complaints(list(problems.items()))
    if not axes and not grid:
        clone = {"clone_of": preset["clone_of"]} if "clone_of" in preset else {}
        return _one_run({"config": config, "tags": tags, **clone})
    control = grid != "rules" and permalinks.check(  # which has it
        "Learning-rate control",
        "sweep-control",
        help=f"Adds {visitor.rules().baseline.label} at learning rate × (αK + 1). In a flat region, a look-ahead "
        "equals this longer step.",
    )
    values = {path: axis for path, axis in axes.items() if path != "seed"}
    sweep = {"grid": values, "seeds": axes.get("seed", [config["seed"]]), "control": control, "preset": grid or None}
    return _sweep({"name": config["name"], "base": {"config": config}, "tags": tags, **sweep})


def _one_run(body: Json) -> Problems:
    checked, refused = visitor.client().post("/runs/validate", body=body), Problems()
    if not checked["valid"]:
        refused = _complaints([(error["field"], error["message"]) for error in checked["errors"]])
    else:
        cost = checked["cost"] or {}
        words = plain(str(cost.get("per_step_words") or ""))
        st.success(f"Valid. {_most(cost)}{words}", icon=":material/check_circle:")
        if checked["equal_runs"]:
            equal = [f"[{plain(run['name'])}](?view=run&run={run['id']})" for run in checked["equal_runs"][:5]]
            st.info(f"Runs with the same settings exist: {', '.join(equal)}", icon=":material/content_copy:")
    if made := _submitted("Submit run", "/runs", body, possible=checked["valid"]):
        go("run", run=made["id"])
    if checked["valid"]:
        show_plan(checked)
    _equivalents(checked, "/runs", body)
    return refused


def _most(cost: Json, of: str = "") -> str:
    """The most backward passes; empty where hours or tokens alone end a run."""
    passes = cost.get("backward_passes")
    return f"At most {number_of(passes, 'backward pass')}{of and f' {of}'}. " if passes else ""


def _sweep(body: Json) -> Problems:
    try:
        plan = visitor.client().post("/sweeps/validate", body=body)
    except Refused as error:
        return _complaints(error.errors or [("sweep", str(error))])
    if not plan["valid"]:
        return _complaints([(error["field"], error["message"]) for error in plan["errors"]])
    cost, base = plan["cost"], visitor.client().post("/runs/validate", body=body["base"])
    others = {"budget.hours", "budget.tokens"}  # which may end a run before its passes do
    by_passes = not (others & body["grid"].keys() or any(forms.get(body["base"]["config"], name) for name in others))
    words = sweep_words(plan["runs"], len(body["seeds"]), base.get("plan"), by_passes=by_passes)
    st.markdown(f"**{plain(words)}**")
    st.caption(plain(f"{_most(cost, 'in all')}{cost['per_step_words']}"))
    if made := _submitted(f"Submit {number_of(cost['runs'], 'run')}", "/sweeps", body):
        go("runs", group=made["group"]["id"])
    show_plan(base, cost["runs"])
    rows = [(run["name"], run["rule_label"], run["seed"], count(run["backward_passes"])) for run in plan["runs"]]
    frame = pd.DataFrame(rows, columns=["Run", "Rule", "Seed", "Backward passes"])
    text_table(frame.astype("str"), "Planned runs")
    _equivalents(base, "/sweeps", body)
    return {}


def _equivalents(checked: Json, path: str, body: Json) -> None:
    """The run file of the config that was checked, and the command that submits `body`."""
    # Without highlighting, whose colours have too little contrast in light mode.
    with st.expander("TOML", expanded=checked["valid"]):
        st.code(checked.get("toml") or "# invalid config", language=None, height=420)
    with st.expander("curl"):
        st.code(forms.curl(visitor.service_url(external=True), path, body), language=None, height=300)


def _submitted(label: str, path: str, body: Json, *, possible: bool = True) -> Json | None:
    """A button that submits `body`; the response once it was pressed.

    Until there is an answer, the same has the same idempotency key: pressed again after a lost one, it submits it once.
    """
    look = {"type": "primary", "key": "submit", "shortcut": "Ctrl+Enter"}
    if not actions.change_button(label, ":material/rocket_launch:", possible=possible, **look):
        return None
    submission: uuid.UUID = st.session_state.setdefault("submission", uuid.uuid4())
    try:
        made = visitor.client().submit(body, uuid.uuid5(submission, json.dumps([path, body])).hex, to=path)
    except Refused:  # as one whose run has been deleted since
        del st.session_state["submission"]
        raise
    del st.session_state["submission"]
    return made


def _complaints(errors: list[tuple[str, str]]) -> Problems:
    """List what is wrong; returns it by the path of the setting."""
    st.error(f"Fix {number_of(len(errors), 'setting')}:", icon=":material/error:")
    prefix = re.compile(r"^(base\.|grid\.)?(config\.)?|(?<=^seed)s\b")
    problems = [(prefix.sub("", field), message) for field, message in errors]
    for path, message in problems[:30]:
        st.text(message if message.startswith(path) else f"{path}: {message}")
    return dict(problems)


def show_plan(checked: Mapping[str, Any], runs: int = 1) -> None:
    """The plan in an answer of `/runs/validate`; why there is none where there is none.

    runs: of the sweep whose base configuration was checked.
    """
    plan = checked.get("plan")
    if plan is None:
        if checked.get("plan_problem"):
            st.caption(plain(f"No plan: {checked['plan_problem']}"))
        return
    if runs > 1:
        st.caption(f"Plan of one run with the base settings; the sweep has {count(runs)} runs.")
    words = plain(verdict(plan))
    if plan["fits"]:
        st.markdown(words)
    else:
        st.warning(words, icon=":material/memory:")
    text_table(time_table(plan), "Time and cost by rule")
    st.caption(
        "With the look-ahead on to the end, without evaluation, checkpoints and start-up. The command gxpo plan shows "
        "the memory of each phase and what is assumed."
    )
