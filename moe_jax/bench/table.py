"""A report as rows of text: for a terminal, and as Markdown for the README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_jax.bench.cases import Ceilings, Shape, name_of
from moe_jax.errors import InvalidArgument
from moe_jax.pallas_kernels.linear.heuristics import MAX_ROWS

BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"
HEADINGS = (
    *("H, I, E, k", "rows", "floor µs", "engine µs", "in jit µs"),
    *("÷ floor", "TFLOP/s", "fastest peer µs", "times as fast"),
)
OTHER_HEADINGS = ("operation", "shape", "rows", "floor µs", "µs", "÷ floor")
# What a report calls our contenders; a test compares. A user gets the first by an engine, the others by `grouped_moe`.
ENGINE, JIT = "device graph", "jit: "
NOTED = "†"


def rows_of(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row of text for each cell of the expert layer, under `HEADINGS`.

    What follows "in jit µs" is of the faster of the two ways in which a user can have the layer. An engine never
    launches it for more than `MAX_ROWS` rows, so raw launches of more are in the report and not here.
    """
    return [_row(cell) for cell in report["cells"] if cell["op"] == "ffn"]


def _row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    shape = ", ".join(map(str, cell["shape"]))
    head = (shape, f"{cell['tokens']:,}", f"{cell['floor_us']:.1f}")
    engine, jit = _ours(cell)
    peers = cell["peers"]
    peer = min(peers, key=peers.get) if peers else None
    rival = "–" if peer is None else f"{peer} {peers[peer]:.1f}"
    times = [one["us"] for one in (engine, jit) if one is not None]
    if not times:
        return (*head, "–", "–", "–", "–", rival, "–")
    us = min(times)
    mine = (
        "–" if engine is None else _time(engine),
        "–" if jit is None else f"{_time(jit)} ({jit['name'].removeprefix(JIT)}){f' {NOTED}' * bool(jit['note'])}",
        f"{us / cell['floor_us']:.2f}",
        f"{cell['flops'] / us / 1e6:.0f}",
    )
    return (*head, *mine, rival, "–" if peer is None else f"{peers[peer] / us:.3f}")


