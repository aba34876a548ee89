"""Metric names that docs/metrics.md explains, as patterns."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def undocumented(names: set[str]) -> set[str]:
    """Names that no row of the page covers."""
    patterns = []
    for row in PAGE.read_text(encoding="utf-8").splitlines():
        if row.startswith("| `"):
            patterns += re.findall(r"`([a-z_]+(?:/[^`]+)?)`", row.split("|")[1])
    compiled = []
    for pattern in patterns:
        body = re.escape(pattern).replace("…", ".+")
        compiled.append(re.compile(re.sub(r"<\w+>", r"[^/]+", body)))
    stripped = {re.sub(r"/ci_(low|high)$", "", name) for name in names}
    return {name for name in stripped if not any(p.fullmatch(name) for p in compiled)}
