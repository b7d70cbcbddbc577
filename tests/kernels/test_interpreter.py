"""Triton decides between compiling and interpreting when it is imported, so these tests need a fresh process."""

from __future__ import annotations

import pytest
from interpreting import run_interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_in_tritons_interpreter():
    run_interpreted("interpreted.py")
