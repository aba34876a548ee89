"""The pages that are generated from code, by their path in the repository."""

from __future__ import annotations

from gxpo_trainer.config import docs as settings


def pages() -> dict[str, str]:
    """Path → text. `make docs` writes them; a test fails when a page differs."""
    return {"docs/configuration.md": settings.render_page()}
