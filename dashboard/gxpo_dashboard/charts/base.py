"""Building blocks of charts. Pure: records in, Vega-Lite specification out.

A specification contains no data: everything that changes during a run is in the named datasets. The browser can then
swap the data of a drawn chart, which preserves zoom and hover; a changed specification would be redrawn from scratch.

Colour is never the only cue: series also differ in dash and, with few points, in shape, and every chart has a summary
and a table.

The points of a chart as a table. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from gxpo_client.formats import figure
from gxpo_dashboard.view_models.series import Points, Series

BOUNDS = ("low", "high")


def data_table(frame: pd.DataFrame, labels: Mapping[str, str]) -> pd.DataFrame:
    """One row per x and one column per series if possible, otherwise the rows as they are.

    A series with intervals has two more columns. labels: headers by column of `frame`. The step is a column where it is
    not the x-axis.
    """
    titles = {name: heading(labels.get(name, name)) for name in frame.columns}
    if not {"series", "x", "y"} <= set(frame.columns):
        return frame.rename(columns=titles)
    index = ["x", "step"] if "step" in frame and not frame["step"].eq(frame["x"]).all() else ["x"]
    if frame.duplicated(["series", *index]).any():
        return frame.rename(columns=titles)
    bounds = [name for name in BOUNDS if name in frame and frame[name].notna().any()]
    wide = frame.pivot(index=index, columns="series", values=["y", *bounds])
    columns = {}
    for series in dict.fromkeys(frame["series"]):
        columns[series] = wide["y", series]
        columns |= {f"{series}, {labels.get(name, name)}": wide[name, series] for name in bounds}
    return pd.DataFrame(columns, index=wide.index).reset_index().rename(columns={name: titles[name] for name in index})


def heading(label: str) -> str:
    """A column header in sentence case; names with digits or symbols, such as `pass@1`, stay as they are."""
    return label[:1].upper() + label[1:] if label.partition(" ")[0].isalpha() else label


Spec = dict[str, Any]

DASHES: tuple[tuple[int, ...], ...] = (
    (1, 0), (7, 3), (2, 2), (9, 3, 2, 3), (4, 4), (12, 4), (1, 3), (6, 2, 1, 2, 1, 2),
)  # fmt: skip
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
MUTED = "#7b8794"
"""Grey with a contrast of 3:1 or better on light and dark pages."""
ALARM = "#d1495b"
TEXT = "currentColor"
"""Of words in charts: the page's own, whose contrast is above 4.5:1 in both modes."""
ZOOM = "zoom"
NUMBER = ",.4~g"
"""Four significant digits, with an exponent only where needed."""

AXES = {
    "step": "training step",
    "backward_passes": "backward passes",
    "time": "training time (hours)",
    "tokens": "sampled tokens",
}
AXIS_WORDS = {"step": "Steps", "backward_passes": "Backward passes", "time": "Hours", "tokens": "Tokens"}
"""Labels of the control of the x-axis."""


@dataclass(frozen=True)
class Chart:
    """A chart.

    key: unique on its page. spec: Vega-Lite without data. datasets: by the names in the spec; "points" is also a
    table. alt: fixed alternative text. summary: its current content as text. note: how to read it. thinned: which
    points of long series are left, empty for all.
    """

    key: str
    title: str
    spec: Spec
    datasets: Mapping[str, pd.DataFrame]
    alt: str
    summary: str
    note: str = ""
    zoomable: bool = True
    height: int = 300
    labels: Mapping[str, str] = field(default_factory=dict)
    thinned: str = ""

    @property
    def empty(self) -> bool:
        return bool(self.datasets["points"].empty)

    @property
    def text(self) -> str:
        """The content, and how to read it."""
        return " ".join(part for part in (self.summary, self.note, self.thinning) if part)

    @property
    def thinning(self) -> str:
        """A sentence about thinned data, empty without."""
        return f"Thinned to {self.thinned}; the export in Compare has every step." if self.thinned else ""

    def table(self) -> pd.DataFrame:
        """The points as a table, with one row per x and one column per series if possible."""
        table = data_table(self.datasets["points"], self.labels)
        return table.assign(**{"Thinned to": self.thinned}) if self.thinned else table


def with_colors(chart: Chart, colors: Mapping[str, str]) -> Chart:
    """The chart with these colours of series; charts of other series, or with colours of their own, are unchanged."""
    return replace(chart, spec=_colored(chart.spec, colors))


def _colored(node: Any, colors: Mapping[str, str]) -> Any:
    if isinstance(node, list):
        return [_colored(item, colors) for item in node]
    if not isinstance(node, dict):
        return node
    found = {name: _colored(part, colors) for name, part in node.items()}
    encoded = found.get("color")
    if isinstance(encoded, dict) and encoded.get("field") == "series":
        names = encoded["scale"]["domain"]
        if names and "range" not in encoded["scale"] and all(name in colors for name in names):
            scale = {**encoded["scale"], "range": [colors[name] for name in names]}
            found["color"] = {**encoded, "scale": scale}
    return found


