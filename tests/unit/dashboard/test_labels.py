"""Untrusted text is harmless, and states, reasons and runs have words."""

from __future__ import annotations

from typing import Any

import pytest

from gxpo_dashboard import labels
from gxpo_services.run_states import RunState
from gxpo_trainer.errors import REASONS


@pytest.mark.parametrize(
    "text", ["[a](http://x)", "**b**", "<script>", ":red[c]", "$x$", "# d", "`e`", "~~f~~", "![g](h)", "| i |", "1. j"]
)
def test_markdown_is_escaped(text: str) -> None:
    escaped = labels.plain(text)
    for mark in "[]()*<>:$#`~!|":
        assert escaped.count(mark) == escaped.count(f"\\{mark}")
    assert escaped.replace("\\", "").replace("\u2060", "") == text


def test_addresses_do_not_become_links() -> None:
    for text in ("http://x.org", "see www.x.org", "mail a@b.org"):
        escaped = labels.plain(text).replace("\\", "")
        assert not any(mark in escaped for mark in ("://", "www.", "@b"))


def test_formulas_are_set_and_everything_else_stays_text() -> None:
    rendered = labels.with_formulas("so $x^2$ and **bold** [link](http://a)")
    assert rendered is not None
    assert rendered.startswith("so $x^2$ and ")
    assert r"\*\*bold\*\*" in rendered
    assert r"\[link\]" in rendered
    assert labels.with_formulas(r"\[ \frac{1}{2} \] done") == r"$\frac{1}{2}$ done"
    assert labels.with_formulas("from $5 to $6, not $ 7 $") is None
    assert labels.with_formulas(r"$\href{javascript:alert(1)}{x}$") is None
    assert labels.with_formulas("$`x`$") is None


def test_every_state_and_reason_has_words() -> None:
    assert set(labels.STATES) == set(RunState)
    assert set(REASONS) <= set(labels.REASONS)


@pytest.mark.parametrize(
    ("run", "title", "text"),
    [
        ({"state": "queued", "progress": {"queue_position": 2}}, "No data yet",
         "The run is queued at position 2. Resources are held by a."),
        ({"state": "starting", "phase": "waiting for 3 GPUs"}, "No data yet",
         "The run is starting: waiting for 3 GPUs."),
        ({"state": "running", "phase": "starting engines"}, "No data yet",
         "Engines start and compile; the first step takes longest."),
        ({"state": "running", "phase": None}, "No data yet", "The run is running."),
        ({"state": "paused"}, "No data yet", "The run is paused. Resume it to continue."),
        ({"state": "cancelled"}, "No data", "The run was cancelled."),
        ({"state": "failed", "reason": "disk_full", "detail": ""}, "No data",
         r"The run failed. The disk is full\. The last checkpoint is valid; free space and retry\."),
        ({"state": "succeeded"}, "No data", "The run reported none."),
    ],
)  # fmt: skip
def test_an_empty_state_has_the_cause_of_its_state(run: dict[str, Any], title: str, text: str) -> None:
    assert labels.no_data(run, "data", "a") == (title, text)


def test_names_that_repeat_are_told_apart() -> None:
    views = {
        "r000001": {"name": "a", "seed": 0}, "r000002": {"name": "a", "seed": 1}, "r000003": {"name": "b", "seed": 0},
        "r000004": {"name": "c", "seed": 0}, "r000005": {"name": "c", "seed": 0},
    }  # fmt: skip
    assert list(labels.unique_labels(views).values()) == [
        "a (seed 0)", "a (seed 1)", "b", "c (000004)", "c (000005)"
    ]  # fmt: skip
