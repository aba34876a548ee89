"""The weight publishers and the checksum, without an engine; a GPU and the call that maps its memory are doubles."""

from __future__ import annotations

import errno
import inspect
import operator
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from support.service_processes import free_port
from torch.distributed import HashStore
from torch.multiprocessing import reductions

from gxpo_trainer.errors import TrainingError
from gxpo_trainer.runtime.locks import remove_abandoned
from gxpo_trainer.runtime.processes import interface_to, listen_on
from gxpo_trainer.weights import transports
from gxpo_trainer.weights.buckets import BucketPacker, ChangeMeter, WeightBucket, checksum, tensors_of
from gxpo_trainer.weights.transports import (
    BLOCKING_WAIT,
    PREFIX,
    TIMEOUT_S,
    BroadcastGroup,
    SharedMemoryPublisher,
    open_handle,
    open_store,
)
from gxpo_trainer.weights.worker import WeightReceiver


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The buffers of other runs on this machine are left alone."""
    monkeypatch.setattr(transports, "SHM_ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def publisher() -> Iterator[SharedMemoryPublisher]:
    made = SharedMemoryPublisher()
    yield made
    made.close()


def packer(*named: tuple[str, torch.Tensor], **options: Any) -> BucketPacker:
    return BucketPacker(iter(named), **options)


def contents(bucket: WeightBucket) -> dict[tuple[str, int], torch.Tensor]:
    """Each entry's tensor, read from the published file by its name and first row."""
    buffer = torch.from_numpy(np.fromfile(str(bucket.location), dtype=np.uint8))
    return {(entry.name, entry.first_row): tensor.clone() for entry, tensor in tensors_of(bucket, buffer)}


def test_published_buffers_are_private_stay_readable_and_are_removed_on_close(
    publisher: SharedMemoryPublisher, shared_memory: Path
) -> None:
    first = publisher.publish(packer(("weight", torch.full((7,), 1.0))), 1, 0)
    content = Path(first.location).read_bytes()
    publisher.publish(packer(("weight", torch.full((7,), 2.0))), 2, 0)
    assert Path(first.location).read_bytes() == content, "while the next is written"
    assert publisher.directory.stat().st_mode & 0o777 == 0o700
    assert Path(first.location).stat().st_mode & 0o777 == 0o600
    assert publisher.directory not in remove_abandoned(shared_memory, PREFIX)
    publisher.close()
    assert not publisher.directory.exists()


def test_a_group_of_one_member_listens_nowhere() -> None:
    assert isinstance(open_store("127.0.0.1", 9, 0, 1, timedelta(seconds=1)), HashStore)


def test_next_publisher_removes_the_buffers_of_a_killed_one(shared_memory: Path) -> None:
    code = (
        "import os, pathlib, signal, sys, torch\n"
        "from gxpo_trainer.weights import transports\n"
        "from gxpo_trainer.weights.buckets import BucketPacker\n"
        "transports.SHM_ROOT = pathlib.Path(sys.argv[1])\n"
        "publisher = transports.SharedMemoryPublisher()\n"
        "publisher.publish(BucketPacker(iter([('weight', torch.ones(8))])), 1, 0)\n"
        "print(publisher.directory, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, str(shared_memory)]
    killed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = Path(killed.stdout.strip())
    assert left.exists()
    assert left.parent == shared_memory
    SharedMemoryPublisher().close()
    assert not left.exists()


def test_buckets_hold_at_most_their_capacity_and_every_row_once(publisher: SharedMemoryPublisher) -> None:
    """Capacity of 256 bytes: 64 floats. 40 rows of 8 floats must be split, small tensors share a bucket."""
    torch.manual_seed(0)
    tensors = {"a": torch.randn(5), "big": torch.randn(40, 8), "b": torch.randn(3, 3), "scalar": torch.tensor(2.5)}
    stream = packer(*tensors.items(), capacity=256)
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in tensors}
    index = 0
    while not stream.empty:
        bucket = publisher.publish(stream, 1, index)
        assert bucket.num_bytes <= 256
        assert (bucket.index, bucket.last) == (index, stream.empty)
        for (name, first_row), tensor in contents(bucket).items():
            assert first_row == sum(map(len, rows[name]))
            rows[name].append(tensor.reshape(-1, *tensor.shape[1:]))
        index += 1
    assert index >= 40 * 8 * 4 // 256
    for name, tensor in tensors.items():
        assert torch.equal(torch.cat(rows[name]).reshape(tensor.shape), tensor)


