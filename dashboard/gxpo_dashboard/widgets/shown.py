"""Charts, tables and foreign text on a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import streamlit as st

from gxpo_dashboard.charts.base import ZOOM, Chart
from gxpo_dashboard.text.labels import plain


def live(function: Callable[[], None], every_s: float | None) -> None:
    """Show a part of the page and draw it anew every so many seconds; None: only when something is pressed."""
    st.fragment(run_every=every_s)(function)()


@contextmanager
def charts_ahead() -> Iterator[None]:
    """Let the browser fetch what draws charts while the figures of the page are still being worked out. It does so
    when it meets the first chart of a session: an empty one, which is gone when the page is drawn."""
    if "charts_ahead" in st.session_state:
        yield
        return
    place = st.empty()
    place.vega_lite_chart(None, {"mark": "point", "data": {"values": []}}, height=1)
    yield
    place.empty()
    st.session_state["charts_ahead"] = True


_DRAWING_S = 0.8
"""About what a browser needs to make ready what draws charts, and to draw twenty lines."""


def draw_first() -> None:
    """Let the browser draw what it has before more of a session's first page follows. It draws in one thread, and a
    chart waits there for all that came behind it; the page as a whole is not later for it."""
    if "charts_ahead" not in st.session_state:
        time.sleep(_DRAWING_S)


def chart(found: Chart, scope: str) -> None:
    """A chart with its sentence, its data as a table and as CSV. `scope` tells equal charts of two runs apart."""
    with st.container(border=True, height="stretch"):
        st.markdown(f"##### {plain(found.title)}")
        key = f"{scope}-{found.key}"
        if found.empty:
            st.caption(found.summary)
            return
        spec = {**found.spec, "datasets": dict(found.datasets), **_FRAME}
        if found.zoomable:
            # Only a selection that the page listens to survives new data; that is what keeps the zoom.
            st.vega_lite_chart(
                None, spec, key=key, alt=found.alt, height=found.height, on_select="rerun", selection_mode=[ZOOM]
            )
        else:
            st.vega_lite_chart(None, spec, key=key, alt=found.alt, height=found.height)
        st.caption(plain(found.summary) + (f" {plain(found.note)}" if found.note else ""))
        data(found.table, key, found.title)


_LONG_TABLE = 16
_FRAME = {
    "autosize": {"type": "fit", "contains": "padding"},
    "padding": {"left": 4, "right": 12, "top": 4, "bottom": 4},
    # Legends one under another, never over each other.
    "config": {"legend": {"layout": {"top": {"direction": "vertical", "anchor": "start", "margin": 2}}}},
}


def data(make: Callable[[], pd.DataFrame], key: str, title: str) -> None:
    """A closed drawer with the data behind a picture; made only when it is opened."""
    drawer = st.expander("Data", key=f"{key}-data", on_change="rerun", icon=":material/table:")
    if drawer.open:
        with drawer:
            frame = make()
            st.dataframe(frame, hide_index=True, height=260, key=f"{key}-table", alt=f"Data of: {title}")
            download("CSV", f"{key}.csv", lambda: frame.to_csv(index=False).encode(), f"{key}-csv")


def text_table(frame: pd.DataFrame, title: str, *, closed: bool = False) -> None:
    """A table of text in a card, its cells shown as they are; a long one, or one that is `closed`, is made only when
    it is opened."""
    with st.container(border=True):
        st.markdown(f"##### {plain(title)}")
        if frame.empty:
            st.caption("No row yet.")
        elif not closed and len(frame) <= _LONG_TABLE:
            _cells(frame, title)
        else:
            drawer = st.expander(f"{len(frame)} rows", key=f"table-{title}", on_change="rerun")
            if drawer.open:
                with drawer:
                    _cells(frame, title)


def _cells(frame: pd.DataFrame, title: str) -> None:
    shown = frame.map(plain).rename(columns=plain)
    st.table(shown, border="horizontal", hide_index=True, alt=title)


def download(label: str, name: str, make: Callable[[], bytes], key: str) -> None:
    st.download_button(
        label, make, file_name=name, mime="application/octet-stream", key=key, on_click="ignore",
        icon=":material/download:",
    )  # fmt: skip


def grid(charts: Sequence[Chart], scope: str, columns: int = 2) -> None:
    """Charts in rows; the last one of an odd number keeps its width."""
    for start in range(0, len(charts), columns):
        for place, found in zip(st.columns(columns), charts[start : start + columns], strict=False):
            with place:
                chart(found, scope)


def foreign(label: str, text: Any, key: str | None = None) -> None:
    """Text that the product did not write, as text: never Markdown, never HTML, never a link."""
    st.markdown(f"**{label}**")
    st.code(str(text) if text not in (None, "") else " ", language=None, wrap_lines=True)


def empty(title: str, text: str) -> None:
    """A state in which there is nothing to show yet, and what to do about it."""
    with st.container(border=True):
        st.markdown(f"#### {title}")
        st.markdown(text)