def series_of(chart: Chart) -> list[str]:
    """The series of a chart, in order."""
    frame = chart.datasets["points"]
    return list(dict.fromkeys(frame["series"])) if "series" in frame else []


def long_frame(series: Series, names: Mapping[str, str], x: str = "step") -> pd.DataFrame:
    """Metrics as rows (series, x, y, step); hours for `time`. Columns exist even without rows."""
    rows: list[tuple[str, float, float, int]] = []
    for name, label in names.items():
        found = series.get(name)
        if found:
            rows += [
                (label, axis_value(at, x), value, step)
                for step, at, value in zip(found.steps, found.x, found.y, strict=True)
            ]
    return points_frame(rows)


def axis_value(value: float, x: str) -> float:
    """A value on the x-axis; converts seconds to hours."""
    return value / 3600 if x == "time" else value


def thinned(*found: Points | None) -> str:
    """Which points of long series are left, empty for all."""
    return ", ".join(dict.fromkeys(points.thinned for points in found if points and points.thinned))


def value_at(points: Points | None, step: int, x: str = "step") -> float:
    """Position of a step on the x-axis: that of the last point at or before it, or NaN."""
    if x == "step":
        return float(step)
    before = [at for at, seen in zip(points.x, points.steps, strict=True) if seen <= step] if points else []
    return axis_value(before[-1], x) if before else math.nan


EDGE = 6
"""Padding in pixels: zoomable plots clip marks at their edge."""


def x_encoding(x: str) -> Spec:
    axis: Spec = {"grid": False, "labelFlush": False, "tickCount": 8, "labelOverlap": "greedy"}
    if x in ("tokens", "backward_passes"):
        axis["format"] = "~s"
    if x == "step":
        axis["format"] = ",d"
        axis["tickMinStep"] = 1
    scale = {"nice": False, "zero": False, "padding": EDGE}
    return quantity("x", title=AXES[x], axis=axis, scale=scale)


def y_encoding(title: str, form: str = NUMBER, zero: bool = False, log: bool = False) -> Spec:
    scale: Spec = {"type": "log", "nice": True} if log else {"zero": zero, "nice": True}
    axis: Spec = {"format": form, "tickCount": 5, "titlePadding": 8, "labelFlush": False}
    if log:
        axis["grid"] = False  # there would be too many lines
    return quantity(title=title, axis=axis, scale=scale)


def legend(names: Sequence[str], marks: bool = False) -> Spec | None:
    """A legend above the plot, in as many columns as fit; None for a single series.

    It shows the stroke of each series, or with `marks` the shape of its points.
    """
    if len(names) < 2:
        return None
    longest = max(len(name) for name in names)
    columns = 4 if longest <= 14 else 3 if longest <= 22 else 2 if longest <= 36 else 1
    symbol: Spec = {"symbolStrokeWidth": 0} if marks else {"symbolType": "stroke", "symbolStrokeWidth": 2}
    return {
        "orient": "top",
        "direction": "horizontal",
        "columns": columns,
        "title": None,
        "labelLimit": 420,
        **symbol,
        "symbolOpacity": 1,
        "symbolSize": 110,
        "rowPadding": 2,
        "columnPadding": 14,
    }


def by_series(shown: Spec | None, names: Sequence[str], **scale: Any) -> Spec:
    """An encoding by series, with the legend `shown`."""
    scale = {"domain": list(names), **scale}
    return {"field": "series", "type": "nominal", "scale": scale, "legend": shown, "sort": None}


def color(names: Sequence[str], marks: bool = False) -> Spec:
    """Colour encoding, shared by lines, points and bands, so that they have one legend."""
    return by_series(legend(names, marks), names)


def dash(names: Sequence[str], marks: bool = False) -> Spec:
    dashes = [list(DASHES[i % len(DASHES)]) for i in range(len(names))]
    return by_series(None if marks else legend(names), names, range=dashes)


def shape(names: Sequence[str]) -> Spec:
    return by_series(legend(names, marks=True), names, range=[SHAPES[i % len(SHAPES)] for i in range(len(names))])


def quantity(field: str = "y", **properties: Any) -> Spec:
    """Encoding of a numeric field."""
    return {"field": field, "type": "quantitative", **properties}


def layer(data: str, mark: str, encoding: Spec, *, params: Sequence[Spec] = (), **properties: Any) -> Spec:
    """Marks of the dataset `data`; properties: of the mark."""
    found: Spec = {"data": {"name": data}, "mark": {"type": mark, **properties}, "encoding": encoding}
    return {**found, "params": list(params)} if params else found


