"""Check and time the decode kernels on a GPU: projections, routing, append, attention, sampling.

    python benchmarks/decode_ops_bench.py CUBINS --json FILE [--seconds N] [--phases check,linear,route,attention,rest]

Cubins come from decode_ops_cases.py. Every check has fresh random inputs, poisoned outputs and scratch, and a f64
reference. Times are replays of CUDA graphs of a chain of launches over rotating weights or pages (L2 is cold),
divided by the number of launches. Ceilings are measured first, in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path

import decode_ops_cases as cases
import numpy as np
import torch
from cuda.core import Device
from experts_measure import Clock, ceilings, graph_time, relative, say

from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.launcher import capture, load_kernel, median_and_spread, replay_times

COLD_BYTES = 256 * 2**20
CUDA = "cuda"


class Launches:
    """Kernels in a row, with buffers of their own for what is no input of the first that has it."""

    def __init__(self, specs, bench):
        self.stream = bench.stream
        self.specs = tuple(specs)
        self.kernels = [load_kernel(s, compiled.load(bench.folder, s, 90)) for s in self.specs]
        self.wanted = {}
        self.buffers = {}
        for a in (a for spec in self.specs for a in spec.arguments):
            self.wanted[a.name] = a
            if a.role == "state":
                self.buffers[a.name] = torch.zeros(a.shape, dtype=torch.int32, device=CUDA)
            elif a.role in ("out", "scratch"):
                self.buffers[a.name] = torch.empty(a.shape, dtype=getattr(torch, a.dtype), device=CUDA)
        self.none = torch.zeros(64, device=CUDA)

    def poison(self) -> None:
        for name, buffer in self.buffers.items():
            if self.wanted[name].role != "state":
                buffer.fill_(float("nan") if buffer.is_floating_point() else -7)

    def record(self, stream, given: dict[str, torch.Tensor]) -> None:
        for kernel in self.kernels:
            addresses = []
            for a in kernel.spec.arguments:
                tensor = self.buffers.get(a.name, given.get(a.name))
                if tensor is None:
                    assert a.shape == (1,), f"{kernel.spec.name}: {a.name} is missing"
                    tensor = self.none
                elif (
                    tuple(tensor.shape) != a.shape
                    or str(tensor.dtype) != f"torch.{a.dtype}"
                    or not tensor.is_contiguous()
                ):
                    raise ValueError(f"{kernel.spec.name}: {a.name} is {tensor.dtype}{list(tensor.shape)}, wanted {a}")
                addresses.append(tensor.data_ptr())
            kernel.launch(stream, addresses)

    def run(self, given: dict[str, torch.Tensor], repeats: int = 1) -> dict[str, torch.Tensor]:
        """Outputs of the last kernel. Raises when runs differ or state is left."""
        found = []
        for _ in range(repeats):
            self.poison()
            torch.cuda.synchronize()
            self.record(self.stream, given)
            self.stream.sync()
            found.append({a.name: self.buffers[a.name].clone() for a in self.specs[-1].outputs})
        for other in found[1:]:
            for name, value in found[0].items():
                if not same(value, other[name]):
                    raise RuntimeError(f"{self.specs[-1].name}: {name} differs between runs")
        for name, buffer in self.buffers.items():
            if self.wanted[name].role == "state" and int(buffer.abs().max()):
                raise RuntimeError(f"{self.specs[-1].name}: state is not zero after the launch")
        return found[0]

    def time(self, steps: list[dict[str, torch.Tensor]], replays: int = 15) -> tuple[float, float]:
        """Median and spread of a launch's microseconds in a chain."""
        self.poison()
        torch.cuda.synchronize()
        result = replay(self, steps, replays)
        for a in self.specs[-1].outputs:
            out = self.buffers[a.name]
            if a.shape != (1,) and out.is_floating_point() and not bool(torch.isfinite(out).all()):
                raise RuntimeError(f"{self.specs[-1].name}: {a.name} is not finite")
        return result


