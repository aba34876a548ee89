"""Responses serialized in the endpoint's own thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Response
from pydantic import BaseModel
from pydantic_core import to_json


def answer(body: BaseModel, status: int = 200, **headers: str) -> Response:
    """A JSON response, serialized before the endpoint returns.

    FastAPI serializes a plain return value in another thread of its bounded pool while the transaction is still open.
    If every thread of the pool waits for a lock of that transaction, this deadlocks.
    """
    return Response(body.model_dump_json(), status, headers, "application/json")


def plain_answer(body: Mapping[str, Any]) -> Response:
    """A JSON response from plain values, without validation, which would cost more than the query."""
    return Response(to_json(body, inf_nan_mode="strings"), media_type="application/json")
