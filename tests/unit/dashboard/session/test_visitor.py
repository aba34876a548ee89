"""The address in copied commands, and what a session keeps."""

from __future__ import annotations

import pytest

from gxpo_client.connection import keep
from gxpo_dashboard.session import visitor


@pytest.mark.parametrize(
    ("own", "external", "address"),
    [
        ("http://api:8000", "https://gxpo.example/api-host/", "https://gxpo.example/api-host"),
        ("http://api:8000/", "", "http://api:8000"),
        (None, None, "http://127.0.0.1:8000"),
    ],
)
def test_commands_name_the_address_for_people(
    own: str | None, external: str | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GXPO_URL", own), ("GXPO_EXTERNAL_URL", external)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert visitor.external_url() == address
    assert visitor.service_url() == (own or "http://127.0.0.1:8000"), "the dashboard itself uses its own"


def test_the_oldest_entries_are_dropped_and_a_change_makes_an_entry_the_newest() -> None:
    store: dict[str, int] = {}
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        assert keep(store, key, value, 2) == value
    assert store == {"a": 3, "c": 4}
