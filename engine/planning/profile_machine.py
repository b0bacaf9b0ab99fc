"""What is no layer's, measured: the loss's products, gradients into their buffers, the optimizer's
step, links between ranks."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from engine.planning.costs import Machine, block_bytes
from engine.planning.devices import COMMUNICATOR_BYTES
from engine.planning.measured import device_identity
from engine.planning.profile_layers import CacheFlusher, Clock, Ranks
from engine.planning.stage_costs import ELEMENTWISE_FLOPS
from engine.streams import runs_behind

# that are measured: more than a cache holds, as after a backward; few enough for any device
NUM_PARAMETERS = 1 << 23
MOST_TENSORS = 1024
# a forward or backward of one micro-batch was 0.2 to 0.3 ms longer than its layers, where an
# operation took 2.5 µs
INSTRUCTION_OPERATIONS = 100
MOST_ROWS = 2048
# bytes/s, s: only where there is one rank, which sends nothing
NOMINAL_LINK = {"cpu": (1e9, 1e-4), "cuda": (50e9, 2e-5)}


def profile_machine(
    device: torch.device,
    dtype: torch.dtype,
    parameter_sizes: Sequence[int],
    batch_size: int,
    embed_dim: int,
    ranks: Ranks | None = None,
) -> Machine:
    """This rank's hardware, without links: those of one rank by itself are nominal.

    `parameter_sizes`: elements of every parameter of the model; kernels have a price of their own,
    so they matter beside the sum. `batch_size` is the global one. A replica's messages are not in
    the times.
    """
    ranks = ranks or Ranks()
    sample = _sample(parameter_sizes)
    optimizer = _Step(sample, dtype, device)
    rows = min(batch_size, MOST_ROWS)
    # the towers' backwards come before a step
    flush = CacheFlusher(float("inf"), 0.0, device).before_forward
    loss_s, reduce_s, step_s, host_s = ranks.mean(
        [
            _seconds(_loss_like(rows, embed_dim, device), device),
            _seconds(optimizer.reduce, device, after=flush),
            _seconds(optimizer.step, device, after=flush),
            _host_s(),
        ]
    )
    on_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    gpu_bytes = get_accelerator().total_memory() if runs_behind(device) else 0
    bandwidth, latency = NOMINAL_LINK.get(device.type, NOMINAL_LINK["cpu"])
    return Machine(
        name=device_identity(device)["device"],
        memory_bytes=usable_bytes(device, ranks),
        link_bytes_per_s=bandwidth,
        link_latency_s=latency,
        flops_per_s=(4 * embed_dim + ELEMENTWISE_FLOPS) * rows * rows / loss_s,
        optimizer_s_per_parameter=step_s / sum(sample),
        gradient_s_per_parameter=reduce_s / sum(sample),
        instruction_s=host_s,
        communicator_bytes=COMMUNICATOR_BYTES if on_nccl else 0.0,
        block_bytes=block_bytes(gpu_bytes),
        measured=True,
    )


def _sample(sizes: Sequence[int]) -> list[int]:
    """As many sizes as have about `NUM_PARAMETERS` elements, in the proportions of all: every n-th,
    or all of them n times."""
    total = sum(sizes)
    if not total:
        return [NUM_PARAMETERS]
    every, times = (
        -(-total // NUM_PARAMETERS),
        -(-min(NUM_PARAMETERS, MOST_TENSORS * total // len(sizes)) // total),
    )
    return [min(size, NUM_PARAMETERS) for size in sorted(sizes)[::-1][::every]] * times


def _seconds(
    work: Callable[[], object],
    device: torch.device,
    after: Callable[[], object] = lambda: None,
    typical: Callable[[Iterable[float]], float] = statistics.median,
    repeats: int = 5,
) -> float:
    """Of one call, each after one of `after`, which is not counted, and after two calls that are
    not either."""
    clock, marks = Clock(device), []
    for _ in range(repeats + 2):
        after()
        clock.wait()
        start = clock.mark()
        work()
        marks.append((start, clock.mark()))
    clock.wait()
    return typical(clock.between(*pair) for pair in marks[2:])


def _loss_like(rows: int, width: int, device: torch.device) -> Callable[[], Tensor]:
    """One side's logits [rows, rows], their softmax in both directions, and the gradient of its
    embeddings [rows, width]."""
    own, other = torch.randn(2, rows, width, device=device).unbind()

    def work() -> Tensor:
        logits = own @ other.T
        statistics_ = logits.logsumexp(1)
        d_logits = (
            (logits - statistics_[:, None])
            .exp_()
            .add_((logits - statistics_[None, :]).exp_())
            .div_(2 * rows)
        )
        return d_logits @ other

    return torch.no_grad()(work)


class _Step:
    """Gradients of these sizes in `dtype` (under bf16 their fp32 sums), and AdamW over a flat fp32
    copy of the weights, as DeepSpeed's ZeRO-1 and BF16_Optimizer keep them. One replica: without
    messages."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device):
        total, sums = sum(sizes), torch.float32 if dtype == torch.bfloat16 else dtype
        self.gradients = [torch.full((size,), 1e-3, dtype=sums, device=device) for size in sizes]
        self.weights = torch.zeros(total, dtype=dtype, device=device)
        self.master = nn.Parameter(torch.zeros(total, device=device))
        # as `engine/build.py` asks for
        self.optimizer = torch.optim.AdamW([self.master], lr=1e-6, fused=True)

    @torch.no_grad()
    def reduce(self) -> None:
        """Into the buffer that is sent, divided, and back."""
        buffer = torch.cat(self.gradients).div_(1.0)
        torch._foreach_copy_(self.gradients, buffer.split([len(own) for own in self.gradients]))

    @torch.no_grad()
    def step(self) -> None:
        """The norm, the clip, the optimizer, and the weights back into their own precision."""
        self.master.grad = torch.cat(self.gradients).float()
        nn.utils.clip_grad_norm_([self.master], 1.0)
        self.optimizer.step()
        self.weights.copy_(self.master)


