"""The audit trail for admins, and the last use of tokens."""

from __future__ import annotations

import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import text
from support.paging import walk
from support.reporting import body, event_row, launch, post
from support.service_processes import until

from gxpo_services.api.principals import Principal, Role, TokenUses, hash_token
from gxpo_services.auth.tokens import prepare_local, revoke_token
from gxpo_services.db.database import Database
from gxpo_services.db.tables import AccessToken
from gxpo_services.settings import ServiceSettings

API = "/api/v1"


def test_admins_read_who_did_what_page_by_page(client: TestClient, anonymous: TestClient, database: Database) -> None:
    run_id = client.post(f"{API}/runs", json={"preset": "demo"}).json()["id"]
    client.post(f"{API}/runs/{run_id}/cancel")
    made = client.post(f"{API}/tokens", json={"name": "ci"}).json()
    client.delete(f"{API}/tokens/{made['id']}")
    gone = client.post(f"{API}/runs", json={"preset": "demo"}).json()["id"]
    client.post(f"{API}/runs/{gone}/cancel")
    client.delete(f"{API}/runs/{gone}")
    launched = launch(database)
    assert post(anonymous, launched, body(1, events=[event_row("noise")])).status_code == 200

    entries = walk(client, "/audit", limit=2, actor="token:admin")
    kinds = ["run_deleted", "token_revoked", "token_created", "state", "submitted"]
    assert [entry["kind"] for entry in entries] == kinds
    assert [entry["run"] for entry in entries] == [None, None, None, run_id, run_id]
    assert entries[0]["fields"]["run"] == gone
    everything = walk(client, "/audit", limit=200)
    assert {entry["actor"] for entry in everything} >= {"token:admin", "tests"}
    assert "trainer" not in {entry["actor"] for entry in everything}
    assert [e["number"] for e in everything] == sorted((e["number"] for e in everything), reverse=True)
    assert [e["kind"] for e in walk(client, "/audit", run=run_id)] == ["state", "submitted"]
    assert [e["kind"] for e in walk(client, "/audit", kind="token_revoked")] == ["token_revoked"]
    assert walk(client, "/audit", before=entries[-1]["time"], actor="token:admin") == []
    assert walk(client, "/audit", after=entries[0]["time"], actor="token:admin") == []
    assert client.get(f"{API}/audit", params={"cursor": "x"}).status_code == 422


def test_the_longest_name_of_a_token_makes_tokens(client: TestClient, anonymous: TestClient) -> None:
    """An actor is the name after `token:`, and longer than the column that holds who made a token."""
    made = client.post(f"{API}/tokens", json={"name": "n" * 100, "role": "admin"}).json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    second = anonymous.post(f"{API}/tokens", json={"name": "ci"}, headers=headers)
    assert (second.status_code, second.json().get("created_by")) == (201, "token:" + "n" * 94)


def test_the_last_use_of_a_token_is_shown(
    app: FastAPI, client: TestClient, anonymous: TestClient, database: Database, token_for: Callable[[str], str]
) -> None:
    used, unused, revoked = token_for("viewer"), token_for("viewer"), token_for("viewer")
    with database.writing() as session:
        session.query(AccessToken).filter_by(sha256=hash_token(revoked)).one().revoked_at = 1.0
    now = 1_800_000_000.0
    uses = app.state.token_uses = TokenUses(lambda: now)
    for path in ("/api/v1/runs", "/api/v1/tokens/me", "/metrics"):
        now += 1
        assert anonymous.get(path, headers={"Authorization": f"Bearer {used}"}).status_code == 200
    assert anonymous.get("/api/v1/runs", headers={"Authorization": f"Bearer {revoked}"}).status_code == 401
    assert anonymous.get("/api/v1/runs", headers={"Authorization": "Bearer gxpo_invented"}).status_code == 401

    def last_uses() -> list[float | None]:
        with database.reading() as session:
            last = dict(session.query(AccessToken.sha256, AccessToken.last_used_at).all())
        return [last[hash_token(secret)] for secret in (used, unused, revoked)]

    assert last_uses() == [None] * 3, "no request waits for the database's writer"
    uses.write(database)
    assert last_uses() == [now, None, None]
    shown = {token["last_used_at"] for token in client.get(f"{API}/tokens").json()["items"]}
    assert shown == {now, None}


