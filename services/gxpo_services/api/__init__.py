"""What every endpoint shares: dependencies, errors, middleware, field types, paging, idempotency, OpenAPI."""
