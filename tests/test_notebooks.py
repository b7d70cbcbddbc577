"""Every notebook runs from top to bottom, as it is checked in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
# The notebook libraries warn about their own event loops and sockets; what the notebook itself does runs in
# another process, where warnings are shown in its output.
@pytest.mark.filterwarnings("default")
def test_notebook_runs(path, monkeypatch, tmp_path):
    reason = "extra `notebooks` is not installed"
    nbformat = pytest.importorskip("nbformat", reason=reason)
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    pytest.importorskip("matplotlib", reason=reason)
    # The kernel is this Python, whatever kernels the user has installed.
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share/jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # The tests' four devices are not what a user has; that programs compile fast is.
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "host_platform_device_count" not in flag]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
