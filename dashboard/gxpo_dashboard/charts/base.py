"""Building blocks of charts. Pure: records in, Vega-Lite specification out.

A specification contains no data: everything that changes during a run is in the named datasets. The browser can then
swap the data of a drawn chart, which preserves zoom and hover; a changed specification would be redrawn from scratch.

Colour is never the only cue: series also differ in dash and, with few points, in shape, and every chart has a summary
and a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from gxpo_client.formats import count, figure, number_of
from gxpo_dashboard.view_models.series import Points, Series

Spec = dict[str, Any]

DASHES: tuple[tuple[int, ...], ...] = (
    (1, 0), (7, 3), (2, 2), (9, 3, 2, 3), (4, 4), (12, 4), (1, 3), (6, 2, 1, 2, 1, 2),
)  # fmt: skip
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
MUTED = "#7b8794"
"""Grey with a contrast of 3:1 or better on light and dark pages."""
TEXT = "currentColor"
"""Of words in charts: the page's own, whose contrast is above 4.5:1 in both modes."""
BRUSH = "brush"
NUMBER = ",.6~g"
"""Six significant digits, with an exponent only from a million on and below a millionth."""
SHARE = ".3~p"
"""A percentage with three significant digits: with a number of decimals, ticks of a narrow range have equal labels."""
EDGE = 6
"""Padding of the x-axis in pixels: plots clip marks at their edge."""

AXES = {
    "step": "training step",
    "backward_passes": "backward passes",
    "time": "training time (hours)",
    "tokens": "sampled tokens",
}
AXIS_WORDS = {"step": "Steps", "backward_passes": "Backward passes", "time": "Hours", "tokens": "Tokens"}
"""Labels of the control of the x-axis."""
COMPARED_AXES = {"backward_passes": "Backward passes"} | AXIS_WORDS | {"step": "Steps (unequal cost)"}
"""The same where runs of different rules are compared."""
BOUNDS = ("low", "high")
POINTS = {"series": "str", "x": "float64", "y": "float64", "low": "float64", "high": "float64", "step": "int64"}
PARTS = {"x": "float64", "series": "str", "y": "float64"}
LABELS = {"y": "float64", "label": "str"}
"""Columns of frequent datasets and their types."""


def typed_frame(rows: Iterable[Sequence[Any]], **kinds: str) -> pd.DataFrame:
    """Rows with the types of their columns (name → dtype), also without rows."""
    return pd.DataFrame(list(rows), columns=list(kinds)).astype(kinds)


@dataclass(frozen=True)
class Chart:
    """A chart.

    key: unique on its page. spec: Vega-Lite without data. datasets: by the names in the spec; "points" is also a
    table. alt: fixed alternative text. summary: its current content as text. note: how to read it. x: its axis, of
    AXES, empty for another one. thinned: what is drawn of long series, empty for all points. smoothing: weight of the
    exponential average that is drawn, 0 for measured values. log: whether its y-axis is logarithmic.
    """

    key: str
    title: str
    spec: Spec
    datasets: Mapping[str, pd.DataFrame]
    alt: str
    summary: str
    note: str = ""
    x: str = ""
    height: int = 300
    labels: Mapping[str, str] = field(default_factory=dict)
    thinned: str = ""
    smoothing: float = 0.0
    log: bool = False

    @property
    def points(self) -> pd.DataFrame:
        return self.datasets["points"]

    @property
    def text(self) -> str:
        """The content, and how to read it."""
        return " ".join(part for part in (self.summary, self.note, self.processing) if part)

    @property
    def processing(self) -> str:
        """Sentences about smoothed, thinned and hidden data, empty without."""
        hidden = int((self.points["y"] <= 0).sum()) if self.log else 0
        parts = (
            f"Exponential average, weight {self.smoothing:g}." if self.smoothing else "",
            f"Thinned to {self.thinned}; the export in Compare has every step." if self.thinned else "",
            f"Not shown on the logarithmic axis: {number_of(hidden, 'value')} ≤ 0." if hidden else "",
        )
        return " ".join(filter(None, parts))

    def table(self) -> pd.DataFrame:
        """The points, one row each, under headings from `labels`; with the step where it is not the x-axis."""
        empty = [name for name in BOUNDS if name in self.points and self.points[name].isna().all()]
        if "step" in self.points and self.points["step"].eq(self.points["x"]).all():
            empty.append("step")
        labels = {"x": AXES.get(self.x, "x"), "y": "value", **self.labels}
        frame = self.points.drop(columns=empty)
        # In sentence case; names with digits or symbols, such as `pass@1`, stay as they are.
        words = [labels.get(name, name) for name in frame.columns]
        frame.columns = [word[:1].upper() + word[1:] if word.partition(" ")[0].isalpha() else word for word in words]
        said = {"Average, weight": self.smoothing, "Thinned to": self.thinned}
        return frame.assign(**{name: value for name, value in said.items() if value})


