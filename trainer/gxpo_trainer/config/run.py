"""RunConfig, a whole run; the learner's settings (loss, optimizer, adapters, ZeRO) and the small sections."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, FiniteFloat, field_validator, model_validator

from gxpo_trainer.config.base import LARGEST_INTEGER, MOST_STEPS, Fraction, Settings, Steps, TimeoutsConfig
from gxpo_trainer.config.components import Choice
from gxpo_trainer.config.engines import (
    TOKEN_BUDGET,
    ModelConfig,
    PlacementConfig,
    RolloutConfig,
    TeacherConfig,
)
from gxpo_trainer.config.rules import GxpoRule, RuleConfig
from gxpo_trainer.config.tasks import (
    EMBEDDED_TASKS,
    AnyEnvironment,
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    VerifierConfig,
)


class LoraConfig(Settings):
    """Low-rank adapters by PEFT; the rule then acts on the adapter's parameters only. Off unless the run file has this
    section."""

    rank: int = Field(16, ge=1, le=512, description="Rank of the adapter matrices; vLLM loads at most 512.")
    alpha: FiniteFloat = Field(32.0, gt=0, description="Scaling; the adapter's output is multiplied by alpha / rank.")
    dropout: Fraction = Field(0.0, description="Must be 0: two passes of a rule must see the same function.")
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        max_length=1000,
        description="Names of the linear layers that get an adapter.",
    )

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value != 0.0:
            raise ValueError("must be 0: with dropout two gradients of one batch differ randomly; set it to 0")
        return value


class LossSettings(Settings):
    """Base of the losses' settings classes. A subclass narrows `surrogate` to its Literal."""

    implementation: ClassVar[str]
    """`module:Class` of the surrogate on the contract of algo/losses.py; the class takes these settings."""
    scales_with_advantage: ClassVar[bool] = False
    """Whether a token's loss and gradient are 0 where its advantage is; the learner then leaves out a backward pass."""

    surrogate: str
    clip_low: float = Field(0.2, ge=0, description="ε_low.")
    clip_high: float = Field(0.2, ge=0, description="ε_high; above ε_low it is clip-higher.")
    kl_beta: FiniteFloat = Field(0.0, ge=0, description="β of the KL term to the frozen start policy.")
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = Field(
        "token_mean", description="Mean over tokens; tokens then sequences; sum over max_new_tokens (Dr. GRPO)."
    )
    advantage_std: bool = Field(True, description="Divide by the group's std; false leaves it out (Dr. GRPO).")
    advantage_epsilon: FiniteFloat = Field(1e-6, gt=0, description="ε added to the std.")
    zero_variance: Literal["keep", "drop", "resample"] = Field(
        "keep", description="Groups whose rewards are all equal: kept (no signal), excluded, or resampled."
    )
    resample_limit: int = Field(3, ge=1, le=1000, description="resample only: most extra sampling rounds per step.")
    mask_truncated: bool = Field(False, description="Exclude responses truncated at the length limit from the loss.")
    proximal: Literal["auto", "learner", "sampler"] = Field(
        "auto",
        description="Policy that the ratio is taken to. learner: that of the step's first pass; sampler: the one that "
        "sampled, by its own log-probabilities. auto: learner.",
    )
    correction: Literal["auto", "none", "token_truncate", "token_mask", "sequence_mask"] = Field(
        "auto",
        description="What replaces the importance weights of samples of another policy. token_truncate: at most "
        "importance_high (TIS); token_mask: 0 outside the bounds; sequence_mask: that of the response, or of its row "
        "where it has several, 0 outside the bounds. auto: none at rollout.async_depth 0, else token_truncate.",
    )
    importance_low: float = Field(0.5, ge=0, description="Lower bound of the masks.")
    importance_high: float = Field(2.0, gt=0, description="Upper bound of importance weights.")

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.importance_low > self.importance_high:
            raise ValueError(
                f"importance_low = {self.importance_low} exceeds importance_high = {self.importance_high}; "
                "lower the first or raise the second"
            )
        return self

    @property
    def corrects(self) -> bool:
        """Whether importance weights are truncated or masked; false while `correction` is automatic."""
        return self.correction not in ("auto", "none")

    def resolved(self, async_depth: int) -> Self:
        """The same with automatic values replaced by those that this depth implies."""
        implied = {"proximal": "learner", "correction": "token_truncate" if async_depth else "none"}
        return self.model_copy(update={name: value for name, value in implied.items() if getattr(self, name) == "auto"})