def replay(launches: Launches, steps: list[dict[str, torch.Tensor]], replays: int = 15) -> tuple[float, float]:
    """Median and spread of microseconds of one step of a graph of them."""

    def record(builder) -> None:
        for step in steps:
            launches.record(builder, step)

    graph = capture(launches.stream, record)
    times = [t / len(steps) for t in replay_times(graph, launches.stream, replays)]
    graph.close()
    return median_and_spread(times)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, NaN included."""
    as_int = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(as_int), b.view(as_int))


class Bench:
    def __init__(self, args):
        self.folder, self.clock = args.cubins, Clock(args.seconds)
        device = Device(0)
        device.set_current()
        self.stream = device.create_stream()
        self.report: dict = {"failures": [], "checks": [], "cells": []}
        self.generator = torch.Generator(CUDA).manual_seed(1)
        self.rng = np.random.default_rng(1)

    def random(self, *shape, scale: float = 1.0, dtype=torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, device=CUDA, dtype=dtype).normal_(0.0, scale, generator=self.generator)

    def fail(self, text: str) -> None:
        self.report["failures"].append(text)
        say("  FAIL", text)

    def error(self, case: str, out, exact, plain) -> None:
        """Relative error, held against twice that of the same arithmetic in the plain dtype."""
        error, allowed = relative(out, exact), 2 * relative(plain, exact)
        self.report["checks"].append({"case": case, "error": error, "allowed": allowed})
        if not error <= max(allowed, 1e-6):
            self.fail(f"{case}: error {error:.2e}, allowed {allowed:.2e}")

    def cell(self, op: str, rows: int, us: float, spread: float, floor: float, bar: float, **more) -> None:
        entry = {"op": op, "rows": rows, "us": us, "spread": spread, "floor_us": floor, "bar_us": bar}
        self.report["cells"].append(entry | more)

    def timed(self, op: str, rows: int, specs, steps, floor: float, bar: float, **more) -> None:
        replays = max(4, min(15, int(3e5 / max(floor * len(steps), 1))))
        try:
            us, spread = Launches(specs, self).time(steps, replays)
        except Exception as error:
            self.fail(f"time {op} {rows} {more}: {type(error).__name__}: {error}"[:300])
            if "CUDA driver" in str(error):
                raise
            return
        self.cell(op, rows, us, spread, floor, bar, **more)


def positions_of(rows: int) -> list[int]:
    return sorted({0, 1 % rows, rows // 2, rows - 1})


def int32(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values, np.int32), device=CUDA)


def rms(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in the dtype of x, or exactly when that is f64."""
    if x.dtype == torch.float64:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.double()
    wide = x.float()
    return gain * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


# -- projections ----------------------------------------------------------------------------------------------------


def linear_given(bench: Bench, name: str, rows: int, w: torch.Tensor) -> dict[str, torch.Tensor]:
    shape, options = cases.LINEARS[name], dict(cases.LINEARS[name].options)
    given = {"x_ptr": bench.random(rows, shape.inputs), "w_ptr": w}
    if "norm_eps" in options:
        given["gain_ptr"] = bench.random(shape.inputs, scale=0.2) + 1
    if "residual" in options:
        given["residual_ptr"] = bench.random(rows, shape.outputs)
    return given


def linear_reference(name: str, given: dict[str, torch.Tensor], dtype) -> torch.Tensor:
    x, w = given["x_ptr"].to(dtype), given["w_ptr"].to(dtype)
    if "gain_ptr" in given:
        x = rms(x, given["gain_ptr"], cases.EPS)
    y = x @ w.T
    if "residual_ptr" in given:
        y = y + given["residual_ptr"].to(dtype)
    return y


def check_linear(bench: Bench) -> None:
    for name, shape in cases.LINEARS.items():
        w = bench.random(shape.outputs, shape.inputs, scale=shape.inputs**-0.5)
        launches = {rows: Launches([cases.linear_case(name, rows)], bench) for rows in cases.BUCKETS}
        alone = linear_given(bench, name, 1, w)
        for rows in cases.BUCKETS:
            given = linear_given(bench, name, rows, w)
            out = launches[rows].run(given, repeats=10)["out_ptr"]
            if rows in (1, 8, 64):
                exact = linear_reference(name, given, torch.float64)
                bench.error(f"linear {name} {rows}", out, exact, linear_reference(name, given, torch.bfloat16))
        first = launches[1].run(alone)["out_ptr"][0]
        for rows in cases.BUCKETS:
            for position in positions_of(rows):
                given = linear_given(bench, name, rows, w) | {k: alone[k] for k in ("gain_ptr",) if k in alone}
                for key in ("x_ptr", "residual_ptr"):
                    if key in given:
                        given[key][position] = alone[key][0]
                if not same(launches[rows].run(given)["out_ptr"][position], first):
                    bench.fail(f"linear {name}: bits of a row differ at {rows} rows, position {position}")


