"""Responses of one prompt: their counts do not depend on the page, and they can be listed alone."""

from __future__ import annotations

from fastapi.testclient import TestClient
from support.reporting import body, launch, post, sample_row

from gxpo_services.db.database import Database


def test_counts_are_of_whole_groups_on_every_page(client: TestClient, database: Database) -> None:
    launched = launch(database)
    rows = [
        sample_row(1, group=group, sample=sample, prompt_id=f"p{group}", verdict="wrong" if sample else "correct")
        for group in range(2)
        for sample in range(3)
    ]
    assert post(client, launched, body(1, samples=rows)).status_code == 200
    path = f"/api/v1/runs/{launched.split()[0]}/samples"

    def counts(**query: object) -> list[tuple[str, int, int]]:
        found = client.get(path, params=query).raise_for_status().json()["groups"]
        return [(group["prompt_id"], group["correct"], group["responses"]) for group in found]

    first = client.get(path, params={"limit": 2}).raise_for_status().json()
    assert counts(limit=2) == [("p0", 1, 3)]
    assert counts(limit=2, cursor=first["next_cursor"]) == [("p0", 1, 3), ("p1", 1, 3)]
    assert counts(verdict="correct") == [("p0", 1, 3), ("p1", 1, 3)]
    assert counts(verdict="error") == []
    alone = client.get(path, params={"group": 1}).raise_for_status().json()["items"]
    assert [(item["group"], item["sample"]) for item in alone] == [(1, 0), (1, 1), (1, 2)]
