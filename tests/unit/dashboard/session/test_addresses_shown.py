"""The address of the API in the commands that a visitor copies."""

from __future__ import annotations

import pytest

from gxpo_dashboard.session import visitor


@pytest.mark.parametrize(
    ("own", "external", "shown"),
    [
        ("http://api:8000", "https://gxpo.example/api-host/", "https://gxpo.example/api-host"),
        ("http://api:8000/", "", "http://api:8000"),
        (None, None, "http://127.0.0.1:8000"),
    ],
)
def test_commands_name_the_address_for_people(
    own: str | None, external: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GXPO_URL", own), ("GXPO_EXTERNAL_URL", external)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert visitor.external_url() == shown
    assert visitor.service_url() == (own or "http://127.0.0.1:8000"), "the dashboard itself uses its own"
