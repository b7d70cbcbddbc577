"""Check and time the expert kernel on a GPU, beside its peers, in one run.

    python benchmarks/experts_measure.py CUBINS --json FILE [--seconds N] [--phases check,sweep,peers,jax]

Cubins come from experts_build.py. Weight sets rotate, so that L2 is cold; times are CUDA-graph replays of a chain of
layers, divided by their number. Ceilings are measured first, in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from cuda.core import Device
from experts_cases import (
    BENCHED,
    BUCKETS,
    MIXTRAL,
    QWEN3,
    SHAPES,
    flops,
    plan_for,
    routing,
    spec_for,
    touched_bytes,
    variants,
)

from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.launcher import capture, load_kernel, median_and_spread, replay_times

SETS = {QWEN3: 4, MIXTRAL: 2}
CHAIN = {QWEN3: 16, MIXTRAL: 8}


class Clock:
    """Seconds since the start, against a limit."""

    def __init__(self, limit: float):
        self.start, self.limit = time.monotonic(), limit

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    def has(self, seconds: float) -> bool:
        return self.limit - self.spent > seconds


def say(*words: object) -> None:
    print(*words, flush=True)


def event_time(run, repeats: int = 20) -> float:
    """Median microseconds of a call, by events."""
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return float(np.median([a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]))


def graph_time(run, calls: int, repeats: int = 15) -> tuple[float, float]:
    """Median and spread of microseconds per call of a torch function captured as a graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(3):
        graph.replay()
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / calls)
    return median_and_spread(times)


