"""What is made for good is kept away from the garbage collector."""

from __future__ import annotations

import gc

import pytest

from gxpo_trainer.cluster.memory import lasting


def test_nothing_is_collected_while_lasting_things_are_made_nor_are_they_later():
    before = gc.get_freeze_count()
    try:
        with lasting():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_collection_goes_on_after_an_import_that_failed():
    try:
        with pytest.raises(ImportError), lasting():
            raise ImportError("no such engine")
        assert gc.isenabled()
    finally:
        gc.unfreeze()