def with_colors(chart: Chart, colors: Mapping[str, str]) -> Chart:
    """The chart with these colours of series; charts of other series, or with colours of their own, are unchanged."""

    def colored(layer: Spec) -> Spec:
        color = layer["encoding"].get("color", {})
        scale = color.get("scale", {})
        names = scale.get("domain", ())
        if color.get("field") != "series" or "range" in scale or not names or not colors.keys() >= set(names):
            return layer
        color = {**color, "scale": {**scale, "range": [colors[name] for name in names]}}
        return {**layer, "encoding": {**layer["encoding"], "color": color}}

    return replace(chart, spec={**chart.spec, "layer": [colored(layer) for layer in chart.spec["layer"]]})


def between(chart: Chart, low: float, high: float) -> Chart:
    """The chart with the part of its data from `low` to `high` on the x-axis, to which both axes then fit."""

    def cut(frame: pd.DataFrame) -> pd.DataFrame:
        if "x" not in frame:
            return frame
        end = frame["x2"] if "x2" in frame else frame["x"]
        kept = frame[(end >= low) & (frame["x"] <= high)]
        return kept.assign(**{name: kept[name].clip(low, high) for name in ("x", "x2") if "x2" in frame})

    return replace(chart, datasets={name: cut(frame) for name, frame in chart.datasets.items()})


def without_outliers(chart: Chart) -> tuple[Chart, int]:
    """The chart without values further from the quartiles of their line than three interquartile ranges (Tukey's
    "far out"), and their number. The axis then fits to the rest; bands end where values would be hidden. Stacked charts
    are unchanged: without a part, the sum of the others would be drawn in its place."""
    stacked = any("stack" in layer["encoding"].get("y", {}) for layer in chart.spec["layer"])
    if stacked or not {"series", "y"} <= set(chart.points):
        return chart, 0
    lines = chart.points.groupby("series")["y"]
    reach = 3 * (lines.quantile(0.75) - lines.quantile(0.25)).replace(0, math.inf)
    least, most = lines.quantile(0.25) - reach, lines.quantile(0.75) + reach

    def cut(frame: pd.DataFrame) -> pd.DataFrame:
        if not {"series", "y"} <= set(frame):
            return frame
        low, high = (frame["series"].map(limit) for limit in (least, most))
        bounds = {name: frame[name].clip(low, high) for name in BOUNDS if name in frame}
        return frame.assign(**bounds)[~((frame["y"] < low) | (frame["y"] > high))]

    calm = replace(chart, datasets={name: cut(frame) for name, frame in chart.datasets.items()})
    return calm, len(chart.points) - len(calm.points)


def with_brush(chart: Chart) -> Spec:
    """The specification with a selection of a range of x by dragging; the wheel scrolls the page."""
    select = {"type": "interval", "encodings": ["x"], "zoom": False, "translate": False}
    first, *others = chart.spec["layer"]
    params = [*first.get("params", []), {"name": BRUSH, "select": select}]
    return {**chart.spec, "layer": [{**first, "params": params}, *others]}


_MOST_NEAR = 250
"""Hover points. The browser rebuilds its nearest-point index on new data, which takes seconds for tens of thousands."""


