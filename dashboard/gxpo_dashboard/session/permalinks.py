"""Widgets whose values are in the URL, so that a link or a reload opens the same view, and navigation between views.

Each widget has one query parameter with raw values (run ids, never labels). The last change wins: if the URL differs
from what this session wrote (a link, the back button), it is adopted; otherwise the widget's value is written to it.
Default values are omitted from the URL.

All views are one Streamlit page, selected by the query parameter `view`. Streamlit cannot switch pages from the server
while fragments refresh themselves: a pending refresh still names the old page, and the browser then drops the new
elements. Paths (`/compare?runs=…`) work as entry points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import streamlit as st

Options = Sequence[str] | Mapping[str, str]
"""What can be selected; a mapping has the label of each option."""
Span = tuple[float, float]


def adopt(
    address: Sequence[str], written: Sequence[str] | None, current: Sequence[str] | None, default: Sequence[str]
) -> list[str]:
    """The initial values of a widget. Pure.

    address: in the URL. written: last written by this session, or None. current: of the widget, None before it exists.
    """
    if current is not None and written is not None and list(address) == list(written):
        return list(current)
    return list(address) or list(default)


def _start(name: str, default: Sequence[str], decode: Callable[[list[str]], Any]) -> str:
    """Initialize a widget's session value from the URL; returns its key."""
    key = f"in_{name}"
    written = st.session_state.setdefault("address", {})
    current = _words(st.session_state[key]) if st.session_state.get(key) is not None else None
    values = adopt(address := st.query_params.get_all(name), written.get(name), current, default)
    written[name] = address  # also if the back button ends this script before `_publish`
    if current != values:
        st.session_state[key] = decode(values)
    return key


def _publish(name: str, value: Any, default: Sequence[str]) -> None:
    """Write a widget's value to the URL, unless it is the default."""
    words = _words(value)
    st.session_state["address"][name] = written = [] if words == list(default) else words
    write({name: written})


def write(changes: Mapping[str, list[str]]) -> None:
    """Write parameters to the URL, without those that are empty, all at once: each message of Streamlit to the browser
    is an entry of its history, and a back button that leads to an entry that writes another leads no further."""
    query = {name: st.query_params.get_all(name) for name in st.query_params}
    if (changed := {name: words for name, words in {**query, **changes}.items() if words}) != query:
        st.query_params.from_dict(changed)


def _words(value: Any) -> list[str]:
    if value is None or value == "":
        return []
    if isinstance(value, bool):
        return ["1" if value else "0"]
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def text(label: str, name: str, **widget: Any) -> str:
    key = _start(name, [], lambda values: values[0] if values else "")
    value: str = st.text_input(label, key=key, **widget) or ""
    _publish(name, value, [])
    return value


def check(label: str, name: str, **widget: Any) -> bool:
    key = _start(name, ["0"], lambda values: values[:1] == ["1"])
    value = st.checkbox(label, key=key, **widget)
    _publish(name, value, ["0"])
    return value


def select(
    label: str, name: str, options: Options, default: str, *, box: Callable[..., Any] = st.selectbox, **widget: Any
) -> str:
    """One of the options; an unknown option in the URL falls back to the default. box: the kind of widget."""
    selected(name, options, default)
    _relabel(name, options)
    value: str | None = box(label, list(options), key=f"in_{name}", **_labels(options), **widget)
    # An empty option that is not the default is `name=` in the URL, so that a reload does not restore the default.
    _publish(name, [value] if default and value is not None else value, [default])
    return default if value is None else value


def choice(label: str, name: str, options: Options, default: str, **widget: Any) -> str:
    """The same as a segmented control; one is always selected."""
    widget = {"label_visibility": "collapsed", "required": True} | widget
    return select(label, name, options, default, box=st.segmented_control, **widget)


def multi(label: str, name: str, options: Options, default: Sequence[str] = (), **widget: Any) -> list[str]:
    key = _start(name, list(default), lambda values: [value for value in values if value in options])
    _relabel(name, options)
    value = [str(item) for item in st.multiselect(label, list(options), key=key, **_labels(options), **widget)]
    _publish(name, value, list(default))
    return value


