"""JAX's compilation cache, as `moe_jax.use_compilation_cache` switches it on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from moe_jax.cache import Executables, executables, program_key
from moe_jax.errors import InvalidArgument

ROOT = Path(__file__).parent.parent


def get(store: Executables, size: int):
    aval = jax.ShapeDtypeStruct((size,), jnp.float32)
    return store.get_or_compile(program_key("add", size), lambda x: x + 1, (aval,))


CACHED = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
from moe_jax.cache.executables import use_compilation_cache
use_compilation_cache(sys.argv[1])
time.sleep(max(0, float(sys.argv[2]) - time.time()))
x = jax.random.normal(jax.random.key(0), (256, 256))
print(jax.jit(lambda x: jnp.sum(jnp.sin(x) @ x)).lower(x).compile()(x).tobytes().hex())
"""


def start(folder: Path, at: float, seed: int) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", CACHED, str(folder), str(at)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip(), err


def test_C69_processes_share_a_folder_of_compiled_programs_from_a_cold_start(tmp_path):
    """Started together on an empty folder; then one file is cut short. Bits are equal throughout (C68)."""
    folder = tmp_path / "new/folder"
    at = time.time() + 5
    together = [start(folder, at, seed) for seed in range(4)]
    bits = {finish(process)[0] for process in together}
    files = sorted(folder.glob("*-cache"))
    assert len(bits) == 1 and files
    stamps = [file.stat().st_mtime_ns for file in files]
    assert {finish(start(folder, 0, 5))[0]} == bits
    assert [file.stat().st_mtime_ns for file in sorted(folder.glob("*-cache"))] == stamps, "compiled again"
    for file in files:
        file.write_bytes(file.read_bytes()[:40])
    out, err = finish(start(folder, 0, 6))
    assert {out} == bits and "Error reading persistent compilation cache entry" in err


def test_the_compilation_cache_is_an_option_of_jax_and_can_be_switched_off(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before, environment = {name: getattr(jax.config, name) for name in names}, dict(os.environ)
    try:
        executables.use_compilation_cache(tmp_path / "a")
        get(Executables(), 1001)
        assert list((tmp_path / "a").glob("*-cache"))
        executables.use_compilation_cache(str(tmp_path / "b"))
        get(Executables(), 1002)
        assert list((tmp_path / "b").glob("*-cache"))
        executables.use_compilation_cache(None)
        count = len(list(tmp_path.rglob("*-cache")))
        get(Executables(), 1003)
        assert len(list(tmp_path.rglob("*-cache"))) == count
        (tmp_path / "file").touch()
        with pytest.raises(InvalidArgument, match="wanted a folder"):
            executables.use_compilation_cache(tmp_path / "file")
    finally:
        executables.use_compilation_cache(None)
        for name, value in before.items():
            jax.config.update(name, value)
    assert dict(os.environ) == environment


@pytest.mark.parametrize("path", [3, b"folder", "", "a\0b", True])
def test_what_is_no_path_is_refused(path):
    before = jax.config.jax_compilation_cache_dir
    with pytest.raises(InvalidArgument, match=r"path: got .* wanted the path of a folder"):
        executables.use_compilation_cache(path)
    assert jax.config.jax_compilation_cache_dir == before


def test_nothing_is_unpickled_from_disk():
    sources = [*(ROOT / "cache").rglob("*.py"), *(ROOT / "moe_jax").glob("*.py")]
    assert [
        path.name for path in sources if "pickle.load" in path.read_text() or "import pickle" in path.read_text()
    ] == []
