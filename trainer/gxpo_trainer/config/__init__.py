"""Every setting of a run, typed, documented and checked once, at the edge.

Sections of the run file: `tasks` (data, environment, verifier, evaluation), `engines` (model, rollout, placement),
`rules` (learner.rule), `base` (timeouts), `run` (RunConfig, learner and the small sections). `io` reads files and
presets, `messages` turns validation errors into one line per setting.

Free of torch, so that `gxpo config --check FILE` takes less than half a second. An unknown or contradictory setting is
an error that names it; what depends on the machine (folders, devices) is checked by `training.prepare` before anything
starts.
"""

from gxpo_trainer.config.base import Settings as Settings, TimeoutsConfig as TimeoutsConfig
from gxpo_trainer.config.engines import ModelConfig as ModelConfig, TeacherConfig as TeacherConfig
from gxpo_trainer.config.rules import (
    EpochsRule as EpochsRule,
    ExtragradientRule as ExtragradientRule,
    GateConfig as GateConfig,
    GrpoRule as GrpoRule,
    GxpoRule as GxpoRule,
    RuleSettings as RuleSettings,
    SfpoGateConfig as SfpoGateConfig,
    SfpoRule as SfpoRule,
)
from gxpo_trainer.config.run import (
    AdvantageSettings as AdvantageSettings,
    BudgetConfig as BudgetConfig,
    CheckpointConfig as CheckpointConfig,
    DppoLossConfig as DppoLossConfig,
    GroupAdvantageConfig as GroupAdvantageConfig,
    LearnerConfig as LearnerConfig,
    LoggerSettings as LoggerSettings,
    LoraConfig as LoraConfig,
    LossConfig as LossConfig,
    LossSettings as LossSettings,
    OptimizerConfig as OptimizerConfig,
    RunConfig as RunConfig,
    WarmStartConfig as WarmStartConfig,
)
from gxpo_trainer.config.tasks import (
    DataConfig as DataConfig,
    EnvironmentConfig as EnvironmentConfig,
    EvaluationConfig as EvaluationConfig,
    HttpRewardConfig as HttpRewardConfig,
    RewardConfig as RewardConfig,
    VerifierConfig as VerifierConfig,
)
