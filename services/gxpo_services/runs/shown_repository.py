"""SQL of what a list shows of its runs: most of their columns, tags, group and reward in one query, and the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import JSON, BigInteger, ColumnElement, Select, and_, any_, bindparam, func, select
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Session

from gxpo_services.metrics import repository as metrics
from gxpo_services.metrics.models import MetricLast
from gxpo_services.runs.models import Group, Run, RunTag
from gxpo_services.runs.states import RunState

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
    """One parameter, so that the statement's text, and its plan, are the same for any number of runs."""
    found: ColumnElement[bool] = column == any_(bindparam("numbers", type_=ARRAY(BigInteger)))
    return found


_AMONG: dict[str, Callable[[Any], ColumnElement[bool]]] = {"sqlite": _in_list, "postgresql": _in_array}


def _query(dialect: str, tags_as_json: Any) -> Select[Any]:
    """Columns, not objects: a page of Run objects takes several times as long to make."""
    tags = select(tags_as_json(_tags.tag, type_=JSON)).where(_tags.run_number == _runs.number).scalar_subquery()
    reward = and_(_last.run_number == _runs.number, _last.name_number == bindparam("reward"))
    shown = [column for column in _runs if column.key not in _NOT_SHOWN]
    return (
        select(*shown, _groups.id.label("group"), tags.label("tags"), _last.last.label("reward"))
        .outerjoin_from(Run.__table__, Group.__table__, _groups.number == _runs.group_number)
        .outerjoin(MetricLast.__table__, reward)
        .where(_AMONG[dialect](_runs.number))
    )


_QUERIES = {
    "sqlite": _query("sqlite", func.json_group_array),
    "postgresql": _query("postgresql", func.json_agg),
}


def shown_rows(session: Session, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Columns of these runs by name, with `group` (its id), `tags` and `reward`, in the order of `numbers`."""
    session.flush()
    reward = metrics.find_numbers(session, [REWARD]).get(REWARD, -1)  # -1: nobody has reported one
    result = session.execute(_QUERIES[session.get_bind().dialect.name], {"numbers": list(numbers), "reward": reward})
    names = list(result.keys())
    rows = {row.number: dict(zip(names, row, strict=True)) for row in result.all()}
    for row in rows.values():
        row["tags"] = sorted(row["tags"] or [])
    return [rows[number] for number in numbers]


_QUEUE = (
    select(
        _runs.number,
        func.row_number().over(order_by=(_runs.priority.desc(), _runs.queued_at, _runs.number)).label("place"),
    )
    .where(_runs.state == RunState.QUEUED)
    .subquery()
)
"""The queue once through; a count per shown run would go through it again for each."""
_PLACES = {
    dialect: select(_QUEUE.c.number, _QUEUE.c.place).where(among(_QUEUE.c.number)) for dialect, among in _AMONG.items()
}


def queue_positions(session: Session, numbers: Sequence[int]) -> dict[int, int]:
    """run number → its place in the queue from 1, of those that are queued: how many come up to it."""
    if not numbers:
        return {}
    places = _PLACES[session.get_bind().dialect.name]
    return dict(list(session.execute(places, {"numbers": list(numbers)})))
