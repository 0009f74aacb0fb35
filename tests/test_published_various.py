"""The third table: frameworks, devices and models of which the first two have nothing, and to which nothing is fitted."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]

from published import predicted  # noqa: E402
from published_choices import alternatives  # noqa: E402
from published_frameworks import EAGER, NORM_BYTES, ROTARY_BYTES, written_out  # noqa: E402
from published_layers import eight_bits  # noqa: E402
from published_machines import machine_of, model_of  # noqa: E402
from published_runs import DATA, Left, read_runs  # noqa: E402
from published_sending import broadcasts_seconds, data_seconds  # noqa: E402
from published_table import read_row  # noqa: E402, F401

from autopar.mesh import Link, LogicalMesh  # noqa: E402

VARIOUS = DATA.with_name("various_runs.tsv")


@pytest.fixture(scope="module")
def runs():
    return read_runs(VARIOUS)[0]


def test_every_row_says_where_it_is_from_and_is_read(runs):
    left = read_runs(VARIOUS)[1]
    assert len(runs) + len(left) == 172 and len(left) <= 1
    assert len({run.source for run in runs}) == 16
    assert {run.source for run in read_runs(DATA)[0]}.isdisjoint(run.source for run in runs)


@pytest.mark.parametrize("source", ["InternLM", "TPUs", "fms-fsdp", "TinyLlama"])
def test_seconds_of_frameworks_that_nothing_is_fitted_to(runs, source):
    run = next(run for run in runs if source in run.source)
    row = predicted(run)
    assert not isinstance(row, Left), row
    assert 0.75 < row[1].seconds / run.seconds < 1.25, run


def test_norms_and_rotary_positions_of_pytorch_are_single_operations(read):
    """Two norms of the width, and the queries and keys of all heads; a compiler, or kernels for it, are told by their names."""
    run = read(framework="Hugging Face transformers", microbatch="2", kv_heads="2")
    passes = written_out(run)
    for phase in ("forward", "backward"):
        numbers = 2 * 512 * 2 * 256, 2 * 512 * (4 + 2) * 64
        expected = sum(n * moved[phase][0] for n, moved in zip(numbers, (NORM_BYTES, ROTARY_BYTES), strict=True))
        assert EAGER * sum(kernel.num_bytes for kernel in passes[phase]) == pytest.approx(expected)
    for cells in (
        {"framework": "Megatron-LM"},
        {"framework": "PyTorch, fused kernels"},
        {"model": "GPT", "ffn": "1024"},
    ):
        assert written_out(read(**{"framework": "PyTorch"} | cells)) == {}
    assert written_out(read(framework="PyTorch, torch.compile")) == {}
    # Complex numbers are left as they are.
    assert written_out(read(framework="torchtitan"))["forward"]


def test_replicas_of_pytorch_reduce_gradients_as_they_come(read):
    names = ("PyTorch DDP", "Lightning", "Hugging Face Accelerate", "Megatron-LM", "DeepSpeed (PyTorch)", "somebody's")
    hidden = [read(zero="none", framework=name).hides_gradients for name in names]
    assert hidden == [True, True, True, False, False, False]


def test_some_layers_are_half_of_them_where_no_number_is_said(read):
    run = read(recompute="selective", framework="PyTorch FSDP")
    assert {(one.recompute, one.recomputed) for one in alternatives(run)} == {("full", 0.5)}
    assert dict(run.unstated)["recompute"] == ("full",)


def test_rows_that_leave_out_what_they_need_not_say(read):
    """Heads that do not divide the width; stages that do not divide the layers; what follows from the microbatch."""
    assert read(heads="3").head_size == 64 and "size" in dict(read(heads="3").unstated)
    stages = read(layers="70", gpus="384", dp="8", tp="4", pp="", global_batch="2048", framework="Megatron-LM")
    assert stages.pipeline == 12
    cells = {"tp": "", "pp": "", "dp": "", "gpus": "16", "global_batch": "16", "framework": "Megatron-LM"}
    assert {one.microbatch for one in alternatives(read(**cells, microbatch="4"))} == {4}


def test_programs_of_tpus_are_whole_whoever_made_them(read):
    run = read(gpu_type="TPU v5 lite", framework="somebody's", recompute="")
    assert run.whole and run.compiled and ("dots" in dict(run.unstated)["recompute"])
    assert model_of(run).device.name == "TPU v5e"
    assert not read(framework="somebody's").compiled


def test_other_spellings_of_frameworks(read):
    spelled = {"TorchTitan 0.2": "torchtitan 0.2", "Megatron Deepspeed": "Megatron-DeepSpeed", "megatron_lm": "Megatron-LM",
               "NEMO": "NeMo", "": ""}  # fmt: skip
    assert {name: read(framework=name).framework for name in spelled} == spelled


def test_replicas_that_send_their_parts_one_after_the_other(read):
    """Each broadcast goes once around: few take no longer than to gather, of a thousand the latency is all."""
    links = Link(1e-5, 2e10), Link(4e-6, 2e11)
    hops = 1 * 1e-5 + 2 * 3 * 4e-6
    assert broadcasts_seconds(8e9, LogicalMesh((2, 4), links=links)) == pytest.approx(8 * hops + 8e9 / 8e10)
    assert broadcasts_seconds(8e9, LogicalMesh((1, 4), links=links)) == pytest.approx(4 * 3 * 4e-6 + 8e9 / 2e11)

    def once(framework, devices):
        cells = {"gpus": str(devices), "dp": str(devices), "global_batch": str(devices)}
        run = read(zero="1", framework=framework, **cells)
        return data_seconds(run, machine_of(run), 1e9, 32, 1e-3, 3e-3)[0]

    assert once("InternLM", 1024) > 10 * once("somebody's", 1024)
    assert once("InternLM", 8) < 1.2 * once("somebody's", 8)


def test_operands_of_eight_bits_are_made_narrow_in_both_orders():
    """No two casts are of the same array, which a compiler would do once; gradients are those of the plain product."""
    x, w, dy = (
        jnp.arange(n, dtype=jnp.bfloat16).reshape(s) % 5
        for n, s in ((12, (2, 2, 3)), (24, (3, 4, 2)), (32, (2, 2, 4, 2)))
    )

    def gradients(product, x, w, dy):
        return jax.vjp(product, x, w)[1](dy)

    def narrow(x, w):
        return eight_bits("float8", x, w)

    def plain(x, w):
        return jnp.tensordot(x, w, 1)

    for found, expected in zip(gradients(narrow, x, w, dy), gradients(plain, x, w, dy), strict=True):
        np.testing.assert_array_equal(found, expected)
    eqns = jax.make_jaxpr(lambda *args: gradients(narrow, *args))(x, w, dy).eqns
    cast = [eqn.invars[0] for eqn in eqns if eqn.params.get("new_dtype") == jnp.float8_e4m3fn]
    assert len(cast) == len(set(cast)) and len(cast) >= 4
