"""Access tokens: roles, secrets, and what a loopback start makes."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from fastapi.testclient import TestClient

from gxpo_services.api.principals import hash_token
from gxpo_services.auth.tokens import ensure_local_token
from gxpo_services.db.database import Database
from gxpo_services.db.tables import AccessToken


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_only_admins_manage_tokens_and_each_role_knows_itself(
    anonymous: TestClient, token_for: Callable[[str], str]
) -> None:
    for role in ("viewer", "submitter"):
        secret = token_for(role)
        assert anonymous.get("/api/v1/tokens", headers=bearer(secret)).status_code == 403
        assert anonymous.get("/api/v1/tokens/me", headers=bearer(secret)).json()["role"] == role
    answer = anonymous.get("/api/v1/tokens", headers=bearer(token_for("admin")))
    assert answer.status_code == 200
    assert "sha256" not in answer.text


def test_a_name_that_cannot_be_stored_is_refused(anonymous: TestClient, token_for: Callable[[str], str]) -> None:
    refused = anonymous.post("/api/v1/tokens", headers=bearer(token_for("admin")), json={"name": "a\x00b"})
    assert refused.status_code == 422
    assert "must not contain a NUL character" in refused.json()["detail"]


def test_tokens_are_listed_page_by_page(anonymous: TestClient, token_for: Callable[[str], str]) -> None:
    admin = bearer(token_for("admin"))
    made = [
        anonymous.post("/api/v1/tokens", headers=admin, json={"name": f"t{number}"}).json()["id"] for number in range(4)
    ]
    found, cursor = [], None
    while cursor is not None or not found:
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = anonymous.get("/api/v1/tokens", headers=admin, params=query).json()
        assert len(page["items"]) <= 2
        found += [token["id"] for token in page["items"]]
        cursor = page["next_cursor"]
    assert len(found) == 5
    assert set(made) < set(found)
    assert anonymous.get("/api/v1/tokens", headers=admin, params={"cursor": "x"}).status_code == 422


def test_no_token_and_a_wrong_one_are_refused_with_the_way_in(anonymous: TestClient) -> None:
    for headers in ({}, bearer("gxpo_wrong"), {"Authorization": "Basic YTpi"}):
        answer = anonymous.get("/api/v1/tokens/me", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["content-type"] == "application/problem+json"


def test_a_revoked_or_expired_token_stops_working(
    anonymous: TestClient, database: Database, token_for: Callable[[str], str]
) -> None:
    admin = bearer(token_for("admin"))
    made = anonymous.post("/api/v1/tokens", headers=admin, json={"name": "ci", "role": "viewer", "days": 1}).json()
    assert anonymous.get("/api/v1/tokens/me", headers=bearer(made["token"])).status_code == 200
    assert anonymous.delete(f"/api/v1/tokens/{made['id']}", headers=admin).status_code == 200
    assert anonymous.get("/api/v1/tokens/me", headers=bearer(made["token"])).status_code == 401
    other = anonymous.post("/api/v1/tokens", headers=admin, json={"name": "old", "days": 1}).json()
    with database.writing() as session:
        row = session.get(AccessToken, other["id"])
        assert row is not None
        row.expires_at = row.created_at
    assert anonymous.get("/api/v1/tokens/me", headers=bearer(other["token"])).status_code == 401


def test_the_last_admin_token_cannot_be_revoked(client: TestClient) -> None:
    mine = client.get("/api/v1/tokens/me").json()["id"]
    refused = client.delete(f"/api/v1/tokens/{mine}")
    assert (refused.status_code, "last admin" in refused.json()["detail"]) == (409, True)


def test_only_the_hash_of_a_secret_is_stored(database: Database, token_for: Callable[[str], str]) -> None:
    secret = token_for("viewer")
    with database.reading() as session:
        row = session.query(AccessToken).one()
        assert row.sha256 == hash_token(secret)
        assert all(secret not in str(getattr(row, column.key)) for column in AccessToken.__table__.columns)


def test_the_local_token_is_made_once_for_its_owner_alone(database: Database, tmp_path: Path) -> None:
    file = tmp_path / "home" / "token"
    with database.writing() as session:
        first = ensure_local_token(session, file)
    with database.writing() as session:
        assert ensure_local_token(session, file) == first
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with database.writing() as session:
        session.query(AccessToken).one().revoked_at = 1.0
    with database.writing() as session:
        assert ensure_local_token(session, file) != first, "a revoked token must be replaced"