def ceilings() -> dict[str, float]:
    """Rate of reading 2 GiB (TB/s) and of a bf16 matmul of 8192 cubed (TFLOP/s)."""
    from peers import stream_read

    data = torch.randint(-(2**31), 2**31 - 1, (2**29,), dtype=torch.int32, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    best = min(event_time(lambda c=c: stream_read(data, sink, *c)) for c in ((2048, 4), (4096, 8), (8192, 8)))
    rates = {"read_tbs": data.numel() * 4 / best / 1e6}
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rates["matmul_tflops"] = 2 * 8192**3 / event_time(lambda: a @ b, 10) / 1e6
    return rates


class Layer:
    """Weight sets of one shape, and buffers for launches of the expert kernel on them."""

    def __init__(self, shape: tuple[int, int, int, int], seed: int):
        self.shape = shape
        hidden, inner, experts, _ = shape
        generator = torch.Generator("cuda").manual_seed(seed)

        def random(*size: int, scale: float) -> torch.Tensor:
            out = torch.empty(size, device="cuda", dtype=torch.bfloat16)
            return out.normal_(0.0, scale, generator=generator)

        self.sets = [
            (random(experts, 2 * inner, hidden, scale=hidden**-0.5), random(experts, hidden, inner, scale=inner**-0.5))
            for _ in range(SETS[shape])
        ]
        self.x = random(max(BUCKETS), hidden, scale=1.0)


class Launches:
    """The launches of one layer: grouping (for two rows or more) and experts, with buffers of their own."""

    def __init__(self, shape, tokens: int, tile, pdl: bool, folder: Path):
        spec = spec_for(shape, tokens, tile, pdl=pdl)
        parts = [part for part in (plan_for(shape, spec, pdl=pdl), spec) if part]
        self.kernels = [load_kernel(part, compiled.load(folder, part, 90)) for part in parts]
        self.buffers: dict[str, torch.Tensor] = {}
        for a in [a for part in parts for a in part.arguments]:
            if a.role == "state":
                self.buffers[a.name] = torch.zeros(a.shape, dtype=torch.int32, device="cuda")
            elif a.role in ("out", "scratch"):
                self.buffers[a.name] = torch.empty(a.shape, dtype=getattr(torch, a.dtype), device="cuda")

    def poison(self) -> None:
        for name, buffer in self.buffers.items():
            if name != "state_ptr":
                buffer.fill_(float("nan") if buffer.is_floating_point() else -7)

    def record(self, stream, x, ids, scale, weights) -> None:
        given = {"x_ptr": x, "ids_ptr": ids, "scale_ptr": scale, "gate_up_ptr": weights[0], "down_ptr": weights[1]}
        given |= self.buffers
        for kernel in self.kernels:
            kernel.launch(stream, [given.get(a.name, x).data_ptr() for a in kernel.spec.arguments])


def device_routing(rng, tokens, shape):
    ids, scale = routing(rng, tokens, shape[2], shape[3])
    return ids, torch.from_numpy(ids).cuda(), torch.from_numpy(scale).cuda()


def reference(x, ids, scale, weights, dtype) -> torch.Tensor:
    """The layer expert by expert in ``dtype``; the intermediate is rounded to bf16 unless dtype is f64."""
    gate_up, down = weights
    inner = down.shape[2]
    pairs = torch.zeros(*ids.shape, x.shape[1], dtype=dtype, device="cuda")
    for e in torch.unique(ids[(ids >= 0) & (ids < gate_up.shape[0])]).tolist():
        rows, rank = torch.nonzero(ids == e, as_tuple=True)
        h = x[rows].to(dtype) @ gate_up[e].to(dtype).T
        h = torch.nn.functional.silu(h[:, :inner]) * h[:, inner:]
        if dtype != torch.float64:
            h = h.bfloat16().to(dtype)
        pairs[rows, rank] = h @ down[e].to(dtype).T
    total = torch.zeros(x.shape, dtype=dtype, device="cuda")
    for r in range(ids.shape[1]):
        total = total + scale[:, r, None].to(dtype) * pairs[:, r]
    return total if dtype == torch.float64 else total.bfloat16()


def relative(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def check(layer: Layer, folder: Path, stream, clock: Clock) -> dict:
    """Error against f64, poisoned buffers, repeatability, and one row's bits at every bucket, position and company."""
    rng, shape = np.random.default_rng(7), layer.shape
    result: dict = {"shape": shape, "errors": [], "bits": [], "failures": []}
    launches = {tokens: Launches(shape, tokens, None, False, folder) for tokens in BUCKETS}
    weights = layer.sets[0]

    def run(tokens, x, ids, scale, repeats=1):
        one = launches[tokens]
        outs = []
        for _ in range(repeats):
            one.poison()
            torch.cuda.synchronize()
            one.record(stream, x, ids, scale, weights)
            stream.sync()
            outs.append(one.buffers["out_ptr"].clone())
        if int(one.buffers["state_ptr"].abs().max()):
            result["failures"].append(f"{tokens} rows: state not zero after the launch")
        if any(not torch.equal(outs[0], other) for other in outs[1:]):
            result["failures"].append(f"{tokens} rows: runs differ")
        return outs[0]

    for tokens in BUCKETS:
        _, ids, scale = device_routing(rng, tokens, shape)
        if tokens >= 4:
            ids[1] = -1
            ids[2, 0] = shape[2]
            ids[3] = ids[0]
        x = layer.x[:tokens].contiguous()
        out = run(tokens, x, ids, scale, repeats=10)
        exact = reference(x, ids, scale, weights, torch.float64)
        error, same = relative(out, exact), relative(reference(x, ids, scale, weights, torch.float32), exact)
        result["errors"].append({"tokens": tokens, "error": error, "same_dtype": same})
        if not (error <= 2 * same and bool(torch.isfinite(out).all())):
            result["failures"].append(f"{tokens} rows: error {error:.2e}, same-dtype reference {same:.2e}")
        if tokens >= 4 and bool((out[1] != 0).any()):
            result["failures"].append(f"{tokens} rows: a row without experts is not zero")
    # One row in every bucket, position and company: its ids and x stay, everything else changes.
    _, row_ids, row_scale = device_routing(rng, 1, shape)
    alone = run(1, layer.x[:1].contiguous(), row_ids, row_scale)
    for tokens in BUCKETS[1:]:
        for position in sorted({0, 1, tokens // 2, tokens - 1}):
            for crowd in (False, True):
                _, ids, scale = device_routing(rng, tokens, shape)
                if crowd:
                    ids[:] = row_ids
                x = torch.randn_like(layer.x[:tokens])
                x[position], ids[position], scale[position] = layer.x[0], row_ids[0], row_scale[0]
                same = torch.equal(run(tokens, x, ids, scale)[position], alone[0])
                result["bits"].append({"tokens": tokens, "position": position, "crowd": crowd, "equal": same})
                if not same:
                    result["failures"].append(f"row differs: {tokens} rows, position {position}, crowd {crowd}")
    say(f"check {shape}: {len(result['failures'])} failures, spent {clock.spent:.0f} s")
    for failure in result["failures"][:12]:
        say("  FAIL", failure)
    for e in result["errors"]:
        say(f"  {e['tokens']:3d} rows: error {e['error']:.2e} (same dtype {e['same_dtype']:.2e})")
    return result


def time_variant(layer, folder, stream, tokens, tile, pdl, steps, replays=15) -> tuple[float, float]:
    one = Launches(layer.shape, tokens, tile, pdl, folder)
    one.poison()
    x = layer.x[:tokens].contiguous()
    torch.cuda.synchronize()

    def record(builder) -> None:
        for i, (_, ids, scale) in enumerate(steps):
            one.record(builder, x, ids, scale, layer.sets[i % len(layer.sets)])

    graph = capture(stream, record)
    times = [t / len(steps) for t in replay_times(graph, stream, replays)]
    if not bool(torch.isfinite(one.buffers["out_ptr"]).all()):
        raise RuntimeError("not finite")
    graph.close()
    return median_and_spread(times)


def steps_of(shape, tokens) -> list:
    rng = np.random.default_rng(tokens)
    return [device_routing(rng, tokens, shape) for _ in range(CHAIN[shape])]


def floor_of(shape, tokens, steps, rates) -> float:
    compute = flops(shape, tokens) / rates["matmul_tflops"] / 1e6
    return float(np.mean([max(touched_bytes(shape, ids) / rates["read_tbs"] / 1e6, compute) for ids, _, _ in steps]))


def sweep(layer, folder, stream, clock, rates, report) -> None:
    for tokens in BENCHED:
        steps = steps_of(layer.shape, tokens)
        floor = floor_of(layer.shape, tokens, steps, rates)
        for tile, pdl in variants(layer.shape, tokens):
            if not clock.has(5):
                say("sweep stopped by the clock at", layer.shape, tokens)
                return
            try:
                us, spread = time_variant(layer, folder, stream, tokens, tile, pdl, steps)
            except Exception as error:
                say("  skipped", tile, f"{type(error).__name__}: {error}"[:100])
                if "CUDA driver" in str(error):
                    raise
                continue
            entry = {"shape": layer.shape, "tokens": tokens, "tile": dataclasses.asdict(tile), "pdl": pdl}
            report["sweep"].append(entry | {"us": us, "spread": spread, "floor_us": floor, "ratio": us / floor})


def peers(layer, clock, rates, report) -> None:
    import peers as p

    for tokens in BENCHED:
        steps = steps_of(layer.shape, tokens)
        floor = floor_of(layer.shape, tokens, steps, rates)
        x = layer.x[:tokens].contiguous()
        found = {}
        for name, make in p.PEERS.items():
            if not clock.has(10):
                return
            try:
                _, ids, scale = steps[0]
                exact = reference(x, ids, scale, layer.sets[0], torch.float64)
                best = None
                for run_one in make(layer, tokens):
                    prepared = [p.prepare(layer.shape, ids, scale) for _, ids, scale in steps]
                    error = relative(run_one(x, prepared[0], layer.sets[0]), exact)
                    if not error < 2e-2:
                        say(f"  peer {name} is wrong: {error:.2e}")
                        continue

                    def chain(run_one=run_one, prepared=prepared, x=x) -> None:
                        for i, plan in enumerate(prepared):
                            run_one(x, plan, layer.sets[i % len(layer.sets)])

                    us, _ = graph_time(chain, len(steps))
                    best = us if best is None else min(best, us)
                found[name] = best
            except Exception as error:
                say(f"  peer {name} failed: {type(error).__name__}: {error}"[:200])
        report["peers"].append({"shape": layer.shape, "tokens": tokens, "floor_us": floor, "us": found})
        say("peers", layer.shape, tokens, {k: v and round(v, 1) for k, v in found.items()})


def table(report: dict) -> list[str]:
    lines = ["shape tokens | floor | best us ratio tile pdl | shipped | peers"]
    for shape in SHAPES:
        for tokens in BENCHED:
            mine = [s for s in report["sweep"] if tuple(s["shape"]) == shape and s["tokens"] == tokens]
            if not mine:
                continue
            other = [q["us"] for q in report["peers"] if tuple(q["shape"]) == shape and q["tokens"] == tokens]
            lines.append(f"{shape} {tokens} | floor {mine[0]['floor_us']:.1f} | peers {other}")
            shipped = f"{mine[0]['us']:.2f} without PDL {mine[1]['us']:.2f}" if len(mine) > 1 else ""
            lines.append(f"   shipped {shipped}")
            for s in sorted(mine, key=lambda s: s["us"])[:7]:
                t = s["tile"]
                short = f"m{t['block_m']} k{t['block_k']} w{t['num_warps']} n{t['block_n']} s{t['num_stages']}"
                short += f" lag{t['lag']} p{t['programs']} pf{t['prefetch']} pdl{int(s['pdl'])}"
                lines.append(f"   {s['us']:.2f} ±{s['spread']:.2f} ratio {s['ratio']:.3f} {short}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cubins", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--phases", default="check,sweep,peers")
    args = parser.parse_args()
    clock, phases = Clock(args.seconds), args.phases.split(",")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name(0), "date": time.strftime("%F")}
    report: dict = {"versions": versions, "checks": [], "sweep": [], "peers": []}
    try:
        rates = report["ceilings"] = ceilings()
        say("ceilings", rates, f"spent {clock.spent:.0f} s")
        for shape in SHAPES:
            layer = Layer(shape, seed=1)
            if "check" in phases:
                report["checks"].append(check(layer, args.cubins, stream, clock))
            if "sweep" in phases:
                sweep(layer, args.cubins, stream, clock, rates, report)
            if "peers" in phases:
                peers(layer, clock, rates, report)
            say(f"{shape} done, spent {clock.spent:.0f} s")
            del layer
            torch.cuda.empty_cache()
    except Exception:
        traceback.print_exc(file=sys.stdout)
    args.json.write_text(json.dumps(report))
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
