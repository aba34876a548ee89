"""The store of a process group: reachable by its members on one address, by nobody else on another."""

from __future__ import annotations

import multiprocessing
import os
import socket
from datetime import timedelta
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
import torch.distributed as dist

from gxpo_trainer.runtime.processes import interface_to, listen_on
from gxpo_trainer.weights import transports
from gxpo_trainer.weights.transports import open_store


def _member(member: int, size: int, port: int, pipe: Connection) -> None:
    timeout = timedelta(seconds=60)
    store = open_store("127.0.0.1", port, member, size, timeout)
    dist.init_process_group("gloo", store=store, rank=member, world_size=size, timeout=timeout)
    total = torch.full((1,), float(member + 1))
    dist.all_reduce(total)
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    pipe.send((total.item(), listening, {os.environ[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL")}))
    pipe.recv()  # member 0 serves the store until all are done


@pytest.mark.parametrize("size", [1, 2])
def test_members_meet_and_listen_on_loopback_alone(size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    members = [
        context.Process(target=_member, args=(member, size, port, theirs)) for member, (_, theirs) in enumerate(pipes)
    ]
    for process in members:
        process.start()
    results = [ours.recv() for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send(None)
    for process in members:
        process.join()
    assert [total for total, _, _ in results] == [size * (size + 1) / 2] * size
    assert all(listening <= {"127.0.0.1"} for _, listening, _ in results)
    assert all(interfaces == {"lo"} for _, _, interfaces in results), "whatever the host's name resolves to"


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


def test_a_buffer_grows_by_doubling_up_to_a_full_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them are planned with a bucket each, not with twice that."""
    monkeypatch.setattr(transports, "WEIGHT_BUCKET_BYTES", 1000)
    buffer, sizes = torch.empty(0, dtype=torch.uint8), []
    for used in (300, 400, 700, 950, 1000, 1000):
        buffer = transports.grown(buffer, used)
        sizes.append(buffer.numel())
    assert sizes == [300, 600, 1000, 1000, 1000, 1000]
