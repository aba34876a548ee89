"""Which engine gets which request, whatever dies in between."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gxpo_trainer.rollout.engines import Dispatcher


def test_the_engine_with_the_fewest_unfinished_tokens_gets_the_next_request() -> None:
    dispatcher = Dispatcher(8)
    dispatcher.add([100, 10, 10, 50], [1, 1, 1, 1])
    dispatcher.add_engine(0)
    dispatcher.add_engine(1)
    # 100 to engine 0, then 10 + 10 + 50 to engine 1, which has less than 100 before each.
    assert dispatcher.assign() == {0: [0], 1: [1, 2, 3]}


def test_an_engine_takes_more_when_it_has_finished_some() -> None:
    dispatcher = Dispatcher(8)
    dispatcher.add([8] * 5, [4] * 5)
    dispatcher.add_engine(0)
    assert dispatcher.assign() == {0: [0, 1]}
    assert dispatcher.assign() == {}
    assert dispatcher.finish(0, 1)
    assert dispatcher.assign() == {0: [2]}


def test_requests_of_a_lost_engine_come_before_those_that_wait() -> None:
    dispatcher = Dispatcher(2)
    dispatcher.add([1] * 4, [1] * 4)
    dispatcher.add_engine(0)
    assert dispatcher.assign() == {0: [0, 1]}
    dispatcher.remove_engine(0)
    dispatcher.add_engine(1)
    assert dispatcher.assign() == {1: [0, 1]}
    assert not dispatcher.finish(0, 0), "a late answer of the lost engine does not count"
    assert dispatcher.finish(1, 0)
    assert not dispatcher.finish(1, 0)


def test_requests_that_are_added_later_wait_behind_or_before_the_others() -> None:
    dispatcher = Dispatcher(1)
    dispatcher.add([1] * 2, [1] * 2)
    dispatcher.add_engine(0)
    assert dispatcher.assign() == {0: [0]}
    assert dispatcher.add([1, 1], [1, 1]) == [2, 3]
    assert dispatcher.add([1, 1], [1, 1], first=True) == [4, 5]
    order = []
    while not dispatcher.done:
        order.append(open_ := next(iter(dispatcher._loads[0].open)))
        assert not dispatcher.finished.issuperset([0, open_])
        dispatcher.finish(0, open_)
        dispatcher.assign()
    assert order == [0, 4, 5, 1, 2, 3]
    assert dispatcher.finished.issuperset([2, 5])


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32))
def test_every_request_is_finished_once_whichever_engines_die(
    num_requests: int, num_engines: int, max_sequences: int, seed: int
) -> None:
    draw = random.Random(seed)
    sequences = [draw.randint(1, 4) for _ in range(num_requests)]
    dispatcher = Dispatcher(max_sequences)
    dispatcher.add([7 * n for n in sequences], sequences)
    alive = set(range(num_engines))
    owner: dict[int, int] = {}
    finished: list[int] = []
    for engine in alive:
        dispatcher.add_engine(engine)
    while not dispatcher.done:
        for engine, indices in dispatcher.assign().items():
            assert engine in alive
            assert not {*indices} & {*owner}, "assigned to two engines"
            owner.update(dict.fromkeys(indices, engine))
        action = draw.random()
        if action < 0.1 and alive:
            lost = draw.choice(sorted(alive))
            alive.remove(lost)
            dispatcher.remove_engine(lost)
            owner = {index: engine for index, engine in owner.items() if engine != lost}
        elif action < 0.3 and len(alive) < num_engines:
            back = draw.choice(sorted({*range(num_engines)} - alive))
            alive.add(back)
            dispatcher.add_engine(back)
        elif owner:
            index = draw.choice(sorted(owner))
            assert dispatcher.finish(owner.pop(index), index)
            finished.append(index)
    assert sorted(finished) == list(range(num_requests))
