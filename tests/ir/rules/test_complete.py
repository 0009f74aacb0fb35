"""Every primitive of JAX has a rule or stands in one list of `replicated.py`: a new JAX that adds one fails here."""

from __future__ import annotations

import sys

import jax
import jax.nn
import jax.numpy
import jax.random
import jax.scipy  # noqa: F401

from autopar._jax import Primitive, primitives
from autopar.ir.rules import has_rule
from autopar.ir.rules.replicated import list_of

# Where `import jax` defines primitives; those of Pallas, exports and sparse arrays are their own.
FAMILIES = ("jax._src.lax", "jax._src.random", "jax._src.nn", "jax._src.numpy", "jax._src.scipy", "jax._src.prng")
FAMILIES += ("jax._src.ad_util", "jax._src.ad_checkpoint", "jax._src.api", "jax._src.callback", "jax._src.core")
FAMILIES += ("jax._src.custom_derivatives", "jax._src.custom_batching", "jax._src.debugging", "jax._src.dispatch")
FAMILIES += ("jax._src.ffi", "jax._src.pjit", "jax._src.shard_map", "jax._src.cudnn", "jax._src.hijax")


def all_primitives() -> list[Primitive]:
    """Of the public list and of the modules behind `jax.lax`, `jax.random`, `jax.nn`; in a fixed order."""
    modules = [primitives, *(module for name, module in sorted(sys.modules.items()) if name.startswith(FAMILIES))]
    found = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Primitive)}
    return list(found.values())


def test_there_are_many():
    assert len(all_primitives()) > 200


def test_every_primitive_has_a_place():
    nowhere = [str(p) for p in all_primitives() if not has_rule(p) and list_of(p.name) is None]
    assert not nowhere, (
        f"JAX {jax.__version__} has primitives without a place: {', '.join(nowhere)}. "
        "Register a rule for each, or name it in one list of autopar/ir/rules/replicated.py."
    )


def test_no_primitive_has_two():
    twice = [f"{p} (also in {list_of(p.name)})" for p in all_primitives() if has_rule(p) and list_of(p.name)]
    assert not twice, f"with a rule and in a list: {', '.join(twice)}"
