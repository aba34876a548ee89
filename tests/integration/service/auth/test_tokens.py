"""Access tokens: roles, secrets, and what a loopback start makes."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from fastapi.testclient import TestClient
from support.paging import walk

from gxpo_services.api.principals import hash_token
from gxpo_services.auth.tokens import ensure_local_token
from gxpo_services.db.database import Database
from gxpo_services.db.tables import AccessToken


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_tokens_are_listed_page_by_page_without_their_secrets(client: TestClient) -> None:
    made = [client.post("/api/v1/tokens", json={"name": f"t{number}"}).json()["id"] for number in range(4)]
    listed = walk(client, "/tokens", limit=2)
    assert [token["id"] for token in listed[1:]] == made
    assert not any({"sha256", "token"} & token.keys() for token in listed)
    assert client.get("/api/v1/tokens", params={"cursor": "x"}).status_code == 422
    refused = client.post("/api/v1/tokens", json={"name": "a\x00b"})
    assert (refused.status_code, "NUL character" in refused.json()["detail"]) == (422, True)


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
