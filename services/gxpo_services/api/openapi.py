"""The OpenAPI description, with one schema for all errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gxpo_services.api.errors import MEDIA_TYPE, ProblemDetails, responses

TAGS = [
    {"name": "runs", "description": "Submit, list and control runs."},
    {"name": "groups", "description": "Sweeps: a grid of settings × seeds as one group."},
    {"name": "metrics", "description": "Metrics, and what trainers report."},
    {"name": "samples", "description": "Responses, evaluations, events, logs and checkpoints of a run."},
    {"name": "comparisons", "description": "Compare runs at equal cost, with confidence intervals."},
    {"name": "tokens", "description": "Access tokens and roles."},
    {"name": "health", "description": "Health checks and Prometheus metrics."},
]


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
                    if "requestBody" in operation:
                        # Any body can be malformed or too large.
                        more = {str(status): text for status, text in responses(400, 413).items()}
                        operation["responses"] = more | operation["responses"]
                    _one_error_shape(operation)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]


def _one_error_shape(operation: dict[str, Any]) -> None:
    """Replace FastAPI's 422 schema by problem details."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    for status, answer in operation.get("responses", {}).items():
        if status.isdigit() and int(status) >= 400:
            answer["content"] = content