def _relabel(name: str, options: Options) -> None:
    """Send a selection again when its labels have changed, as when a run is renamed or another one has its name: the
    browser sends labels, and would send those that no option has any more."""
    if isinstance(options, Mapping):
        value, before = st.session_state[f"in_{name}"], st.session_state.get(f"labels_{name}", {})
        labels = {item: options[item] for item in _words(value) if item in options}
        if any(before.get(item, label) != label for item, label in labels.items()):
            st.session_state[f"in_{name}"] = value
        st.session_state[f"labels_{name}"] = labels


def _labels(options: Options) -> dict[str, Any]:
    return {"format_func": options.__getitem__} if isinstance(options, Mapping) else {}


def selected(name: str, options: Options, default: str) -> str:
    """The value that `select` or `choice` shows next, for what is drawn before the widget."""
    key = _start(name, [default], lambda values: values[0] if values and values[0] in options else default)
    if st.session_state.get(key) not in options:
        st.session_state[key] = default
    value: str = st.session_state[key]
    return value


def span(x: str) -> Span | None:
    """The visible part of the x-axis in its units, if the address has one and the view's charts have the axis `x`."""
    try:
        low, high = (float(st.query_params[end]) for end in ("from", "to"))
    except (KeyError, ValueError):
        return None
    return (low, high) if low <= high and x == st.session_state.get("axis") else None


def zoom(low: float | None = None, high: float | None = None) -> None:
    """Write the visible part of the x-axis to the address; without one, the whole axis is visible."""
    write({end: [] if value is None else [f"{value:.9g}"] for end, value in (("from", low), ("to", high))})


SMOOTHING = {"0": "none"} | {weight: f"average, weight {weight}" for weight in ("0.3", "0.6", "0.9")}


def smoothing() -> float:
    """Weight of the exponential average of the view's curves, from the address."""
    weight = st.query_params.get("smooth", "0")
    return float(weight) if weight in SMOOTHING else 0.0


_FORM = "set"
"""Parameter with the changed settings of the form."""


def received() -> list[str] | None:
    """The words of the form in the URL, where they are not ones that this session has sent; None if they are.

    Unlike the widgets above, which follow the back button: a form is filled in faster than the URL is, so that an
    earlier URL would take away what was just typed.
    """
    words = st.query_params.get_all(_FORM)
    return None if words in st.session_state.get("sent", []) else words


def send(words: list[str]) -> None:
    """Write the words of the form to the URL."""
    if words not in (sent := st.session_state.setdefault("sent", [])):
        sent.append(words)
    write({_FORM: words})


def forget() -> None:
    """Let the URL alone fill in the form the next time."""
    st.session_state.pop("sent", None)


DEFAULT = "runs"


def view_of(address: Mapping[str, str], path: str, views: Sequence[str]) -> str:
    """The view selected by `view`, the path, or the default. Pure."""
    names = (address.get("view", ""), path.strip("/"))
    return next((name for name in names if name in views), DEFAULT)


def go(view: str, **query: Any) -> NoReturn:
    """Switch to a view; lists become repeated parameters, empty values are omitted."""
    st.query_params.from_dict({"view": view, **{name: value for name, value in query.items() if value}})
    st.rerun()


def bar(titles: Mapping[str, tuple[str, str]], current: str) -> None:
    """The navigation bar (name → title, icon); each view opens with its last parameters."""
    last: dict[str, dict[str, list[str]]] = st.session_state.setdefault("last_query", {})
    last[current] = {name: st.query_params.get_all(name) for name in st.query_params if name != "view"}
    for name, (title, icon) in titles.items():
        kind: Literal["primary", "tertiary"] = "primary" if name == current else "tertiary"
        if st.button(title, icon=icon, type=kind, key=f"nav-{name}") and name != current:
            go(name, **last.get(name, {}))