class LossConfig(LossSettings):
    """The surrogate of the GRPO family and its options; formulas in algo/losses.py."""

    implementation: ClassVar[str] = "gxpo_trainer.algo.losses:ClippedSurrogate"
    scales_with_advantage: ClassVar[bool] = True

    surrogate: Literal["ppo", "gspo", "cispo"] = Field(
        "ppo",
        description="ppo: GRPO's clipped ratio of each token; gspo: one clipped ratio a response; cispo: the clipped "
        "ratio as a weight of the token's gradient.",
    )


class DppoLossConfig(LossSettings):
    """DPPO: tokens whose probability has moved too far, as a divergence, get no gradient."""

    implementation: ClassVar[str] = "gxpo_trainer.algo.losses:DivergenceMaskedSurrogate"
    scales_with_advantage: ClassVar[bool] = True

    surrogate: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = Field(
        "tv", description="Between sampling the token and not: total variation |π_θ − π_old|, or KL(π_old ‖ π_θ)."
    )
    clip_low: float = Field(0.15, ge=0, description="δ where A < 0 and the probability falls; 0.05 for kl.")
    clip_high: float = Field(0.15, ge=0, description="δ where A > 0 and the probability rises; 0.05 for kl.")
    proximal: Literal["auto", "learner", "sampler"] = Field(
        "sampler", description="π_old. sampler: the policy that sampled; learner: that of the step's first pass."
    )
    correction: Literal["auto", "none", "token_truncate", "token_mask", "sequence_mask"] = Field(
        "none", description="As for the other losses; the paper has none."
    )


class AdvantageSettings(Settings):
    """Base of the advantages' settings classes. A subclass narrows `name` to its Literal."""

    implementation: ClassVar[str]
    """`module:Class` of the advantage on the contract of algo/batch.py; the class takes these settings and those of
    `learner.loss`."""

    name: str


class GroupAdvantageConfig(AdvantageSettings):
    """Relative to the group, by learner.loss.advantage_std and learner.loss.advantage_epsilon."""

    implementation: ClassVar[str] = "gxpo_trainer.algo.batch:GroupAdvantage"

    name: Literal["group"] = "group"


class MaxRLAdvantageConfig(AdvantageSettings):
    """Relative to the group, divided by its mean reward: groups that are rarely right count more."""

    implementation: ClassVar[str] = "gxpo_trainer.algo.batch:MaxRLAdvantage"

    name: Literal["maxrl"] = "maxrl"


class ShrinkageAdvantageConfig(AdvantageSettings):
    """Relative to the group's mean shrunk towards that of the other groups (James and Stein)."""

    implementation: ClassVar[str] = "gxpo_trainer.algo.batch:ShrinkageAdvantage"

    name: Literal["shrinkage"] = "shrinkage"


_LOSSES = Choice(
    "losses", "learner.loss", LossSettings, classes=[LossConfig, DppoLossConfig], key="surrogate", default="ppo"
)
_ADVANTAGES = Choice(
    "advantages",
    "learner.advantage",
    AdvantageSettings,
    classes=[GroupAdvantageConfig, MaxRLAdvantageConfig, ShrinkageAdvantageConfig],
    default="group",
)
AnyLoss = Annotated[LossSettings, _LOSSES]
AnyAdvantage = Annotated[AdvantageSettings, _ADVANTAGES]


OWN_LOGGERS = ("tensorboard", "wandb", "mlflow", "trackio")


