"""On a CUDA device: extrapolation against the bytes it must move, for the fp32 shards of a 1.5 B policy.

Prints the reason and does nothing where there is no device.
"""

from __future__ import annotations

import torch

from benchmarks.measure import Figure, median, ratio, save
from gxpo_trainer.config import GxpoRule
from gxpo_trainer.rules.extrapolation import Plan, extrapolate_by_gradient

ELEMENTS = 1_543_714_304
"""Parameters of Qwen2.5-1.5B."""
READS_AND_WRITES = 5
"""θ², θ⁰, g⁰, g¹ read and θ̃ written: 20 bytes an element in fp32."""


def main() -> None:
    if not torch.cuda.is_available():
        print("gpu: no CUDA device is visible; nothing measured")
        return
    theta, theta0, g0, g1 = (torch.randn(ELEMENTS, device="cuda") for _ in range(4))
    plan = Plan.of(GxpoRule(k=5))
    kernel = torch.compile(extrapolate_by_gradient, dynamic=True)
    passes = _milliseconds(lambda: kernel(plan, theta, theta0, g0, g1))
    copies = _milliseconds(lambda: theta0.copy_(theta))
    # A copy moves 2 × 4 bytes an element.
    bound = [copy * READS_AND_WRITES / 2 for copy in copies]
    figures: list[Figure] = [
        median("extrapolation of 1.5 B fp32", passes, "ms"),
        median("copy-bandwidth bound", bound, "ms"),
        ratio("extrapolation / bound", passes, bound, at_most=1.5),
    ]
    save("gpu", figures, {"elements": ELEMENTS, "device": torch.cuda.get_device_name()})


def _milliseconds(action: object, repeats: int = 20) -> list[float]:
    assert callable(action)
    for _ in range(3):
        action()
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return found


if __name__ == "__main__":
    main()
