"""Seeds of samples and of their turns."""

from __future__ import annotations

from itertools import product

import numpy as np

from gxpo_trainer.rollout.open_groups import sample_seed


def test_the_seed_of_a_response_is_numpys_of_request_and_index() -> None:
    low, high = np.random.SeedSequence([11, 3]).generate_state(2)
    assert sample_seed(11, 3) == (int(high) * 2**32 + int(low)) // 2


def test_every_turn_of_every_sample_has_a_seed_of_its_own() -> None:
    seeds = [sample_seed(request, index, turn) for request, index, turn in product(range(8), range(8), range(4))]
    assert len({*seeds}) == 256
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


def test_unseeded_requests_stay_unseeded() -> None:
    assert sample_seed(None, 3, 2) is None
