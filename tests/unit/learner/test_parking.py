"""Where a parked learner's memory lies on the host. That a learner continues bit for bit: test_learner_stages.py."""

from __future__ import annotations

import torch

from gxpo_trainer.learner.shards import ALIGNMENT, Parking


def test_everything_is_parked_in_one_buffer_of_its_size_which_is_kept() -> None:
    """Not a power of two for each tensor: 3, 1025 and 600 elements of 4 bytes take 256, 4352 and 2560 of 256 each."""
    kept = [torch.randn(count) for count in (3, 1025, 600)]
    dropped, expected = torch.ones(7), [tensor.clone() for tensor in kept]
    parking = Parking()
    places = set()
    for _ in range(2):
        assert parking.park(kept, [dropped]) == 4 * (3 + 1025 + 600 + 7)
        assert sum(tensor.untyped_storage().nbytes() for tensor in [*kept, dropped]) == 0
        (buffer,) = parking.host
        assert buffer.numel() == 256 + 4352 + 2560
        places.add(buffer.data_ptr())
        parking.unpark()
        assert all(torch.equal(now, then) for now, then in zip(kept, expected, strict=True))
        assert not dropped.any()
    assert len(places) == 1
    # A canary's copy comes last, and gets a buffer of its own.
    more = torch.arange(100.0)
    parking.park([*kept, more])
    assert [buffer.numel() for buffer in parking.host] == [7168, 2 * ALIGNMENT]
    parking.unpark()
    assert torch.equal(more, torch.arange(100.0))
    assert all(torch.equal(now, then) for now, then in zip(kept, expected, strict=True))