class LoggerSettings(Settings):
    """A list: one `[[logging.trackers]]` a tracker, or names alone, as `trackers = ["mlflow"]` (docs/trackers.md)."""

    implementation: ClassVar[str]
    """Of a subclass: `module:Class` of the logger on the contract of reporting/trackers.py; the class takes these
    settings."""

    name: str = Field(
        description="`tensorboard`, `wandb`, `mlflow`, `trackio`, the name of an installed logger, or a class as "
        "`package.module:Class`."
    )
    address: str | None = Field(
        None,
        description="Of the server, without credentials. Default: WANDB_BASE_URL, MLFLOW_TRACKING_URI or "
        "TRACKIO_SERVER_URL of the environment, which has the keys too.",
    )

    @field_validator("address")
    @classmethod
    def _no_secret(cls, value: str | None) -> str | None:
        parts = urlsplit(value or "")
        if parts.username or parts.password or parts.query:
            raise ValueError("has credentials or a query; keys are read from environment variables (docs/trackers.md)")
        return value

    @model_validator(mode="after")
    def _usable_address(self) -> Self:
        if self.address is not None and self.name == "tensorboard":
            raise ValueError("tensorboard writes into the run's folder; remove address")
        if self.address and self.name in ("wandb", "trackio") and not self.address.startswith(("http://", "https://")):
            raise ValueError(f"address = {self.address!r} must look like https://host:port")
        return self


LOGGER_CHOICE = Choice("loggers", "logging.trackers", LoggerSettings, built_in=OWN_LOGGERS, plain=True)
AnyLogger = Annotated[LoggerSettings, LOGGER_CHOICE]


