"""Requests that arrive while an engine is sampling, and the seeds of their samples and turns."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any, cast

import numpy as np
import pytest

from gxpo_trainer.rollout.requests import Intake, sample_seed

A, B = cast(Any, (0, "a")), cast(Any, (1, "b"))


def test_requests_are_taken_once_and_in_order() -> None:
    intake = Intake()
    intake.put([A])
    intake.put([B])
    assert intake.take(wait=True) == [A, B]
    assert intake.take(wait=False) == []
    intake.close()
    assert intake.take(wait=True) is None


def test_a_closed_intake_still_gives_what_it_holds() -> None:
    intake = Intake([A], closed=True)
    assert intake.take(wait=True) == [A]
    assert intake.take(wait=True) is None


@pytest.mark.parametrize(("wake", "taken"), [(Intake.abort, None), (lambda intake: intake.put([B]), [B])])
def test_a_waiting_engine_is_woken_by_a_request_and_by_an_abort(wake: Any, taken: Any) -> None:
    intake = Intake()
    received: list[Any] = []
    waiting = threading.Thread(target=lambda: received.append(intake.take(wait=True)))
    waiting.start()
    wake(intake)
    waiting.join(10)
    assert received == [taken]
    assert intake.aborted == (taken is None)


def test_a_closed_intake_runs_what_is_posted_and_waits_for_it() -> None:
    """The last request was submitted; its environment answers later."""
    intake = Intake([A], closed=True)
    assert intake.take(wait=True, expect_calls=True) == [A]
    ran: list[str] = []
    posting = threading.Timer(0.0, lambda: intake.post(lambda: ran.append("answer")))
    posting.start()
    assert intake.take(wait=True, expect_calls=True) is None
    intake.run_calls(wait=True)
    posting.join(10)
    assert ran == ["answer"]


def test_nothing_is_posted_to_an_aborted_intake() -> None:
    intake = Intake()
    ran: list[str] = []
    intake.post(lambda: ran.append("before"))
    intake.abort()
    intake.post(lambda: ran.append("after"))
    intake.run_calls(wait=True)
    assert ran == []
    assert intake.take(wait=True, expect_calls=True) is None


def test_the_seed_of_a_response_is_numpys_of_request_and_index() -> None:
    low, high = np.random.SeedSequence([11, 3]).generate_state(2)
    assert sample_seed(11, 3) == (int(high) * 2**32 + int(low)) // 2


def test_every_turn_of_every_sample_has_a_seed_of_its_own() -> None:
    seeds = [sample_seed(request, index, turn) for request, index, turn in product(range(8), range(8), range(4))]
    assert len({*seeds}) == 256
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(None, 3, 2) is None, "unseeded requests stay unseeded"
