"""Synchronization of widgets with the URL, so that a link or a reload opens the same view.

Each widget has one query parameter with raw values (run ids, never labels). The last change wins: if the URL differs
from what this session wrote (a link, the back button), it is adopted; otherwise the widget's value is written to it.
Default values are omitted from the URL.

Navigation between views.

All views are one Streamlit page, selected by the query parameter `view`. Streamlit cannot switch pages from the server
while fragments refresh themselves: a pending refresh still names the old page, and the browser then drops the new
elements. Paths (`/compare?runs=…`) work as entry points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import streamlit as st

T = TypeVar("T")


def adopt(
    address: Sequence[str], written: Sequence[str] | None, current: Sequence[str] | None, default: Sequence[str]
) -> list[str]:
    """The initial values of a widget. Pure.

    address: in the URL. written: last written by this session, or None. current: of the widget, None before it exists.
    """
    changed_outside = written is None or list(address) != list(written)
    if changed_outside:
        return list(address) or list(default)
    return list(current) if current is not None else list(address) or list(default)


def in_address(values: Sequence[str], default: Sequence[str]) -> list[str]:
    """The values to write to the URL. Pure."""
    return [] if list(values) == list(default) else list(values)


def _key(name: str) -> str:
    return f"in_{name}"


def _start(name: str, default: Sequence[str], decode: Callable[[list[str]], Any]) -> str:
    """Initialize a widget's session value from the URL; returns its key."""
    key = _key(name)
    memory = st.session_state.setdefault("address", {})
    current = st.session_state.get(key)
    values = adopt(
        st.query_params.get_all(name), memory.get(name), None if current is None else _words(current), default
    )
    if current is None or _words(current) != values:
        st.session_state[key] = decode(values)
    return key


def _publish(name: str, value: Any, default: Sequence[str]) -> None:
    found = in_address(_words(value), default)
    _write(name, found)
    st.session_state["address"][name] = found


def _write(name: str, values: list[str]) -> None:
    if st.query_params.get_all(name) == values:
        return
    if values:
        st.query_params[name] = values
    else:
        st.query_params.pop(name, None)


def _words(value: Any) -> list[str]:
    if value is None or value == "":
        return []
    if isinstance(value, bool):
        return ["1" if value else "0"]
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def text(label: str, name: str, default: str = "", **widget: Any) -> str:
    words = _words(default)
    key = _start(name, words, lambda values: values[0] if values else "")
    value: str = st.text_input(label, key=key, **widget) or ""
    # An emptied field that has a default is `name=` in the URL, so that a reload does not restore the default.
    _publish(name, [value] if words else value, words)
    return value


def check(label: str, name: str, default: bool = False, **widget: Any) -> bool:
    words = ["1" if default else "0"]
    key = _start(name, words, lambda values: values[:1] == ["1"])
    value = st.checkbox(label, key=key, **widget)
    _publish(name, value, words)
    return value


def select(label: str, name: str, options: Sequence[str], default: str | None = None, **widget: Any) -> str | None:
    """One of the options; an unknown option in the URL falls back to the default."""
    return _one(st.selectbox, label, name, options, default, widget)


def choice(label: str, name: str, options: Sequence[str], default: str, **widget: Any) -> str:
    """The same as a segmented control; one is always selected."""
    widget = {"label_visibility": "collapsed", "required": True} | widget
    return _one(st.segmented_control, label, name, options, default, widget) or default


def multi(label: str, name: str, options: Sequence[str], default: Sequence[str] = (), **widget: Any) -> list[str]:
    key = _start(name, list(default), lambda values: [value for value in values if value in options])
    value = [str(item) for item in st.multiselect(label, options, key=key, **widget)]
    _publish(name, value, list(default))
    return value


def selected(name: str, options: Sequence[str], default: str | None = None) -> str | None:
    """The value that `select` or `choice` shows next, for what is drawn before the widget."""
    words = [default] if default is not None else []
    key = _start(name, words, lambda values: values[0] if values and values[0] in options else default)
    if st.session_state.get(key) not in options:
        st.session_state[key] = default
    value: str | None = st.session_state[key]
    return value


def number(label: str, name: str, default: int, least: int, most: int, **widget: Any) -> int:
    """A whole number; what is no number from `least` to `most` in the URL falls back to the default."""

    def decode(values: list[str]) -> int:
        try:
            value = int(values[0])
        except (IndexError, ValueError):
            return default
        return value if least <= value <= most else default

    words = [str(default)]
    key = _start(name, words, decode)
    value = int(st.number_input(label, min_value=least, max_value=most, step=1, key=key, **widget))
    _publish(name, value, words)
    return value


def received(name: str) -> list[str] | None:
    """The parameter's values, where they are not ones that this session has sent; None if they are.

    Unlike the widgets above, which follow the back button: a form is filled in faster than the URL is, so that an
    earlier URL would take away what was just typed.
    """
    values = st.query_params.get_all(name)
    return None if values in _sent(name) else values


def send(name: str, values: list[str]) -> None:
    """Write a parameter's values to the URL; none removes it."""
    if values not in (sent := _sent(name)):
        sent.append(values)
    _write(name, values)


def _sent(name: str) -> list[list[str]]:
    sent: list[list[str]] = st.session_state.setdefault("sent", {}).setdefault(name, [])
    return sent


def _one(
    show: Callable[..., Any],
    label: str,
    name: str,
    options: Sequence[str],
    default: str | None,
    widget: dict[str, Any],
) -> str | None:
    words = [default] if default is not None else []
    selected(name, options, default)
    value: str | None = show(label, options, key=_key(name), **widget)
    _publish(name, value, words)
    return value


DEFAULT = "runs"


def wanted(address: Mapping[str, str], path: str, views: Sequence[str]) -> str:
    """The view selected by `view`, the path, or the default. Pure."""
    for name in (address.get("view", ""), path.strip("/")):
        if name in views:
            return name
    return DEFAULT


def go(view: str, **query: Any) -> None:
    """Switch to a view; lists become repeated parameters, empty values are omitted."""
    found = {name: value for name, value in query.items() if value}
    st.query_params.from_dict({"view": view, **found})
    st.rerun()


def bar(titles: Mapping[str, tuple[str, str]], current: str) -> None:
    """The navigation bar (name → title, icon); each view opens with its last parameters."""
    left: dict[str, dict[str, list[str]]] = st.session_state.setdefault("left", {})
    left[current] = {name: st.query_params.get_all(name) for name in st.query_params if name != "view"}
    for name, (title, icon) in titles.items():
        kind: Literal["primary", "tertiary"] = "primary" if name == current else "tertiary"
        if st.button(title, icon=icon, type=kind, key=f"nav-{name}") and name != current:
            go(name, **left.get(name, {}))
