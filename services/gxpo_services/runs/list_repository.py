"""SQL of the list of runs: filters, order by a column or by a metric, and keyset pages.

Rows are ordered by (has no value, value, row number), so that those without a value come last either way and equal
values keep one order. A page begins after a row's place in that order, not after a count of rows: runs that are made
meanwhile move nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, and_, asc, desc, false, func, or_, select, tuple_
from sqlalchemy.orm import Session, defer

from gxpo_services.metrics.models import MetricLast, MetricName
from gxpo_services.runs.cursors import Kind, Position, Value
from gxpo_services.runs.metric_values import values_at_step
from gxpo_services.runs.models import Group, Run, RunTag
from gxpo_services.runs.states import RunState

Columns = dict[str, tuple[Any, Kind, bool]]
COLUMNS: Columns = {
    # name: (column, kind, may be NULL)
    "created_at": (Run.created_at, "float", False),
    "updated_at": (Run.updated_at, "float", False),
    "queued_at": (Run.queued_at, "float", False),
    "started_at": (Run.started_at, "float", True),
    "ended_at": (Run.ended_at, "float", True),
    "heartbeat_at": (Run.heartbeat_at, "float", True),
    "name": (Run.name, "text", False),
    "state": (Run.state, "text", False),
    "reason": (Run.reason, "text", True),
    "rule": (Run.rule, "text", False),
    "model": (Run.model, "text", False),
    "created_by": (Run.created_by, "text", False),
    "seed": (Run.seed, "int64", False),
    "priority": (Run.priority, "int32", False),
    "recoveries": (Run.recoveries, "int32", False),
    "step": (Run.step, "int32", False),
    "score_step": (Run.score_step, "int32", True),
    "backward_passes": (Run.backward_passes, "float", False),
    "tokens": (Run.tokens, "float", False),
    "training_s": (Run.training_s, "float", False),
    "score": (Run.score, "float", True),
    "score_best": (Run.score_best, "float", True),
}
"""What a list can be sorted by, beside metrics."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Which runs; what is empty or None filters nothing. archived: None for both kinds."""

    states: Sequence[RunState] = ()
    rule: str | None = None
    model: str | None = None
    tags: Sequence[str] = ()
    group: str | None = None
    text: str | None = None
    created_after: float | None = None
    created_before: float | None = None
    archived: bool | None = False


@dataclass(frozen=True, slots=True)
class Order:
    """By a column, or by a metric's last, highest or lowest value or the one at a step."""

    column: str | None
    metric: str | None
    at: Literal["last", "highest", "lowest"] | int
    descending: bool

    @property
    def word(self) -> str:
        by = self.column if self.metric is None else f"metric:{self.metric}@{self.at}"
        return f"{'-' if self.descending else '+'}{by}"

    @property
    def kind(self) -> Kind:
        return "float" if self.column is None else COLUMNS[self.column][1]


Found = list[tuple[Run, Value]]


def page(session: Session, filters: Filters, order: Order, after: Position | None, limit: int) -> Found:
    """At most `limit` runs behind `after`, each with the value that it is sorted by."""
    conditions = _conditions(filters)
    if order.metric is not None and isinstance(order.at, int):
        return _page_at_step(session, conditions, order, after, limit)
    query = select(Run.number)
    if order.metric is None:
        assert order.column is not None
        column, _, nullable = COLUMNS[order.column]
    else:
        number = session.scalar(select(MetricName.number).where(MetricName.name == order.metric))
        column, nullable = getattr(MetricLast, str(order.at)), True
        # -1 is no metric's number: nobody has a value of a metric that was never reported.
        here = and_(MetricLast.run_number == Run.number, MetricLast.name_number == (-1 if number is None else number))
        query = query.outerjoin(MetricLast, here)
    if after is not None:
        conditions.append(_behind(column, nullable, after, order.descending))
    direction = desc if order.descending else asc
    parts = [*([column.is_(None)] if nullable else []), direction(column), direction(Run.number)]
    rows = session.execute(query.add_columns(column).where(*conditions).order_by(*parts).limit(limit))
    return _loaded(session, [(number, value) for number, value in rows])


def _loaded(session: Session, chosen: Sequence[tuple[int, Value]]) -> Found:
    """The chosen runs in their order. They are looked up by number: whole rows are too wide to be sorted."""
    query = select(Run).where(Run.number.in_([number for number, _ in chosen])).options(defer(Run.identity))
    runs = {run.number: run for run in session.scalars(query)}
    return [(runs[number], value) for number, value in chosen]


def count(session: Session, filters: Filters) -> int:
    return session.scalar(select(func.count()).select_from(Run).where(*_conditions(filters))) or 0


def _conditions(filters: Filters) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if filters.archived is not None:
        found.append(Run.archived.is_(filters.archived))
    if filters.states:
        found.append(Run.state.in_(sorted(set(filters.states))))
    if filters.rule is not None:
        found.append(Run.rule == filters.rule)
    if filters.model is not None:
        found.append(Run.model == filters.model)
    if filters.group is not None:
        found.append(Run.group_number == select(Group.number).where(Group.id == filters.group).scalar_subquery())
    if filters.created_after is not None:
        found.append(Run.created_at > filters.created_after)
    if filters.created_before is not None:
        found.append(Run.created_at < filters.created_before)
    for tag in set(filters.tags):
        found.append(_tagged(RunTag.tag == tag))
    if filters.text:
        columns = (Run.name, Run.notes, Run.id, Run.model)
        parts = [column.icontains(filters.text, autoescape=True) for column in columns]
        found.append(or_(*parts, _tagged(RunTag.tag.icontains(filters.text, autoescape=True))))
    return found


def _tagged(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    return select(RunTag.tag).where(RunTag.run_number == Run.number, condition).exists()


def _behind(column: Any, nullable: bool, after: Position, descending: bool) -> ColumnElement[bool]:
    """Whether a row comes after a position."""
    further = Run.number < after.number if descending else Run.number > after.number
    if after.value is None:
        return and_(column.is_(None), further) if nullable else false()
    row, here = tuple_(column, Run.number), tuple_(after.value, after.number)
    beyond = row < here if descending else row > here
    return or_(beyond, column.is_(None)) if nullable else beyond


def _page_at_step(
    session: Session, conditions: list[ColumnElement[bool]], order: Order, after: Position | None, limit: int
) -> Found:
    """Values at a step lie in bytes that no database reads: they are ordered here, and only the page's runs loaded."""
    assert order.metric is not None
    assert isinstance(order.at, int)
    numbers = list(session.scalars(select(Run.number).where(*conditions)))
    values = values_at_step(session, order.metric, order.at, select(Run.number).where(*conditions))
    sign = -1 if order.descending else 1

    def place(value: float | None, number: int) -> tuple[bool, float, int]:
        return (value is None, 0.0 if value is None else sign * value, sign * number)

    places = sorted((place(values.get(number), number), number) for number in numbers)
    if after is not None:
        assert not isinstance(after.value, str)
        first = place(after.value, after.number)
        places = [item for item in places if item[0] > first]
    return _loaded(session, [(number, values.get(number)) for _, number in places[:limit]])
