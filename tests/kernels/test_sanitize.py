"""The sanitizer's run as far as it goes without a GPU: it leaves no kernel out, and its launches fit together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

from gluon_numpy import run_row

from benchmarks import sanitize

STEPS = [name for name in sanitize.STEPS if name != "mosaic"]


def stand_in(launch: sanitize.Launch, buffers: dict[str, np.ndarray]) -> None:
    """Groups by the reference, which is plain NumPy, and leaves zeros where a kernel would compute."""
    spec = launch.spec
    for a in spec.arguments:
        array = buffers[launch.buffer(a.name)]
        assert (array.shape, array.dtype.name) == (a.shape, a.dtype), f"{spec.name}: {a.name}"
    values = [np.zeros(a.shape, a.dtype) for a in spec.outputs]
    if "plan" in spec.name:
        values = spec.reference(*(buffers[launch.buffer(a.name)] for a in spec.inputs))
        values = values if isinstance(values, tuple) else (values,)
    for a, value in zip(spec.outputs, values, strict=True):
        buffers[launch.buffer(a.name)] = np.asarray(value).reshape(a.shape)


@pytest.mark.parametrize("name", STEPS)
def test_launches_fit_together(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "error", lambda *_: None)
    assert sanitize.run_step(name, stand_in) == len(capsys.readouterr().out.splitlines()) > 0


def test_the_kernel_for_one_row_is_right_in_its_cases() -> None:
    """On NumPy, where an access out of bounds is an error too."""
    found = []
    for _, launches, given in sanitize.experts(np.random.default_rng(0)):
        for launch in launches:
            spec = launch.spec
            if spec.name == "expert_ffn_row":
                made = dict(given)
                made |= sanitize.wanted(launch, made, np.random.default_rng(1))
                before = [made[a.name].copy() for a in spec.inputs]
                run_row(spec, made)
                found.append(sanitize.error(spec, before, [made["out_ptr"]]))
                assert not made["state_ptr"].any()
    assert len(found) == 2 and all(worst < 3e-2 for worst in found)


def test_a_wrong_result_is_refused() -> None:
    def right(launch: sanitize.Launch, buffers: dict[str, np.ndarray]) -> None:
        spec = launch.spec
        buffers["out_ptr"] = np.array(spec.reference(*(buffers[a.name] for a in spec.inputs)))

    def wrong(launch: sanitize.Launch, buffers: dict[str, np.ndarray]) -> None:
        right(launch, buffers)
        buffers["out_ptr"].flat[-1] += 1

    assert sanitize.run_step("linear", right) == 3
    with pytest.raises(AssertionError, match="linear is wrong"):
        sanitize.run_step("linear", wrong)


def test_every_kernel_of_the_tree_has_a_step() -> None:
    covered = set().union(*(made for _, made in sanitize.STEPS.values()))
    assert sanitize.makers() == covered


def test_makers_are_found_by_what_they_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/specs.py").write_text(
        "def new_spec() -> KernelSpec: ...\n"
        "def new_specs() -> tuple[KernelSpec, ...]: ...\n"
        "def _part() -> KernelSpec: ...\n"
        "def tile() -> Tile: ...\n"
    )
    monkeypatch.setattr(sanitize, "FOLDER", tmp_path)
    assert sanitize.makers() == {"new.new_spec", "new.new_specs"}
