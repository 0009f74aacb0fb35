"""Registers the adapters: one file per framework whose steps take objects, imported only if the framework is.

In:     `import autopar`.
Out:    the adapters, registered in `frameworks.py`.
"""

from __future__ import annotations

from autopar.frameworks import Adapter, register


def _nnx() -> Adapter:
    from autopar.adapters.nnx import NnxAdapter

    return NnxAdapter()


def _equinox() -> Adapter:
    from autopar.adapters.equinox import EquinoxAdapter

    return EquinoxAdapter()


register("flax.nnx", _nnx)
register("equinox", _equinox)