def test_a_row_larger_than_a_bucket_gets_one_of_its_own() -> None:
    stream = packer(("wide", torch.zeros(3, 100)), ("small", torch.zeros(2)), capacity=256)
    sizes = []
    while not stream.empty:
        entries, _ = stream.pack(lambda size: torch.empty(size, dtype=torch.uint8))
        sizes.append([(entry.name, entry.first_row) for entry in entries])
    assert sizes == [[("wide", 0)], [("wide", 1)], [("wide", 2)], [("small", 0)]]


def test_ranks_that_do_not_publish_advance_in_step() -> None:
    """At ZeRO-3 reading the next tensor is collective: all ranks must have read as many after each bucket."""
    sizes = [3, 70, 500, 1, 1, 64, 129, 5]

    def counted(read: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        for number, size in enumerate(sizes):
            read.append(number)
            yield str(number), torch.zeros(size)

    first: list[int] = []
    other: list[int] = []
    publishing, following = (BucketPacker(counted(read), capacity=256) for read in (first, other))
    buffer = torch.empty(1024, dtype=torch.uint8)
    while not publishing.empty:
        publishing.pack(lambda size: buffer)
        following.pack(None)
        assert first == other
    assert following.empty
    assert first == list(range(len(sizes)))


def test_published_values_have_the_wanted_dtype_and_no_negative_zero(publisher: SharedMemoryPublisher) -> None:
    bucket = publisher.publish(packer(("w", torch.tensor([-0.0, 1.0, 1e-9])), dtype=torch.bfloat16), 1, 0)
    ((_, published),) = contents(bucket).items()
    assert published.dtype == torch.bfloat16
    assert published.view(torch.int16)[0] == 0


def test_a_version_that_is_published_again_is_compared_with_the_one_before_it(publisher: SharedMemoryPublisher) -> None:
    """Two tensors in two buckets: the second attempt begins after the first bucket, the third after both."""
    meter = ChangeMeter(num_elements=16)
    weights = {"a": torch.zeros(8), "b": torch.zeros(8)}

    def publish(version: int, buckets: int = 2) -> float | None:
        stream, fraction = packer(*weights.items(), capacity=32), None
        for index in range(buckets):
            bucket = publisher.publish(stream, version, index)
            fraction = meter.add(bucket, publisher.buffer(bucket))
        return fraction

    assert publish(1) is None
    weights["a"][:2] = 1.0
    assert publish(2, buckets=1) is None
    assert publish(2) == 2 / 16
    assert publish(2) == 2 / 16
    assert publish(3) == 0.0


def test_a_large_models_change_is_estimated(publisher: SharedMemoryPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gxpo_trainer.weights.buckets.MOST_SAMPLED", 25)
    meter = ChangeMeter(num_elements=100)
    weights = torch.zeros(100)
    for version, fraction in ((1, None), (2, 0.4)):  # every fourth of 100: 10 of 25
        bucket = publisher.publish(packer(("w", weights)), version, 0)
        assert meter.add(bucket, publisher.buffer(bucket)) == fraction
        weights[:40] = 1.0


def test_the_wait_of_an_nccl_group_blocks_and_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group itself needs GPUs; its constructor reads the variable, and no other group of the process may."""
    seen = {}

    class Group:
        Options = SimpleNamespace

        def __init__(self, store: Any, member: int, size: int, options: Any) -> None:
            seen.update(member=member, size=size, timeout=options._timeout, blocking=os.environ[BLOCKING_WAIT])

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv(BLOCKING_WAIT, "0")
    BroadcastGroup("127.0.0.1", 9, 0, 1, torch.device("cuda:0"))  # one member needs no port
    assert seen == {"member": 0, "size": 1, "timeout": timedelta(seconds=TIMEOUT_S), "blocking": "1"}
    assert os.environ[BLOCKING_WAIT] == "0"


def test_an_engine_that_pins_nccl_settings_joins_the_learner_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's batch-invariant mode pins them; NCCL, which needs GPUs, hangs where the members of a group differ."""
    from vllm.utils import nccl

    monkeypatch.setattr(nccl, "_unpinned_env", {"NCCL_PROTO": None})
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    receiver = WeightReceiver(cast(Any, SimpleNamespace(verify_adapter=None)), torch.device("cpu"))
    seen: list[str | None] = []
    receiver._group = cast(Any, SimpleNamespace(broadcast=lambda _: seen.append(os.environ.get("NCCL_PROTO"))))
    receiver._read(WeightBucket(1, 0, True, (), 8, "nccl"))
    assert seen == [None]
    assert os.environ["NCCL_PROTO"] == "Simple"


def test_a_broadcast_reaches_every_member_and_they_listen_on_loopback_alone() -> None:
    """Gloo on this machine instead of NCCL; the group is otherwise the same."""
    port = free_port()
    received = [torch.zeros(1000, dtype=torch.uint8) for _ in range(3)]
    received[0] = torch.arange(1000).to(torch.uint8)

    def listening() -> set[Any]:
        return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}

    earlier = listening()

    def member(number: int) -> BroadcastGroup:
        group = BroadcastGroup("127.0.0.1", port, number, 3, torch.device("cpu"))
        group.broadcast(received[number])
        return group

    with ThreadPoolExecutor(3) as threads:
        groups = [*threads.map(member, range(3))]
    assert {where.ip for where in listening() - earlier} == {"127.0.0.1"}, "whatever the host's name resolves to"
    assert {os.environ[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL")} == {"lo"}
    assert all(torch.equal(buffer, received[0]) for buffer in received)
    assert len(groups) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (5,), (33, 7), (3, 200_001)])
def test_checksum_is_the_sum_of_weighted_words(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(dtype)
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    raw += bytes(-len(raw) % 8)
    words = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
    weights = [int(weight) | 1 for weight in np.random.Philox(key=0).random_raw(1 << 19)]
    total = 0
    for chunk, start in enumerate(range(0, len(words), 1 << 19)):
        part = sum(map(operator.mul, words[start : start + (1 << 19)], weights))
        total += part * (int(np.random.Philox(key=1 + chunk).random_raw()) | 1)
    assert checksum(tensor) == total % 2**64


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


def test_full_shared_memory_says_what_helps(
    publisher: SharedMemoryPublisher, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full))
    fix = rf"Cannot allocate a weight bucket of 1 GiB in {shared_memory} .*shm_size"
    with pytest.raises(TrainingError, match=fix):
        publisher._allocate(2**30)


def test_a_worker_answers_once_its_gpu_has_read_the_bucket_whose_buffer_the_learner_then_overwrites(
    publisher: SharedMemoryPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Mock(slots={})
    monkeypatch.setattr(torch.cuda, "synchronize", calls.synchronize)
    bucket = publisher.publish(packer(("weight", torch.ones(3)), ("other", torch.ones(3)), capacity=64), 1, 0)
    assert not bucket.last
    receiver = WeightReceiver(calls, torch.device("cpu"))
    receiver.receive(bucket)
    assert [name for name, *_ in calls.mock_calls] == ["load"]
    receiver._device = torch.device("cuda", 1)
    receiver.receive(bucket)
    assert [name for name, *_ in calls.mock_calls] == ["load", "load", "synchronize"]
    assert calls.synchronize.call_args.args == (receiver._device,)


def test_a_worker_maps_the_learners_buffer_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's only GPU is device 0 in its process and device 1 in the worker's of tensor parallelism."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    exported = tuple(0 if name == "storage_device" else name for name in names)
    opened: dict[str, Any] = {}

    def rebuild(*arguments: Any) -> torch.Tensor:
        opened.update(zip(names, arguments, strict=True))
        return torch.zeros(3, dtype=torch.uint8)

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"gpu-{device.index}"))
    bucket = WeightBucket(1, 0, True, (), 3, "cuda_ipc", {"gpu-0": ("another rank's",), "gpu-1": exported})
    assert open_handle(bucket, torch.device("cuda:1")).numel() == 3
    assert opened.pop("storage_device") == 1
    assert opened == {name: name for name in names if name != "storage_device"}


def test_members_on_several_hosts_listen_between_them_or_where_told(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [(n, a.address) for n, of in psutil.net_if_addrs().items() for a in of if a.family == socket.AF_INET]
    for name, address in addresses:
        assert interface_to(address) == ("lo" if address.startswith("127.") else name)
    for library in ("GLOO", "NCCL"):
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME", raising=False)
        monkeypatch.delenv(f"GXPO_{library}_SOCKET_IFNAME", raising=False)
    listen_on("GLOO_SOCKET_IFNAME", "lo")
    listen_on("GLOO_SOCKET_IFNAME", None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    listen_on("GLOO_SOCKET_IFNAME", "eth7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "a later group of this process, with members elsewhere"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    listen_on("NCCL_SOCKET_IFNAME", "eth7")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
