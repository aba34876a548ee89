"""SQL of the list of runs: filters, order by a column or by a metric, keyset pages, and the rows that a page shows.

Rows are ordered by (has no value, value, row number): rows without a value come last in both directions, and ties have
a stable order. Pages are keyset pages, so new runs do not shift them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Float, Integer, Select, bindparam, func, select, tuple_
from sqlalchemy.orm import Session

from gxpo_client.formats import percent
from gxpo_services.api.errors import Invalid
from gxpo_services.api.fields import Kind, Value, decode_cursor, encode_cursor
from gxpo_services.db.tables import QUEUE_ORDER, Group, MetricLast, Run, RunDocument, RunSearch, RunTag
from gxpo_services.outputs import metrics
from gxpo_services.run_states import RunState
from gxpo_services.runs.configs import setting
from gxpo_services.runs.schemas import HeadlineView, ListQuery, Progress, RunPage, RunView, with_progress
from gxpo_trainer.config.rules import in_words

# Table columns instead of ORM attributes: their statements compile and run in half the time.
_run, _group, _tag, _search, _last, _document = (
    table.__table__.c for table in (Run, Group, RunTag, RunSearch, MetricLast, RunDocument)
)

COLUMNS = {
    column.key: column
    for column in (
        *(_run.created_at, _run.updated_at, _run.queued_at, _run.started_at, _run.ended_at, _run.heartbeat_at),
        *(_run.name, _run.state, _run.reason, _run.rule, _run.model, _run.created_by),
        *(_run.seed, _run.priority, _run.recoveries, _run.step, _run.score_step),
        *(_run.backward_passes, _run.tokens, _run.training_s, _run.score, _run.score_best),
    )
}


@dataclass(frozen=True, slots=True)
class _Order:
    """A sort order: by a column, or by the last, highest or lowest value of a metric, which some runs lack.

    word: its name in a cursor. kind: of its values. rows: (number, value) of the runs that have one. lacks: whether a
    row of Run has none.
    """

    word: str
    kind: Kind
    descending: bool
    rows: Select[int, Any]
    number: Any
    value: Any
    lacks: ColumnElement[bool]


def _order(session: Session, query: ListQuery) -> _Order:
    """Raises Invalid for an unknown order."""
    descending = query.order == "desc"
    sign, metric = "-" if descending else "+", query.sort.removeprefix("metric:")
    if not query.sort.startswith("metric:") or not metric:
        if query.sort not in COLUMNS:
            raise Invalid.of("sort", f"must be metric:<name> or one of {', '.join(COLUMNS)}")
        value = COLUMNS[query.sort]
        rows = select(_run.number, value).where(value.is_not(None))
        kinds: dict[type, Kind] = {Float: "float", BigInteger: "int64", Integer: "int32"}
        kind: Kind = next((kinds[name] for name in kinds if isinstance(value.type, name)), "text")
        return _Order(f"{sign}{query.sort}", kind, descending, rows, _run.number, value, value.is_(None))
    at = "highest" if query.metric_at == "best" else query.metric_at
    # -1 is not the number of any metric: a metric that was never reported has no values.
    name = metrics.find_numbers(session, [metric]).get(metric, -1)
    number, value = _last.run_number, _last[at]
    has_value = (_last.name_number == name, value.is_not(None))
    rows = select(number, value).join_from(MetricLast.__table__, Run.__table__, _run.number == number).where(*has_value)
    lacks = ~select(number).where(number == _run.number, *has_value).exists()
    return _Order(f"{sign}{query.sort}@{at}", "float", descending, rows, number, value, lacks)


def _page(
    session: Session,
    conditions: Sequence[ColumnElement[bool]],
    order: _Order,
    after: tuple[Any, int] | None,
    limit: int,
) -> list[tuple[int, Value]]:
    """Numbers of at most `limit` runs after `after`, with their sort values: those with one in index order, then those
    without."""

    def following(query: Any, columns: Sequence[Any], values: Sequence[Any] | None, most: int) -> Any:
        """Rows of a query in this order of columns, behind `values`."""
        ordered = query.where(*conditions).order_by(*(c.desc() if order.descending else c.asc() for c in columns))
        if values is not None:
            row, here = tuple_(*columns), tuple_(*values)
            ordered = ordered.where(row < here if order.descending else row > here)
        return session.execute(ordered.limit(most))

    page: list[tuple[int, Value]] = []
    if after is None or after[0] is not None:
        page = [(number, value) for number, value in following(order.rows, (order.value, order.number), after, limit)]
    if len(page) < limit:
        last = after[1:] if after is not None and after[0] is None else None
        rest = select(_run.number).where(order.lacks)
        page += [(number, None) for (number,) in following(rest, (_run.number,), last, limit - len(page))]
    return page


def _conditions(filters: ListQuery, dialect: str) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    wants_archived = filters.archived == "true"
    if filters.archived != "any" and (filters.tag or filters.text):
        # As an inequality: for an equality SQLite would use an index that covers nearly all runs.
        conditions.append(_run.archived != (not wants_archived))
    elif filters.archived != "any":
        conditions.append(_run.archived == wants_archived)
    if filters.state:
        conditions.append(_run.state.in_(sorted(set(filters.state))))
    equal = {_run.rule: filters.rule, _run.model: filters.model, _run.created_by: filters.owner}
    conditions += [column == value for column, value in equal.items() if value is not None]
    if filters.group is not None:
        group = select(_group.number).where(_group.id == filters.group)
        conditions.append(_run.group_number == group.scalar_subquery())
    if filters.created_after is not None:
        conditions.append(_run.created_at > filters.created_after)
    if filters.created_before is not None:
        conditions.append(_run.created_at < filters.created_before)
    conditions += [_run.number.in_(select(_tag.run_number).where(_tag.tag == tag)) for tag in set(filters.tag)]
    if filters.text:
        # Materialized: a generic plan would search for the text in each run separately.
        among = select(_search.run_number).where(_has_part(dialect, filters.text)).cte().prefix_with("MATERIALIZED")
        conditions.append(_run.number.in_(select(among.c.run_number)))
    return conditions


def _has_part(dialect: str, part: str) -> ColumnElement[bool]:
    """Whether `part` is in a run's text. The pattern is built here: a database would build it for each row.

    Backslash is PostgreSQL's default escape; stated explicitly, the pattern would be translated for each row.
    """
    escape = "\\"
    pattern = part.casefold()
    for special in (escape, "%", "_"):
        pattern = pattern.replace(special, escape + special)
    return _search.text.like(f"%{pattern}%", escape=None if dialect == "postgresql" else escape)


REWARD = "reward/mean"
_SHOWN = {"number", "step", *RunView.model_fields, *Progress.model_fields}
_ROWS = (
    # Columns instead of ORM objects, which take several times as long.
    select(
        *(column for column in _run if column.key in _SHOWN),
        _group.id.label("group"),
        _last.last.label("reward"),
        func.coalesce(_document.config["warm_start", "steps"].as_integer(), 0).label("warm_steps"),
        _document.config["evaluation", "benchmarks"].label("benchmarks"),
    )
    .join_from(Run.__table__, RunDocument.__table__, _document.run_number == _run.number)
    .outerjoin(Group.__table__, _group.number == _run.group_number)
    .outerjoin(MetricLast.__table__, (_last.run_number == _run.number) & (_last.name_number == bindparam("metric")))
    .where(_run.number.in_(bindparam("numbers", expanding=True)))
)


def list_rows(session: Session, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Columns of these runs by name, in the order of `numbers`, without those of runs deleted meanwhile.

    Adds `group` (its id), `tags`, `reward`, `warm_steps`, `benchmarks` and, for queued runs, `queue_position`.
    """
    session.flush()
    reward = metrics.find_numbers(session, [REWARD]).get(REWARD, -1)  # -1: never reported
    result = session.execute(_ROWS, {"numbers": list(numbers), "metric": reward})
    rows = {row["number"]: {**row, "tags": [], "queue_position": None} for row in result.mappings()}
    for number, tag in session.execute(select(_tag.run_number, _tag.tag).where(_tag.run_number.in_(rows))):
        rows[number]["tags"].append(tag)
    for row in rows.values():
        row["tags"].sort()
        row["benchmarks"] = row["benchmarks"] or []  # a run older than the setting
    queued = {number for number, row in rows.items() if row["state"] == RunState.QUEUED}
    if queued:
        queue = session.scalars(select(_run.number).where(_run.state == RunState.QUEUED).order_by(*QUEUE_ORDER))
        for place, number in enumerate(queue, start=1):
            if number in queued:
                rows[number]["queue_position"] = place
    return [rows[number] for number in numbers if number in rows]


