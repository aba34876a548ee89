"""`gxpo submit --check` names what does not fit."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from gxpo_services.cli.submit import _check


class Answering:
    """A client whose service gives one answer."""

    def __init__(self, plan: dict[str, Any] | None) -> None:
        self.plan = plan

    def validate(self, body: dict[str, Any]) -> dict[str, Any]:
        cost = {"steps": 4, "backward_passes": 12, "per_step_words": "GXPO"}
        return {"valid": True, "cost": cost, "equal_runs": [], "plan": self.plan}


@pytest.mark.parametrize(
    ("plan", "lines"),
    [
        (None, ["valid; 4 steps, at most 12 backward passes (GXPO)"]),
        ({"device": "l4-24", "advice": None}, ["valid; 4 steps, at most 12 backward passes (GXPO)"]),
        (
            {"device": "l4-24", "advice": "learner: needs 30.0 GiB; set learner.zero_stage = 3"},
            [
                "valid; 4 steps, at most 12 backward passes (GXPO)",
                "does not fit on l4-24: learner: needs 30.0 GiB; set learner.zero_stage = 3",
            ],
        ),
    ],
)
def test_a_check_prints_the_cost_and_what_does_not_fit(
    plan: dict[str, Any] | None, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    client: Any = Answering(plan)
    assert _check(Namespace(json=False), client, {}) == 0
    assert capsys.readouterr().out.splitlines() == lines
