"""Progress of an engine's compilation: shown on a terminal, when it takes long."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from moe_jax.engine import building


@pytest.mark.parametrize(("terminal", "patience", "shown"), [(True, -1, True), (True, 60, False), (False, -1, False)])
def test_progress_is_shown_on_a_terminal_when_it_takes_long(monkeypatch, terminal, patience, shown):
    monkeypatch.setattr(building, "PATIENCE", patience)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with building._progress("compiling kernels", console) as report:
        for done in range(4):
            report(done, 3)
    text = console.file.getvalue()
    assert ("compiling kernels" in text and "3/3" in text) == shown
    assert shown or not text


def test_progress_ends_where_the_work_fails(monkeypatch):
    monkeypatch.setattr(building, "PATIENCE", -1)
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with pytest.raises(RuntimeError, match="no"), building._progress("compiling kernels", console) as report:
        report(1, 3)
        raise RuntimeError("no")
    assert "\x1b[?25h" in console.file.getvalue(), "the cursor is back"
