"""How fast, how exact and how large: clearhead beside torch, wins and losses in one table.

    python benchmarks/run.py [--quick] [--only PART ...] [--threads N] [--cpu-time]
    python benchmarks/run.py --shape 1,12,4096,64 --dtype bf16 --mask "causal & window(256)"

All ways of a row run interleaved in this process; a ratio is the median time over that of
`F.scaled_dot_product_attention` in the same row (below 1: clearhead is faster). Errors are against
the equation in float64. `--cpu-time` counts the CPU time of all threads: for a machine that is not
idle.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import measure
import torch
from torch.nn import functional as F

import clearhead as ch
from clearhead import _impl, masks, readings

FIVE = (
    readings.LogSumExp(),
    readings.TopK(8),
    readings.Entropy(),
    readings.Received(),
    readings.BlockMap(32),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
READ = {"none": None, "five": FIVE}


class Bench:
    """What the parts share: the clock, how many rounds, and the rows that were measured."""

    def __init__(self, quick: bool, cpu_time: bool) -> None:
        self.quick = quick
        self.rounds = 5 if quick else 11
        self.clock = time.process_time if cpu_time else time.perf_counter
        self.rows: list[dict[str, Any]] = []

    def compare(
        self, work: str, base: str, ways: dict[str, Callable[[], Any]], goals: dict[str, str],
        errors: dict[str, float] | None = None, times: int = 1,
    ) -> None:  # fmt: skip
        """Measure the ways of one row of work; print each against the base."""
        found = measure.interleave(
            {name: measure.repeat(way, times) for name, way in ways.items()},
            self.rounds,
            self.clock,
        )
        for name, numbers in found.items():
            row = {
                "work": work,
                "way": name,
                "ms": numbers["median"] / times * 1e3,
                "spread": numbers["spread"],
                "ratio": numbers["median"] / found[base]["median"],
                "goal": goals.get(name, ""),
                "error": (errors or {}).get(name),
            }
            self.rows.append(row)
            print(text(row), flush=True)


def text(row: dict[str, Any]) -> str:
    shown = "" if row.get("error") is None else f"{row['error']:.1e}"
    return (
        f"{row['work']:<34} {row['way']:<24} {row['ms']:>10.3f} ms +-{row['spread']:>4.0%} "
        f"{row['ratio']:>7.2f}x {row['goal']:<10} {shown}"
    )


def inputs(shape: tuple[int, ...], dtype: torch.dtype, sources: int | None = None) -> list[Any]:
    torch.manual_seed(0)
    *lead, length, width = shape
    return [
        torch.randn(*lead, size, width).to(dtype)
        for size in (length, sources or length, sources or length)
    ]


def sdpa(q: Any, k: Any, v: Any, mask: masks.Mask | None, bool_mask: bool = False) -> Callable:
    """Torch's fused call for the same work; a causal mask by its flag unless asked otherwise."""
    if mask is None:
        return lambda: F.scaled_dot_product_attention(q, k, v)
    if repr(mask) == repr(masks.causal()) and not bool_mask and q.shape[-2] == k.shape[-2]:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    dense = mask.to_sdpa(q.shape[-2], k.shape[-2])
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense)


def ours(q: Any, k: Any, v: Any, mask: Any, read: Any = None, impl: str | None = None) -> Callable:
    return lambda: ch.attend(q, k, v, mask, read=read, impl=impl)


def first(answer: Any) -> torch.Tensor:
    return answer[0] if isinstance(answer, tuple) else answer


def one_case(
    bench: Bench, shape: tuple[int, ...], dtype: str, mask: masks.Mask | None, impls: list[str],
    goals: dict[str, str] | None = None, read: tuple = ("none", "five"), label: str = "",
) -> None:  # fmt: skip
    """SDPA, then each implementation with nothing read and with the readings."""
    q, k, v = inputs(shape, DTYPES[dtype])
    ways = {"SDPA": sdpa(q, k, v, mask)}
    for impl in impls:
        for what in read:
            ways[f"{impl}, {what} read"] = ours(q, k, v, mask, READ[what], impl)
    errors = {name: measure.error(first(way()), q, k, v, mask) for name, way in ways.items()}
    kind = label or ("full" if mask is None else repr(mask).replace(', align="end"', ""))
    kind = kind.replace('align="end"', "")
    work = f"{dtype} {'x'.join(map(str, shape))} {kind}"
    bench.compare(work, "SDPA", ways, goals or {}, errors)


