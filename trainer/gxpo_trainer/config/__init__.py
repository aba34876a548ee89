"""Every setting of a run, typed, documented and checked once, at the edge.

Sections of the run file: `tasks` (data, environment, verifier, evaluation), `engines` (model, rollout, placement),
`rules` (learner.rule), `base` (timeouts), `run` (RunConfig, learner and the small sections). `io` reads files and
presets, `messages` turns validation errors into one line per setting.

Free of torch, so that `gxpo config --check FILE` takes less than half a second. An unknown or contradictory setting is
an error that names it; what depends on the machine (folders, devices) is checked by `training.prepare` before anything
starts.
"""

from gxpo_trainer.config.base import Settings, TimeoutsConfig
from gxpo_trainer.config.engines import ModelConfig, PlacementConfig, TeacherConfig
from gxpo_trainer.config.rules import (
    EpochsRule,
    ExtragradientRule,
    GateConfig,
    GrpoRule,
    GxpoRule,
    RuleSettings,
    SfpoGateConfig,
    SfpoRule,
)
from gxpo_trainer.config.run import (
    AdvantageSettings,
    BudgetConfig,
    CheckpointConfig,
    DppoLossConfig,
    GroupAdvantageConfig,
    LearnerConfig,
    LoggerSettings,
    LoggingConfig,
    LoraConfig,
    LossConfig,
    LossSettings,
    OptimizerConfig,
    RunConfig,
    WarmStartConfig,
)
from gxpo_trainer.config.tasks import (
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    HttpRewardConfig,
    RewardConfig,
    VerifierConfig,
)

__all__ = [
    "AdvantageSettings",
    "BudgetConfig",
    "CheckpointConfig",
    "DataConfig",
    "DppoLossConfig",
    "EnvironmentConfig",
    "EpochsRule",
    "EvaluationConfig",
    "ExtragradientRule",
    "GateConfig",
    "GroupAdvantageConfig",
    "GrpoRule",
    "GxpoRule",
    "HttpRewardConfig",
    "LearnerConfig",
    "LoggerSettings",
    "LoggingConfig",
    "LoraConfig",
    "LossConfig",
    "LossSettings",
    "ModelConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "RewardConfig",
    "RuleSettings",
    "RunConfig",
    "Settings",
    "SfpoGateConfig",
    "SfpoRule",
    "TeacherConfig",
    "TimeoutsConfig",
    "VerifierConfig",
    "WarmStartConfig",
]