def _headline(session: Session, states: Mapping[str, int], conditions: Sequence[ColumnElement[bool]]) -> HeadlineView:
    """How many runs are in each state, and the one whose last evaluation is the most accurate, if above 0, with its
    benchmarks: the highest of all accuracies is also the highest on these."""
    counts = ", ".join(f"{states[state]:,} {state}" for state in RunState if state in states)
    scored = select(Run.__table__).where(_run.score > 0, *conditions).order_by(_run.score.desc(), _run.number.desc())
    best = session.execute(scored.limit(1)).first()
    accuracy = ""
    if best is not None:
        config = session.scalar(select(RunDocument.config).where(RunDocument.run_number == best.number)) or {}
        benchmarks = setting(config, "evaluation.benchmarks")
        tasks = f" on {in_words([*benchmarks], 'and')}" if benchmarks else ""
        place = f"at step {best.score_step or 0:,}"
        if best.score_step == best.step and best.backward_passes:  # of an earlier step the passes are not in this table
            place = f"after {best.backward_passes:,.0f} backward passes"
        accuracy = f"Most accurate{tasks}: {best.name}, {percent(best.score)} {place}."
    return HeadlineView.of(
        ("state", f"{counts}." if counts else "", []), ("evaluation", accuracy, [best.id] if best is not None else [])
    )


