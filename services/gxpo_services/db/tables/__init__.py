"""Every table. Importing the package completes `metadata`."""

from gxpo_services.db.base import Base
from gxpo_services.db.tables import alerts as _alerts
from gxpo_services.db.tables import events as _events
from gxpo_services.db.tables import metrics as _metrics
from gxpo_services.db.tables import runs as _runs
from gxpo_services.db.tables import samples as _samples
from gxpo_services.db.tables import schedulers as _schedulers
from gxpo_services.db.tables import tokens as _tokens

metadata = Base.metadata
__all__ = ["metadata"]
_ = (_alerts, _events, _metrics, _runs, _samples, _schedulers, _tokens)
