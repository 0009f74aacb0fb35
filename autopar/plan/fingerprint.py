"""Fingerprints: what a plan depends on, hashed, so that a stale plan is noticed.

In:     a flat program; a cluster.
Out:    short hex digests, equal in every process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re

import jax

from autopar.ir.printer import print_jaxpr
from autopar.ir.program import Program
from autopar.mesh import Cluster


def program_fingerprint(program: Program) -> str:
    """Digest of the program's equations, types and argument names."""
    text = "\n".join((print_jaxpr(program.jaxpr), *program.in_paths, str(program.static)))
    return _digest(re.sub(r"0x[0-9a-f]+", "0x", text))


def cluster_fingerprint(cluster: Cluster) -> str:
    """Digest of the machine's description; which devices are meant does not count."""
    return _digest(_described(cluster))


def _described(cluster: Cluster) -> str:
    """All that tells one cluster from another."""
    told = [(part.name, getattr(cluster, part.name)) for part in dataclasses.fields(cluster) if part.compare]
    return ", ".join(
        f"{name}=({'; '.join(map(_described, value))})" if name == "groups" else f"{name}={value!r}"
        for name, value in told
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprints(program: Program, cluster: Cluster) -> dict[str, str]:
    """What a plan was made for, and with which JAX."""
    return {"program": program_fingerprint(program), "cluster": cluster_fingerprint(cluster), "jax": jax.__version__}