def list_runs(session: Session, query: ListQuery) -> RunPage:
    """A page of the list. Raises Invalid for an unknown order or a cursor of another order."""
    order = _order(session, query)
    after = decode_cursor(query.cursor, order.word, order.kind) if query.cursor is not None else None
    conditions = _conditions(query, session.get_bind().dialect.name)
    rows = _page(session, conditions, order, after, query.limit + 1)
    states: dict[str, int] | None = None
    headline = None
    if after is None:
        counted = select(_run.state, func.count()).where(*conditions).group_by(_run.state)
        states = dict(session.execute(counted).all())
        headline = _headline(session, states, conditions)
    sort_values = dict(rows[: query.limit])
    numbers = list(sort_values)
    values = metrics.last_values(session, numbers, query.with_metric) if query.with_metric else {}
    configs: dict[int, dict[str, Any]] = {}
    if query.with_setting:
        documents = select(RunDocument.run_number, RunDocument.config).where(RunDocument.run_number.in_(numbers))
        configs = dict(session.execute(documents).all())
    items = []
    for row in list_rows(session, numbers):
        number = row["number"]
        last: dict[str, Any] = {name: values.get(number, {}).get(name) for name in query.with_metric}
        if query.sort.startswith("metric:"):
            last[query.sort.removeprefix("metric:")] = sort_values[number]
        settings = {path: setting(configs.get(number, {}), path) for path in query.with_setting}
        items.append(with_progress(row) | {"metrics": last, "settings": settings})
    next_cursor = None
    if len(rows) > query.limit:
        number, value = rows[query.limit - 1]
        next_cursor = encode_cursor(order.word, value, number)
    total = None if states is None else sum(states.values())
    whole = {"total": total, "states": states, "headline": headline}
    return RunPage.model_validate({"items": items, "next_cursor": next_cursor, **whole})
