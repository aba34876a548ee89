"""Lists of the API, page after page."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient


def walk(client: TestClient, path: str, **query: Any) -> list[dict[str, Any]]:
    """The items of all pages; each page but the last is full."""
    items: list[dict[str, Any]] = []
    cursor = None
    while True:
        answer = client.get(f"/api/v1{path}", params=query | ({"cursor": cursor} if cursor else {}))
        assert answer.status_code == 200, answer.text
        page = answer.json()
        if "total" in page:
            assert (page["total"] is None) == (cursor is not None), "on the first page only"
        items += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return items
        assert len(page["items"]) == query["limit"]
