"""Objects allocated in `frozen_allocations` are exempt from garbage collection."""

from __future__ import annotations

import gc

import pytest

from gxpo_trainer.runtime.processes import frozen_allocations


def test_objects_allocated_in_the_block_are_never_collected():
    before = gc.get_freeze_count()
    try:
        with frozen_allocations():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_collection_resumes_after_a_failed_import():
    try:
        with pytest.raises(ImportError), frozen_allocations():
            raise ImportError("no such engine")
        assert gc.isenabled()
    finally:
        gc.unfreeze()
