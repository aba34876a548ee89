"""Memory and time of a run before it starts, from its config and the shape of its model. Free of torch and Ray.

    RunConfig ──inputs_of──▶ Inputs ──make_plan──▶ Plan ──▶ fits, refusal, report

Apart from its own tables, a plan reads only the model's config.json (`inputs.py`).
"""

from gxpo_trainer.planner.inputs import Inputs, inputs_of
from gxpo_trainer.planner.plan import Plan, make_plan, refusal

__all__ = ["Inputs", "Plan", "inputs_of", "make_plan", "refusal"]
