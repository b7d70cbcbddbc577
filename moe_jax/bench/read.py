"""The streaming read that the read rate is measured with."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_jax.pallas_kernels.spec import Argument, KernelSpec

WORDS = 2**29  # int32: 2 GiB
LOOPS = 4
SIZES = ((2048, 4), (4096, 8), (8192, 8))  # words a program reads at once, warps


@triton.jit
def _read(data_ptr, sink_ptr, SIZE: tl.constexpr, LOOPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SIZE * LOOPS
    total = tl.zeros([SIZE], tl.int32)
    for i in tl.static_range(LOOPS):
        total ^= tl.load(data_ptr + start + i * SIZE + tl.arange(0, SIZE))
    if tl.sum(total, 0) == 123456789:  # so that the loads are not dropped
        tl.store(sink_ptr, 1)


def read_specs() -> list[KernelSpec]:
    """Launches that read int32 ``[WORDS]`` once, each in another way; the fastest is the read rate."""
    return [
        KernelSpec(
            name="stream_read",
            function=_read,
            arguments=(Argument("data_ptr", "int32", (WORDS,), "in"), Argument("sink_ptr", "int32", (1,), "scratch")),
            constexprs=(("SIZE", size), ("LOOPS", LOOPS)),
            grid=(WORDS // (size * LOOPS), 1, 1),
            num_warps=warps,
            num_stages=1,
            enable_fp_fusion=False,
            pdl=False,
        )
        for size, warps in SIZES
    ]
