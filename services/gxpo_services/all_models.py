"""Imports every table, so that metadata is whole."""

from gxpo_services.db import Base
from gxpo_services.metrics import models as _metrics
from gxpo_services.runs import models as _runs
from gxpo_services.samples import models as _samples
from gxpo_services.tokens import models as _tokens

metadata = Base.metadata
__all__ = ["metadata"]
_ = (_metrics, _runs, _samples, _tokens)
