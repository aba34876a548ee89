"""The weight publishers and the checksum, without an engine."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gxpo_trainer.errors import ConfigError, TrainingError
from gxpo_trainer.rollout.requests import SamplerSettings
from gxpo_trainer.rollout.sampler import Sampler
from gxpo_trainer.sync.checksums import checksum
from gxpo_trainer.sync.nccl import NcclPublisher
from gxpo_trainer.sync.shared_memory import SharedMemoryPublisher, remove_stale_directories


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is visible")
def test_nccl_transfer_without_cuda_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r'needs CUDA .* use the transfer "shared_memory"'):
        NcclPublisher(None, address="127.0.0.1", port=1, num_sampler_gpus=1, dtype=torch.float32)


def test_tensor_parallel_sampler_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"placement.tensor_parallel = 2"):
        Sampler(SamplerSettings(model="none", max_length=8, tensor_parallel=2))


def test_published_buffer_is_private_and_removed_on_close() -> None:
    publisher = SharedMemoryPublisher()
    manifest = publisher.publish(1, [("weight", torch.ones(3, 5))])
    assert manifest.buffer is not None
    assert publisher.directory.stat().st_mode & 0o777 == 0o700
    assert Path(manifest.buffer).stat().st_mode & 0o777 == 0o600
    assert publisher.directory not in remove_stale_directories()
    publisher.close()
    assert not publisher.directory.exists()


def test_next_publisher_removes_the_buffers_of_a_killed_one() -> None:
    code = (
        "import os, signal, torch\n"
        "from gxpo_trainer.sync.shared_memory import SharedMemoryPublisher\n"
        "publisher = SharedMemoryPublisher()\n"
        "publisher.publish(1, [('weight', torch.ones(8))])\n"
        "print(publisher.directory, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = Path(killed.stdout.strip())
    assert left.exists()
    SharedMemoryPublisher().close()
    assert not left.exists()


def test_previous_version_stays_readable_while_the_next_is_written() -> None:
    publisher = SharedMemoryPublisher()
    first = publisher.publish(1, [("weight", torch.full((7,), 1.0))])
    content = Path(str(first.buffer)).read_bytes()
    publisher.publish(2, [("weight", torch.full((7,), 2.0))])
    assert Path(str(first.buffer)).read_bytes() == content
    publisher.close()


def test_published_tensors_may_share_one_storage() -> None:
    publisher = SharedMemoryPublisher()

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        scratch = torch.empty(1000)
        for index in range(5):
            yield f"weight {index}", scratch.fill_(float(index))

    manifest = publisher.publish(1, stream())
    buffer = np.fromfile(str(manifest.buffer), dtype=np.float32)
    for index, entry in enumerate(manifest.tensors):
        values = buffer[entry.offset // 4 :][:1000]
        assert (values == index).all()
    publisher.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (5,), (33, 7), (3, 200_001)])
def test_checksum_is_the_sum_of_weighted_words(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(dtype)
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    raw += bytes(-len(raw) % 8)
    chunk = 1 << 19
    total = 0
    for position in range(len(raw) // 8):
        word = int.from_bytes(raw[8 * position : 8 * position + 8], "little")
        weight = splitmix(position % chunk + 1) | 1
        total += word * weight * (splitmix(chunk + 1 + position // chunk) | 1)
    assert checksum(tensor) == total % 2**64


def splitmix(counter: int) -> int:
    """SplitMix64 in Python's own integers."""
    mask = 2**64 - 1
    z = counter * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def test_checksum_detects_exchanges_and_last_bits_but_not_memory_layout() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(64, 48)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    exchanged = tensor.clone()
    exchanged[[3, 4]] = exchanged[[4, 3]]
    assert checksum(exchanged) != checksum(tensor)
    nudged = tensor.clone()
    nudged[10, 10] = torch.nextafter(nudged[10, 10], torch.tensor(torch.inf))
    assert checksum(nudged) != checksum(tensor)


def test_shared_memory_that_is_full_names_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    publisher = SharedMemoryPublisher()
    fix = r"Cannot allocate a weight buffer of 1 GiB in /dev/shm .*shm_size .*placement\.weight_transport"
    with pytest.raises(TrainingError, match=fix):
        publisher._buffer(2**30)
    publisher.close()
