"""Shared by all endpoints: dependencies, errors, middleware, field types, paging, idempotency, OpenAPI."""
