"""Finds the number of experts of a mixture, and how many of them see a token.

In:     a row, and the sizes of the model that it states.
Out:    `Experts`.
Method: columns `experts` and `experts_active`, if the table has them or the model is public. Otherwise the number of experts
        is read from the name ("8x7B", "16 experts", "E8") or follows from the number of parameters; how many see a token
        follows from FLOP/s over tokens/s, which are the FLOPs of a token, or from the active parameters in the name
        ("A22B"), or is two, as in GShard (Lepikhin et al., 2021). If experts in every layer would have more than the stated
        parameters, only some layers have experts, as every second layer in GShard.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from published_cells import Cells, count_of, needed, number_of, says, teraflops_of, text_of

_NAMES = r"moe|expert|mixtral|\dx\d+(\.\d+)?b|[-_ ]a\d+(\.\d+)?b|deepseek[-_ ]?v[23]|gpt[-_ ]?oss|kimi"
_IN_GSHARD = 2


@dataclass(frozen=True)
class Experts:
    """Of a model.

    Attributes:
        number: In a layer that has them.
        active: Of them that see a token.
        parallel: Devices that they are dealt out to.
        share: Part of the layers that has them.
        is_masked: Whether tokens are sent by products with a mask, instead of being sorted.
        is_padded: Whether an expert has room for so many tokens and the rest is dropped.
    """

    number: int
    active: int
    parallel: int
    share: float
    is_masked: bool = False
    is_padded: bool = False


@dataclass(frozen=True)
class Dense:
    """Parameters of a model but its experts: of attention and norms in one layer, of an expert, of an embedding."""

    layers: int
    attention: float
    expert: float
    embedding: float
    scores_flops: float

    def total(self, experts: float) -> float:
        """With so many experts in each layer."""
        return self.layers * (self.attention + experts * self.expert) + 2 * self.embedding


def has_experts(row: Cells) -> bool:
    """Whether the row says that the model is a mixture of experts."""
    columns = number_of(row, "ep"), number_of(row, "experts")
    return (
        any((found or 1) > 1 for found in columns)
        or re.search(_NAMES, text_of(row, "model"), re.IGNORECASE) is not None
    )


def experts_of(row: Cells, dense: Dense, parallel: int) -> Experts:
    """What the row says of its experts.

    Raises:
        ValueError: Neither name nor parameters tell how many there are.
    """
    name, billions = text_of(row, "model"), number_of(row, "params_B")
    stated = re.search(r"(\d+)\s*experts|\bE(\d+)\b|\b(\d+)x\d+(?:\.\d+)?b", name, re.IGNORECASE)
    per_layer = (billions * 1e9 - dense.total(0)) / (dense.layers * dense.expert) if billions else None
    if count_of(row, "experts"):
        number = needed(row, "experts")
    elif stated:
        number = int(next(group for group in stated.groups() if group))
    elif per_layer and per_layer >= 2:
        number = max(1, round(per_layer / parallel)) * parallel
    else:
        raise ValueError("a mixture of experts whose number neither its name nor its parameters tell")
    # With half of the layers dense, a layer has on average half of the experts and half of a dense MLP.
    share = min(1.0, (per_layer - 1) / (number - 1)) if stated and per_layer and number > 1 else 1.0
    share = share if share < 0.75 else 1.0
    # DeepSpeed and what is written as GShard is multiply by a mask, MaxText and what came later sorts.
    is_masked = says(row, "Alpa|DeepSpeed|GShard|T5X|Pax|Mesh", "framework") and not says(row, "Megatron", "framework")
    is_padded = is_masked or says(row, r"token ?drop|capacity factor|[^a-z]drop(?!less)", "model", "notes")
    active = max(1, min(number, round(_active(row, dense))))
    return Experts(number, active, parallel, share, is_masked, is_padded)


def _active(row: Cells, dense: Dense) -> float:
    if count_of(row, "experts_active"):
        return needed(row, "experts_active")
    rate, tokens = teraflops_of(row), number_of(row, "tokens_per_s_per_gpu")
    if rate and tokens:
        per_token = rate * 1e12 / tokens - dense.scores_flops
    else:
        named = re.search(r"[-_ ]a(\d+(?:\.\d+)?)b", text_of(row, "model"), re.IGNORECASE)
        if not named:
            return _IN_GSHARD
        per_token = 6e9 * float(named[1])
    # The embedding that tokens are looked up in multiplies nothing.
    return (per_token / 6 - dense.total(0) + dense.embedding) / (dense.layers * dense.expert)
