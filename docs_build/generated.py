"""The pages that are generated from code, by their path in the repository."""

from __future__ import annotations

import tempfile
from pathlib import Path

from docs_build import commands, metrics, rest, settings
from gxpo_services.app import create_app
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.cli import build_parser


def pages() -> dict[str, str]:
    """Path → text. `make docs` writes them; `make check` fails when a page differs."""
    return {
        "docs/commands.md": commands.render_page(build_parser()),
        "docs/configuration.md": settings.render_page(),
        "docs/metrics.md": metrics.render_page(),
        "docs/rest.md": rest.render_page(_openapi()),
    }


def stale(root: Path) -> list[str]:
    """Pages below `root` that differ from what the code generates now."""
    return [path for path, text in pages().items() if (root / path).read_text(encoding="utf-8") != text]


def _openapi() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as home:
        app = create_app(ServiceSettings(home=Path(home)))
        try:
            return app.openapi()
        finally:
            app.state.database.close()