def line_data(
    series: Series, names: Mapping[str, str], x: str = "step", *, log: bool = False
) -> dict[str, pd.DataFrame]:
    """Datasets of line_layers of metrics (name → label), hours for `time`: `points`, and evenly spaced hover points
    `near` with `lone`, whether a point has no neighbour to which a line could lead. log: on a logarithmic axis."""
    rows = [
        (label, axis_value(at, x), value, low, high, step)
        for name, label in names.items()
        if (points := series.get(name))
        for step, at, value, low, high in points.drawn
    ]
    frame = typed_frame(rows, **POINTS)
    shown = frame["y"].between(0 if log else -math.inf, math.inf, inclusive="neither")
    joined = [shown & shown.groupby(frame["series"]).shift(way, fill_value=False) for way in (1, -1)]
    lone = shown & ~joined[0] & ~joined[1]
    evenly = frame.index % max(1, math.ceil(len(frame) / _MOST_NEAR)) == 0
    return {"points": frame, "near": frame.assign(lone=lone)[evenly | lone]}


def column(points: Points | None) -> pd.Series:
    """The finite values of a metric by step."""
    values = pd.Series(points.y, points.steps, dtype=float) if points else pd.Series(dtype=float)
    return values[values.map(math.isfinite)]


def axis_value(value: float, x: str) -> float:
    """A value on the x-axis; converts seconds to hours."""
    return value / 3600 if x == "time" else value


def thinned(*series: Points | None) -> str:
    """Which points of long series are left, empty for all."""
    return ", ".join(dict.fromkeys(points.thinned for points in series if points and points.thinned))


def value_at(points: Points | None, step: int, x: str) -> float:
    """Position of a step on the x-axis: that of the last point at or before it, or NaN."""
    if x == "step":
        return float(step)
    before = [at for at, known in zip(points.x, points.steps, strict=True) if known <= step] if points else []
    return axis_value(before[-1], x) if before else math.nan


def quantity(field: str = "y", **properties: Any) -> Spec:
    """Encoding of a numeric field."""
    return {"field": field, "type": "quantitative", **properties}


def x_encoding(x: str) -> Spec:
    axis: Spec = {"grid": False, "labelFlush": False, "tickCount": 8, "labelOverlap": "greedy"}
    if x in ("tokens", "backward_passes"):
        axis["format"] = "~s"
    if x == "step":
        axis |= {"format": ",d", "tickMinStep": 1, "labelExpr": "datum.value % 1 ? '' : datum.label"}
    return quantity("x", title=AXES[x], axis=axis, scale={"nice": False, "zero": False, "padding": EDGE})


def y_encoding(title: str, form: str = NUMBER, zero: bool = False, log: bool = False) -> Spec:
    scale: Spec = {"type": "log", "nice": True} if log else {"zero": zero, "nice": True}
    axis: Spec = {"format": form, "tickCount": 5, "titlePadding": 8, "labelFlush": False}
    if title.startswith("bytes"):
        axis["labelExpr"] = "replace(datum.label, /[kMGT]?$/, ' $&B')"  # 8G → 8 GB
    if log:
        axis["grid"] = False  # there would be too many lines
    return quantity(title=title, axis=axis, scale=scale)


Z_SCORE: Spec = {**y_encoding("z-score"), "scale": {"zero": True, "nice": False, "padding": 18}}
"""y-axis of gate z-scores, with room above τ for its label."""


def _legend_column(names: Sequence[str]) -> int:
    """Approximate pixels of the longest name and its symbol."""
    return 34 + 7 * max(map(len, names))


_PHONE_PX, _LEGEND_ROW, _AROUND, _LEAST_PLOT = 280, 16, 92, 160
"""Pixels: width of a plot on a phone; height of a row of a legend, of axis and margins, and of the smallest plot."""


