"""Actions on runs, with their buttons and dialogs. The service authorizes; its errors are shown."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, NoReturn

import streamlit as st

from gxpo_client.errors import Refused, ServiceUnavailable
from gxpo_client.formats import comma_separated, number_of
from gxpo_dashboard.labels import ACTIONS, NO_RIGHT, plain
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.session.permalinks import go
from gxpo_dashboard.widgets import focus

Json = dict[str, Any]


def act(runs: Sequence[str], action: str) -> list[Json]:
    """Apply an action to runs and show the result; returns the changed runs."""
    done, refused = [], []
    for run in runs:
        try:
            done.append(visitor.client().act(run, action))
        except Refused as error:
            refused.append(str(error))
        except ServiceUnavailable as error:  # each further one would wait for it as well
            refused.append(str(error))
            break
    label = ACTIONS[action][0]
    if done:
        st.toast(f"{label}: {number_of(len(done), 'run')}", icon=ACTIONS[action][1])
    for message in refused:
        st.toast(plain(message), icon=":material/error:", duration="long")
    return done


def change_button(label: str, icon: str, *, possible: bool = True, **widget: Any) -> bool:
    """A button of a change, disabled for read-only tokens and while it is not possible."""
    allowed = visitor.may_change()
    words = None if allowed else NO_RIGHT
    return st.button(label, icon=icon, disabled=not (allowed and possible), help=words, **widget)


def buttons(run: Json, key: str) -> None:
    """Buttons of a run's actions, aligned right.

    Those of an active run are disabled rather than removed when the state does not allow them, so that a change of
    state never moves a button under the pointer.
    """
    possible = run["possible_actions"]
    with st.container(horizontal=True, gap="small", width="content"):
        if "delete" not in possible:
            # One widget with two labels: Streamlit keeps a focused button that a refresh removed until the next click,
            # and that click then shifts the row and is lost.
            action = "resume" if "resume" in possible else "pause"
            displayed = st.session_state.get(f"{key}-displayed", action)
            st.session_state[f"{key}-displayed"] = action
            if change_button(*ACTIONS[action], possible=action in possible, key=f"{key}-pause"):
                act([run["id"]], displayed)
            if change_button(*ACTIONS["cancel"], possible="cancel" in possible, key=f"{key}-cancel"):
                ask("cancel", [run])
        else:
            retry = "retry" in possible and change_button(*ACTIONS["retry"], key=f"{key}-retry")
            if retry and (made := act([run["id"]], "retry")):
                go("run", run=made[0]["id"])
            if change_button("Delete…", ":material/delete:", key=f"{key}-delete"):
                ask("delete", [run])
        if change_button(*ACTIONS["clone"], key=f"{key}-clone"):
            clone(run)
        if change_button("Edit…", ":material/edit:", key=f"{key}-edit"):
            ask("edit", run)


def clone(run: Json) -> NoReturn:
    """Open the form with the settings of a run, and nothing of an earlier clone of it."""
    permalinks.forget()
    go("submit", preset=run["id"], tags=", ".join(run["tags"]))


def tags_of(text: str, original: Sequence[str]) -> list[str]:
    """The tags in a field that first has those of a run, in which there may be commas."""
    return list(original) if text == ", ".join(original) else comma_separated(text)


def ask(dialog: str, about: Json | list[Json]) -> NoReturn:
    """Open a dialog: `edit` of a run, `cancel`, `delete` of runs.

    The page opens it, because the next refresh of a fragment would close it. Every run of the page, as after an outage
    of the service, shows it until the visitor closes it or leaves.
    """
    st.session_state["dialog"] = (dialog, about, _page())
    st.rerun()


_CONFIRMED = {
    "cancel": "A run stops at the end of its step and cannot be resumed. Its results are kept.",
    "delete": "Metrics, samples, logs and checkpoints are deleted permanently.",
}


def dialogs() -> None:
    """Show the open dialog. Call it outside fragments."""
    dialog, about, page = st.session_state.get("dialog", (None, None, None))
    if page != _page():
        _close()
    elif dialog in _CONFIRMED:
        st.dialog(f"{dialog.capitalize()} runs?", on_dismiss=_close)(_confirm)(dialog, about)
    elif dialog is not None:
        _edit(about)


def _page() -> tuple[str | None, str | None]:
    return st.query_params.get("view"), st.query_params.get("run")


def _close() -> None:
    st.session_state.pop("dialog", None)


def _confirm(action: str, runs: list[Json]) -> None:
    """Cancel or delete runs. Those that the service refuses stay in the dialog, with the reason."""
    st.write(_CONFIRMED[action])
    st.text("\n".join(run["name"] for run in runs))
    for run in runs:
        if refusal := run.get("refusal"):
            st.error(plain(f"{run['name']}: {refusal}"), icon=":material/error:")
    if action == "cancel":  # Enter confirms; what deletes is not one key away
        focus(".st-key-confirm-cancel button")
    label = f"{action.capitalize()} run" if len(runs) == 1 else f"{action.capitalize()} {len(runs)} runs"
    if st.button(label, type="primary", key=f"confirm-{action}"):
        with visitor.guarded():
            items = visitor.client().act_on_all([run["id"] for run in runs], action)
            # A run that no longer exists counts as deleted.
            problems = {item["run"]: problem for item in items if (problem := item["problem"]) is not None}
            refused = {run: problem for run, problem in problems.items() if problem["status"] != HTTPStatus.NOT_FOUND}
            kept = [run | {"refusal": refused[run["id"]]["detail"]} for run in runs if run["id"] in refused]
            if kept:
                ask(action, kept)
            _close()
            if action == "delete" and "run" in st.query_params:
                go("runs")
            st.rerun()  # the list, with its filters


@st.dialog("Edit", width="medium", on_dismiss=_close)
def _edit(run: Json) -> None:
    """Edit name, tags, notes and archived."""
    focus("[role=dialog] input")
    name = st.text_input("Name", value=run["name"], max_chars=200)
    tags = st.text_input("Tags", value=", ".join(run["tags"]), help="Comma-separated.")
    notes = st.text_area("Notes", value=run["notes"])
    archived = st.checkbox("Archived", value=run["archived"], help="Archived runs are hidden from the list.")
    if st.button("Save", type="primary", key="edit-save"):
        with visitor.guarded():
            edited = {"name": name, "tags": tags_of(tags, run["tags"]), "notes": notes, "archived": archived}
            # Only these: what others have changed since the dialog was opened stays.
            if changes := {field: value for field, value in edited.items() if value != run[field]}:
                visitor.client().change(run["id"], **changes)
            _close()
            st.rerun()
