"""The OpenAPI description: one shape for every error, and who may call what."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gxpo_services.api.errors import MEDIA_TYPE, ProblemDetails, responses

TAGS = [
    {"name": "runs", "description": "Submit runs, see them, and steer them."},
    {"name": "groups", "description": "Sweeps: a grid of settings × seeds as one group."},
    {"name": "metrics", "description": "Metrics, and what trainers report."},
    {"name": "samples", "description": "Responses, evaluations, events, logs and checkpoints of a run."},
    {"name": "comparisons", "description": "Which run is better at the same cost, and how sure that is."},
    {"name": "tokens", "description": "Who may do what."},
    {"name": "health", "description": "For supervisors and Prometheus."},
]


def describe(app: FastAPI) -> None:
    """Let `app.openapi()` give the finished description, made once."""

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
                        # A body can be no JSON at all, or too large, whatever it is for.
                        more = {str(status): text for status, text in responses(400, 413).items()}
                        operation["responses"] = more | operation["responses"]
                    _one_error_shape(operation)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]


def _one_error_shape(operation: dict[str, Any]) -> None:
    """FastAPI documents its own 422; ours is problem details like every other error."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    for status, answer in operation.get("responses", {}).items():
        if status.isdigit() and int(status) >= 400:
            answer["content"] = content