def built() -> bool:
    return (
        _impl.available()["native"] not in ("not installed", "not built") and not _native_reasons()
    )


def _native_reasons() -> list[str]:
    x = torch.ones(1, 1, 2, 4)
    plain = _impl.problem.Problem(x, x, x, None, 1.0)
    module = next(m for m in _impl.IMPLEMENTATIONS if m.NAME == "native")
    return module.unsupported_reasons(plain, ())


def part_tiled(bench: Bench) -> None:
    """The implementation in plain torch operations."""
    goals = {"tiled, none read": "<= 1.15", "tiled, five read": "<= 2.10"}
    for mask in (None, masks.causal()):
        one_case(bench, (1, 12, 4096, 64), "fp32", mask, ["tiled"], goals)


def part_native(bench: Bench) -> None:
    """The CPU kernel: forward, with and without readings."""
    if not built():
        print("native: not compiled here, nothing to measure")
        return
    lengths = (1024, 4096) if bench.quick else (1024, 2048, 4096, 8192)
    for dtype, full, causal in (("fp32", "<= 0.43", "<= 0.38"), ("bf16", "<= 0.25", "<= 0.22")):
        for width in (64, 128):
            for length in lengths:
                for mask, goal in ((None, full), (masks.causal(), causal)):
                    goals = {"native, none read": goal}
                    if length >= 4096 and dtype == "fp32":
                        goals["native, five read"] = "<= 0.50"
                    one_case(bench, (1, 12, length, width), dtype, mask, ["native"], goals)


def part_sparse(bench: Bench) -> None:
    """Windows and packed documents, where whole tiles are skipped."""
    ids = torch.arange(4096) // 600
    impls = ["native", "tiled"] if built() else ["tiled"]
    for label, mask in (
        ("window(256)", masks.causal() & masks.window(256)),
        ("documents of 600", masks.causal() & masks.document(ids)),
    ):
        goals = {"native, none read": "<= 0.04"}
        one_case(bench, (1, 12, 4096, 64), "fp32", mask, impls, goals, ("none",), label)
    if bench.quick:
        return
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = inputs((1, 12, 4096, 64), torch.float32)
    mask = masks.causal() & masks.window(256)
    block_mask = mask.to_flex(4096)
    flex = torch.compile(flex_attention)
    ways = {"flex, compiled": lambda: flex(q, k, v, block_mask=block_mask)}
    for impl in impls:
        ways[f"{impl}, none read"] = ours(q, k, v, mask, None, impl)
    goals = {"native, none read": "<= 0.50"}
    bench.compare("fp32 1x12x4096x64 window(256)", "flex, compiled", ways, goals)


def part_backward(bench: Bench) -> None:
    """`autograd.grad` alone, after a forward that is not timed."""
    impls = ["native", "tiled"] if built() else ["tiled"]
    for dtype, goal in (("fp32", "<= 0.43"), ("bf16", "<= 0.50")):
        for length in (1024,) if bench.quick else (1024, 4096):
            for name, mask in (("full", None), ("causal", masks.causal())):
                leaves = [x.requires_grad_() for x in inputs((1, 12, length, 64), DTYPES[dtype])]
                answers = {"SDPA": sdpa(*leaves, mask)()}
                for impl in impls:
                    answers[f"{impl}, backward"] = ours(*leaves, mask, None, impl)()
                grad = torch.randn_like(answers["SDPA"])
                ways = {way: _grad(answer, leaves, grad) for way, answer in answers.items()}
                goals = {"native, backward": goal}
                bench.compare(f"{dtype} 1x12x{length}x64 {name} backward", "SDPA", ways, goals)


def _grad(answer: torch.Tensor, leaves: list[Any], grad: torch.Tensor) -> Callable:
    return lambda: torch.autograd.grad(answer, leaves, grad, retain_graph=True)


