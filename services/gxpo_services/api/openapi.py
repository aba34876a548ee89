"""The OpenAPI description, with one schema for all errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from gxpo_services.api.errors import PROBLEM, ProblemDetails, responses

TAGS = [
    {"name": "runs", "description": "Submit, list and control runs."},
    {"name": "groups", "description": "Sweeps: a grid of settings × seeds as one group."},
    {"name": "metrics", "description": "Metrics, and what trainers report."},
    {"name": "samples", "description": "Responses, evaluations, events, logs and checkpoints of a run."},
    {"name": "comparisons", "description": "Compare runs at equal cost, with confidence intervals."},
    {"name": "tokens", "description": "Access tokens and roles."},
    {"name": "health", "description": "Health checks and Prometheus metrics."},
]


def operation_id(route: APIRoute) -> str:
    """`runs_submit`: the domain, and the endpoint's name without it. Generated clients name their methods so."""
    domain = str(route.tags[0]) if route.tags else "api"
    words = [word for word in route.name.split("_") if word not in (domain, domain.removesuffix("s"))]
    return "_".join([domain, *(words or ["list"])])


def describe(app: FastAPI) -> None:
    """Make `app.openapi()` return the complete description, built once."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes, tags=TAGS
            )
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            problem = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
            components.update(problem.pop("$defs", {}))
            components["ProblemDetails"] = problem
            for unused in ("HTTPValidationError", "ValidationError"):
                components.pop(unused, None)
            for path in schema["paths"].values():
                for operation in path.values():
                    # Any body can be malformed or too large. FastAPI's own 422 has another schema.
                    more = responses(400, 408, 413) if "requestBody" in operation else {}
                    if "401" in operation["responses"]:
                        more |= responses(403)  # a token for /metrics alone
                    answers = {str(status): text for status, text in more.items()} | operation["responses"]
                    errors = [text for status, text in answers.items() if status.isdigit() and int(status) >= 400]
                    for text in errors:
                        text["content"] = PROBLEM
                    operation["responses"] = answers
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]
