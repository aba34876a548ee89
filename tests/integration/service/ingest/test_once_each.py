"""Reports sent twice, late, overlapping or read from disk at the same time: the database equals the files.

The reference is the trainer's own reading of its files (gxpo_trainer.reporting.reporter).
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from sqlalchemy import select
from support import queued_runs as runs
from support.reporting import KINDS, body, evaluation_row, event_row, launch, metric_row, sample_row, send, write_lines

from gxpo_services.api.errors import Conflict
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Event, MetricLast, MetricName, Sample
from gxpo_services.ingest.drain import FILES, drain
from gxpo_services.outputs import metric_series, metrics, samples as left
from gxpo_services.outputs.metric_series import SeriesQuery
from gxpo_trainer.jsonl import plain
from gxpo_trainer.reporting.reading import read_evaluations, read_metrics, read_samples

pytestmark = pytest.mark.each_database

NAMES = ("a", "b/c", "update/backward_passes_total", "rollout/tokens_total", "time/training_s", "eval/average/pass@1")
VALUES = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])
Rows = dict[str, list[dict[str, Any]]]


@st.composite
def histories(draw: st.DrawFn) -> Rows:
    """Files of a run: attempts that continue from an earlier step, several rows of a step, evaluations, samples."""
    rows: Rows = {kind: [] for kind in KINDS}
    step = 0
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        step = draw(st.integers(0, step))
        for _ in range(draw(st.integers(0, 6))):
            for _ in range(draw(st.integers(1, 2))):
                values = draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=len(NAMES)))
                rows["metrics"].append(metric_row(step, attempt, **values))
            if draw(st.booleans()):
                rows["samples"] += [sample_row(step, attempt, sample=n, response=f"{attempt}.{step}") for n in (0, 1)]
            if draw(st.booleans()):
                rows["evaluations"].append(evaluation_row(step, attempt, scores={"pass@1": draw(VALUES)}))
            rows["events"].append(event_row("step", f"{attempt}.{step}", step=step))
            step += draw(st.sampled_from([1, 1, 1, 90]))
    return rows


class Trainer:
    """A trainer that sends arbitrary batches."""

    def __init__(self, database: Database, rows: Rows, folder: Path) -> None:
        self.database, self.rows, self.folder = database, rows, folder
        self.launched = launch(database)
        self.run_id = self.launched.split()[0]
        self.number = 1
        self.launch = 1
        self.last: dict[str, Any] | None = None
        for kind, name in FILES.items():
            write_lines(folder / name, rows[kind])

    @property
    def received(self) -> dict[str, int]:
        offsets = runs.get(self.database, self.run_id).offsets
        return {kind: offsets.get(kind, 0) for kind in KINDS}

    def send(self, back: int, size: int) -> None:
        """`size` rows of each kind, from `back` rows before those that the service has."""
        begin = {kind: max(0, count - back) for kind, count in self.received.items()}
        parts: dict[str, Any] = {kind: self.rows[kind][begin[kind] : begin[kind] + size] for kind in KINDS}
        self.last = body(self.number, self.launch, offsets=begin, **parts)
        assert send(self.database, self.launched, self.last).applied
        self.number += 1

    def resend(self) -> None:
        """The last call once more, as if its answer had been lost."""
        if self.last is not None:
            assert not send(self.database, self.launched, self.last).applied

    def too_far(self) -> None:
        begin = {kind: count + 1 for kind, count in self.received.items()}
        content = body(self.number, self.launch, offsets=begin, metrics=[metric_row(999, 9)])
        with pytest.raises(Conflict) as refused:
            send(self.database, self.launched, content)
        assert refused.value.extra["offsets"] == self.received

    def drain(self) -> None:
        drain(self.database, self.run_id, self.folder, self.launch, runs.get(self.database, self.run_id).lease_token)

    def relaunch(self) -> None:
        self.launch += 1
        self.launched = launch(self.database, self.run_id, self.launch)
        self.number, self.last = 1, None


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 4), st.integers(0, 5)),
        st.tuples(st.sampled_from(["resend", "too_far", "relaunch", "drain"])),
    ),
    max_size=8,
)


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # to make a failing example smaller takes minutes of database work
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows=histories(), actions=ACTIONS, rest_is_drained=st.booleans())
def test_the_database_holds_each_line_once(
    database: Database, rows: Rows, actions: list[tuple[Any, ...]], rest_is_drained: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        trainer = Trainer(database, rows, folder)
        for action, *arguments in actions:
            getattr(trainer, action)(*arguments)
        if rest_is_drained:
            trainer.drain()
        else:
            while trainer.received != {kind: len(rows[kind]) for kind in KINDS}:
                trainer.send(1, 7)
        check_metrics(database, trainer.run_id, folder)
        check_the_rest(database, trainer.run_id, folder, rows)


def check_metrics(database: Database, run_id: str, folder: Path) -> None:
    expected: dict[str, dict[int, float]] = {}
    history = read_metrics(folder)
    for row in history:
        for name, value in row["metrics"].items():
            expected.setdefault(name, {})[row["step"]] = value
    run = runs.get(database, run_id)
    with database.reading() as session:
        assert metrics.names_of(session, run.number) == sorted(expected)
        curves = metric_series.curves(session, [run_id], SeriesQuery(names=list(NAMES)))[run_id]
        query = select(MetricName.name, MetricLast).join(MetricLast, MetricLast.name_number == MetricName.number)
        last = dict(session.execute(query.where(MetricLast.run_number == run.number)).all())
    for name in NAMES:
        series = curves["series"][name]
        values = expected.get(name, {})
        assert series["steps"] == sorted(values)
        assert plain(series["y"]) == [plain(values[step]) for step in sorted(values)]
        if values:
            check_last(last[name], values)
    assert run.step == (history[-1]["step"] if history else 0)
    assert curves["last_step"] == run.step
    for column, name in (("tokens", "rollout/tokens_total"), ("training_s", "time/training_s")):
        total = expected[name][max(expected[name])] if name in expected else 0.0
        assert getattr(run, column) == (total if math.isfinite(total) else 0.0)


def check_last(row: MetricLast, values: dict[int, float]) -> None:
    known = [value for value in values.values() if not math.isnan(value)]
    newest = values[max(values)]
    assert row.last_step == max(values)
    assert row.last == (None if math.isnan(newest) else newest)
    assert (row.lowest, row.highest) == ((min(known), max(known)) if known else (None, None))


def check_the_rest(database: Database, run_id: str, folder: Path, rows: Rows) -> None:
    number = runs.get(database, run_id).number
    with database.reading() as session:
        samples = left.arrived_samples(session, number, after=0, limit=1000)
        evaluations = left.evaluations_of(session, [number])[number]
        steps = left.sample_steps(session, number)
        stored = session.query(Sample).where(Sample.run_number == number).count()
        events = list(session.scalars(select(Event).where(Event.run_number == number, Event.actor == "trainer")))
    assert stored == len(rows["samples"])
    assert {(row.step, row.sample_index, row.response) for row in samples} == {
        (row["step"], row["sample"], row["response"]) for row in read_samples(folder)
    }
    assert steps == sorted({row["step"] for row in read_samples(folder)})
    assert evaluations == plain(read_evaluations(folder))
    messages = [event.message for event in events if event.kind == "step"]
    assert messages == [row["message"] for row in rows["events"]]
