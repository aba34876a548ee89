"""The whole OpenAPI description under generated requests, one by one and in sequences, by tokens of every role.

Nothing may answer with a 5xx, or with a status, content type, header or body that the description does not promise. The
examples are derived from a fixed seed, so that a failure comes back.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given
from hypothesis.errors import Unsatisfiable
from hypothesis.stateful import run_state_machine_as_test
from schemathesis import Case, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.generation.stateful.state_machine import APIStateMachine
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.specs.openapi.schemas import OpenApiSchema
from support.queued_runs import all_rows

from gxpo_services.db.database import Database
from gxpo_services.db.tables import metadata

pytestmark = pytest.mark.long("volume of generated requests")

API = "/api/v1"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
LEFT_OUT = [
    f"GET {API}/runs/{{run_id}}/logs/stream",  # lasts as long as its run
    f"GET {API}/events/stream",  # the same
]
SIZE = int(os.environ.get("GXPO_FUZZ", "1"))
"""How many times as many requests as in the test suite; `make fuzz` sends more than 20,000 to each database."""
EXAMPLES_OF_ONE = 6 * SIZE
SEQUENCES, STEPS = 25 * SIZE, 12


def settings_of(examples: int, **more: Any) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        **more,
    )


@pytest.fixture
def tokens(client: TestClient, token_for: Callable[[str], str]) -> list[str]:
    return [token_for(role) for role in ("admin", "submitter", "admin", "viewer")]


Known = Callable[[], dict[str, list[str]]]


@pytest.fixture
def known(client: TestClient) -> Known:
    """Makes things and tells their ids: a run that waits, one that has ended, a sweep, and a token that is not used."""

    def make() -> dict[str, list[str]]:
        runs = [client.post(f"{API}/runs", json={"preset": "demo"}).json()["id"] for _ in range(2)]
        client.post(f"{API}/runs/{runs[1]}/cancel")
        group = client.post(f"{API}/sweeps", json={"name": "s", "base": {"preset": "demo"}}).json()["group"]["id"]
        token = client.post(f"{API}/tokens", json={"name": "t"}).json()["id"]
        return {"run_id": runs, "runs": runs, "group_id": [group], "groups": [group], "token_id": [token]}

    return make


@pytest.fixture
def schema(app: FastAPI, client: TestClient) -> OpenApiSchema:
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    schema.config.generation.update(with_security_parameters=False)
    for label in LEFT_OUT:
        method, path = label.split()
        assert method.lower() in schema.raw_schema["paths"][path]
        schema = schema.exclude(method=method, path=path)
    return schema


def test_no_single_request_finds_an_undocumented_answer(schema: OpenApiSchema, tokens: list[str], known: Known) -> None:
    secrets = cycle(tokens)

    def ask_with(ids: dict[str, Iterator[str | None]]) -> Callable[[Case], None]:
        def ask(case: Case) -> None:
            # Most go to things that are there: generated ids alone would see little but 404.
            for place, name in itertools.product((case.path_parameters, case.query), ids):
                real = next(ids[name]) if place and name in place else None
                if real is not None:
                    place[name] = real if place is case.path_parameters else [real]
            answer = case.call(headers={"Authorization": f"Bearer {next(secrets)}"})
            case.validate_response(answer, checks=CHECKS)
            statuses[answer.status_code] += 1

        return ask

    statuses: Counter[int] = Counter()

    for result in schema.get_all_operations():
        for mode in GenerationMode:
            # Recreated, because the previous operation may have deleted them.
            ids = {name: cycle([*values, None]) for name, values in known().items()}
            cases = result.ok().as_strategy(generation_mode=mode)
            # What takes no input cannot be asked wrongly.
            with suppress(*([Unsatisfiable] if mode is GenerationMode.NEGATIVE else [])):
                settings_of(EXAMPLES_OF_ONE)(given(case=cases)(ask_with(ids)))()
    assert_many_succeed(statuses, 300 * SIZE)
    print(f"{statuses.total()} requests: {sorted(statuses.items())}")


def test_every_answer_is_documented(schema: OpenApiSchema, tokens: list[str], known: Known, database: Database) -> None:
    known()
    begin = all_rows(database.engine)
    machine = schema.as_state_machine()

    class Clients(machine):  # type: ignore[misc, valid-type]
        def setup(self) -> None:
            # Hypothesis takes a sequence that it has seen before to go the same way: each begins with the same rows.
            put_back(database, begin)
            self.secrets = cycle(tokens)

        def get_call_kwargs(self, case: Case) -> dict[str, Any]:
            return {"headers": {"Authorization": f"Bearer {next(self.secrets)}"}}

        def validate_response(self, response: Response, case: Case, **kwargs: Any) -> None:
            case.validate_response(response, checks=CHECKS)
            statuses[response.status_code] += 1

    statuses: Counter[int] = Counter()
    assert issubclass(Clients, APIStateMachine)
    run_state_machine_as_test(Clients, settings=settings_of(SEQUENCES, stateful_step_count=STEPS))
    assert_many_succeed(statuses, 5 * SEQUENCES)


def assert_many_succeed(statuses: Counter[int], fewest: int) -> None:
    """More requests than that, and an eighth of them with a 2xx: where all are refused, most answers are not seen."""
    assert statuses.total() > fewest, statuses
    assert sum(times for status, times in statuses.items() if status < 300) > statuses.total() / 8, statuses


def put_back(database: Database, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Make the database hold these rows and no others."""
    with database.engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
        for table in metadata.sorted_tables:
            if rows[table.name]:
                connection.execute(table.insert(), rows[table.name])
