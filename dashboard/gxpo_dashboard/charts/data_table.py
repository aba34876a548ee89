"""The points of a chart as a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

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