def part_decode(bench: Bench) -> None:
    """One query over a long cache."""
    impl = "native" if built() else "tiled"
    for length in (4096, 32768) if bench.quick else (4096, 16384, 32768):
        q, k, v = inputs((1, 12, 1, 64), torch.float32, sources=length)
        ways = {
            "SDPA": sdpa(q, k, v, None),
            f"{impl}, none read": ours(q, k, v, masks.causal(), None, impl),
            "torch.sum of K and V": lambda k=k, v=v: (k.sum(), v.sum()),
        }
        bench.compare(
            f"fp32 decode, cache {length}", "SDPA", ways, {f"{impl}, none read": "<= 0.67"}
        )


def part_small(bench: Bench) -> None:
    """Short sequences, and the bare cost of a call."""
    impls = ["native", "tiled"] if built() else ["tiled"]
    for shape, goal in (((32, 8, 64, 32), "<= 0.50"), ((1, 4, 64, 64), "<= 0.77")):
        q, k, v = inputs(shape, torch.float32)
        ways = {"SDPA": sdpa(q, k, v, None)}
        ways |= {f"{impl}, none read": ours(q, k, v, None, None, impl) for impl in impls}
        work = f"fp32 {'x'.join(map(str, shape))} full"
        bench.compare(work, "SDPA", ways, {"native, none read": goal}, times=50)
    q, k, v = inputs((1, 1, 4, 3), torch.float32)
    ways = {"SDPA": sdpa(q, k, v, None), "attend": ours(q, k, v, None)}
    bench.compare("fp32 1x1x4x3, a call", "SDPA", ways, {"attend": "<= 12 us"}, times=2000)


def part_peers(bench: Bench) -> None:
    """The other ways to get context or weights at T = 1024."""
    length, width, heads = 1024, 64, 12
    q, k, v = inputs((1, heads, length, width), torch.float32)
    layer = torch.nn.MultiheadAttention(heads * width, heads, batch_first=True).eval()
    layer_ours = ch.MultiheadAttention(heads * width, heads, batch_first=True).eval()
    x = torch.randn(1, length, heads * width)
    blocked = masks.causal().to_multihead(length)
    allowed = masks.causal().dense(length)

    def eager() -> torch.Tensor:
        scores = (q @ k.mT / width**0.5).masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1) @ v

    ways = {
        "SDPA": sdpa(q, k, v, masks.causal()),
        "SDPA, bool mask": sdpa(q, k, v, masks.causal(), bool_mask=True),
        "eager, weights": eager,
        "attend": ours(q, k, v, masks.causal()),
        "attend, five read": ours(q, k, v, masks.causal(), FIVE),
        "attend, Weights read": ours(q, k, v, masks.causal(), readings.Weights()),
    }
    bench.compare(f"fp32 1x12x{length}x64 causal", "SDPA", ways, {})
    with torch.no_grad():
        ways = {
            "torch MHA": lambda: layer(x, x, x, attn_mask=blocked, need_weights=False),
            "torch MHA, weights": lambda: layer(x, x, x, attn_mask=blocked),
            "our MHA": lambda: layer_ours(x, x, x, mask=masks.causal(), need_weights=False),
            "our MHA, five read": lambda: layer_ours(x, x, x, mask=masks.causal(), read=FIVE),
        }
        bench.compare(f"fp32 layer 1x{length}x768 causal", "torch MHA", ways, {})


def part_train(bench: Bench) -> None:
    """A training step of the default GPT, attending by clearhead and by SDPA."""
    from clearhead.models import gpt
    from clearhead.models.train import loss_of

    model = gpt.GPT(96, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(96, (16, 129))

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, (tokens[:, :-1], tokens[:, 1:], None)).backward()
        optimizer.step()

    def on_sdpa() -> None:
        kept, gpt.attend = gpt.attend, _sdpa_as_attend
        try:
            step()
        finally:
            gpt.attend = kept

    ways = {"on SDPA": on_sdpa, "on attend": step}
    bench.compare("training step, default GPT", "on SDPA", ways, {"on attend": "<= 0.87"})


def _sdpa_as_attend(q: Any, k: Any, v: Any, mask: Any, *, read: Any, dropout: float) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)


