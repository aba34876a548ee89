"""The pictures of docs/algorithms show what the rules do."""

from __future__ import annotations

import re

import pytest

from docs_build import pictures


@pytest.mark.parametrize("name", ["grpo", "grpo-longer-step", "sfpo", "gxpo", "epochs", "extragradient"])
def test_a_picture_has_a_circle_for_each_pass_that_its_title_states(name: str) -> None:
    title, settings, _ = pictures.RULES[name]
    (axes,) = pictures.draw(name).axes
    circles = [text.get_text() for text in axes.texts if text.get_text().isdigit()]
    assert len(circles) == int(re.search(r"(\d+) pass", title)[1]) == settings.passes_per_step(gate_open=True)
