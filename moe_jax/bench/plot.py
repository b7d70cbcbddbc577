"""The roofline of a report: throughput against operations per byte, under the two measured ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_jax.bench.table import title
from moe_jax.errors import CannotServe


def figure_class() -> Any:
    """matplotlib's ``Figure``; asked for before anything is measured.

    Raises:
        CannotServe: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CannotServe(
            "no plot", where="--plot", got=f"no matplotlib ({error})", wanted="pip install matplotlib, or no --plot"
        ) from error
    return Figure


def roofline(report: Mapping[str, Any], path: Path) -> None:
    """Draw the report's expert layers into a PNG: ours filled, the fastest peer hollow.

    Operations per byte count each distinct expert's weights once, as the floor does.

    Raises:
        CannotServe: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    cells = [cell for cell in report["cells"] if cell["op"] == "ffn"]
    read, matmul = report["read_tbs"], report["matmul_tflops"]
    ridge = matmul / read
    ends = [*(cell["flops"] / cell["bytes"] for cell in cells), ridge]
    left, right = min(ends) / 2, max(ends) * 2
    axes.plot([left, ridge, right], [left * read, matmul, matmul], color="black", linewidth=1)
    axes.annotate(f"{read:.2f} TB/s read", (left, left * read), textcoords="offset points", xytext=(6, 12))
    axes.annotate(f"{matmul:.0f} TFLOP/s", (right, matmul), textcoords="offset points", xytext=(-80, 6))
    for number, name in enumerate(dict.fromkeys(title(cell) for cell in cells)):
        mine = [cell for cell in cells if title(cell) == name]
        color = f"C{number}"
        ours = [(c["flops"] / c["bytes"], c["tflops"]) for c in mine if c["us"] is not None]
        peers = [(c["flops"] / c["bytes"], c["flops"] / min(c["peers"].values()) / 1e6) for c in mine if c["peers"]]
        axes.plot(*_columns(ours), "o", color=color, label=name)
        axes.plot(*_columns(peers), "o", color=color, markerfacecolor="none", label=f"{name}, fastest peer")
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP per byte of the weights read", ylabel="TFLOP/s",
        title=f"Expert layer, bf16, {report['device']}",
    )  # fmt: skip
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