def time_linear(bench: Bench, rates: dict) -> None:
    for name, shape in cases.LINEARS.items():
        size = shape.inputs * shape.outputs * 2
        count = max(2, math.ceil(COLD_BYTES / size))
        stacks = [bench.random(shape.outputs, shape.inputs, scale=shape.inputs**-0.5) for _ in range(count)]
        for rows in cases.BENCHED:
            given = linear_given(bench, name, rows, stacks[0])
            wide = 4 if "out_dtype" in dict(shape.options) else 2
            moved = size + rows * (shape.inputs * 2 + shape.outputs * wide)
            floor = moved / rates["read_tbs"] / 1e6
            bar = 1.06 * floor if name == "head" else floor + 2
            steps = [given | {"w_ptr": w} for w in stacks * (1 if count > 8 else 2)]
            for tile, pdl in cases.linear_variants(name, rows):
                if not bench.clock.has(8):
                    say("linear stopped by the clock at", name, rows)
                    return
                spec = cases.linear_case(name, rows, tile, pdl)
                more = {"tile": dataclasses.asdict(tile), "pdl": pdl}
                bench.timed(f"linear {name}", rows, [spec], steps, floor, bar, **more)
            x, outs = given["x_ptr"], []

            def chain(x=x, stacks=stacks, outs=outs) -> None:
                outs[:] = [torch.nn.functional.linear(x, w) for w in stacks]

            us, spread = graph_time(chain, len(stacks))
            bench.cell(f"linear {name}", rows, us, spread, floor, bar, peer="torch linear (no norm)")
        say(f"linear {name} done, spent {bench.clock.spent:.0f} s")


# -- routing --------------------------------------------------------------------------------------------------------


def route_given(bench: Bench, name: str, rows: int) -> dict[str, torch.Tensor]:
    hidden, config, options = cases.ROUTERS[name]
    given = {
        "x_ptr": bench.random(rows, hidden, scale=3.0),
        "gain_ptr": bench.random(hidden, scale=0.2) + 1,
        "w_ptr": bench.random(config.experts, hidden, scale=2 * hidden**-0.5),
        "position_ptr": int32(np.arange(rows)),
    }
    if "bias" in options:
        given["bias_ptr"] = bench.random(config.experts)
    if "selection_bias" in options:
        given["selection_bias_ptr"] = bench.random(config.experts, dtype=torch.float32, scale=0.1)
    return given


def route_reference(config, given: dict[str, torch.Tensor], normed: torch.Tensor):
    """Exact scores of normed rows, and what is chosen by; f64."""
    logits = normed.double() @ given["w_ptr"].double().T
    if "bias_ptr" in given:
        logits = logits + given["bias_ptr"].double()
    scores = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "topk_softmax": lambda x: x}[config.score](
        logits
    )
    choice = scores + given["selection_bias_ptr"].double() if "selection_bias_ptr" in given else scores
    if config.groups_kept < config.groups:
        by_group = choice.view(choice.shape[0], config.groups, -1)
        kept = by_group.topk(2, -1).values.sum(-1).topk(config.groups_kept, -1).indices
        mask = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=CUDA).scatter_(1, kept, True)
        choice = torch.where(mask[:, :, None], by_group, -math.inf).flatten(1)
    return scores, choice


