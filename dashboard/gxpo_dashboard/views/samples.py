"""Samples of a run: prompts worst first, and the answers to one of them."""

from __future__ import annotations

import json
import math
from typing import Any

import streamlit as st

from gxpo_client.formats import count, figure, number_of, significant
from gxpo_dashboard.labels import TERMINAL, VERDICT_COLORS, VERDICTS, differing, plain, unique_labels, with_formulas
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.view_models.series import number
from gxpo_dashboard.view_models.tables import answers, episode_facts, turn_rows, worst_first
from gxpo_dashboard.views import explorer, records
from gxpo_dashboard.widgets import cursors, empty, pager, table, untrusted

Json = dict[str, Any]

_PAGE = 500
"""Prompts of a list, and responses of a prompt: the largest page of the service."""
_MOST_OTHERS = 5
"""Further runs in which a prompt is looked up."""
_INLINE = 120
"""Characters of an answer that is shown in full."""


def show(run: str, x: str) -> None:
    """The prompts of a step, or a prompt at all steps and in further runs, worst first; answers of the selected one."""
    prompt = st.query_params.get("prompt", "")
    steps = [str(step) for step in visitor.client().get("/runs", run, "samples", limit=1)["steps"]]
    if not steps:
        records.none(run, "samples")
        return
    runs = {run: visitor.client().run(run)}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        if prompt:
            if st.button("All prompts", icon=":material/arrow_back:"):
                del st.query_params["prompt"]
                st.rerun()
            step = "all"
        else:
            offered = {"": "newest", "all": "all"} | {step: count(int(step)) for step in reversed(steps)}
            step = permalinks.select("Step", "step", offered, "", width=160)
            behind = step in steps[:-1] and runs[run]["state"] not in TERMINAL
            if behind and st.button(f"Newest (step {offered[steps[-1]]})", icon=":material/last_page:"):
                permalinks.write({"step": []})
                st.rerun()
        verdict = permalinks.select("Verdict", "verdict", {"": "any"} | VERDICTS, "", width=220)
        if prompt:
            runs |= explorer.runs("Also in", "also", most=_MOST_OTHERS)
    query: Json = {"step": {"": steps[-1], "all": None}.get(step, step), "verdict": verdict, "prompt_id": prompt}
    # One response lists a prompt; with a verdict it may be any of them.
    query |= {"limit": _PAGE} if verdict else {"limit": _PAGE, "sample": 0}
    visited = cursors("samples", (run, query))
    # Later pages are of this run: the first one has what is listed of the others.
    cursor = visited[-1] if visited else None
    shown = [run] if visited else list(runs)
    pages = {of: visitor.client().get("/runs", of, "samples", **query, cursor=cursor) for of in shown}
    groups = worst_first(group | {"run": of} for of, page in pages.items() for group in page["groups"])
    if not groups:
        empty("No matching samples", "Select another step or verdict.")
        return
    prompts = {_identity(item): item["prompt"] for page in pages.values() for item in page["items"]}
    labels = unique_labels(runs) if len(runs) > 1 else {}
    listed, read = st.columns([2, 3])
    with listed:
        chosen, has_selected = _group_list(
            groups, prompts, labels, f"samples-{run}-{query}", by_step=query["step"] is None
        )
        if has_selected and not step and runs[run]["state"] not in TERMINAL:
            # The next step would take its place while it is read.
            permalinks.write({"step": [steps[-1]]})
            st.rerun()
        following = pages[run]["next_cursor"]
        if visited or following:
            pager("samples", visited, following, len(visited) * _PAGE, len(pages[run]["items"]))
    with read:
        query = {"step": chosen["step"], "group": chosen["group"], "verdict": verdict, "limit": _PAGE}
        whole = visitor.client().get("/runs", chosen["run"], "samples", **query)["items"]
        # A later attempt may just have replaced the step.
        if items := [item for item in whole if _identity(item) == _identity(chosen)]:
            _group(chosen, items)


def _identity(item: Json) -> tuple[Any, ...]:
    """Of the group of a sample, or of a group's counts."""
    return item["step"], item["attempt"], item["group"], item["prompt_id"]


