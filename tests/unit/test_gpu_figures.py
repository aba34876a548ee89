"""What the GPU figures are held against; the figures themselves need a GPU."""

from __future__ import annotations

import pytest

from benchmarks.gpu import ELEMENTS, model_flops
from benchmarks.policies import LARGE_SHAPE


def test_a_pass_counts_six_products_a_parameter_and_token() -> None:
    assert ELEMENTS == 1_543_714_304
    # Without the attention over 2 tokens, which is next to nothing, and with logits of every token.
    assert model_flops(LARGE_SHAPE, 1, 0, 2) == pytest.approx(6 * ELEMENTS * 2, rel=1e-3)
    # 28 layers: a query attends to 1,024 tokens on average, 1,536 wide, scores and values, 2 products each.
    assert model_flops(LARGE_SHAPE, 1, 2048, 0) == pytest.approx(
        3 * 2048 * (2 * (ELEMENTS - 151_936 * 1536) + 4 * 28 * 1536 * 1024), rel=1e-3
    )
