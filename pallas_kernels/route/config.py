"""How a router turns logits into experts and weights, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from jaxtyping import Array, Float32, Int32

from ..checks import check_choice, check_number
from ..errors import InvalidArgument

Score = Literal["softmax", "topk_softmax", "sigmoid"]


class Routing(NamedTuple):
    """Chosen experts of each row, best first.

    Attributes:
        weights: f32 ``[T, k]``, what each expert's output is multiplied by.
        ids: int32 ``[T, k]``. An id of -1 or E (an expert that lives elsewhere, or none) adds exactly 0.
    """

    weights: Float32[Array, "T k"]
    ids: Int32[Array, "T k"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Router of one MoE layer.

    Attributes:
        experts: number of experts E.
        top_k: experts per row, ``1 <= top_k <= experts``.
        score: ``"softmax"`` is softmax over all experts, then top-k (Mixtral, Qwen, OLMoE);
            ``"topk_softmax"`` is top-k, then softmax over the chosen logits (gpt-oss);
            ``"sigmoid"`` is elementwise (DeepSeek-V3).
        renormalize: divide the chosen weights by their sum. ``"topk_softmax"`` sums to one as it is.
        scaling_factor: multiplies the final weights (DeepSeek-V3's ``routed_scaling_factor``), once.
        groups, groups_kept: group-limited selection: experts form ``groups`` equal groups, a group's
            score is the sum of its two best biased scores, the best ``groups_kept`` stay eligible
            (DeepSeek-V3, arXiv:2412.19437, section 2.1.2; its code's ``n_group`` and ``topk_group``).
    """

    experts: int
    top_k: int
    score: Score = "softmax"
    renormalize: bool = False
    scaling_factor: float = 1.0
    groups: int = 1
    groups_kept: int = 1

    def __post_init__(self) -> None:
        def check(ok: bool, problem: str, got: object, wanted: object) -> None:
            if not ok:
                raise InvalidArgument(problem, where="RouterConfig", got=got, wanted=wanted)

        for name in ("experts", "top_k", "groups", "groups_kept"):
            value = getattr(self, name)
            check(type(value) is int, f"type of {name}", repr(value), "an int")
        check(type(self.renormalize) is bool, "type of renormalize", repr(self.renormalize), "True or False")
        object.__setattr__(self, "scaling_factor", check_number("RouterConfig", "scaling_factor", self.scaling_factor))
        check(self.experts >= 1, "experts", self.experts, "at least 1")
        check(1 <= self.top_k <= self.experts, "top_k", self.top_k, f"1 to experts={self.experts}")
        check_choice("RouterConfig", "score", self.score, get_args(Score))
        check(
            self.groups >= 1 and self.experts % self.groups == 0,
            "groups",
            self.groups,
            f"a divisor of experts={self.experts}",
        )
        check(1 <= self.groups_kept <= self.groups, "groups_kept", self.groups_kept, f"1 to groups={self.groups}")
        eligible = self.groups_kept * (self.experts // self.groups)
        check(self.top_k <= eligible, "top_k", self.top_k, f"at most the {eligible} experts of groups_kept groups")
