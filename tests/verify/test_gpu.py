"""Plans against XLA's compiler for GPUs, which needs no GPU: where it is installed, or lies in a folder beside this Python.

The compiler is a plugin of JAX's that complains where there is no GPU, so that it has a Python of its own here.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.verify.targets import PLUGINS

FOLDER = Path(sys.prefix) / "verify"
"""Where `make` puts it."""


def installed() -> str | None:
    """The folder to look in; "": Python finds it anyway; None: it is nowhere."""
    packages = importlib.util.find_spec("jax_plugins")
    here = [Path(p) for p in (packages.submodule_search_locations or ())] if packages else []
    names = [plugin.split(".")[1] for plugin in PLUGINS]
    if any((place / name).is_dir() for place in here for name in names):
        return ""
    return str(FOLDER) if any((FOLDER / "jax_plugins" / name).is_dir() for name in names) else None


pytestmark = pytest.mark.skipif(
    installed() is None, reason="XLA's compiler for GPUs is not installed: pip install 'autopar[verify]'"
)


@pytest.fixture(scope="module")
def found():
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "on_gpus.py"), installed() or ""],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["zero", "stages"])
def test_bytes_are_equal_and_memory_is_near(found, name):
    checked = found[name]
    assert checked["ok"] and "H100: the compiler agrees" in checked["text"]
    for predicted, compiled in zip(checked["predicted"], checked["compiled"], strict=True):
        assert compiled < 1.03 * predicted + 2**22  # cuBLAS has 4 MiB to work in


@pytest.mark.parametrize("form", ["scanned", "unrolled"])
def test_zero_3_takes_no_more_than_fsdp_by_hand(found, form):
    """Each layer gathers its weights at its beginning, and again in the backward pass."""
    by_hand, planned = found["fsdp"][form]
    assert planned <= 1.05 * by_hand


def test_what_is_offloaded_lies_in_the_memory_of_hosts(found):
    there, saved = found["offloaded"], found["saved"]
    assert there["host"] == there["planned_host"] == found["entering"] and saved["host"] == 0
    assert there["device"] < saved["device"] and there["planned_device"] < saved["planned_device"]
    both_ways = dict.fromkeys(("to host", "from host"), found["entering"])
    assert there["copies"] == there["planned_copies"] == both_ways and not saved["copies"]


@pytest.mark.parametrize("form", ["scanned", "unrolled"])
def test_activations_that_the_planner_offloads_are_not_in_device_memory(found, form):
    chosen = found["chosen"][form]
    assert chosen["activations"] and chosen["planned"] == chosen["emitted"]
    assert chosen["emitted"]["to host"] == chosen["emitted"]["from host"] > 0
    assert chosen["compiled"] < 0.85 * chosen["free"]
    assert chosen["compiled"] < 1.03 * chosen["predicted"] + 2**22 and chosen["compiled"] <= chosen["budget"]


@pytest.mark.parametrize("what", ["state", "both"])
def test_state_on_the_hosts_is_copied_parameter_by_parameter(found, what):
    """XLA would have all of it on the device at once."""
    made, num_bytes = found["with state"][what], 12 * 4 * 2048 * 2048 * 4
    num_bytes += 4 * 8 * 8 * 2048 * 4 if what == "both" else 0  # what enters four layers, 8 of 64 sequences of 8 tokens
    assert made["planned"] == made["emitted"]
    assert made["emitted"]["to host"] == made["emitted"]["from host"] == num_bytes
    assert made["compiled"] < 1.03 * made["predicted"] + 2**22


@pytest.mark.parametrize("form", ["scanned", "unrolled"])
def test_parameters_on_the_hosts_are_copied_layer_by_layer(found, form):
    """Forwards, for most of them backwards too, and for the update."""
    made = found["parameters"][form]
    assert made["planned"] == made["emitted"] and made["emitted"]["to host"] > 2.99 * made["size"]
    assert 3.5 * made["size"] < made["emitted"]["from host"] <= 5.01 * made["size"]
    least = {"scanned": 0.92, "unrolled": 0.93}[form]
    assert least * made["predicted"] < made["compiled"] < 1.03 * made["predicted"] + 2**22


def test_a_stage_leaves_there_what_its_backward_pass_reads(found):
    assert found["left"] == [found["entering"] // 2] * 2
    assert found["planned_left"] == 2 * found["left"][0]  # two microbatches are in flight on the first
    assert found["fetched"] == found["left"]


def test_weights_are_gathered_while_kernels_run(found):
    assert found["zero"]["async"] > 0.5
    gathered = found["zero"]["bytes"]["all-gather"]
    assert gathered == found["zero"]["planned"]["all-gather"] and gathered >= 2**23, "all weights, at least once"


def test_gradients_are_summed_while_the_backward_pass_runs(found):
    assert found["written out"]["hidden"] > 0.9


def test_gradients_that_a_loop_reduces_are_reduced_in_the_loop(found):
    """XLA would move the all-reduces behind the loop over microbatches, and add up 16-bit gradients in 16 bits."""
    summed = found["accumulated"]
    assert summed["emitted"] == summed["planned"] and summed["times"] == 2


def test_a_step_compiles_for_devices_that_are_not_there(found):
    assert {"stage0/F", "stage1/B"} <= set(found["programs"])


def test_rows_travel_to_experts_in_an_all_to_all_of_unequal_counts(found):
    planned, emitted = found["experts"]["planned"], found["experts"]["emitted"]
    both_ways = 1024 // 8 * (64 + 128) * 4  # into a product and out of it
    assert planned == emitted and planned["ragged-all-to-all"] >= 2 * both_ways
    assert planned["ragged-all-to-all"] % both_ways == 0


def test_gradients_of_strided_convolutions_are_kernels_of_their_own(found):
    """Waits before them do not hide from XLA what they are; the first convolution's input has no gradient."""
    assert found["strided"] == {"Forward": 3, "BackwardFilter": 3, "BackwardInput": 2}