def route_weights(config, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = scores.gather(1, ids.long())
    if config.score == "topk_softmax":
        weights = weights.softmax(-1)
    if config.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * config.scaling_factor


def check_route(bench: Bench) -> None:
    counts = [("qwen3", rows) for rows in (*cases.BUCKETS, 256)] + [(name, 9) for name in cases.ROUTERS]
    for name, rows in counts:
        config = cases.ROUTERS[name][1]
        given = route_given(bench, name, rows)
        out = Launches([cases.route_case(name, rows)], bench).run(given, repeats=10)
        # From the kernel's own normed rows: f32 sums of another order round a few of them otherwise.
        scores, choice = route_reference(config, given, out["normed_ptr"])
        norm_error = relative(out["normed_ptr"], rms(given["x_ptr"], given["gain_ptr"], cases.EPS).double())
        ids = out["ids_ptr"].long()
        case = f"route {name} {rows}"
        if int(ids.min()) < 0 or int(ids.max()) >= config.experts:
            bench.fail(f"{case}: ids out of range")
            continue
        # Each choice is as good as the exact one, up to f32 rounding of near ties.
        loss = (choice.topk(config.top_k, -1).values - choice.gather(1, ids)).abs().max() / scores.abs().max()
        distinct = all(len(set(row)) == config.top_k for row in ids.tolist())
        error = relative(out["scale_ptr"], route_weights(config, scores, ids))
        entry = {"error": error, "loss": float(loss), "normed": norm_error, "distinct": distinct}
        bench.report["checks"].append({"case": case} | entry)
        if not (float(loss) < 1e-5 and distinct and error < 1e-5 and norm_error < 1e-3):
            bench.fail(f"{case}: {entry}")
    alone = route_given(bench, "qwen3", 1)
    first = Launches([cases.route_case("qwen3", 1)], bench).run(alone)
    for rows in cases.BUCKETS:
        launch = Launches([cases.route_case("qwen3", rows)], bench)
        for position in positions_of(rows):
            given = route_given(bench, "qwen3", rows) | {k: alone[k] for k in ("gain_ptr", "w_ptr")}
            given["x_ptr"][position] = alone["x_ptr"][0]
            if rows > 2:
                given["x_ptr"][position - 1] = float("nan")
                given["position_ptr"][(position + 1) % rows] = -1
            out = launch.run(given)
            if not all(same(out[k][position], first[k][0]) for k in first):
                bench.fail(f"route: bits of a row differ at {rows} rows, position {position}")
            if rows > 2 and (
                bool((out["ids_ptr"][(position + 1) % rows] != -1).any())
                or out["ids_ptr"][position - 1].tolist() != list(range(8))
            ):
                bench.fail(f"route: dead or NaN row at {rows} rows, position {position}")


def time_route(bench: Bench, rates: dict) -> None:
    hidden, config, _ = cases.ROUTERS["qwen3"]
    count = 256
    stacks = bench.random(count, config.experts, hidden, scale=hidden**-0.5)
    for rows in cases.BENCHED:
        given = route_given(bench, "qwen3", rows)
        steps = [given | {"w_ptr": w} for w in stacks]
        floor = config.experts * hidden * 2 / rates["read_tbs"] / 1e6
        for tile, pdl in cases.route_variants(rows):
            if not bench.clock.has(5):
                return
            bench.timed(
                "route",
                rows,
                [cases.route_case("qwen3", rows, tile, pdl)],
                steps,
                floor,
                5.0,
                tile=dataclasses.asdict(tile),
                pdl=pdl,
            )
    say(f"route done, spent {bench.clock.spent:.0f} s")


# -- append and attention -------------------------------------------------------------------------------------------


def paging(bench: Bench, pages: int, rows: int, longest: int) -> dict[str, torch.Tensor]:
    """Table of 64 sequences over shuffled pages (page 0 stands for none), and rows at random places."""
    needed = -(-longest // cases.PAGE)
    table = np.zeros((64, cases.LONGEST // cases.PAGE), np.int32)
    table[:, :needed] = bench.rng.permutation(pages - 1)[: 64 * needed].reshape(64, needed) + 1
    sequence = bench.rng.permutation(64)[:rows]
    return {
        "table_ptr": int32(table),
        "position_ptr": int32(bench.rng.integers(0, longest, rows)),
        "sequence_ptr": int32(sequence),
    }


def gathered(pages: torch.Tensor, table: torch.Tensor, sequence: int, keys: int) -> torch.Tensor:
    """Keys or values of a sequence, f64 ``[kv_heads, keys, dim]``."""
    used = table[sequence, : -(-keys // cases.PAGE)].long()
    stack = pages[used].transpose(0, 1).reshape(cases.KV_HEADS, -1, cases.DIM)
    return stack[:, :keys].double()


def attention_reference(given: dict[str, torch.Tensor], dtype, window=None, **_: object) -> torch.Tensor:
    rows = given["position_ptr"].shape[0]
    out = torch.zeros(rows, cases.HEADS, cases.DIM, dtype=torch.float64, device=CUDA)
    for row, (position, sequence) in enumerate(
        zip(given["position_ptr"].tolist(), given["sequence_ptr"].tolist(), strict=True)
    ):
        if position < 0:
            continue
        k, v = (gathered(given[f"{x}_pages_ptr"], given["table_ptr"], sequence, position + 1) for x in "kv")
        low = 0 if window is None else max(0, position - window + 1)
        k, v = k[:, low:].to(dtype), v[:, low:].to(dtype)
        q = given["q_ptr"][row].view(cases.KV_HEADS, -1, cases.DIM).to(dtype)
        score = (q @ k.transpose(1, 2)).to(torch.float64 if dtype == torch.float64 else torch.float32) * cases.DIM**-0.5
        if "sink_ptr" in given:
            sink = given["sink_ptr"].view(cases.KV_HEADS, -1, 1).to(score.dtype)
            p = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
        else:
            p = score.softmax(-1)
        out[row] = (p.to(dtype) @ v).double().view(cases.HEADS, cases.DIM)
    return out.view(rows, -1)


def attention_given(bench: Bench, pools, rows: int, longest: int = 2048, **options) -> dict[str, torch.Tensor]:
    given = paging(bench, cases.CHECK_PAGES, rows, longest)
    given |= {"k_pages_ptr": pools[0], "v_pages_ptr": pools[1], "q_ptr": bench.random(rows, cases.HEADS * cases.DIM)}
    if options.get("sink"):
        given["sink_ptr"] = bench.random(cases.HEADS)
    return given


def check_attention(bench: Bench) -> None:
    # Scores of a few units, so that the softmax is neither flat nor a maximum.
    pools = [bench.random(cases.CHECK_PAGES, cases.KV_HEADS, cases.PAGE, cases.DIM, scale=s) for s in (1.5, 1.0)]
    for pool in pools:
        pool[0] = float("nan")
    plain = {"window": None, "sink": False}
    launches = {rows: Launches(cases.attention_case(rows, cases.CHECK_PAGES), bench) for rows in cases.BUCKETS}
    tests = [(f"attention {rows}", launches[rows], rows, {}) for rows in (1, 8, 64)]
    for options in cases.CHECKED_ATTENTION:
        tests.append(
            (f"attention {options}", Launches(cases.attention_case(8, cases.CHECK_PAGES, **options), bench), 8, options)
        )
    for case, launch, rows, options in tests:
        given = attention_given(bench, pools, rows, **options)
        if rows > 1:
            given["position_ptr"][1] = -1
            given["position_ptr"][0] = 2047
        if "rows_of_sequence" in options:
            given["sequence_ptr"] = int32([5] * 4 + [9] * 4)
            given["position_ptr"] = int32([1000, 1001, 1002, 1003, 511, 512, 513, 514])
        out = launch.run(given, repeats=10)["out_ptr"]
        exact = attention_reference(given, torch.float64, **options)
        bench.error(case, out, exact, attention_reference(given, torch.bfloat16, **options).bfloat16())
        if rows > 1 and "rows_of_sequence" not in options and bool((out[1] != 0).any()):
            bench.fail(f"{case}: a row that is not there is not 0")
    for options, base in ((plain, launches), (cases.CHECKED_ATTENTION[0], None)):
        one = base[1] if base else Launches(cases.attention_case(1, cases.CHECK_PAGES, **options), bench)
        for place in (1500, 37):
            alone = attention_given(bench, pools, 1, **options)
            alone["position_ptr"][0] = place
            first = one.run(alone)["out_ptr"][0]
            for rows in cases.BUCKETS if base else (8,):
                launch = base[rows] if base else Launches(cases.attention_case(8, cases.CHECK_PAGES, **options), bench)
                for position in positions_of(rows):
                    given = attention_given(bench, pools, rows, **options) | {
                        k: alone[k] for k in ("table_ptr", "sink_ptr") if k in alone
                    }
                    for key in ("q_ptr", "position_ptr", "sequence_ptr"):
                        given[key][position] = alone[key][0]
                    if not same(launch.run(given)["out_ptr"][position], first):
                        where = f"{rows} rows, position {position}, place {place}"
                        bench.fail(f"attention {options}: bits of a row differ at {where}")
    # Rows of one sequence taken together have the bits of rows alone.
    given = attention_given(bench, pools, 8)
    given["sequence_ptr"], given["position_ptr"] = (
        int32([5] * 4 + [9] * 4),
        int32([1000, 1001, 1002, 1003, 511, 512, 513, 514]),
    )
    together = Launches(cases.attention_case(8, cases.CHECK_PAGES, rows_of_sequence=4), bench).run(given)["out_ptr"]
    if not same(together, launches[8].run(given)["out_ptr"]):
        bench.fail("attention: bits of rows of one sequence taken together differ")


def check_append(bench: Bench) -> None:
    half = cases.DIM // 2
    angle = torch.arange(cases.LONGEST, device=CUDA)[:, None] * (1e6 ** (-torch.arange(half, device=CUDA) / half))
    cos, sin = angle.double().cos().float(), angle.double().sin().float()
    gains = {"q_gain_ptr": bench.random(cases.DIM, scale=0.2) + 1, "k_gain_ptr": bench.random(cases.DIM, scale=0.2) + 1}
    pools = [bench.random(cases.CHECK_PAGES, cases.KV_HEADS, cases.PAGE, cases.DIM) for _ in range(2)]
    kept, first = None, None
    for rows in cases.BUCKETS:
        given = (
            paging(bench, cases.CHECK_PAGES, rows, 2048)
            | gains
            | {"cos_ptr": cos.contiguous(), "sin_ptr": sin.contiguous()}
        )
        given["qkv_ptr"] = bench.random(rows, (cases.HEADS + 2 * cases.KV_HEADS) * cases.DIM)
        if kept is None:
            kept = given
        else:
            given |= {"table_ptr": kept["table_ptr"]}
            for key in ("qkv_ptr", "position_ptr", "sequence_ptr"):
                given[key][rows // 2] = kept[key][0]
            given["position_ptr"][0] = -1
        new = [p.clone() for p in pools]
        launch = Launches([cases.append_case(rows, cases.CHECK_PAGES)], bench)
        out = launch.run(given | {"k_pages_ptr": new[0], "v_pages_ptr": new[1]})["q_ptr"]
        wanted = [p.clone() for p in pools]
        queries = torch.zeros_like(out)
        for row, (p, s) in enumerate(zip(given["position_ptr"].tolist(), given["sequence_ptr"].tolist(), strict=True)):
            if p < 0:
                continue
            q, k, v = given["qkv_ptr"][row].view(-1, cases.DIM).split([cases.HEADS, cases.KV_HEADS, cases.KV_HEADS])

            def turn(x, gain, p=p):
                x = rms(x, gain, cases.EPS).float()
                low, high = x[:, :half], x[:, half:]
                return torch.cat([low * cos[p] - high * sin[p], high * cos[p] + low * sin[p]], -1).bfloat16()

            page = int(given["table_ptr"][s, p // cases.PAGE])
            wanted[0][page, :, p % cases.PAGE] = turn(k, gains["k_gain_ptr"])
            wanted[1][page, :, p % cases.PAGE] = v
            queries[row] = turn(q, gains["q_gain_ptr"]).flatten()
        errors = (
            [relative(a, b.double()) for a, b in ((out, queries), (new[0], wanted[0]), (new[1], wanted[1]))]
            if rows > 1
            else [relative(out, queries.double())]
        )
        bench.report["checks"].append({"case": f"append {rows}", "errors": errors})
        # A difference in the last place of bf16 in few elements: the sum of squares goes in another order.
        if not all(e < 1e-3 for e in errors):
            bench.fail(f"append {rows}: {errors}")
        if first is None:
            first = out[0]
        elif not same(out[rows // 2], first):
            bench.fail(f"append: bits of a row differ at {rows} rows")


def time_attention(bench: Bench, rates: dict) -> None:
    pools = [
        torch.empty(cases.BENCH_PAGES, cases.KV_HEADS, cases.PAGE, cases.DIM, device=CUDA, dtype=torch.bfloat16)
        for _ in range(2)
    ]
    for pool in pools:
        pool.normal_(generator=bench.generator)
    needed = cases.LONGEST // cases.PAGE
    for rows in cases.BENCHED:
        for length in cases.LENGTHS:
            size = rows * length * cases.KV_HEADS * cases.DIM * 2 * 2
            count = max(2, min(128, math.ceil(COLD_BYTES / size)))
            count = 1 if size > 2e9 else count
            used, order = length // cases.PAGE, bench.rng.permutation(cases.BENCH_PAGES - 1) + 1
            steps = []
            for i in range(count):
                table = np.zeros((64, needed), np.int32)
                start = i * rows * used % max(1, len(order) - rows * used + 1)
                table[:rows, :used] = order[start : start + rows * used].reshape(rows, used)
                steps.append({
                    "table_ptr": int32(table), "k_pages_ptr": pools[0], "v_pages_ptr": pools[1],
                    "q_ptr": bench.random(rows, cases.HEADS * cases.DIM), "position_ptr": int32([length - 1] * rows),
                    "sequence_ptr": int32(np.arange(rows)),
                })  # fmt: skip
            floor = size / rates["read_tbs"] / 1e6
            for schedule, pdl in cases.schedules(rows):
                if not bench.clock.has(5):
                    say("attention stopped by the clock at", rows, length)
                    return
                specs = cases.attention_case(rows, cases.BENCH_PAGES, schedule, pdl=pdl)
                more = {"length": length, "schedule": dataclasses.asdict(schedule), "pdl": pdl}
                bench.timed(f"attention {length}", rows, specs, steps, floor, 1.15 * floor + 4, **more)
            if not bench.clock.has(5):
                return
            launch = Launches(cases.attention_case(rows, cases.BENCH_PAGES), bench)
            launch.run(steps[0])
            launch.kernels = launch.kernels[1:]
            us, spread = replay(launch, steps[:1] * len(steps))
            bench.cell(f"combine {length}", rows, us, spread, 0.0, 0.0)
        say(f"attention {rows} rows done, spent {bench.clock.spent:.0f} s")


def time_append(bench: Bench) -> None:
    half = cases.DIM // 2
    tables = {
        "cos_ptr": torch.ones(cases.LONGEST, half, device=CUDA),
        "sin_ptr": torch.zeros(cases.LONGEST, half, device=CUDA),
    }
    shape = (cases.BENCH_PAGES, cases.KV_HEADS, cases.PAGE, cases.DIM)
    tables |= {f"{x}_pages_ptr": torch.empty(shape, device=CUDA, dtype=torch.bfloat16) for x in "kv"}
    tables |= {"q_gain_ptr": bench.random(cases.DIM), "k_gain_ptr": bench.random(cases.DIM)}
    for rows in cases.BENCHED:
        given = tables | paging(bench, cases.BENCH_PAGES, rows, 2048)
        given["qkv_ptr"] = bench.random(rows, (cases.HEADS + 2 * cases.KV_HEADS) * cases.DIM)
        bench.timed("append", rows, [cases.append_case(rows, cases.BENCH_PAGES)], [given] * 32, 0.0, 0.0)


# -- sampling -------------------------------------------------------------------------------------------------------


def sample_given(bench: Bench, rows: int, kind: str) -> dict[str, torch.Tensor]:
    full = lambda value, dtype=torch.float32: torch.full((rows,), value, device=CUDA, dtype=dtype)  # noqa: E731
    # Peaked as a language model's: a few tokens hold most of the probability.
    logits = bench.random(rows, cases.VOCABULARY, dtype=torch.float32, scale=2.0)
    logits[:, ::1001] += 8
    return {
        "logits_ptr": logits,
        "position_ptr": int32(bench.rng.integers(0, 1000, rows)),
        "sequence_ptr": int32(bench.rng.integers(0, 1000, rows)),
        "seed_ptr": int32(bench.rng.integers(-(2**31), 2**31, (rows, 2))),
        "temperature_ptr": full(0.0 if kind == "greedy" else 0.8),
        "top_k_ptr": full(50 if kind == "top_k" else 0, torch.int32),
        "top_p_ptr": full(0.9 if kind == "top_p" else 1.0),
    }


def check_sample(bench: Bench) -> None:
    from moe_jax.pallas_kernels.sample.reference import sample as oracle

    launch = {rows: Launches(cases.sample_specs(rows, cases.VOCABULARY, pdl=True), bench) for rows in (1, 8, 64)}
    for kind in ("greedy", "plain", "top_k", "top_p"):
        given = sample_given(bench, 8, kind)
        tokens = launch[8].run(given, repeats=10)["token_ptr"].tolist()
        wanted = oracle(*(given[k].cpu().numpy() for k in given))
        off = [(t, w) for t, w in zip(tokens, np.asarray(wanted).tolist(), strict=True) if t != w]
        bench.report["checks"].append({"case": f"sample {kind}", "differing": len(off)})
        if off:
            bench.fail(f"sample {kind}: {off}")
        for rows, position in ((1, 0), (64, 63), (64, 10)):
            mates = sample_given(bench, rows, "plain")
            for key in mates:
                mates[key][position] = given[key][3]
            if launch[rows].run(mates)["token_ptr"][position].item() != tokens[3]:
                bench.fail(f"sample {kind}: token differs at {rows} rows")


def time_sample(bench: Bench) -> None:
    for rows in cases.BENCHED:
        for kind in ("greedy", "plain", "top_k", "top_p"):
            given = sample_given(bench, rows, kind)
            specs = cases.sample_specs(rows, cases.VOCABULARY, pdl=True)
            bench.timed(f"sample {kind}", rows, specs, [given] * 8, 0.0, 0.0)


# -------------------------------------------------------------------------------------------------------------------


def table(report: dict) -> list[str]:
    lines = [f"failures: {len(report['failures'])}", *(f"  {f}"[:160] for f in report["failures"][:12])]
    groups: dict[tuple, list[dict]] = {}
    for cell in report["cells"]:
        groups.setdefault((cell["op"], cell["rows"]), []).append(cell)
    for (op, rows), found in groups.items():
        ours = [c for c in found if "peer" not in c]
        peers = " ".join(f"{c['peer']} {c['us']:.1f}" for c in found if "peer" in c)
        if not ours:
            continue
        shipped, best = ours[0], min(ours, key=lambda c: c["us"])
        changed = {**best.get("tile", {}), **best.get("schedule", {})}
        base = {**shipped.get("tile", {}), **shipped.get("schedule", {})}
        short = " ".join(f"{k}={v}" for k, v in changed.items() if base.get(k) != v)
        others = [f"{c['us']:.2f}" for c in ours[1:3]] if len(ours) > 2 else []
        lines.append(
            f"{op:16s} {rows:3d} floor {shipped['floor_us']:7.2f} bar {shipped['bar_us']:7.2f} | {shipped['us']:7.2f} "
            f"±{shipped['spread']:.2f} (then {' '.join(others)}) | best {best['us']:7.2f} {short} "
            f"pdl{int(best.get('pdl', True))} | {peers}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cubins", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--phases", default="check,linear,route,attention,rest")
    args = parser.parse_args()
    phases = args.phases.split(",")
    # JAX computes a reference only; the device's memory is torch's here.
    os.environ["JAX_PLATFORMS"] = "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device=CUDA)
    bench = Bench(args)
    bench.report["versions"] = {
        "torch": torch.__version__, "device": torch.cuda.get_device_name(0), "date": time.strftime("%F"),
    }  # fmt: skip
    rates = bench.report["ceilings"] = ceilings()
    say("ceilings", rates, f"spent {bench.clock.spent:.0f} s")
    work = {
        "check": (check_linear, check_route, check_append, check_attention, check_sample),
        "route": (lambda b: time_route(b, rates),),
        "linear": (lambda b: time_linear(b, rates),),
        "attention": (lambda b: time_attention(b, rates),),
        "rest": (time_append, time_sample),
    }
    for phase, functions in work.items():
        for function in functions if phase in phases else ():
            try:
                function(bench)
            except Exception as error:
                bench.fail(f"{phase}: {type(error).__name__}: {error}"[:300])
                traceback.print_exc(file=sys.stdout)
                if "CUDA" in str(error):
                    break
            say(f"{phase} {getattr(function, '__name__', '')} spent {bench.clock.spent:.0f} s")
            torch.cuda.empty_cache()
            args.json.write_text(json.dumps(bench.report))
    print("\n".join(table(bench.report)))


if __name__ == "__main__":
    main()
