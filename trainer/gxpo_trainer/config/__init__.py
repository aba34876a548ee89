"""Every setting of a run, typed, documented and checked once, at the edge.

Sections of the run file: `tasks` (data, environment, verifier, evaluation), `engines` (model, rollout, placement),
`rules` (learner.rule), `base` (timeouts), `run` (RunConfig, learner and the small sections). `io` reads files and
presets, `messages` turns validation errors into one line per setting.

Free of torch, so that `gxpo config --check FILE` takes less than half a second. An unknown or contradictory setting is
an error that names it; what depends on the machine (folders, devices) is checked by `training.prepare` before anything
starts.
"""

from gxpo_trainer.config.base import Settings as Settings
from gxpo_trainer.config.base import TimeoutsConfig as TimeoutsConfig
from gxpo_trainer.config.engines import ModelConfig as ModelConfig
from gxpo_trainer.config.engines import TeacherConfig as TeacherConfig
from gxpo_trainer.config.rules import EpochsRule as EpochsRule
from gxpo_trainer.config.rules import ExtragradientRule as ExtragradientRule
from gxpo_trainer.config.rules import GateConfig as GateConfig
from gxpo_trainer.config.rules import GrpoRule as GrpoRule
from gxpo_trainer.config.rules import GxpoRule as GxpoRule
from gxpo_trainer.config.rules import RuleSettings as RuleSettings
from gxpo_trainer.config.rules import SfpoGateConfig as SfpoGateConfig
from gxpo_trainer.config.rules import SfpoRule as SfpoRule
from gxpo_trainer.config.run import AdvantageSettings as AdvantageSettings
from gxpo_trainer.config.run import BudgetConfig as BudgetConfig
from gxpo_trainer.config.run import CheckpointConfig as CheckpointConfig
from gxpo_trainer.config.run import DppoLossConfig as DppoLossConfig
from gxpo_trainer.config.run import GroupAdvantageConfig as GroupAdvantageConfig
from gxpo_trainer.config.run import LearnerConfig as LearnerConfig
from gxpo_trainer.config.run import LoggerSettings as LoggerSettings
from gxpo_trainer.config.run import LoraConfig as LoraConfig
from gxpo_trainer.config.run import LossConfig as LossConfig
from gxpo_trainer.config.run import LossSettings as LossSettings
from gxpo_trainer.config.run import OptimizerConfig as OptimizerConfig
from gxpo_trainer.config.run import RunConfig as RunConfig
from gxpo_trainer.config.run import WarmStartConfig as WarmStartConfig
from gxpo_trainer.config.tasks import DataConfig as DataConfig
from gxpo_trainer.config.tasks import EnvironmentConfig as EnvironmentConfig
from gxpo_trainer.config.tasks import EvaluationConfig as EvaluationConfig
from gxpo_trainer.config.tasks import HttpRewardConfig as HttpRewardConfig
from gxpo_trainer.config.tasks import RewardConfig as RewardConfig
from gxpo_trainer.config.tasks import VerifierConfig as VerifierConfig