def height_with_legend(names: Sequence[str], height: int = 300) -> int:
    """The height of a chart, or more where the legend, which is a part of it, would leave too little for the plot."""
    if len(names) < 2:
        return height
    rows = math.ceil(len(names) / max(1, _PHONE_PX // _legend_column(names)))
    return max(height, _LEAST_PLOT + _AROUND + _LEGEND_ROW * rows)


def legend(names: Sequence[str], **symbol: Any) -> Spec | None:
    """A legend above the plot, in as many columns as fit into its width; None for a single series.

    symbol: properties of the symbols, by default the stroke of each series.
    """
    if len(names) < 2:
        return None
    return {
        "orient": "top",
        "direction": "horizontal",
        "columns": {"expr": f"max(1, floor(width / {_legend_column(names)}))"},
        "symbolLimit": 0,  # Vega would leave out names after the 30th
        "title": None,
        "labelLimit": {"expr": "width - 30"},
        **(symbol or {"symbolType": "stroke", "symbolStrokeWidth": 2}),
        "symbolOpacity": 1,
        "symbolSize": 110,
        "rowPadding": 2,
        "columnPadding": 14,
    }


def by_series(legend: Spec | None, names: Sequence[str], **scale: Any) -> Spec:
    """An encoding by series."""
    scale = {"domain": list(names), **scale}
    return {"field": "series", "type": "nominal", "scale": scale, "legend": legend, "sort": None}


def line_styles(names: Sequence[str], marks: bool = False) -> dict[str, Spec]:
    """Encodings by series: `color`, shared by lines, points and bands so that they have one legend, `strokeDash`, and
    `shape` of points that are always drawn (`marks`)."""
    key = legend(names, symbolStrokeWidth=0) if marks else legend(names)
    dashes = [list(DASHES[i % len(DASHES)]) for i in range(len(names))]
    return {
        "color": by_series(key, names),
        "strokeDash": by_series(None if marks else key, names, range=dashes),
        "shape": by_series(key, names, range=[SHAPES[i % len(SHAPES)] for i in range(len(names))]),
    }


def layer(data: str, mark: str, encoding: Spec, *, param: Spec | None = None, **properties: Any) -> Spec:
    """Marks of the dataset `data`; properties: of the mark.

    Screen readers get no description of every mark, which is expensive: the chart has one, and a table.
    """
    spec: Spec = {"data": {"name": data}, "mark": {"type": mark, "aria": False, **properties}, "encoding": encoding}
    return {**spec, "params": [param]} if param else spec


HOVER: Spec = {
    "name": "hover",
    "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"},
}
"""The point under the pointer."""


def on_hover(always: bool = False) -> Spec:
    """Opacity of points: visible under the pointer, without neighbours, or `always`."""
    alone = {"test": "datum.lone", "value": 1}
    return {"condition": [{"param": "hover", "empty": False, "value": 1}, alone], "value": int(always)}


def tooltip(x: str, form: str, more: Iterable[Spec], value: str = "value") -> list[Spec]:
    fields: list[Spec] = [{"field": "series", "title": "series"}, {"field": "step", "title": "step", "format": ",d"}]
    if x != "step":
        fields.append({"field": "x", "title": AXES[x], "format": ",.6~r"})
    return [*fields, {"field": "y", "title": value, "format": form}, *more]


def line_layers(
    names: Sequence[str], x: str, y: Spec, *, marks: bool = False, form: str = NUMBER, more: Iterable[Spec] = ()
) -> list[Spec]:
    """Bands from `low` to `high` of the dataset `points`, its lines, and hover points: those of `near`, or with `marks`
    all points, always drawn, one shape per series. A press on a series in the legend shows its line alone."""
    styles = line_styles(names, marks)
    place = {"x": x_encoding(x), "y": y, "color": styles["color"]}
    # The title of the lines: Vega would join two different ones, and drop that of all layers for a missing one.
    bounds = {**place, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    known = [{"filter": "isValid(datum.low) && isValid(datum.high)"}]
    dots = {**place, "opacity": on_hover(marks), "tooltip": tooltip(x, form, more, y["title"])}
    if marks:
        dots["shape"] = styles["shape"]
    lines = {**place, "strokeDash": styles["strokeDash"]}
    press: Spec | None = None
    if len(names) > 1:
        lines["opacity"] = {"condition": {"param": "chosen", "value": 1}, "value": 0.08}
        press = {"name": "chosen", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}
    alone = {"joinaggregate": [{"op": "count", "as": "num"}], "groupby": ["series"]}
    bars = layer("points", "rule", bounds, opacity=0.5)
    return [
        layer("points", "area", bounds, opacity=0.2),
        *([{**bars, "transform": [*known, alone, {"filter": "datum.num == 1"}]}] if marks else []),
        layer("points", "line", lines, param=press, strokeWidth=2),
        layer("points" if marks else "near", "point", dots, param=HOVER, filled=True, size=55),
    ]


def interval_layers(names: Sequence[str], metric: str, x: str, *, bounds: bool = True) -> list[Spec]:
    """Scores with their 95% intervals, and all points; an interval without neighbours is a bar. bounds: whether there
    are intervals."""
    more = [{"field": name, "title": f"95% {name}", "format": ".1%"} for name in BOUNDS if bounds]
    return line_layers(names, x, y_encoding(metric, SHARE), marks=True, form=".1%", more=more)


def rule_layers(data: str, rule: Spec, words: Spec, along: Spec, place: Spec) -> list[Spec]:
    """Rules of a dataset at `along` (the position's encoding), and their labels.

    rule: properties of the rules. words: other position of the labels. place: properties of the labels.
    """
    text = {**along, **words, "text": {"field": "label"}}
    return [layer(data, "rule", along, strokeWidth=2, **rule), layer(data, "text", text, color=TEXT, **place)]


def threshold_layers() -> list[Spec]:
    """Labelled horizontal rules of the dataset `rules`. Labels are on the left: a gate that fired ends on the right."""
    place = {"align": "left", "baseline": "bottom", "dx": 4, "dy": -3, "fontSize": 12, "fontWeight": 600}
    rule = {"strokeDash": [6, 4], "color": TEXT}
    return rule_layers("rules", rule, {"x": {"value": 0}}, {"y": quantity()}, place)


@dataclass(frozen=True)
class Plot:
    """Metrics of a run that share a chart.

    metrics: name → label. form: of the y-axis and tooltips. zero: whether the axis has 0. log: a logarithmic axis,
    which shows no values ≤ 0. say: formats a value in the summary. note: how to read it.
    """

    key: str
    title: str
    metrics: Mapping[str, str]
    y_title: str
    form: str = NUMBER
    zero: bool = False
    log: bool = False
    say: Callable[[float], str] = figure
    note: str = ""


def metric_chart(plot: Plot, series: Series, x: str) -> Chart:
    """The chart of a plot. Metrics without points are omitted."""
    present = {name: label for name, label in plot.metrics.items() if series.get(name)}
    names = list(present.values())
    layers = line_layers(names, x, y_encoding(plot.y_title, plot.form, plot.zero, plot.log), form=plot.form)
    if plot.log:  # in the browser: the table keeps what was measured
        positive = [{"calculate": f"datum.{name} > 0 ? datum.{name} : null", "as": name} for name in ("y", *BOUNDS)]
        layers = [{**each, "transform": positive} for each in layers]
    words = ", ".join(f"{label} {plot.say(series[name].last)}" for name, label in present.items())
    return Chart(
        plot.key,
        plot.title,
        {"layer": layers},
        line_data(series, present, x, log=plot.log),
        f"{plot.title}: {', '.join((present or plot.metrics).values())} over {AXES[x]}",
        f"At step {count(max(series[name].steps[-1] for name in present))}: {words}." if words else "No data.",
        plot.note,
        x=x,
        height=height_with_legend(names),
        thinned=thinned(*(series[name] for name in present)),
        smoothing=max((series[name].smoothing for name in present), default=0.0),
        log=plot.log,
    )


def metric_charts(plots: Iterable[Plot], series: Series, x: str) -> list[Chart]:
    """Charts of plots; those whose metrics a run does not report are omitted."""
    return [metric_chart(plot, series, x) for plot in plots if any(series.get(name) for name in plot.metrics)]
