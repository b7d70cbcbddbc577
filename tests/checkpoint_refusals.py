"""Loading that must be refused, and the folder that its tests spoil."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_files import random_tensors, small_config, write_folder
from moe_jax.checkpoint import load_module
from moe_jax.errors import CheckpointError

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    raw = small_config("olmoe")
    return write_folder(tmp_path / "model", raw, random_tensors(raw))


def refused(folder: Path, *words: str, read: bool = True) -> CheckpointError:
    """The error of loading; with every word in its message, and found before any tensor is read unless ``read``."""
    seen: list[int] = []
    with pytest.raises(CheckpointError) as caught:
        load_module(folder, progress=lambda done, total: seen.append(done))
    message = str(caught.value)
    for word in (*words, "got ", "wanted "):
        assert word in message
    assert seen == [] or read
    return caught.value
