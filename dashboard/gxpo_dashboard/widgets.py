"""Widgets that several views share: charts, tables, pages of a list, and untrusted text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import streamlit as st

from gxpo_client.formats import count, figure, number_of
from gxpo_dashboard.charts.base import AXIS_WORDS, BRUSH, Chart, between, with_brush, without_outliers
from gxpo_dashboard.labels import plain
from gxpo_dashboard.session import permalinks
from gxpo_dashboard.view_models.tables import csv_file

T = TypeVar("T")


def cursors(name: str, query: Any) -> list[str]:
    """Cursors of the pages up to the current one of the list `name`; another query starts at the first page."""
    if st.session_state.get(f"{name}_query") != query:
        st.session_state[f"{name}_query"], st.session_state[f"{name}_cursors"] = query, []
    visited: list[str] = st.session_state[f"{name}_cursors"]
    return visited


def pager(name: str, visited: list[str], following: str | None, first: int, num: int, of: str = "") -> None:
    """Buttons to the pages before and after, and the range on this page. first: number of items before it."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        # A callback gets the whole list, as two quick clicks may call it twice.
        for label, icon, changed, is_possible in (
            ("Back", "chevron_left", visited[:-1], visited),
            ("Next", "chevron_right", [*visited, following], following),
        ):
            st.button(
                label, icon=f":material/{icon}:", disabled=not is_possible, key=f"{name}-{label.lower()}",
                on_click=st.session_state.update, args=({f"{name}_cursors": changed},),
            )  # fmt: skip
        st.caption(f"{name.capitalize()} {count(first + 1)} to {count(first + num)}{of}")


def focus(selector: str) -> None:
    """Give an input the keys once it is drawn, where no other has them.

    Streamlit gives them to a dialog, where typed letters are its own shortcuts, or to nothing.
    """
    script = f"""<script>{{
    let looks = 0;
    const focus = setInterval(() => {{
      if (document.activeElement.matches("[role=dialog], body")) document.querySelector({selector!r})?.focus();
      if (++looks > 30) clearInterval(focus);
    }}, 50);
    }}</script>"""
    st.html(script, unsafe_allow_javascript=True)


def sentence(part: Mapping[str, Any], key: str) -> bool:
    """A sentence of a headline, a button for its evidence; whether it was pressed."""
    return st.button(
        f"**{plain(part['text'])}**", key=key, type="tertiary", icon=":material/arrow_outward:", icon_position="right",
        wrap=True,
    )  # fmt: skip


_DRAWING_S = 0.8
"""Approximate time of a browser to load Vega and draw twenty lines."""


def draw_first() -> None:
    """On the first page of a session, let the browser draw its first chart before sending more. It draws in one thread,
    where the chart would wait for later elements; the page as a whole is not slower."""
    if "charts" not in st.session_state:
        time.sleep(_DRAWING_S)


def axis(name: str, default: str, words: Mapping[str, str] = AXIS_WORDS, *, smoothed: bool = True) -> str:
    """Controls of the view's charts: the x-axis, smoothing where any are `smoothed`, outliers, and the end of a zoom.

    Another x-axis has other units: choosing it ends the zoom.
    """
    x = permalinks.choice("X-axis", name, words, default, on_change=permalinks.zoom)
    st.session_state["axis"] = x
    with st.popover("Curves", icon=":material/tune:"):
        if smoothed:
            help = "Over all steps. Gates, passes and the evaluations of a run are not smoothed."
            permalinks.select("Smoothing", "smooth", permalinks.SMOOTHING, "0", help=help)
        permalinks.check("Hide outliers", "calm", help="Values further from the quartiles than 3 interquartile ranges.")
        ends = [
            permalinks.text("Visible from", "from", help="With *Visible to*, what dragging over a chart selects."),
            permalinks.text("Visible to", "to"),
        ]
        if any(ends) and permalinks.span(x) is None:
            st.caption(":red[Visible from and to are two numbers, the smaller one first.]")
    if (span := permalinks.span(x)) is not None:
        label = f"Reset zoom ({figure(span[0])} to {figure(span[1])})"
        st.button(label, icon=":material/zoom_out_map:", type="tertiary", on_click=permalinks.zoom, key="reset-zoom")
    return x


