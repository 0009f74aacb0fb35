"""Checkpoints: every plan reads every plan's, orbax reads them alone, and a damaged one is never taken for good."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import PipelineParallel, ShardParallel, checkpoint, parallelize
from autopar.checkpoint.folder import close_workplace, open_workplace
from autopar.errors import CheckpointError, DonatedError
from autopar.runtime.stacks import StackedArray
from tests.checkpoint_model import batches, create_state, step_on, there
from tests.patience import PATIENCE_SECONDS

PLANS = {
    "one device": lambda: step_on(1, ShardParallel()),
    "mesh of 4": lambda: step_on(4, ShardParallel(mesh_shape=(2, 2))),
    "2 stages of 2": lambda: step_on(4, PipelineParallel(num_stages=2, num_microbatches=1)),
    "stages of 1, 1 and 2": lambda: step_on(4, PipelineParallel(submeshes=(1, 1, 2), num_microbatches=1)),
}


@pytest.fixture(scope="module")
def plans():
    """Each plan compiled, and its state after two steps."""
    first, second = batches(2)
    found = {}
    for name, make in PLANS.items():
        step = make()
        state, _ = step(create_state(), first)
        state, _ = step(state, second)
        found[name] = step, state
    return found


def host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if isinstance(want, jax.Array) and jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            assert got.dtype == want.dtype
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        got, want = np.asarray(got), np.asarray(want)
        assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


@pytest.mark.parametrize("source", PLANS)
def test_any_plan_reads_any_plans(tmp_path, plans, source):
    """The state of one plan under each other, and with none; the next step then moves nothing and gives the same."""
    _, state = plans[source]
    wanted = host(state)
    checkpoint.save(tmp_path, state, 2).wait()
    for step, example in plans.values():
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), example)
        restored = checkpoint.restore(tmp_path, like, compiled=step)
        assert_same(host(restored), wanted)
        for got, before in zip(jax.tree.leaves(restored), jax.tree.leaves(example), strict=True):
            assert type(got) is type(before)
            if isinstance(got, StackedArray):
                assert [p.sharding for p in got.parts] == [p.sharding for p in before.parts]
            else:
                assert got.sharding.is_equivalent_to(before.sharding, got.ndim)
        np.testing.assert_allclose(step(restored, batches(3)[2])[1], _next_loss(plans), rtol=1e-5)
    assert_same(checkpoint.restore(tmp_path, wanted), wanted)
    assert_same(host(checkpoint.restore(tmp_path, state)), wanted)


def _next_loss(plans):
    step, state = plans["one device"]
    return step(jax.tree.map(jnp.copy, state), batches(3)[2])[1]


def test_there_are_stacks_of_both_kinds(plans):
    kinds = {name: type(state["params"]["layers"]["w"]) for name, (_, state) in plans.items()}
    assert kinds["stages of 1, 1 and 2"] is StackedArray and kinds["2 stages of 2"] is not StackedArray
    assert len(plans["2 stages of 2"][1]["params"]["layers"]["w"].sharding.device_set) == 4


def test_a_stack_of_unequal_parts_is_an_argument_of_any_step(plans):
    _, state = plans["stages of 1, 1 and 2"]
    mixed = jax.tree.map(lambda x: x if isinstance(x, StackedArray) else np.asarray(x), state)
    _, loss = step_on(1, ShardParallel())(mixed, batches(3)[2])
    np.testing.assert_allclose(loss, _next_loss(plans), rtol=1e-5)


@pytest.mark.parametrize("source", ["mesh of 4", "2 stages of 2", "stages of 1, 1 and 2"])
def test_orbax_alone_reads_them(tmp_path, plans, source):
    _, state = plans[source]
    checkpoint.save(tmp_path, state, 2).wait()
    wanted = host(state)
    for reader in (ocp.StandardCheckpointer(), ocp.PyTreeCheckpointer()):
        found = reader.restore(tmp_path / "2")
        assert_same(found["params"], wanted["params"])
        assert found["step"] == 2
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    target["params"]["layers"]["w"] = jax.ShapeDtypeStruct(
        (4, 16, 16), np.float32, sharding=NamedSharding(mesh, PartitionSpec("x"))
    )
    assert_same(host(ocp.StandardCheckpointer().restore(tmp_path / "2", target)), wanted)


def test_orbax_alone_reads_them_on_other_devices(tmp_path, plans):
    """Another process, one device, no autopar, no target."""
    _, state = plans["2 stages of 2"]
    checkpoint.save(tmp_path, state, 2).wait()
    script = (
        "import sys, jax, orbax.checkpoint as ocp\n"
        f"found = ocp.StandardCheckpointer().restore({str(tmp_path / '2')!r})\n"
        "assert 'autopar' not in sys.modules and jax.device_count() == 1\n"
        "print(found['params']['layers']['w'].shape, float(found['params']['layers']['w'].sum()))"
    )
    environment = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    shape, total = done.stdout.rsplit(maxsplit=1)
    assert shape == "(4, 16, 16)"
    np.testing.assert_allclose(float(total), np.asarray(state["params"]["layers"]["w"]).sum(), rtol=1e-5)


def test_every_kind_of_leaf(tmp_path):
    model = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(1))  # its activations are functions, its sizes static
    params = {"dense": {"kernel": jnp.ones((4, 2), jnp.bfloat16), "mask": jnp.array([True, False])}}
    state = {
        "flax": TrainState.create(apply_fn=lambda: 0, params=params, tx=optax.chain(optax.clip(1.0), optax.adam(1e-3))),
        "equinox": model,
        "numbers": [True, 3, 2.5, 1 + 2j, float("nan"), float("inf"), -7],
        "keys": (jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg"), (2, 3)), jax.random.PRNGKey(5)),
        "dtypes": {
            name: jnp.arange(6).astype(name).reshape(2, 3)
            for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "int4", "uint4", "float4_e2m1fn", "float16")
        }
        | {"complex64": jnp.array([1 + 2j]), "uint8": jnp.arange(3, dtype=jnp.uint8)},
        "numpy": {"f64": np.linspace(0, 1, 5), "scalar": np.float64(2.5), "i64": np.arange(3)},
        "empty": {
            "z": jnp.zeros((0, 3)),
            "n": np.zeros((2, 0), np.int8),
            "keys": jax.random.split(jax.random.key(0), 0),
        },
        "none": None,
        "no leaves": {},
        "haiku/~/linear": {"w.1": jnp.ones(2)},
        "scalar": jnp.float32(1.5),
    }
    checkpoint.save(tmp_path, state, 0).wait()
    restored = checkpoint.restore(tmp_path, state)
    arrays, rest = eqx.partition(state, lambda x: not callable(x))
    assert_same(eqx.filter(restored, lambda x: not callable(x)), arrays)
    assert eqx.tree_equal(eqx.filter(restored, callable), rest)
    assert [type(x) for x in restored["numbers"]] == [type(x) for x in state["numbers"]]
    assert isinstance(restored["numpy"]["f64"], np.ndarray) and isinstance(restored["flax"], TrainState)
    plain = ocp.StandardCheckpointer().restore(tmp_path / "0")
    assert plain["dtypes"]["float8_e4m3fn"].dtype == ml_dtypes.float8_e4m3fn and plain["numbers"][1] == 3


def test_devices_of_other_processes_get_numpy_arrays(tmp_path):
    """A mesh without devices: what another runtime's arrays say of themselves."""
    checkpoint.save(tmp_path, jnp.arange(8.0), 0).wait()
    far = NamedSharding(jax.sharding.AbstractMesh((2,), ("x",)), PartitionSpec("x"))
    restored = checkpoint.restore(tmp_path, jax.ShapeDtypeStruct((8,), jnp.float32, sharding=far))
    assert isinstance(restored, np.ndarray) and restored.tolist() == list(range(8))