class LoggingConfig(Settings):
    """Experiment trackers that are sent the run while it trains. They change no result, and none of them stops it."""

    trackers: tuple[AnyLogger, ...] = Field((), max_length=20, description="Where metrics, config and samples go.")
    project: str = Field(
        "gxpo", min_length=1, max_length=128, description="Project of W&B and Trackio, experiment of MLflow."
    )
    samples_per_step: int = Field(
        4, ge=0, le=1000, description="Responses sent of each step, out of those to its first four prompts; 0: none."
    )

    @field_validator("trackers", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return (
            [{"name": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value
        )

    @field_validator("trackers")
    @classmethod
    def _once(cls, value: tuple[LoggerSettings, ...]) -> tuple[LoggerSettings, ...]:
        if len({tracker.name for tracker in value}) < len(value):
            raise ValueError("a tracker is listed twice; remove one")
        return value


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Settings):
    """The base optimizer and its schedule, counted in training steps."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: FiniteFloat = Field(1e-5, gt=0, description="η.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW only.")
    epsilon: FiniteFloat = Field(1e-8, gt=0, description="AdamW only.")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD only.")
    weight_decay: FiniteFloat = Field(0.0, ge=0, description="Decoupled for AdamW, added to the gradient for SGD.")
    max_grad_norm: float = Field(1.0, gt=0, description="Clip the global gradient norm; inf turns it off.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="After the warm-up; falls to 0 at budget.steps, without it at budget.backward_passes."
    )
    warmup_steps: Steps = Field(0, description="Training steps of linear warm-up.")


class LearnerConfig(Settings):
    """The DeepSpeed learner."""

    rule: RuleConfig = GxpoRule()
    loss: AnyLoss = LossConfig()
    advantage: AnyAdvantage = GroupAdvantageConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: Literal["fp32", "bf16"] = Field("fp32", description="Of the forward and backward pass.")
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="DeepSpeed ZeRO stage.")
    lora: LoraConfig | None = Field(None, description="Train adapters instead of all weights.")
    mini_batches: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="Rule steps per rollout batch, each on a part of it; the gate observes their mean once.",
    )
    token_budget: Annotated[int, Field(ge=16, le=MOST_STEPS)] | Literal["auto"] = Field(
        "auto",
        description="Most tokens of a micro-batch, with padding. auto: on a GPU 16384, 8192 or 4096, what fits by the "
        "planner; elsewhere 4096.",
    )
    packing: Literal["auto", "padded", "shared", "packed"] = Field(
        "auto",
        description="padded: sorted rows; shared: a prompt once for its short responses; "
        "packed: one row, on GPUs with varlen or flash_attention_2 alone. "
        "auto: shared on CPU; on GPU packed if possible, else padded.",
    )

    sequence_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Learner ranks that share the columns of each row (Ulysses), for long responses; divides "
        "placement.learner_ranks and the model's attention heads.",
    )

    @property
    def micro_batch_tokens(self) -> int:
        """`token_budget` as a number; of "auto" before anything is known of the device."""
        return TOKEN_BUDGET if self.token_budget == "auto" else self.token_budget

    @model_validator(mode="after")
    def _supported(self) -> LearnerConfig:
        if self.precision == "bf16" and self.zero_stage == 0:
            raise ValueError(
                'precision = "bf16" with zero_stage = 0 keeps its fp32 masters where rules cannot access them; '
                "set zero_stage = 1, 2 or 3"
            )
        return self


class CheckpointConfig(Settings):
    """What is saved and kept."""

    every_steps: Steps = Field(10, description="0: only at the end.")
    keep_last: int = Field(2, ge=1, le=MOST_STEPS, description="Newest checkpoints to keep.")
    keep_best: Steps = Field(1, description="Best by eval/average/pass@1, kept in addition to the newest.")


class DiagnosticsConfig(Settings):
    """Measurements that cost extra passes, which are counted separately."""

    trajectory_every: Steps = Field(0, description="Steps between true K-step trajectories; 0: never.")
    noise_floor: bool = Field(False, description="With each trajectory, repeat a gradient at the same point.")


class BudgetConfig(Settings):
    """The first bound that is reached ends the run cleanly."""

    steps: int | None = Field(None, le=LARGEST_INTEGER, description="Training steps; 40 without a [budget].")
    backward_passes: int | None = Field(
        None, le=LARGEST_INTEGER, description="Full-batch gradients, without repeated and diagnostic ones."
    )
    hours: float | None = Field(None, description="Training time without evaluation, diagnostics, checkpoints.")
    tokens: int | None = Field(None, le=LARGEST_INTEGER, description="Sampled tokens.")

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set, by name."""
        return self.model_dump(exclude_none=True)

    @model_validator(mode="after")
    def _some_and_positive(self) -> BudgetConfig:
        for name, value in self.bounds.items():
            if not value > 0:
                raise ValueError(f"{name} = {value} leaves nothing to train; set it above 0 or remove it")
        if not self.bounds:
            raise ValueError("no bound is set; set one of steps, backward_passes, hours, tokens")
        return self


class WarmStartConfig(Settings):
    """Supervised steps before the run's first one: a plain optimizer step each, on completions. Neither they nor their
    passes count in the budget. The optimizer then starts afresh. Off unless the run file has this section."""

    steps: int = Field(ge=1, le=MOST_STEPS, description="Supervised steps.")
    rows_per_step: int = Field(64, ge=1, le=1_000_000, description="Completions in one supervised step.")
    learning_rate: FiniteFloat = Field(1e-5, gt=0, description="η.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="After warmup_steps; falls to 0 at the last supervised step."
    )
    warmup_steps: Steps = Field(0, description="Supervised steps of linear warm-up.")
    data: DataConfig | None = Field(None, description="Rows with completions; none: those of `data`.")


class RunConfig(Settings):
    """A whole run."""

    name: str = Field("run", min_length=1, max_length=200, description="Display name; need not be unique.")
    seed: int = Field(0, ge=0, le=LARGEST_INTEGER, description="Data order, sampling and generated problems.")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: AnyEnvironment = EnvironmentConfig()
    verifier: VerifierConfig = VerifierConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    budget: BudgetConfig = BudgetConfig(steps=40)
    warm_start: WarmStartConfig | None = Field(None, description="Supervised fine-tuning before the run.")
    teacher: TeacherConfig | None = Field(None, description="Of on-policy distillation.")
    placement: PlacementConfig = PlacementConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="before")
    @classmethod
    def _measured_on_its_data(cls, values: Any) -> Any:
        """Without evaluation.benchmarks: embedded tasks in the data are their own benchmarks; other data have none."""
        data, evaluation = (
            (values.get(name) or {}) if isinstance(values, dict) else {} for name in ("data", "evaluation")
        )
        if not isinstance(data, dict) or not isinstance(evaluation, dict) or "benchmarks" in evaluation:
            return values
        if isinstance(sources := data.get("sources"), list | tuple) and sources:
            paths = [part.get("path") for part in sources if isinstance(part, dict)]
        elif "source" in data:
            paths = [data["source"]]
        else:
            return values
        own = [task for task in EMBEDDED_TASKS if task in paths]
        return {**values, "evaluation": {**evaluation, "benchmarks": own}}

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.rollout.max_new_tokens + self.environment.observation_tokens >= self.model.max_length:
            observed = " and environment.max_observation_tokens in every turn but the last"
            raise ValueError(
                f"rollout.max_new_tokens = {self.rollout.max_new_tokens}"
                f"{observed if self.environment.observation_tokens else ''} leaves no room for a prompt in "
                f"model.max_length = {self.model.max_length}; lower the first or raise the last"
            )
        if not self.environment.multi_turn and any(reward.name == "environment" for reward in self.verifier.rewards):
            raise ValueError(
                f'verifier.rewards: environment is always 0 with environment.name = "{self.environment.name}"; remove '
                "the component or choose an environment"
            )
        self._check_sources()
        if self.evaluation.stop and self.environment.multi_turn:
            raise ValueError(
                f'evaluation.stop cannot end turns of environment.name = "{self.environment.name}": each ends with the '
                "end token of the chat template; remove one of the two"
            )
        if self.learner.mini_batches > self.rollout.prompts_per_step:
            raise ValueError(
                f"learner.mini_batches = {self.learner.mini_batches} exceeds rollout.prompts_per_step = "
                f"{self.rollout.prompts_per_step}; a mini-batch needs at least one prompt"
            )
        ends = (self.budget.steps, self.budget.backward_passes)
        if self.learner.optimizer.schedule != "constant" and ends == (None, None):
            raise ValueError(
                f'learner.optimizer.schedule = "{self.learner.optimizer.schedule}" falls to 0 at the last step; '
                'set budget.steps or budget.backward_passes, or schedule = "constant"'
            )
        parallel, shares = self.learner.sequence_parallel, self.data_ranks
        if self.placement.learner_ranks % parallel:
            raise ValueError(
                f"learner.sequence_parallel = {parallel} does not divide placement.learner_ranks = "
                f"{self.placement.learner_ranks}; change one of them"
            )
        if shares > self.rollout.prompts_per_step // self.learner.mini_batches:
            raise ValueError("placement.learner_ranks exceeds the prompts of a mini-batch; lower it")
        if self.rollout.async_depth and self.placement.colocate is True:
            raise ValueError(
                f"rollout.async_depth = {self.rollout.async_depth} samples while the learner updates, which "
                "placement.colocate = true rules out on shared devices; set placement.colocate = false, or "
                "rollout.async_depth = 0"
            )
        if (self.rollout.source == "teacher") != (self.teacher is not None):
            raise ValueError('rollout.source = "teacher" and the section teacher belong together; set both or neither')
        source, loss = self.rollout.source, self.learner.loss
        for clashes, setting, fix in (
            (source == "dataset" and self.warm_start is not None, "warm_start", "remove the section"),
            (source == "dataset" and self.rollout.async_depth > 0, "rollout.async_depth", "set it to 0"),
            (source != "sampled" and loss.kl_beta > 0, "learner.loss.kl_beta", "set it to 0"),
            (source == "teacher" and loss.zero_variance != "keep", "learner.loss.zero_variance", 'set it to "keep"'),
        ):
            if clashes:
                raise ValueError(f'{setting} has no meaning with rollout.source = "{source}"; {fix}')
        if self.warm_start is not None and self.learner.loss.kl_beta > 0:
            raise ValueError(
                "learner.loss.kl_beta keeps the policy near the one before warm_start; set it to 0, or train from a "
                "checkpoint of `gxpo sft` instead"
            )
        if self.warm_start is not None and shares > self.warm_start.rows_per_step:
            raise ValueError("placement.learner_ranks exceeds warm_start.rows_per_step; lower it")
        return self

    def _check_sources(self) -> None:
        """Raises ValueError for data that the rewards cannot judge, or that the budget never reaches."""
        labels = [reward.label for reward in self.verifier.rewards]
        prompts = self.rollout.prompts_per_step * (self.budget.steps or math.inf)
        for number, (source, share) in enumerate(zip(self.data.sources, self.data.shares, strict=True)):
            if unknown := [label for label in source.rewards if label not in labels]:
                raise ValueError(
                    f"data.sources[{number}].rewards: {unknown[0]!r} is no component of verifier.rewards; choose from "
                    f"{', '.join(labels)}"
                )
            if share * prompts < 1:
                raise ValueError(
                    f"data.sources[{number}].weight = {source.weight:g} is less than one of the {prompts} prompts of "
                    "the run; raise it, or remove the source"
                )
        judged = [source.rewards or labels for source in self.data.sources] or [labels]
        for number, (part, names) in enumerate(zip(self.data.parts, judged, strict=True)):
            graded = not self.environment.multi_turn and "correctness" in names
            if graded and self.rollout.source == "sampled" and part.answer_field is None:
                where = f"data.sources[{number}]" if self.data.sources else "data"
                raise ValueError(
                    f'verifier.rewards: correctness compares with a final answer, and {where}.answer_field = "none" '
                    "says that no row has one; remove the component, or name the field of the answers"
                )

    @property
    def data_ranks(self) -> int:
        """Learner ranks, or groups of them that are parallel over sequences, among which prompts are divided."""
        return self.placement.learner_ranks // self.learner.sequence_parallel

    @property
    def trains_on_boxes(self) -> bool:
        """Whether only a box counts as the answer to a training problem (`verifier.answer`)."""
        data = self.data
        boxed = data.template == "auto" and not data.embedded
        asked = boxed or any("boxed" in text for text in (data.template, data.system_prompt or ""))
        return self.verifier.answer == "boxed" or (self.verifier.answer == "auto" and asked)

    @property
    def warm_steps(self) -> int:
        """Supervised steps before the budget begins; the numbers of its steps follow theirs."""
        return self.warm_start.steps if self.warm_start else 0

    @property
    def last_step(self) -> int | None:
        """Number of the step that `budget.steps` ends at, None without that bound."""
        return None if self.budget.steps is None else self.warm_steps + self.budget.steps

    def updated(self, **sections: Mapping[str, Any]) -> RunConfig:
        """The same with other values in these sections, which are not checked."""
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        )

    @property
    def of_reference(self) -> RunConfig:
        """The same with the frozen model, whose log-probabilities the learner needs besides the policy's, as the model:
        the teacher, or for a KL term the start policy."""
        if self.teacher is None:
            return self
        return self.updated(model=self.teacher.model_dump(), learner={"lora": None})

    @property
    def needs_engines(self) -> bool:
        """Whether anything is sampled; a supervised run without benchmarks has no engines."""
        return self.rollout.source != "dataset" or bool(self.evaluation.benchmarks)

    def without_idle_engines(self) -> RunConfig:
        """The same with no engine and no verifier to place where nothing is sampled. Not for a file."""
        if self.needs_engines:
            return self
        return self.updated(placement={"samplers": 0, "colocate": False, "strategy": "pack"})

    @property
    def compares_in_fp32(self) -> bool:
        """Whether sampler and learner both compute in fp32, so that their log-probabilities agree closely."""
        return self.learner.precision == "fp32" and self.rollout.dtype != "bfloat16"

    def gap_limits(self) -> tuple[float, float]:
        """Limits of the log-prob gap between sampler and learner: the mean ends a run, the largest warns."""
        mean, largest = (1e-5, 1e-3) if self.compares_in_fp32 else (0.05, 5.0)
        return self.rollout.logprob_gap_mean_limit or mean, self.rollout.logprob_gap_max_limit or largest

    def sha256(self) -> str:
        """Hash of everything that can change a result; `name`, `timeouts` and `logging` are left out."""
        body = self.model_dump(mode="json", exclude={"name", "timeouts", "logging"})
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