def part_memory(bench: Bench) -> None:
    """Bytes that a call takes beyond its inputs, each in a process of its own."""
    for name in ("tiled none", "tiled five", "native none", "native five", "eager none"):
        if name.startswith("native") and not built():
            continue
        sizes = (2048, 4096) if name.startswith("eager") else (2048, 4096, 8192)
        found = [_child_memory(name, length) for length in sizes]
        shown = ", ".join(f"{length}: {mb:.1f} MB" for length, mb in zip(sizes, found, strict=True))
        taken = dict(zip(sizes, found, strict=True))
        row = {"work": "memory, fp32 1x12xTx64 causal", "way": name, "MB": taken}
        bench.rows.append(row)
        print(f"{row['work']:<34} {name:<24} {shown}", flush=True)


def _child_memory(name: str, length: int) -> float:
    command = [sys.executable, __file__, "--memory-of", name, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def memory_of(name: str, length: int) -> float:
    """Peak MB of one call over what was there before, context and readings included."""
    impl, what = name.split()

    def call(q: Any, k: Any, v: Any) -> Any:
        if impl == "eager":
            allowed = masks.causal().dense(q.shape[-2])
            return (q @ k.mT / 8).masked_fill(~allowed, -torch.inf).softmax(-1) @ v
        return ch.attend(q, k, v, masks.causal(), read=READ[what], impl=impl)

    call(*inputs((1, 12, 256, 64), torch.float32))
    tensors = inputs((1, 12, length, 64), torch.float32)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far (Linux)
    before = _status("VmRSS")
    answer = call(*tensors)
    peak = _status("VmHWM")
    del answer
    return peak - before


def _status(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))


def part_start(bench: Bench) -> None:
    """What importing adds to torch, and the whole of `clearhead look hell`."""
    ways = {
        "import torch": [sys.executable, "-c", "import torch"],
        "import clearhead": [sys.executable, "-c", "import torch, clearhead"],
        "clearhead look hell": [sys.executable, "-m", "clearhead", "look", "hell"],
    }
    runs = {
        name: lambda command=command: subprocess.run(command, capture_output=True, check=True)
        for name, command in ways.items()
    }
    clock = bench.clock if bench.clock is time.perf_counter else _children
    found = measure.interleave(runs, bench.rounds, clock)
    base = found["import torch"]["median"]
    for name, numbers in found.items():
        goal = {"import clearhead": "<= +150 ms", "clearhead look hell": "<= 5 s"}.get(name, "")
        row = {"work": "start of a process", "way": name, "ms": numbers["median"] * 1e3,
               "spread": numbers["spread"], "ratio": numbers["median"] / base, "goal": goal,
               "over torch, ms": (numbers["median"] - base) * 1e3}  # fmt: skip
        bench.rows.append(row)
        print(f"{text(row)} {row['over torch, ms']:+.0f} ms", flush=True)


def _children() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


PARTS = {
    name.removeprefix("part_"): part
    for name, part in list(globals().items())
    if name.startswith("part_")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="CPU time instead of wall time")
    parser.add_argument("--shape", help="one's own case: batch,head,position,head_dim")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--mask", help='an expression, such as "causal & window(256)"')
    parser.add_argument("--read", default="five", choices=READ)
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(memory_of(options.memory_of[0], int(options.memory_of[1])))
        return
    bench = Bench(options.quick, options.cpu_time)
    about = {**measure.machine(), "clock": bench.clock.__name__}
    print(*(f"{name:<10} {value}" for name, value in about.items()), sep="\n")
    if options.shape:
        shape = tuple(map(int, options.shape.split(",")))
        mask = masks.parse(options.mask) if options.mask else None
        impls = (["native"] if built() else []) + ["tiled"]
        read = ("none",) if options.read == "none" else ("none", options.read)
        one_case(bench, shape, options.dtype, mask, impls, read=read)
        return
    about["limits"] = measure.limits()
    print(*(f"{name:<20} {value:.0f}" for name, value in about["limits"].items()), sep="\n")
    with torch.set_grad_enabled(True):
        for name in chosen(options):
            PARTS[name](bench)
    print(f"Wrote {measure.save('run', {'machine': about, 'rows': bench.rows})}")


def chosen(options: argparse.Namespace) -> Iterator[str]:
    yield from options.only or PARTS


if __name__ == "__main__":
    main()
