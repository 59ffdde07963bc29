"""Attention over the ranks of two hosts, in miniature: two torchruns that find each other."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Run by each of four ranks; torch's own attention is the judge.
SCRIPT = """
import json, os, torch
import torch.distributed as dist
import torch.nn.functional as F
from clearhead import distributed, masks, readings

dist.init_process_group("gloo")
torch.manual_seed(0)
whole = [torch.randn(2, 4, 37, 8, dtype=torch.float64) for _ in "qkv"]
q, k, v = (distributed.shard(x).clone().requires_grad_() for x in whole)
context, entropy = distributed.attend(q, k, v, masks.causal(), read=readings.Entropy())
(context.sin().sum() + entropy.sum()).backward()
right = F.scaled_dot_product_attention(*whole, is_causal=True)
error = (distributed.unshard(context.detach()) - right).abs().max().item()
found = {"rank": dist.get_rank(), "world": dist.get_world_size(), "error": error,
         "entropy": distributed.unshard(entropy.detach(), -1).sum().item(),
         "gradient": q.grad.isfinite().all().item(), "network": os.readlink("/proc/self/ns/net")}
with open(os.path.join(os.environ["FOUND"], f"{dist.get_rank()}.json"), "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""


def torchrun(script: Path, host: int, address: str, first: str, port: int) -> list[str]:
    """The command of one host; the first one has the rendezvous."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{port}", "--rdzv-id=clearhead",
        f"--rdzv-conf=is_host={int(not host)},join_timeout=120", f"--local-addr={address}",
        str(script),
    ]  # fmt: skip


def run(tmp_path: Path, addresses: list[str], networks: list[str], within: list[list[str]]) -> list:
    """What all ranks of both hosts have found, in their order."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = []
    for host, (address, network) in enumerate(zip(addresses, networks, strict=True)):
        command = torchrun(script, host, address, addresses[0], port)
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": network, "FOUND": str(tmp_path), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        hosts.append(
            subprocess.Popen([*within[host], *command], env=environment, stderr=subprocess.PIPE)
        )
    try:
        errors = [process.communicate(timeout=200)[1].decode() for process in hosts]
        assert [process.returncode for process in hosts] == [0, 0], errors
    finally:
        for process in hosts:
            process.kill()
    return [json.loads((tmp_path / f"{rank}.json").read_text("utf-8")) for rank in range(4)]


def check(found: list[dict]) -> None:
    """All ranks have the result of one process."""
    for rank, each in enumerate(found):
        assert (each["rank"], each["world"]) == (rank, 4)
        assert each["error"] < 1e-14
        assert each["gradient"]
    assert len({each["entropy"] for each in found}) == 1


def test_two_loopback_addresses(tmp_path: Path) -> None:
    addresses = ["127.0.0.1", "127.0.0.2"]
    check(run(tmp_path, addresses, ["lo", "lo"], [[], []]))


@contextmanager
def namespaces() -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Two network namespaces with a cable between them: names, interfaces and addresses."""
    ip = shutil.which("ip")
    names = [f"clearhead{os.getpid()}{side}" for side in "ab"]
    ends, addresses = ["ch0", "ch1"], ["10.91.0.1", "10.91.0.2"]

    def do(*words: str) -> bool:
        return subprocess.run([str(ip), *words], capture_output=True, check=False).returncode == 0

    if ip is None or not all([do("netns", "add", name) for name in names]):
        pytest.skip("network namespaces need root and iproute2")
    try:
        made = do("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name",
                  ends[1], "netns", names[1])  # fmt: skip
        if not made:
            pytest.skip("this kernel has no virtual cables (veth)")
        for name, end, address in zip(names, ends, addresses, strict=True):
            assert do("-n", name, "addr", "add", f"{address}/30", "dev", end)
            assert do("-n", name, "link", "set", end, "up")
            assert do("-n", name, "link", "set", "lo", "up")
        yield names, ends, addresses
    finally:
        for name in names:
            do("netns", "del", name)


def test_two_network_namespaces(tmp_path: Path) -> None:
    with namespaces() as (names, ends, addresses):
        within = [["ip", "netns", "exec", name] for name in names]
        found = run(tmp_path, addresses, ends, within)
    check(found)
    networks = [each["network"] for each in found]
    assert networks[0] == networks[1] != networks[2] == networks[3]
