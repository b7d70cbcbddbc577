"""The dispatcher: which back end is chosen, how a refusal reads, and that a slow path is never silent."""

from __future__ import annotations

import copy
import pickle
import warnings

import jax
import pytest

from moe_jax.pallas_kernels import dispatch
from moe_jax.pallas_kernels.dispatch import Backend, Choice, Operation, OutOfScope
from moe_jax.pallas_kernels.errors import CannotServe, InvalidArgument, MoeJaxError, SlowPathWarning
from moe_jax.pallas_kernels.grouped_moe.api import GROUPED_MOE
from moe_jax.pallas_kernels.route.api import ROUTE


def operation(log: list[str], **reasons: str | None) -> Operation:
    """An operation whose back ends decline with the reasons given, and note when they run."""

    def backend(name: str, reason: str | None) -> Backend:
        def serve(*args: object) -> str:
            log.append(name)
            return name

        return Backend(name, serve, lambda *_: reason)

    return Operation("sum", tuple(backend(name, reason) for name, reason in reasons.items()))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_reported", set())


def test_the_first_that_serves_is_chosen() -> None:
    op = operation([], mosaic="T=3 is below 64", triton=None, reference=None)
    chosen, choice = op.choose(1)
    assert chosen.name == "triton"
    assert choice == Choice("sum", "triton", (("mosaic", "T=3 is below 64"),))
    assert str(choice) == "sum: triton\n  mosaic declined: T=3 is below 64"
    assert hash(choice) == hash(op.choose(2)[1])
    assert op.choose(1, backend="reference")[1] == Choice("sum", "reference")


def test_how_a_call_would_be_served_is_asked_by_explain_alone() -> None:
    asked: list[int] = []
    chosen = Backend("triton", lambda x: x, lambda x: None, detail=lambda x: asked.append(x) or f"tile of {x}")
    op = Operation("sum", (Backend("mosaic", lambda x: x, lambda x: "no", detail=lambda x: "never"), chosen))
    assert (op(3), op.choose(3)[1].detail, asked) == (3, None, [])
    assert str(op.explain(3)) == "sum: triton\n  tile of 3\n  mosaic declined: no"
    assert asked == [3]
    assert op.explain(4, backend="triton").detail == "tile of 4"
    plain = operation([], reference=None)
    assert plain.explain(1) == plain.choose(1)[1]


def test_C114_a_back_end_that_was_asked_for_never_gives_way() -> None:
    log: list[str] = []
    op = operation(log, triton="no CUDA device: jax 0.11.2 sees only cpu", reference=None)
    with pytest.raises(CannotServe, match=r"no CUDA device: jax 0\.11\.2 sees only cpu") as caught:
        op(1, backend="triton")
    assert not log
    assert caught.value.declined == (("triton", "no CUDA device: jax 0.11.2 sees only cpu"),)
    assert isinstance(caught.value, NotImplementedError)


def test_all_declined_lists_every_reason() -> None:
    log: list[str] = []
    with pytest.raises(CannotServe) as caught:
        operation(log, mosaic="needs sm_90", triton="needs sm_80")(1)
    assert not log
    assert caught.value.declined == (("mosaic", "needs sm_90"), ("triton", "needs sm_80"))
    assert "mosaic: needs sm_90; triton: needs sm_80" in str(caught.value)


@pytest.mark.parametrize("op", [GROUPED_MOE, ROUTE], ids=lambda op: op.name)
def test_C117_unknown_back_end_names_the_known_ones(op: Operation) -> None:
    with pytest.raises(InvalidArgument, match=r"got 'cuda', wanted auto, .*reference"):
        op(1, backend="cuda")


@pytest.mark.usefixtures("on_gpu")
def test_C108_forced_fallback_warns_once() -> None:
    log: list[str] = []
    op = operation(log, triton="H=7 is not a multiple of 16", reference=None)
    with pytest.warns(SlowPathWarning, match="triton declined: H=7 is not a multiple of 16") as caught:
        assert op(1) == "reference"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(1)
        op(2)
    assert log == ["reference"] * 3
    # Another reason is another report.
    with pytest.warns(SlowPathWarning, match="needs sm_80"):
        operation(log, triton="needs sm_80", reference=None)(1)


@pytest.mark.usefixtures("on_gpu")
def test_what_a_back_end_is_not_made_for_is_told_but_not_warned_of() -> None:
    op = operation([], triton=OutOfScope("65 rows: takes 1 to 64"), reference=None)
    assert str(op.choose(1)[1]) == "sum: reference\n  triton declined: 65 rows: takes 1 to 64"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op(1) == "reference"
    # A second back end's reason is one to mend.
    with pytest.warns(SlowPathWarning, match=r"(?s)needs sm_90.*65 rows"):
        operation([], mosaic="needs sm_90", triton=OutOfScope("65 rows: takes 1 to 64"), reference=None)(1)


@pytest.mark.usefixtures("on_gpu")
def test_a_choice_that_was_asked_for_is_not_reported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operation([], triton="needs sm_80", reference=None)(1, backend="reference")
        operation([], triton=None, reference="too slow")(1)


def test_without_a_gpu_the_reference_is_no_surprise() -> None:
    assert jax.default_backend() == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operation([], triton="no CUDA device", reference=None)(1) == "reference"


def test_C117_errors_carry_their_parts() -> None:
    error = InvalidArgument("size", where="op", got=3, wanted="a multiple of 4")
    assert (error.problem, error.where, error.got, error.wanted) == ("size", "op", 3, "a multiple of 4")
    assert str(error) == "op: size: got 3, wanted a multiple of 4"
    assert isinstance(error, MoeJaxError)
    assert isinstance(error, ValueError)
    refusal = CannotServe("cannot serve", where="op", got="a", wanted="b", declined=[("x", "y")])
    assert refusal.declined == (("x", "y"),)


def test_errors_cross_process_pools_whole() -> None:
    error = CannotServe("no", where="here", got=1, wanted=2, declined=[("triton", "no GPU")])
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is CannotServe
        assert str(again) == str(error)
        assert again.declined == (("triton", "no GPU"),)