def test_a_service_ends_in_order_without_its_database(tmp_path: Path) -> None:
    uses = TokenUses()
    uses.note("1")
    uses.write(Database(f"sqlite:///{tmp_path / 'without-tables.db'}"))


# Access tokens: roles, secrets, and what a loopback start makes.


def test_tokens_are_listed_without_their_secrets_and_the_last_admins_stays(client: TestClient) -> None:
    made = [client.post("/api/v1/tokens", json={"name": f"t{number}"}).json()["id"] for number in range(4)]
    listed = walk(client, "/tokens", limit=2)
    assert [token["id"] for token in listed[1:]] == made
    assert not any({"sha256", "token"} & token.keys() for token in listed)
    assert client.get("/api/v1/tokens", params={"cursor": "x"}).status_code == 422
    refused = client.post("/api/v1/tokens", json={"name": "a\x00b"})
    assert (refused.status_code, "NUL character" in refused.json()["detail"]) == (422, True)
    mine = client.get("/api/v1/tokens/me").json()["id"]
    refused = client.delete(f"/api/v1/tokens/{mine}")
    assert (refused.status_code, "last admin" in refused.json()["detail"]) == (409, True)
    # PostgreSQL would refuse the query of a NUL character.
    assert [client.delete(f"/api/v1/tokens/{token}").status_code for token in ("%00", "t1")] == [422, 404]


@pytest.mark.each_database
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # SQLite has one writer
def test_two_admins_who_revoke_each_other_at_once_leave_one(
    client: TestClient, database: Database, token_for: Callable[[str], str]
) -> None:
    mine = client.get("/api/v1/tokens/me").json()["id"]
    token_for("admin")
    (other,) = {token["id"] for token in client.get("/api/v1/tokens").json()["items"]} - {mine}
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with ThreadPoolExecutor(1) as pool, database.autocommit_connection() as connection:
        with database.writing() as session:
            revoke_token(mine, Principal(other, "other", Role.ADMIN), session)
            asked = pool.submit(client.delete, f"/api/v1/tokens/{other}")
            until(lambda: asked.done() or connection.scalar(text(waiting)) == 1, "the second to wait for the first")
        assert (asked.result().status_code, "last admin" in asked.result().json()["detail"]) == (409, True)


def test_an_expired_token_stops_working(client: TestClient, anonymous: TestClient, database: Database) -> None:
    made = client.post("/api/v1/tokens", json={"name": "old", "days": 1}).json()
    anonymous.headers["Authorization"] = f"Bearer {made['token']}"
    assert anonymous.get("/api/v1/tokens/me").status_code == 200
    with database.writing() as session:
        row = session.get_one(AccessToken, made["id"])
        row.expires_at = row.created_at
    assert anonymous.get("/api/v1/tokens/me").status_code == 401


def test_the_local_token_is_made_once_for_its_owner_alone_and_stored_as_a_hash(
    database: Database, settings: ServiceSettings
) -> None:
    def secret() -> str:
        prepare_local(settings)
        return settings.local_token_file.read_text().strip()

    first = secret()
    assert secret() == first
    with database.writing() as session:
        row = session.query(AccessToken).one()
        assert row.sha256 == hash_token(first)
        assert all(first not in str(getattr(row, column.key)) for column in AccessToken.__table__.columns)
        row.revoked_at = 1.0
    assert stat.S_IMODE(settings.local_token_file.stat().st_mode) == 0o600
    assert secret() != first, "a revoked token must be replaced"
