"""Environments: what answers the policy between its turns. Pure.

An environment is a class without constructor arguments, of which there is one instance an episode:

    from gxpo_trainer.environments import Observation, Problem, Turn

    class Countdown:
        def reset(self, problem: Problem, seed: int) -> Observation:
            self.left = 3
            return Observation.of_text(problem.text)

        def step(self, action: str) -> Turn:
            self.left -= 1
            return Turn(observation=f"{self.left} turns left", done=self.left == 0)

The run file refers to it as `package.module:Class` in `environment.name`, or by the name that an installed package
registers in the entry-point group `gxpo.environments`; see docs/environments.md. With settings of its own it has a
settings class, a subclass of `gxpo_trainer.config.EnvironmentConfig` that names it as its `implementation`.
"""

from gxpo_trainer.environments.contract import Environment, Message, Observation, Problem, Turn

__all__ = ["Environment", "Message", "Observation", "Problem", "Turn"]