def test_keys_are_sharded_too(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, PartitionSpec("x")))
    checkpoint.save(tmp_path, keys, 0).wait()
    restored = checkpoint.restore(tmp_path, keys)
    assert_same(restored, keys)
    assert restored.sharding.is_equivalent_to(keys.sharding, 1)


def test_what_is_saved_may_be_overwritten_at_once(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    increase = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jax.device_put(jnp.zeros((1024, 512)), NamedSharding(mesh, PartitionSpec("x")))
    single, numpy = jnp.zeros((512, 512)), np.zeros((512, 512))
    saving = checkpoint.save(tmp_path, {"a": array, "b": single, "c": numpy}, 0)
    for _ in range(3):
        array, single = increase(array), increase(single)
    numpy += 1
    jax.block_until_ready((array, single))
    saving.wait()
    for leaf in jax.tree.leaves(checkpoint.restore(tmp_path, {"a": array, "b": single, "c": numpy})):
        assert not np.asarray(leaf).any()


def run_script(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    return done


def test_a_program_that_ends_waits_for_its_checkpoint(tmp_path):
    script = (
        "import numpy as np; from autopar import checkpoint\n"
        f"checkpoint.save({str(tmp_path)!r}, {{'a': np.zeros(3_000_000)}}, 5)"
    )
    done = run_script(script)
    if sys.version_info < (3, 12):
        assert checkpoint.latest(tmp_path) == 5 and there(tmp_path) == ["5"]
    else:  # no thread starts while the program ends: written in time, or told
        assert checkpoint.latest(tmp_path) == 5 or "was NOT written" in done.stderr


# Damage.


def test_a_checkpoint_cut_off_anywhere_is_never_good(tmp_path):
    """Every file: cut at its ends and at places between, a bit turned, grown, gone."""
    state = {"a": np.arange(4000.0), "b": jnp.ones((3, 5)), "n": 3}
    checkpoint.save(tmp_path, state, 1).wait()
    assert checkpoint.latest(tmp_path) == 1
    random = np.random.default_rng(0)
    files = [p for p in (tmp_path / "1").rglob("*") if p.is_file()]
    assert {p.name for p in files} >= {"autopar.json", "manifest.ocdbt", "_METADATA"}
    for file in files:
        whole = file.read_bytes()
        cuts = {0, 1, len(whole) // 2, len(whole) - 1, *random.integers(0, len(whole), 12).tolist()}
        damaged = [whole[:cut] for cut in cuts if cut < len(whole)]
        for at in random.integers(0, len(whole), 6):
            damaged.append(whole[:at] + bytes([whole[at] ^ (1 << random.integers(8))]) + whole[at + 1 :])
        damaged += [whole + b"\0", whole + b"\n", whole + whole, b"\xff" * len(whole)]
        for content in damaged:
            file.write_bytes(content)
            assert checkpoint.latest(tmp_path) is None, (file, len(content), len(whole))
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.restore(tmp_path, state, 1)
        file.unlink()
        assert checkpoint.latest(tmp_path) is None
        file.write_bytes(whole)
    assert_same(host(checkpoint.restore(tmp_path, state)), host(state))


def test_the_newest_whole_one_is_taken(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, {"a": np.full(3, step)}, step).wait()
    like = {"a": np.zeros(3, int)}
    (tmp_path / "3" / "_METADATA").unlink()
    with pytest.warns(UserWarning, match=r"3 is damaged: _METADATA is missing. Restoring step 2"):
        assert checkpoint.restore(tmp_path, like)["a"][0] == 2
    with pytest.raises(CheckpointError, match="_METADATA is missing") as caught:
        checkpoint.restore(tmp_path, like, 3)
    assert "restore another step of [1, 2, 3]" in caught.value.do
    for step in (1, 2):
        (tmp_path / str(step) / "autopar.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        checkpoint.restore(tmp_path, like)


def test_a_renamed_checkpoint_is_not_another_step(tmp_path):
    checkpoint.save(tmp_path, {"a": np.ones(3)}, 1).wait()
    (tmp_path / "1").rename(tmp_path / "7")
    with pytest.raises(CheckpointError, match="checkpoint of step 1, under another name"):
        checkpoint.restore(tmp_path, {"a": np.ones(3)}, 7)


# Steps.


def test_steps_are_kept_and_replaced(tmp_path):
    assert checkpoint.latest(tmp_path / "not there") is None and checkpoint.steps(tmp_path) == []
    for step in (0, 5, 10, 15):
        checkpoint.save(tmp_path, {"a": np.full(2, step)}, step, keep=2).wait()
    assert checkpoint.steps(tmp_path) == [10, 15]
    with pytest.raises(CheckpointError, match="already"):
        checkpoint.save(tmp_path, {"a": np.zeros(2)}, 10)
    checkpoint.save(tmp_path, {"a": np.full(2, 11)}, 10, overwrite=True, keep=1).wait()
    assert checkpoint.steps(tmp_path) == [10, 15], "a later one stays"
    assert checkpoint.restore(tmp_path, {"a": np.zeros(2, int)}, 10)["a"][0] == 11
    assert checkpoint.save(tmp_path, {"a": np.zeros(2)}).wait().name == "16"
    assert there(tmp_path) == ["10", "15", "16"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    """Also what it had done before it was killed between the two renames of a replacement."""
    checkpoint.save(tmp_path, {"a": np.zeros(2)}, 4).wait()
    checkpoint.save(tmp_path, {"a": np.ones(2)}, 5).wait()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".autopar-{socket.gethostname()}-{dead.pid}-0a"
    left.mkdir()
    (tmp_path / "5").rename(left / "made")
    (tmp_path / "4").rename(left / "replaced-4")
    checkpoint.save(tmp_path, {"a": np.zeros(2)}, 6).wait()
    assert there(tmp_path) == ["4", "6"]


def test_a_failed_save_says_so(tmp_path, monkeypatch):
    from autopar.checkpoint import save as module

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["autopar.checkpoint.save"], "write_manifest", full)
    with pytest.warns(UserWarning, match="NOT written(?s:.*)No space left") as warned:
        saving = module(tmp_path, {"a": np.ones(3)}, 0)
        with pytest.raises(CheckpointError, match="No space left") as caught:
            saving.wait()
    assert len(warned) == 1 and "see to the disk" in caught.value.do
    assert there(tmp_path) == []
    monkeypatch.undo()
    assert checkpoint.save(tmp_path, {"a": np.ones(3)}, 0).wait().name == "0", "the error has been raised"


def test_a_failed_save_that_nobody_waits_for(tmp_path, monkeypatch):
    """Nobody holds it: it warns, and the next one into its directory, and no other, raises its error once."""
    module = sys.modules["autopar.checkpoint.save"]

    def broken(*_):
        raise ValueError("Unsupported data type")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="Unsupported data type"):
        patch.setattr(module, "write_manifest", broken)
        thread = checkpoint.save(tmp_path / "a", {"a": np.ones(3)}, 0)._thread
        thread.join()
    checkpoint.save(tmp_path / "b", {"a": np.ones(3)}, 1).wait()
    with pytest.raises(CheckpointError, match="Unsupported data type") as caught:
        checkpoint.save(tmp_path / "a", {"a": np.ones(3)}, 1)
    assert caught.value.path == str(tmp_path / "a" / "0") and "disk" not in caught.value.do
    assert checkpoint.save(tmp_path / "a", {"a": np.ones(3)}, 1).wait().name == "1"


def test_a_save_that_fails_while_the_program_ends_says_why(tmp_path):
    script = (
        "import sys, time, numpy as np; from autopar import checkpoint\n"
        "def full(*_):\n"
        "    time.sleep(1)\n"
        "    raise OSError(28, 'No space left on device')\n"
        "sys.modules['autopar.checkpoint.save'].write_manifest = full\n"
        f"checkpoint.save({str(tmp_path)!r}, {{'a': np.zeros(3)}}, 5)"
    )
    done = run_script(script)
    assert "NOT written" in done.stderr
    came_so_far = "No space left" in done.stderr and "see to the disk" in done.stderr
    assert came_so_far != ("call wait() on what checkpoint.save returns before the program ends" in done.stderr)
    assert came_so_far or sys.version_info >= (3, 12)  # from then on, orbax may not come so far


@pytest.mark.parametrize("step", ["best", -1, 1.5, np.float32(2), jnp.ones(2, int), "500"], ids=str)
def test_a_step_is_a_whole_number(tmp_path, step):
    checkpoint.save(tmp_path, {"a": 1}, 500).wait()
    for door in (checkpoint.save, checkpoint.restore):
        with pytest.raises(CheckpointError, match="no whole number, 0 or more"):
            door(tmp_path, {"a": 1}, step)
    assert there(tmp_path) == ["500"]


@pytest.mark.parametrize("step", [np.int64(5), jnp.int32(5)], ids=lambda step: type(step).__name__)
def test_a_step_may_be_an_array(tmp_path, step):
    saving = checkpoint.save(tmp_path, {"a": 1}, step)
    assert saving.wait().name == "5" and type(saving.step) is int and checkpoint.latest(tmp_path) == 5
    assert checkpoint.restore(tmp_path, {"a": 0}, step) == {"a": 1}


@pytest.mark.parametrize("name", [".autopar-foo", ".autopar-x-y-z", f".autopar-{socket.gethostname()}-{10**12}-0a"])
def test_names_that_look_like_ours(tmp_path, name):
    (tmp_path / name).mkdir()
    assert checkpoint.save(tmp_path, {"a": 1}, 0).wait().name == "0"


# Other states.


@pytest.mark.parametrize(
    "like, words",
    [
        ({"a": np.ones(3, np.float32), "b": {"c": 1}, "d": 0}, "d: not in the checkpoint, asked for as Python int"),
        ({"a": np.ones(3, np.float32)}, "b/c: Python int in the checkpoint, not asked for"),
        ({"a": np.ones(4, np.float32), "b": {"c": 1}}, r"a: float32\[3\] in the checkpoint, asked for as float32\[4\]"),
        ({"a": np.ones(3, np.int32), "b": {"c": 1}}, r"a: float32\[3\] in the checkpoint, asked for as int32\[3\]"),
        (
            {"a": np.ones(3, np.float32), "b": {"c": 1.0}},
            "b/c: Python int in the checkpoint, asked for as Python float",
        ),
        ({"a": None, "b": {"c": 1}}, r"a: float32\[3\] in the checkpoint, not asked for"),
    ],
)
def test_another_state_is_named(tmp_path, like, words):
    checkpoint.save(tmp_path, {"a": np.ones(3, np.float32), "b": {"c": 1}}, 0).wait()
    with pytest.raises(CheckpointError, match=words):
        checkpoint.restore(tmp_path, like)


def test_a_part_can_be_read(tmp_path, plans):
    _, state = plans["2 stages of 2"]
    checkpoint.save(tmp_path, state, 0).wait()
    like = {"params": host(state["params"])}
    assert_same(checkpoint.restore(tmp_path, like, partial=True), like)


def test_a_part_of_a_tuple_can_be_read(tmp_path):
    """Also the first of a list in it; orbax by itself compares how many children a tuple has."""
    state = (np.arange(3.0), [np.ones(2), 5], np.arange(4))
    checkpoint.save(tmp_path, state, 0).wait()
    like = (np.zeros(3), [np.zeros(2)])
    assert_same(checkpoint.restore(tmp_path, like, partial=True), (state[0], [state[1][0]]))


def test_a_number_and_a_scalar_array_stand_for_each_other(tmp_path):
    """A step count is a Python number before the first step and an array after it."""
    checkpoint.save(tmp_path, {"n": jnp.int32(3), "m": 4}, 0).wait()
    restored = checkpoint.restore(tmp_path, {"n": 0, "m": jnp.int32(0)})
    assert isinstance(restored["n"], jax.Array) and restored["n"] == 3
    assert isinstance(restored["m"], jax.Array) and restored["m"] == 4


@pytest.mark.parametrize("types_only", [True, False])
def test_what_was_a_number_stays_weakly_typed(tmp_path, types_only):
    """Or a bfloat16 model would go on as a float32 one, and the step be planned anew."""

    def train(state, batch):
        return {"w": state["w"] - state["lr"] * batch.sum(0), "lr": state["lr"] * 0.5, "n": state["n"] + 1}

    def fresh():
        return {"w": jnp.ones(4, jnp.bfloat16), "lr": 0.5, "n": 0}

    step, batch = parallelize(train, method=ShardParallel(), batch_argnums=1), jnp.ones((8, 4), jnp.bfloat16)
    state = step(fresh(), batch)
    checkpoint.save(tmp_path, state, 1).wait()
    like = jax.eval_shape(fresh) if types_only else fresh()
    restored = checkpoint.restore(tmp_path, like, compiled=step)
    assert [x.weak_type for x in jax.tree.leaves(restored)] == [x.weak_type for x in jax.tree.leaves(state)]
    assert step(restored, batch)["w"].dtype == jnp.bfloat16
    assert len(step._made.compiled) == 1


def test_what_cannot_be_saved(tmp_path):
    for state, words in (
        ({"a": "text"}, "only arrays and numbers"),
        ({"a": {"b": 1}, "a.b": 2}, "two leaves have one name"),
        ({"a": {"b": 2**70}}, "a/b: an int of 71 bits"),
        ({"a": np.array(["text"])}, "a: an array of dtype <U4"),
        ({"a": np.array([1, None])}, "a: an array of dtype object"),
        ({"a": np.zeros(2, [("x", int), ("y", float)])}, "a: an array of dtype"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoint.save(tmp_path, state, 0)
    assert there(tmp_path) == []


@pytest.mark.parametrize("state", [{}, (), None, {"a": {}}, {"f": max}, np.zeros((0, 3))], ids=str)
def test_a_state_without_elements(tmp_path, state):
    checkpoint.save(tmp_path, state, 0).wait()
    restored = checkpoint.restore(tmp_path, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert [np.shape(leaf) for leaf in jax.tree.leaves(restored)] == [np.shape(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), np.longdouble(1) / 3, np.datetime64("2020-01-01")], ids=str)
def test_wide_numbers(tmp_path, value):
    checkpoint.save(tmp_path, {"a": value, "b": 1}, 0).wait()
    assert checkpoint.restore(tmp_path, {"a": value, "b": 0}) == {"a": value, "b": 1}
    assert checkpoint.restore(tmp_path, {}, partial=True) == {}


def test_a_missing_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.restore(tmp_path, {})
    checkpoint.save(tmp_path, {"a": 1}, 3).wait()
    with pytest.raises(CheckpointError, match="no checkpoint of step 2") as caught:
        checkpoint.restore(tmp_path, {"a": 1}, 2)
    assert "3" in caught.value.wrong


def test_a_state_that_is_no_argument(tmp_path, plans):
    checkpoint.save(tmp_path, {"a": np.ones(3)}, 0).wait()
    with pytest.raises(CheckpointError, match="does not fit the step"):
        checkpoint.restore(tmp_path, {"a": np.ones(3)}, compiled=plans["one device"][0])
    with pytest.raises(CheckpointError, match="no compiled step"):
        checkpoint.restore(tmp_path, {"a": np.ones(3)}, compiled="x")
    with pytest.raises(CheckpointError, match="no plan yet"):
        checkpoint.restore(tmp_path, {"a": np.ones(3)}, compiled=PLANS["one device"]())


def test_without_orbax(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax", None)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(CheckpointError, match=r"pip install 'autopar\[checkpoint\]'"):
        checkpoint.save(tmp_path, {"a": 1}, 0)
    assert there(tmp_path) == []


def test_nothing_warns(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, {"a": jnp.ones(3)}, 0).wait()
        checkpoint.restore(tmp_path, {"a": jnp.ones(3)})


def test_classes_that_check_their_fields(tmp_path):
    """orbax maps its own options over the state, which such a class does not take."""
    state = {"scale": jmp.DynamicLossScale(jnp.float32(16.0), jnp.int32(3)), "w": jnp.arange(4.0)}
    checkpoint.save(tmp_path, state).wait()
    found = checkpoint.restore(tmp_path, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert [float(jnp.sum(x)) for x in jax.tree.leaves(found)] == [16.0, 3.0, 6.0]


def test_a_state_that_was_donated_is_not_saved(tmp_path):
    state = {"w": jnp.arange(4.0)}
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    with pytest.raises(DonatedError, match="(?s)given:  w\n.*save what the last call returned"):
        checkpoint.save(tmp_path, state)


def test_what_comes_up_again_is_removed(tmp_path):
    """Of a save that failed while another process was still writing; what is being written stays."""
    left = tmp_path / f".autopar-{socket.gethostname()}-{os.getpid()}-0a"
    left.mkdir()
    being_written = open_workplace(tmp_path)
    assert not left.exists()
    checkpoint.save(tmp_path, {"a": 1}, 0).wait()
    assert there(tmp_path) == [being_written.name, "0"]
    close_workplace(being_written)
    assert there(tmp_path) == ["0"]
