"""Requests that arrive while an engine is sampling."""

from __future__ import annotations

import threading
from typing import Any, cast

from gxpo_trainer.rollout.open_groups import Intake

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


def test_abort_drops_what_waits_and_wakes_the_engine() -> None:
    intake = Intake()
    taken: list[Any] = []
    waiting = threading.Thread(target=lambda: taken.append(intake.take(wait=True)))
    waiting.start()
    intake.abort()
    waiting.join(10)
    assert taken == [None]
    assert intake.aborted


def test_a_waiting_engine_is_woken_by_a_request() -> None:
    intake = Intake()
    taken: list[Any] = []
    waiting = threading.Thread(target=lambda: taken.append(intake.take(wait=True)))
    waiting.start()
    intake.put([B])
    waiting.join(10)
    assert taken == [[B]]


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
