"""A report as rows of text: for a terminal, and as Markdown for the README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_jax.bench.cases import Shape, name_of
from moe_jax.errors import InvalidArgument

BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"
HEADINGS = ("H, I, E, k", "rows", "floor µs", "µs", "÷ floor", "TFLOP/s", "back end", "fastest peer", "times as fast")
OTHER_HEADINGS = ("operation", "shape", "rows", "floor µs", "µs", "÷ floor")


def rows_of(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row of text for each cell of the expert layer, under `HEADINGS`."""
    return [_row(cell) for cell in report["cells"] if cell["op"] == "ffn"]


def _row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    shape = ", ".join(map(str, cell["shape"]))
    head = (shape, f"{cell['tokens']:,}", f"{cell['floor_us']:.1f}")
    peers = cell["peers"]
    peer = min(peers, key=peers.get) if peers else None
    rival = "–" if peer is None else f"{peer} {peers[peer]:.1f}"
    if cell["us"] is None:
        return (*head, "–", "–", "–", "none can serve", rival, "–")
    mine = (
        f"{cell['us']:.1f} ± {cell['spread']:.1f}",
        f"{cell['ratio']:.2f}",
        f"{cell['tflops']:.0f}",
        cell["backend"],
    )
    return (*head, *mine, rival, "–" if peer is None else f"{peers[peer] / cell['us']:.2f}")


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
    """Device, ceilings, versions and date in one sentence."""
    named = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    runs = report.get("runs", [report])
    read = _range([run["read_tbs"] for run in runs], ".2f")
    matmul = _range([run["matmul_tflops"] for run in runs], ".0f")
    parts = [f"Measured on one {report['device']}, {report['date']}, bf16: streaming read {read} TB/s,"]
    parts.append(f"8192³ matmul {matmul} TFLOP/s, in the {'same run' if len(runs) == 1 else 'runs of the cells'}.")
    return f"{' '.join(parts)} {named}."


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
    """Reports of one device and one set of versions as one; of a cell that is in several, the last.

    Ceilings are the means over the runs; each cell keeps those that its floor was computed with.

    Raises:
        InvalidArgument: no report, or reports of different devices or versions.
    """
    if not reports:
        raise InvalidArgument("reports", where="merged", got="none", wanted="at least one")
    first = reports[0]
    for report in reports[1:]:
        for name in ("device", "capability", "versions"):
            if report[name] != first[name]:
                raise InvalidArgument(name, where="merged", got=report[name], wanted=f"{first[name]}, as the first")
    cells = {(c["op"], *c["shape"], c["tokens"]): c for report in reports for c in report["cells"]}
    runs = [{name: r[name] for name in ("date", "seed", "read_tbs", "matmul_tflops", "stopped")} for r in reports]
    rates = {name: sum(r[name] for r in reports) / len(reports) for name in ("read_tbs", "matmul_tflops")}
    return {**first, **rates, "date": max(r["date"] for r in reports), "runs": runs, "cells": list(cells.values())}


def title(cell: Mapping[str, Any]) -> str:
    """Shape of a cell by its name."""
    return name_of(Shape(*cell["shape"]))