def _group_list(
    groups: list[Json], prompts: dict[tuple[Any, ...], str], runs: dict[str, str], key: str, *, by_step: bool
) -> tuple[Json, bool]:
    """A row per prompt; returns the selected group, and whether the visitor has just selected it. runs: labels, where
    there are several."""
    kinds = {"Run": "text", "Step": "number", "Correct": "number", "Reward": "number", "Prompt": "name"}
    left_out = {"Run": not runs, "Step": not by_step}
    titles = [title for title in kinds if not left_out.get(title)]
    columns = [{"name": title, "label": title, "help": "", "kind": kinds[title], "order": False} for title in titles]
    known = {"-".join(map(str, (group["run"], *_identity(group)))): group for group in groups}
    rows = []
    for id, group in known.items():
        cells = {
            "Run": runs.get(group["run"]),
            "Step": count(group["step"]),
            "Correct": f"{group['correct']} of {group['responses']}",
            "Reward": significant(number(group["reward"])),
        }
        prompt = prompts[_identity(group)]
        rows.append({"id": id, "name": prompt, "color": "", "cells": [cells.get(title) for title in titles]})
    report = table(key, "Prompts, worst first", columns, rows, [next(iter(known))], single=True)
    selected, before = report.selected or [], st.session_state.get("read_prompt", [])
    st.session_state["read_prompt"] = selected
    return known.get(next(iter(selected), ""), groups[0]), selected not in ([], before)


def _group(counts: Json, items: list[Json]) -> None:
    """A prompt with the answers of all its responses."""
    first = items[0]
    with st.container(border=True, gap="small"):
        with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
            versions = dict.fromkeys(item["extra"].get("weights_version") for item in items)
            facts = f"Step {count(first['step'])}, attempt {first['attempt']}, group {first['group']}" + "".join(
                f", policy version {count(version)}" for version in versions if version is not None
            )
            correct = f"**{counts['correct']} of {counts['responses']}** correct"
            st.markdown(f"{plain(facts)}: {correct}", width="content")
            across = st.query_params.get("prompt") != first["prompt_id"]
            if across and st.button("All steps", icon=":material/history:"):
                st.query_params["prompt"] = first["prompt_id"]
                st.rerun()
        _text(first["prompt"])
        if shown := first["extra"].get("rendered_prompt"):
            with st.expander("What the policy saw"):
                untrusted("Rendered prompt", shown)
        st.markdown(f"Gold answer {_inline(first['gold'])}")
        for place, group in enumerate(answers(items)):
            _answer(group, folded=place > 0 and bool(group[0]["turns"]))


def _answer(group: list[Json], *, folded: bool) -> None:
    """Responses with an equal verdict and answer: how many, and the different ones among them. folded: all of them are
    in the drawer, as turns would fill the page."""
    first = group[0]
    verdict = first["verdict"]
    chip = f":{VERDICT_COLORS.get(verdict, 'gray')}-badge[{plain(VERDICTS.get(verdict, verdict))}]"
    times = f" **{count(len(group))}×**" if len(group) > 1 else ""
    answer = "no answer" if first["extracted"] is None else f"answer {_inline(first['extracted'])}"
    rewards = " to ".join(dict.fromkeys(map(figure, _ends(group, "reward"))))
    tokens = " to ".join(dict.fromkeys(map(count, _ends(group, "length"))))
    cut = ", truncated" if any(item["truncated"] for item in group) else ""
    st.markdown(f"{chip}{times} {answer}, {plain(f'reward {rewards}, {tokens} tokens{cut}')}")
    different: dict[str, Json] = {}
    for item in group:
        different.setdefault(json.dumps([item["response"], item["turns"]]), item)
    hidden = [*different.values()]
    if not folded:
        _response(hidden.pop(0))
    if hidden:
        label = f"{number_of(len(hidden), 'different response')} with this answer"
        drawer = st.expander(label, key=f"others-{first['number']}", on_change="rerun")
        if drawer.open:
            with drawer:
                for item in hidden:
                    _response(item, None if folded else first)


def _ends(group: list[Json], name: str) -> tuple[float | None, float | None]:
    """The lowest and the highest value; None if no sample has one, as a failed verification gives no reward."""
    values = [value for item in group if not math.isnan(value := number(item[name]))]
    return min(values, default=None), max(values, default=None)


def _inline(text: str) -> str:
    """Untrusted text within a line, cut to what fits there."""
    return f"**{plain(text if len(text) <= _INLINE else f'{text[:_INLINE]}…')}**" if text.strip() else "(none)"


def _response(item: Json, like: Json | None = None) -> None:
    """like: the response above, from which its words differ."""
    rows = turn_rows(item)
    for heading, text in rows:
        untrusted(heading, text)  # without typeset formulas
    if not rows and like:
        st.markdown(differing(item["response"], like["response"]))
    elif not rows:
        _text(item["response"])
    if item["extra"].get("detail"):
        untrusted("Grader", item["extra"]["detail"])
    if item.get("end_detail"):
        untrusted("Environment", item["end_detail"])
    if ended := episode_facts(item):
        st.caption(plain(ended))


def _text(text: str) -> None:
    """Untrusted text as it is, and if it has formulas also with these typeset, in a second column."""
    formulas = with_formulas(text)
    if formulas is None:
        st.code(text or " ", language=None, wrap_lines=True)
        return
    raw, typeset = st.columns(2)
    raw.code(text, language=None, wrap_lines=True)
    typeset.markdown(formulas)
