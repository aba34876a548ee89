"""Base class and types of all settings, and the time-outs of a run's phases."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

# Far above what any run needs: they keep a mistyped or hostile config from occupying the process that validates it.
LARGEST_INTEGER = 2**63 - 1
"""Largest integer that the service's databases store."""
MOST_STEPS = 2**31 - 1
MOST_TOKENS = 2**24
"""Of one sequence."""
MOST_PROCESSES = 10_000
"""Of one kind, or threads of one process."""
MOST_MEMORY_MB = 2**24
MOST_SECONDS = 1_000_000
"""Of a wait whose end the operating system is told: eleven days, which is less than 2³¹ ms."""
LONGEST_TEXT = 4096
"""Characters of a text without a bound of its own; the longest path of Linux."""

Steps = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Deadline = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
Temperature = Annotated[float, Field(ge=0.01, le=2.0)]
"""vLLM samples at 0.01 where a request says less, and refuses more than 2."""


_NOT_FINITE = ("Infinity", "-Infinity", "NaN")
"""How JSON that we write spells numbers that it lacks (gxpo_trainer.jsonl.plain)."""


def _settings_schema(schema: Any) -> Any:
    """A core schema with the types that the docstring of Settings promises."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_settings_schema, schema))
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    schema = {key: _settings_schema(value) for key, value in schema.items()}
    if kind not in ("int", "float", "bool", "nullable") or "strict" in schema:
        return schema

    def checked(value: Any) -> Any:
        if kind == "nullable":
            return None if value == "none" else value
        is_text = isinstance(value, str) and not (kind == "float" and value in _NOT_FINITE)
        if isinstance(value, bool) != (kind == "bool") or is_text:
            raise PydanticKnownError(f"{kind}_type")  # type: ignore[arg-type]  # of int, float, bool
        return value

    return core_schema.no_info_before_validator_function(checked, schema | {"strict": False})


class Settings(BaseModel):
    """Base of all settings classes: unknown settings are rejected, instances are immutable.

    A setting that is a number takes neither `true` nor a text, and one that is `true` or `false` no number. Where an
    integer is wanted, a whole float such as `1e5` is one. An optional setting takes "none" for None, which TOML lacks.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=True, protected_namespaces=(), str_max_length=LONGEST_TEXT
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _settings_schema(handler(source))
        return schema


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

Phase = Literal["setup", "sampling", "verifying", "updating", "syncing", "evaluating", "checkpointing"]
"""Phases of a run as the time-outs distinguish them."""
_IDLE = re.compile(r", no progress for (\d+) of (\d+|inf) min$")


def idle_phase(phase: str, minutes: int, limit_s: float) -> str:
    """The phase with the whole minutes without progress and of its time-out, as heartbeats report it.

    minutes 0: the phase alone.
    """
    limit = math.ceil(limit_s / 60) if math.isfinite(limit_s) else limit_s
    return f"{phase}, no progress for {minutes} of {limit} min" if minutes else phase


def half_of_limit_passed(phase: str | None) -> bool:
    """Whether half of the time-out has passed without progress, by the words of `idle_phase`."""
    idle = _IDLE.search(phase or "")
    return idle is not None and 2 * int(idle[1]) >= float(idle[2])


STOP_WAIT_S = 30
"""Default of GXPO_STOP_WAIT_S: seconds from SIGTERM until a run has saved a checkpoint and ended, or is killed."""


class TimeoutsConfig(Settings):
    """Seconds without progress after which a phase has stalled: the process that hangs is ended and its work is done
    again. They change no result."""

    setup_s: float = Field(3600.0, gt=0, description="Loading model and data, or starting a process.")
    sampling_s: float = Field(1800.0, gt=0, description="No engine finished a group.")
    verifying_s: float = Field(900.0, gt=0, description="The verifier returned no verdicts after sampling.")
    updating_s: float = Field(3600.0, gt=0, description="One training step of the learner.")
    syncing_s: float = Field(900.0, gt=0, description="Packing or loading one bucket of weights.")
    evaluating_s: float = Field(1800.0, gt=0, description="No engine finished a problem of an evaluation.")
    checkpointing_s: float = Field(3600.0, gt=0, description="Writing or loading one checkpoint.")

    def limit_s(self, phase: Phase) -> float:
        limit: float = getattr(self, f"{phase}_s")
        return limit
