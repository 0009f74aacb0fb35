"""Plans against XLA's compiler for TPUs, which needs no TPU: where libtpu is installed."""

import importlib.util

import pytest

import autopar
from autopar import Cluster, DataParallel
from tests.planned_mlp import arguments, train_step

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="XLA's compiler for TPUs is not installed: pip install 'jax[tpu]'",
)


def test_the_compiler_agrees():
    """Also where XLA sends all-reduces instead of what it is asked for."""
    plan = autopar.parallelize(train_step, cluster=Cluster.of("8 tpu-v5e"), method=DataParallel(zero=3)).plan(
        *arguments()
    )
    checked = plan.verify()
    assert checked.ok and "TPU v5e: the compiler agrees" in str(checked)
    assert not checked.programs[0].kernels
