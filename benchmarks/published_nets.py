"""Sizes of the convolutional nets of published runs: residual nets of bottleneck blocks, of any depth and width.

In:     a row whose model has such a name ("ResNet-152", "WRN-50-2", "Wide-ResNet-50 (base channels 160, width 2, 224x224)").
Out:    `Net`: its sizes; the mesh that a solver sharded it on.
Method: He et al., CVPR 2016, table 1; Zagoruyko and Komodakis, BMVC 2016. In a wider net, either the
        first two convolutions of a block are wider, or only the second (as Alpa's): whichever gives the stated parameters.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import jax
import wide_resnet
from published_cells import Cells, count_of, number_of, text_of

_DEPTHS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3), "200": (3, 24, 36, 3)}
_NAME = r"(?:wide[-_ ]?)?(?:resnet|wrn)[-_ ]?(50|101|152|200)(?:[-_x ](\d{1,2})\b)?"


@dataclass(frozen=True)
class Net:
    """Sizes of a residual net, as `wide_resnet.Config` has them."""

    depths: tuple[int, ...]
    base: int
    width: int
    entry: int
    pixels: int

    def config(self, batch: int) -> wide_resnet.Config:
        """With a batch."""
        fields = {"depths": self.depths, "width": self.width, "base": self.base, "entry": self.entry}
        return wide_resnet.Config(**fields, pixels=self.pixels, batch=batch)

    def params(self) -> int:
        """Parameters."""
        types = jax.eval_shape(functools.partial(wide_resnet.init_params, self.config(1)))
        return sum(leaf.size for leaf in jax.tree.leaves(types))

    def flops(self) -> float:
        """Of the products of one sample's forward pass."""
        total, side = 2.0 * 49 * 3 * self.base * (self.pixels / 2) ** 2, self.pixels / 4
        channels_in = self.base
        for stage, depth in enumerate(self.depths):
            inner, channels = self.width << stage, 4 * self.base << stage
            entry = self.entry << stage or inner
            for number in range(depth):
                strides = number == 0 and stage > 0
                total += 2 * channels_in * entry * side**2
                side = side / 2 if strides else side
                total += 2 * (9 * entry * inner + inner * channels) * side**2
                total += 2 * channels_in * channels * side**2 if number == 0 else 0
                channels_in = channels
        return total + 2 * channels_in * 1000


def net_of(row: Cells) -> Net | None:
    """The net that a row's model is; None where it is none."""
    name = text_of(row, "model")
    found = re.search(_NAME, name, re.IGNORECASE)
    if not found:
        return None

    def said(pattern: str, otherwise: int) -> int:
        match = re.search(pattern, name, re.IGNORECASE)
        return int(match[1]) if match else otherwise

    base, times = said(r"(?:base channels |\bC)(\d+)", 64), said(r"(?:width |\bW)(\d+)", int(found[2] or 1))
    pixels = said(r"(\d{2,4})x\1", 224)
    times = 2 if times == 1 and re.match("w", name, re.IGNORECASE) and not found[2] else times
    nets = [Net(_DEPTHS[found[1]], base, base * times, entry, pixels) for entry in (0, base)]
    millions = re.search(r"(\d+(?:\.\d+)?)\s?([MB])\b", name)
    stated = number_of(row, "params_B") or (millions and float(millions[1]) / {"M": 1e3, "B": 1}[millions[2]])
    return min(nets, key=lambda net: abs(net.params() - stated * 1e9)) if stated else nets[0]


def as_layers(row: Cells, net: Net) -> Cells:
    """The row with what a net has none of filled in: a sample is one token of one block after the other."""
    filled = {"layers": str(sum(net.depths)), "hidden": str(4 * net.base), "heads": "1", "kv_heads": "1", "ffn": "1"}
    return {**row, **filled, "vocab": "1000", "seq": "1", "attention": "none", "params_B": ""}


def mesh_of(row: Cells, devices: int) -> tuple[int, ...] | None:
    """The mesh on which a solver sharded it, `()` if the row does not say which; None where each device has whole samples.

    Raises:
        ValueError: It was cut into stages, or sharded as no plan is.
    """
    framework = text_of(row, "framework")
    notes = text_of(row, "notes")
    is_searched = re.search(r"\(auto\)", framework) and "shard parallel" not in notes
    if (count_of(row, "pp") or 1) > 1 or is_searched or re.search("heuristic|ppdp", framework):
        raise ValueError("a convolutional net in stages, or sharded by a rule of its own")
    if (count_of(row, "tp") == 1 and count_of(row, "pp") == 1) or devices == 1:
        return None
    said = re.search(r"mesh \((\d+), ?(\d+)\)", notes)
    if said:
        return tuple(side for side in map(int, said.groups()) if side > 1)
    if not re.search(r"shard|intra|auto", framework):
        return None
    return ()
