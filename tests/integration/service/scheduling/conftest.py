"""What tests of the scheduler share: a cluster with a fixed clock and a scripted launcher."""

from __future__ import annotations

import pytest
from support.scheduling import Cluster

from gxpo_services.db.database import Database
from gxpo_services.settings import ServiceSettings


@pytest.fixture
def cluster(database: Database, settings: ServiceSettings) -> Cluster:
    return Cluster(database, settings.model_copy(update={"max_concurrent_runs": 100}))
