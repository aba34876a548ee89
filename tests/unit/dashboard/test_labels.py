"""Untrusted text is harmless, and states, reasons and runs have words."""

from __future__ import annotations

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


def test_names_that_repeat_are_told_apart() -> None:
    views = {
        "r000001": {"name": "a", "seed": 0}, "r000002": {"name": "a", "seed": 1}, "r000003": {"name": "b", "seed": 0},
        "r000004": {"name": "c", "seed": 0}, "r000005": {"name": "c", "seed": 0},
    }  # fmt: skip
    assert list(labels.unique_labels(views).values()) == [
        "a (seed 0)", "a (seed 1)", "b", "c (000004)", "c (000005)"
    ]  # fmt: skip