def _host_s() -> float:
    """Host time of one instruction in the engine and DeepSpeed's part of it: that of
    `INSTRUCTION_OPERATIONS` operations on almost nothing."""
    tiny = torch.zeros(1)

    def work() -> None:
        for _ in range(INSTRUCTION_OPERATIONS):
            tiny.add(1.0)

    return _seconds(work, tiny.device)


GPU_SHARE = 0.9  # the rest is for CUDA itself, ZeRO's buckets, and gaps that the allocator leaves


def usable_bytes(device: torch.device, ranks: Ranks) -> float:
    """What each rank may use, at least: of those that share a device its part of most of the GPU;
    on a CPU its part of what is free, or of what the container may have."""
    devices = ranks.places.devices
    sharing = devices.count(devices[ranks.rank])
    if runs_behind(device):
        return float(ranks.least(int(GPU_SHARE * get_accelerator().total_memory() / sharing)))
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return float(ranks.least(free // sharing))


# -- links

BUCKET_BYTES = 2**24  # 4 M gradients in fp32, as in ds_configs/cpu_fp32.json
SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 22


def with_links(machine: Machine, device: torch.device, ranks: Ranks) -> Machine:
    """The machine with its links as they are while all ranks send at once.

    Every rank of the default group sends to its neighbour and hears from the other one: within its
    node, then across. All call together. With gloo tensors are in host memory, as in
    `engine/communication.py`.
    """
    world, places, rank = dist.get_world_size(), ranks.places, ranks.rank
    wire = torch.device("cpu") if dist.get_backend() == "gloo" else device
    sizes = Counter(places.nodes).values()
    across = within = (float("inf"), 0.0)
    if len(sizes) > 1:
        across = within = _link(places.across(rank), wire, ranks)
    if max(sizes) > 1:
        within = _link(places.beside(rank), wire, ranks)
    linked = replace(
        machine,
        ranks_per_node=min(sizes),
        link_bytes_per_s=within[0],
        link_latency_s=within[1],
        node_bytes_per_s=across[0],
        node_latency_s=across[1],
    )
    # there and back, and there once more
    passes_s = ranks.mean([_step_of_replicas_s(wire, world)])[0] / 3
    messages_s = linked.ring(range(world)).seconds(BUCKET_BYTES)
    return replace(linked, collective_s_per_byte=max(0.0, passes_s - messages_s) / BUCKET_BYTES)


def _step_of_replicas_s(wire: torch.device, world: int) -> float:
    """An all-reduce of a bucket of gradients, then an all-gather of as many weights, as ZeRO-1
    does."""
    bucket = torch.zeros(BUCKET_BYTES // 4 // world * world, device=wire)
    parts = list(bucket.chunk(world))

    def step() -> None:
        dist.all_reduce(bucket)
        dist.all_gather(parts, parts[dist.get_rank()])

    return _seconds(step, wire)


def _link(ring: Sequence[int], wire: torch.device, ranks: Ranks) -> tuple[float, float]:
    """Bytes/s and seconds, the mean over the ranks of the quickest exchange: what else the machine
    does only adds to it. `ring`: the ranks around which this one sends; one by itself, as on a node
    with fewer ranks than others, sends nothing and does not count."""
    own = [0.0, 0.0, 0.0]
    if len(ring) > 1:
        position = ring.index(ranks.rank)
        to, source = ring[(position + 1) % len(ring)], ring[position - 1]
        own = [
            1.0,
            *(_message_s(to, source, num_bytes, wire) for num_bytes in (SMALL_BYTES, LARGE_BYTES)),
        ]
    share, small_s, large_s = ranks.mean(own)
    small_s, large_s = small_s / share, large_s / share
    return LARGE_BYTES / max(large_s - small_s, large_s / 4), small_s


def _message_s(to: int, source: int, num_bytes: int, wire: torch.device) -> float:
    given, taken = (torch.zeros(num_bytes, dtype=torch.uint8, device=wire) for _ in range(2))

    def exchange() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, given, to), dist.P2POp(dist.irecv, taken, source)]
        ):
            work.wait()

    return _seconds(exchange, wire, typical=min, repeats=9)