def chart(chart: Chart, scope: str) -> None:
    """A chart with its summary, its data as a table and as CSV. `scope` makes keys of equal charts unique.

    Dragging over it zooms all charts of the view that have its axis.
    """
    zoomable, span = chart.x == st.session_state.get("axis"), permalinks.span(chart.x)
    note = "Drag over the chart to zoom in." if zoomable else ""
    with st.container(border=True, height="stretch"):
        st.markdown(f"##### {plain(chart.title)}", help=plain(f"{chart.text} {note}"))
        # A brush is drawn until its chart is replaced.
        key = f"{scope}-{chart.key}-{span}" if span else f"{scope}-{chart.key}"
        if span is not None:
            chart = between(chart, *span)
        if chart.points.empty:
            # Of a live series only the visible part was requested.
            st.caption(plain(chart.summary) if span is None else "No points in the visible range. Reset the zoom.")
            return
        if st.query_params.get("calm") == "1":
            chart, hidden = without_outliers(chart)
            if hidden:
                st.caption(f"{number_of(hidden, 'outlier')} hidden.")
        spec = {**_FRAME, **(with_brush(chart) if zoomable else chart.spec), "datasets": dict(chart.datasets)}
        brush: dict[str, Any] = {"on_select": "rerun", "selection_mode": [BRUSH]} if zoomable else {}
        event: Any = st.vega_lite_chart(
            None, spec, key=key, alt=chart.alt, width="stretch", height=chart.height, **brush
        )
        if zoomable and (ends := event.selection.get(BRUSH, {}).get("x")):
            permalinks.zoom(*ends)
            st.rerun()
        if chart.processing:
            st.caption(chart.processing)
        drawer = st.expander("Data", key=f"{key}-data", on_change="rerun", icon=":material/table:")
        if drawer.open:
            with drawer:
                st.caption(plain(chart.text))
                frame = chart.table()
                st.dataframe(frame, hide_index=True, height=260, key=f"{key}-table", alt=f"Data of: {chart.title}")
                download("CSV", f"{key}.csv", lambda: csv_file(frame), f"{key}-csv")


_LONG_TABLE = 16
_SOFT = {"labelOpacity": 0.8, "titleOpacity": 0.8}
_FRAME = {
    # Streamlit draws many points on a canvas, which has no page's own text colour: words would be black in the dark.
    "usermeta": {"embedOptions": {"renderer": "svg"}},
    "autosize": {"type": "fit", "contains": "padding"},
    "padding": {"left": 4, "right": 12, "top": 4, "bottom": 4},
    "config": {
        # Names the rectangles of a brush, to which Vega-Lite gives a role alone. Screen readers get no other marks.
        "mark": {"aria": True, "description": "visible range"},
        # The page's own text colour: Streamlit's grey has a contrast below 4.5:1.
        "axis": {"labelColor": "currentColor", "titleColor": "currentColor", **_SOFT},
        # Stack legends, so that they never overlap.
        "legend": {
            "labelColor": "currentColor",
            "labelOpacity": _SOFT["labelOpacity"],
            "layout": {"top": {"direction": "vertical", "anchor": "start", "margin": 2}},
        },
    },
}


def text_table(frame: pd.DataFrame, title: str, *, colors: Sequence[str] = ()) -> None:
    """A table of escaped text in a card; a long one is collapsed and built when it is opened. colors: of a dot before
    each row."""
    with st.container(border=True):
        st.markdown(f"##### {plain(title)}")
        if frame.empty:
            st.caption("No rows yet.")
            return
        drawer = None
        if len(frame) > _LONG_TABLE:
            drawer = st.expander(number_of(len(frame), "row"), key=f"table-{title}", on_change="rerun")
        if drawer is None or drawer.open:
            with drawer or nullcontext():
                cells = frame.map(plain).rename(columns=plain)
                for row, color in enumerate(colors):
                    cells.iloc[row, 0] = f':color[●]{{foreground="{color}"}} {cells.iloc[row, 0]}'
                st.table(cells, border="horizontal", hide_index=True, alt=title)


_TABLE = Path(__file__).with_name("table.js").read_text(encoding="utf-8")


def table(
    key: str, title: str, columns: list[dict[str, Any]], rows: list[dict[str, Any]], selected: list[str], **options: Any
) -> Any:
    """A table of the page whose rows are selected; table.js has what a column and a row are.

    Returns `selected` and `pointed` (ids of rows), and once `order` (a column), `opened` (an id) or `compared`.

    options: `sorted` (a column), `descending`; `links`, of names to the Run view; `single`, for one row at a time.
    """

    def report() -> None:
        """What has changed is read from what this function returns."""

    data = {"sorted": "", "descending": False, "links": False, "single": False, **options}
    data |= {"title": title, "columns": columns, "rows": rows, "selected": selected}
    changes: dict[str, Any] = {
        f"on_{name}_change": report for name in ("selected", "pointed", "order", "opened", "compared")
    }
    return st.components.v2.component("gxpo_table", js=_TABLE, isolate_styles=False)(key=key, data=data, **changes)


def download(what: str, name: str, make: Callable[[], bytes], key: str) -> None:
    """A button `Download <what>` for a file of this name."""
    st.download_button(
        f"Download {what}", make, file_name=name, mime="application/octet-stream", key=key, on_click="ignore",
        icon=":material/download:",
    )  # fmt: skip


def grid(items: Sequence[T], draw: Callable[[T], None], columns: int = 2) -> None:
    """Draw items in columns; a single last one keeps its width."""
    for start in range(0, len(items), columns):
        for place, item in zip(st.columns(columns), items[start : start + columns], strict=False):
            with place:
                draw(item)


def untrusted(label: str, text: Any) -> None:
    """Untrusted text, shown literally: no Markdown, HTML or links."""
    st.markdown(f"**{label}**")
    st.code(str(text) if text not in (None, "") else " ", language=None, wrap_lines=True)


def empty(title: str, text: str) -> None:
    """An empty state: what is missing, and what to do."""
    with st.container(border=True):
        st.markdown(f"#### {title}")
        st.markdown(text)