def _ours(cell: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """What was measured of an engine's launches, if an engine makes them, and of the fastest back end inside jit."""
    engine = [one for one in cell["measured"] if one["name"] == ENGINE and cell["tokens"] <= MAX_ROWS]
    jit = [one for one in cell["measured"] if one["name"].startswith(JIT)]
    return next(iter(engine), None), min(jit, key=lambda one: one["us"]) if jit else None


def _time(one: Mapping[str, Any]) -> str:
    return f"{one['us']:.1f} ± {one['spread']:.1f}"


def other_rows_of(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row of text for each cell of another operation, under `OTHER_HEADINGS`."""
    return [
        (
            cell["op"],
            " × ".join(map(str, cell["shape"])),
            f"{cell['tokens']:,}",
            f"{cell['floor_us']:.1f}",
            f"{cell['us']:.1f}",
            f"{cell['us'] / cell['floor_us']:.2f}",
        )
        for cell in report["cells"]
        if cell["op"] != "ffn"
    ]


def facts(report: Mapping[str, Any]) -> str:
    """Device, number of runs, date, ceilings and versions in a few words, what is to be known of marked cells, and what
    built the kernels.
    """
    named = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    runs = report.get("runs", [report])
    device = f"{'an' if report['device'].startswith('NVIDIA') else 'a'} {report['device']}"
    count = "one run" if len(runs) == 1 else f"{len(runs)} runs"
    read = _range([run["read_tbs"] for run in runs], ".2f")
    matmul = _range([run["matmul_tflops"] for run in runs], ".0f")
    parts = [f"Measured on {device} in {count}, {report['date']}, bf16: streaming read {read} TB/s, 8192³ matmul"]
    parts.append(f"{matmul} TFLOP/s. {named}.")
    layers = [_ours(cell)[1] for cell in report["cells"] if cell.get("op") == "ffn"]
    if notes := dict.fromkeys(one["note"] for one in layers if one is not None and one["note"]):
        parts.append(f"{NOTED}: {'; '.join(notes)}.")
    return " ".join([*parts, built_by(report)]).rstrip()


def built_by(report: Mapping[str, Any]) -> str:
    """What built the kernels of each contender, in one sentence: not always the Triton that is among the versions. ""
    where no cell has it recorded.
    """
    builders: dict[str, Counter[str]] = {}
    for one in (one for cell in report["cells"] for one in cell.get("measured", ()) if one["builder"]):
        builders.setdefault(one["name"], Counter())[one["builder"]] += 1
    named: dict[str, list[str]] = {}
    for name, found in builders.items():
        for builder, count in found.items():
            some = f" in {count} cell{'s' * (count > 1)}" if len(found) > 1 else ""
            named.setdefault(builder, []).append(f"{name}{some}")
    if not named:
        return ""
    parts = [f"{builder} ({', '.join(names)})" for builder, names in named.items()]
    return f"Kernels were built, as recorded, by {' and '.join(parts)}; those inside jit by the versions named."


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def markdown(report: Mapping[str, Any]) -> str:
    """The tables of a report, and what they were measured on."""
    parts = [_table(HEADINGS, rows_of(report))]
    if others := other_rows_of(report):
        parts.append(_table(OTHER_HEADINGS, others))
    return "\n\n".join([*parts, facts(report)])


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def inserted(text: str, report: Mapping[str, Any]) -> str:
    """A document with the tables of a report between its two marker comments.

    Raises:
        InvalidArgument: the document has not each marker once, in order.
    """
    at, to = text.find(BEGIN), text.find(END)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or at > to:
        got = f"{text.count(BEGIN)} and {text.count(END)} markers"
        raise InvalidArgument("markers", where="document", got=got, wanted=f"{BEGIN} and then {END}, each once")
    return f"{text[: at + len(BEGIN)]}\n{markdown(report)}\n{text[to:]}"


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Reports of one kind of device and one set of versions as one; of a cell that is in several, the last.

    A package that some runs had and others did not is no difference: what runs without it does not use it.
    ``runs`` are those that a cell is left of; each cell keeps the ceilings that its floor was computed with, and those
    of the whole are the means over the runs.

    Raises:
        InvalidArgument: no report, or reports of different devices or versions.
    """
    if not reports:
        raise InvalidArgument("reports", where="merged", got="none", wanted="at least one")
    first = reports[0]
    versions = dict(first["versions"])
    for report in reports[1:]:
        for name in ("device", "capability"):
            if report[name] != first[name]:
                raise InvalidArgument(name, where="merged", got=report[name], wanted=f"{first[name]}, as the first")
        for package, version in report["versions"].items():
            if (wanted := versions.setdefault(package, version)) != version:
                where = f"merged, versions of {package}"
                raise InvalidArgument("version", where=where, got=version, wanted=f"{wanted}, as in another report")
    cells = {(c["op"], *c["shape"], c["tokens"]): c for report in reports for c in report["cells"]}
    left = [cell.get("ceilings") for cell in cells.values()]
    names = ("date", "seed", *Ceilings._fields, "stopped")
    found = [{name: one[name] for name in names} for report in reports for one in report.get("runs", [report])]
    runs = [one for one in found if {name: one[name] for name in Ceilings._fields} in left] or found
    rates = {name: sum(one[name] for one in runs) / len(runs) for name in Ceilings._fields}
    told = {"versions": versions, "runs": runs, "cells": list(cells.values())}
    return {**first, **rates, "date": max(r["date"] for r in reports), **told}


def title(cell: Mapping[str, Any]) -> str:
    """Shape of a cell by its name."""
    return name_of(Shape(*cell["shape"]))