def zoom_params() -> list[Spec]:
    """Zoom and pan along x; a double click resets."""
    return [{"name": ZOOM, "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}]


def hover_params() -> list[Spec]:
    return [{"name": "hover", "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}}]


def tooltip(x: str, form: str, more: Iterable[Spec] = ()) -> list[Spec]:
    fields: list[Spec] = [{"field": "series", "title": "series"}, {"field": "step", "title": "step", "format": ",d"}]
    if x != "step":
        fields.append({"field": "x", "title": AXES[x], "format": ",.4~g"})
    return [*fields, {"field": "y", "title": "value", "format": form}, *more]


def line_layers(
    names: Sequence[str], x: str, y: Spec, *, marks: bool = False, form: str = NUMBER, more: Iterable[Spec] = ()
) -> list[Spec]:
    """Lines of the dataset `points`, and hover points: those of `near`, or with `marks` all points, always drawn, one
    shape per series."""
    place = {"x": x_encoding(x), "y": y, "color": color(names, marks)}
    dots = {**place, "opacity": on_hover(1 if marks else 0), "tooltip": tooltip(x, form, more)}
    if marks:
        dots["shape"] = shape(names)
    # ARIA descriptions of every point are expensive; the chart has one, and a table.
    quiet: Spec = {} if marks else {"aria": False}
    lines = {**place, "strokeDash": dash(names, marks)}
    return [
        layer("points", "line", lines, params=zoom_params(), strokeWidth=2, interpolate="linear", **quiet),
        layer("points" if marks else "near", "point", dots, params=hover_params(), filled=True, size=55, **quiet),
    ]


def on_hover(otherwise: int) -> Spec:
    """Opacity of points: 1 under the pointer."""
    return {"condition": {"param": "hover", "empty": False, "value": 1}, "value": otherwise}


def near(frame: pd.DataFrame, most: int = 500) -> pd.DataFrame:
    """At most `most` evenly spaced rows as hover points. The browser rebuilds its nearest-point index on new data,
    which takes seconds for tens of thousands."""
    return frame.iloc[:: max(1, math.ceil(len(frame) / most))]


def metric_chart(
    key: str,
    title: str,
    series: Series,
    names: Mapping[str, str],
    *,
    x: str = "step",
    y_title: str,
    form: str = NUMBER,
    zero: bool = False,
    log: bool = False,
    say: Callable[[float], str] = figure,
    note: str = "",
) -> Chart:
    """A chart of metrics of a run; `names`: metric → label. Metrics without points are omitted.

    log: a logarithmic axis, without non-positive values. say: formats a value in the summary.
    """
    present = {name: label for name, label in names.items() if series.get(name)}
    frame = long_frame(series, present, x)
    if log:
        frame.loc[frame["y"] <= 0, "y"] = math.nan
    spec: Spec = {"layer": line_layers(list(present.values()), x, y_encoding(y_title, form, zero, log))}
    words = [f"{label} {say(series[name].last)}" for name, label in present.items()]
    newest = int(frame["step"].max()) if not frame.empty else 0
    summary = f"At step {newest}: {', '.join(words)}." if words else "No data yet."
    alt = f"{title}: {', '.join((present or names).values())} over {AXES[x]}"
    datasets = {"points": frame, "near": near(frame)}
    left = thinned(*(series[name] for name in present))
    return Chart(key, title, spec, datasets, alt, summary, note, labels={"x": AXES[x]}, thinned=left)


def threshold_layers() -> list[Spec]:
    """Labelled horizontal rules of the dataset `rules`."""
    place: Spec = {"align": "right", "baseline": "bottom", "dx": -4, "dy": -3, "fontSize": 12, "fontWeight": 600}
    words = {"y": quantity(), "x": {"value": "width"}, "text": {"field": "label"}}
    return [
        layer("rules", "rule", {"y": quantity()}, aria=False, strokeDash=[6, 4], strokeWidth=2, color=ALARM),
        layer("rules", "text", words, aria=False, color=TEXT, **place),
    ]


def z_encoding() -> Spec:
    """y-axis of gate z-scores, with room above τ for its label."""
    return {**y_encoding("z-score"), "scale": {"zero": True, "nice": False, "padding": 18}}


def typed_frame(rows: Iterable[Sequence[Any]], **kinds: str) -> pd.DataFrame:
    """Rows with the types of their columns (name → dtype), also without rows."""
    return pd.DataFrame(list(rows), columns=list(kinds)).astype(kinds)


def points_frame(rows: Iterable[Sequence[Any]]) -> pd.DataFrame:
    """Rows (series, x, y, step)."""
    return typed_frame(rows, series="str", x="float64", y="float64", step="int64")


def labels_frame(rows: Iterable[tuple[float, str]], value: str = "y") -> pd.DataFrame:
    """Rows (value, label)."""
    return typed_frame(rows, **{value: "float64", "label": "str"})
