"""SQL of the rows that lists show, in one query: most columns, tags, group, reward and queue position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import JSON, BigInteger, ColumnElement, Select, and_, any_, bindparam, case, func, select
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by
from sqlalchemy.orm import Session

from gxpo_services.db.tables.metrics import MetricLast
from gxpo_services.db.tables.runs import Group, Run, RunTag
from gxpo_services.metrics import repository as metrics
from gxpo_services.run_states import RunState

REWARD = "reward/mean"
_NOT_SHOWN = frozenset(
    {
        *("created_by_id", "cpus", "gpus", "queued_at", "wish_at", "launched_at", "last_batch", "offsets"),
        *("lease_owner", "lease_token", "lease_expires_at", "job_id", "run_token_sha256"),
    }
)
_runs, _groups, _tags, _last = (table.__table__.c for table in (Run, Group, RunTag, MetricLast))


def _in_list(column: Any) -> ColumnElement[bool]:
    found: ColumnElement[bool] = column.in_(bindparam("numbers", expanding=True))
    return found


def _in_array(column: Any) -> ColumnElement[bool]:
    """One parameter, so that statement and plan are the same for any number of runs."""
    found: ColumnElement[bool] = column == any_(bindparam("numbers", type_=ARRAY(BigInteger)))
    return found


_AMONG: dict[str, Callable[[Any], ColumnElement[bool]]] = {"sqlite": _in_list, "postgresql": _in_array}


def _numbered_place() -> ColumnElement[Any]:
    """Queue position from the numbered queue, computed once per page and only if a run of it is queued."""
    other = Run.__table__.alias("other").c
    place = func.row_number().over(order_by=(other.priority.desc(), other.queued_at, other.number)).label("place")
    queue = select(other.number, place).where(other.state == RunState.QUEUED).cte("queue")
    return select(queue.c.place).where(queue.c.number == _runs.number).scalar_subquery()


def _place_in_array() -> ColumnElement[Any]:
    """The same for PostgreSQL, which would scan the numbered queue for every row."""
    other = Run.__table__.alias("other").c
    order = (other.priority.desc(), other.queued_at, other.number)
    queue = select(func.array_agg(aggregate_order_by(other.number, *order))).where(other.state == RunState.QUEUED)
    return func.array_position(queue.scalar_subquery(), _runs.number)


def _query(dialect: str, tags_in_one: ColumnElement[Any], place: ColumnElement[Any]) -> Select[Any]:
    """Columns instead of ORM objects, which take several times as long."""
    tags = select(tags_in_one).where(_tags.run_number == _runs.number).scalar_subquery()
    reward = and_(_last.run_number == _runs.number, _last.name_number == bindparam("reward"))
    shown = [column for column in _runs if column.key not in _NOT_SHOWN]
    of_others = (_groups.id.label("group"), tags.label("tags"), _last.last.label("reward"))
    return (
        select(*shown, *of_others, case((_runs.state == RunState.QUEUED, place)).label("queue_position"))
        .outerjoin_from(Run.__table__, Group.__table__, _groups.number == _runs.group_number)
        .outerjoin(MetricLast.__table__, reward)
        .where(_AMONG[dialect](_runs.number))
    )


_QUERIES = {
    "sqlite": _query("sqlite", func.json_group_array(_tags.tag, type_=JSON), _numbered_place()),
    "postgresql": _query("postgresql", func.array_agg(_tags.tag), _place_in_array()),
}


def shown_rows(session: Session, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Columns of these runs by name, in the order of `numbers`, without those of runs deleted meanwhile.

    Adds `group` (its id), `tags`, `reward` and, for queued runs, `queue_position`.
    """
    session.flush()
    reward = metrics.find_numbers(session, [REWARD]).get(REWARD, -1)  # -1: never reported
    result = session.execute(_QUERIES[session.get_bind().dialect.name], {"numbers": list(numbers), "reward": reward})
    names = list(result.keys())
    rows = {row.number: dict(zip(names, row, strict=True)) for row in result.all()}
    for row in rows.values():
        row["tags"] = sorted(row["tags"] or [])
    return [rows[number] for number in numbers if number in rows]
