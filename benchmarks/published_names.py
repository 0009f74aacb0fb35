"""Facts that follow from a model's name: whether it is a stack of equal layers, whether its MLP has a gate, its head size.

In:     the name of a model, in lower case.
Out:    yes or no, or a size; `ValueError` with the reason, if the model is not predicted.
Method: facts of the public configurations of families, as a reader of the row would know them.
"""

from __future__ import annotations

import re

from published_cells import Cells, count_of, needed, number_of

_OTHERS = (
    (r"resnet|resnext|regnet|conv|u-?net|vgg|efficientnet|diffusion|inception", "no transformer"),
    (r"mamba|rwkv|hyena|lstm|\bssm|dlrm|\bgnn|retnet", "no transformer"),
    (r"\bq?(lo|do)ra\b|\bpeft\b|adapter", "only adapters are trained"),
    (r"swin|\bmvit|pyramid", "layers of several widths"),
)
_PAIRS = r"\b(flan[-_ ]?|m|by)?t5|\bul2|bart\b|encoder-decoder|seq2seq|nllb|marian"
_ENCODERS = r"bert|electra|\bvit|deit|\bdino|\bclip|siglip|encoder"
_IMAGES = r"\bvit|deit|\bdino|siglip"
_GATED = (
    r"llama|qwen|mistral|mixtral|gemma|deepseek|\byi[-_ ]|palm|glm|internlm|baichuan|olmo|gpt[-_ ]?oss|phi[-_ ]?[34]|smollm|"
    r"grok|kimi|dbrx|granite|command|moonlight|vicuna|alpaca|glu|flan|\bmt5|t5[-_ .]?v?1[._]1"
)
_PLAIN = r"gpt|bert|bart|mpt|\bopt|bloom|megatron|pythia|falcon|nemotron|\bvit|deit|gshard|switch|\bmoe"
_NEAR = 0.1
"""Of an MLP's sides: what they are rounded by."""
_HEAD_SIZES = ((r"qwen[-_ ]?3", 128), (r"gpt[-_ ]?oss", 64), (r"gemma[-_ ]?\d?[-_ ]?(2|7|9)b", 256))
"""Of models whose heads are not parts of the width."""


def check_family(name: str, is_known: bool = False) -> None:
    """Leave out what is no stack of equal layers, but nets that are known.

    Raises:
        ValueError: The name says that it is none.
    """
    for names, reason in () if is_known else _OTHERS:
        if re.search(names, name):
            raise ValueError(reason)


def is_gated(name: str, row: Cells) -> bool:
    """Whether the MLP has a gate: as its name says, or else as many parameters as one that has, or else its sides.

    Who puts a gate beside 4 widths takes 2 / 3 of them, for as many parameters (Shazeer, "GLU variants improve transformer",
    2020).
    """
    billions, hidden, width = number_of(row, "params_B"), count_of(row, "ffn"), needed(row, "hidden")
    if re.search(_GATED, name) or re.search(_PLAIN, name) or not hidden:
        return re.search(_GATED, name) is not None
    if not billions:
        return abs(hidden / width - 8 / 3) < _NEAR
    part = (count_of(row, "kv_heads") or 1) / (count_of(row, "heads") or 1) if count_of(row, "kv_heads") else 1.0
    heads, size = count_of(row, "heads") or 1, count_of(row, "head_size")
    mixed = heads * size if size else width
    # A decoder layer beside that of an encoder looks at both.
    blocks, mlps = (3, 2) if has_decoder(name) else (1, 1)
    per_layer = (billions * 1e9 - width * (count_of(row, "vocab") or 0)) / needed(row, "layers")
    return per_layer - blocks * width * mixed * (2 + 2 * part) > 2.5 * mlps * width * hidden


def head_size_of(name: str) -> int:
    """Of heads that are not the width's parts; 0 where they are."""
    return next((size for names, size in _HEAD_SIZES if re.search(names, name)), 0)


def usual_head_size(width: int, heads: int) -> int:
    """Of heads that do not divide the width: a power of two below their part, as T5 v1.1 has six of 64 in a width of 512."""
    return 1 << (max(1, width // heads).bit_length() - 1)


def is_encoder(name: str) -> bool:
    """Whether all tokens see all."""
    return re.search(_ENCODERS, name) is not None


def has_decoder(name: str) -> bool:
    """Whether it is an encoder with a decoder beside it that is as deep."""
    return re.search(_PAIRS, name) is not None


def sees_images(name: str) -> bool:
    """Whether its tokens are patches, and its vocabulary classes."""
    return re.search(_IMAGES, name) is not None
