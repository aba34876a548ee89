"""Spans of activities, by a clock that the tests move."""

from __future__ import annotations

import pytest

from gxpo_trainer.rollout.timeline import Span, Timeline, overlap_fraction


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_process_has_one_activity_at_a_time() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.enter("engine 0", "sampling")
    clock.now = 2.0
    timeline.enter("engine 0", "sampling")
    clock.now = 3.0
    timeline.enter("engine 0", "syncing")
    clock.now = 4.0
    timeline.enter("engine 0", None)
    timeline.enter("engine 0", None)
    assert timeline.cut(0.0) == [Span("engine 0", "sampling", 0.0, 3.0), Span("engine 0", "syncing", 3.0, 4.0)]


def test_a_window_clips_spans_and_holds_those_that_go_on() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.enter("learner", "updating")
    clock.now = 5.0
    timeline.enter("learner", None)
    timeline.enter("engine 0", "sampling")
    clock.now = 7.0
    assert timeline.cut(2.0) == [Span("engine 0", "sampling", 5.0, 7.0), Span("learner", "updating", 2.0, 5.0)]
    clock.now = 8.0
    assert timeline.cut(7.0) == [Span("engine 0", "sampling", 7.0, 8.0)]
    with timeline.during("learner", "saving"):
        clock.now = 9.0
    clock.now = 20.0
    assert timeline.cut(8.5) == [Span("engine 0", "sampling", 8.5, 20.0), Span("learner", "saving", 8.5, 9.0)]


def test_overlap_is_a_share_of_the_shorter_activity_whichever_processes_do_it() -> None:
    spans = [
        Span("engine 0", "sampling", 0.0, 4.0),
        Span("engine 1", "sampling", 2.0, 6.0),
        Span("learner", "updating", 3.0, 5.0),
        Span("learner", "updating", 7.0, 9.0),
        Span("verifier", "verifying", 0.0, 9.0),
    ]
    # Some engine samples for 6 s, the learner updates for 4 s, both for 2 s.
    assert overlap_fraction(spans, "sampling", "updating") == pytest.approx(0.5)
    assert overlap_fraction(spans, "sampling", "saving") is None
