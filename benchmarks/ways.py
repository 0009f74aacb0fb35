"""The ways to run a step: autopar's methods, plain `jax.jit`, shardings by hand, google-parallax.

In:     a case, its step and types, a cluster.
Out:    `Measured`: a function that runs one step and waits for it; or `Predicted`: seconds, and bytes on a device.
Method: to predict a hand-written sharding, its pins are planned under autopar's costs; what they leave open is chosen for the
        least time.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from cases import Case, Made, example, hand_shardings, path_text
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar

METHODS: dict[str, Callable[[Any], Any]] = {
    "autopar": lambda case: autopar.Auto(microbatch_semantics=case.semantics),
    "autopar fsdp": lambda case: autopar.DataParallel(zero=3),
    "autopar 2 stages": lambda case: autopar.PipelineParallel(
        num_stages=2, num_microbatches=4, microbatch_semantics=case.semantics
    ),
}
BY_HAND = {"by hand, data": "data", "by hand, fsdp": "fsdp", "by hand, tensor": "tensor"}
WAYS = (*METHODS, "jax.jit, one device", *BY_HAND, "parallax")


@dataclass(frozen=True)
class Run:
    """A way to run a step.

    Attributes:
        once: Runs one step and waits for it; None: it is predicted.
        seconds: Predicted; None: nobody predicts it.
        peak_bytes: On the fullest device, predicted, or as XLA says; None: not known.
        plan: In words.
    """

    once: Callable[[], None] | None
    seconds: float | None = None
    peak_bytes: int | None = None
    plan: str = ""


class NotThere(Exception):
    """This way does not exist for this case here; says why."""


def run_of(case: Case, made: Made, way: str, cluster: autopar.Cluster) -> Run:
    """A step by one of `WAYS`.

    Raises:
        NotThere: It cannot be had.
    """
    step, state, batch = made
    if way in BY_HAND and BY_HAND[way] == "tensor" and not case.tensor:
        raise NotThere("nobody splits this model's tensors by hand")
    is_here = cluster.devices is not None or cluster.machine is not None
    if way in METHODS:
        return _planned(step, (state, batch), METHODS[way](case), cluster, is_here)
    if cluster.machine is not None:
        raise NotThere("runs in one process")
    if way == "jax.jit, one device":
        return _on_one_device(step, (state, batch), cluster, is_here)
    if way == "parallax":
        return _parallax(step, (state, batch), is_here)
    return _by_hand(case, step, (state, batch), BY_HAND[way], cluster, is_here)


def _planned(step: Any, arguments: Any, method: Any, cluster: autopar.Cluster, is_here: bool) -> Run:
    parallel = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,))
    plan = parallel.plan(*arguments)
    words = f"{len(plan.stages)} stages, {plan.schedule}" if plan.schedule != "none" else str(plan.mesh)
    once = None
    if is_here:
        state, batch = example(arguments)
        if cluster.machine is not None:
            state = parallel.create_state(lambda: example(arguments)[0], example=(batch,))
        once = _turning(parallel, state, batch)
    return Run(once, plan.cost.step_seconds, max(plan.cost.peak_bytes), words)


def _on_one_device(step: Any, arguments: Any, cluster: autopar.Cluster, is_here: bool) -> Run:
    alone = autopar.Cluster(1, 1, cluster.device, cluster.intra, cluster.inter)
    try:
        plan = autopar.parallelize(step, cluster=alone, batch_argnums=(1,)).plan(*arguments)
    except autopar.errors.InfeasibleError as error:
        raise NotThere(error.summary) from None
    once = None
    if is_here:
        jitted = jax.jit(step, donate_argnums=0)
        once = _turning(jitted, *jax.device_put(example(arguments), cluster.devices[0]))
    return Run(once, plan.cost.step_seconds, max(plan.cost.peak_bytes))


def _by_hand(case: Case, step: Any, arguments: Any, way: str, cluster: autopar.Cluster, is_here: bool) -> Run:
    sizes = {"data": max(1, cluster.num_devices // 4), "model": min(4, cluster.num_devices)}
    specs = hand_shardings(case, way, arguments, sizes)
    once, peak = None, None
    if is_here:
        kinds = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=cluster.devices, axis_types=kinds)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
        results = (shardings[0], NamedSharding(mesh, P()))
        jitted = jax.jit(step, in_shardings=shardings, out_shardings=results, donate_argnums=0)
        compiled = jitted.lower(*arguments).compile()
        peak = _compiled_bytes(compiled)
        once = _turning(compiled, *jax.device_put(example(arguments), shardings))
    method = _pinned(specs, sizes, tuple(inspect.signature(step).parameters))
    plan = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,)).plan(*arguments)
    return Run(once, plan.cost.step_seconds, peak or max(plan.cost.peak_bytes), f"{sizes['data']} x {sizes['model']}")


def _pinned(specs: Any, sizes: dict[str, int], names: tuple[str, ...]) -> Any:
    """The same shardings as pins: the axes are called x and y there, and one of length 1 is left out."""
    kept = [axis for axis, size in sizes.items() if size > 1]
    letters = dict(zip(kept, "xy", strict=False))

    def renamed(entry: Any) -> Any:
        axes = [letters[axis] for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis in letters]
        return tuple(axes) if axes else None

    pins = {}
    for name, tree in zip(names, specs, strict=True):
        for path, spec in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, P)):
            pins["/".join(filter(None, (name, path_text(path))))] = P(*map(renamed, spec))
    return autopar.ShardParallel(mesh_shape=tuple(sizes[axis] for axis in kept), constraints=pins)


def _parallax(step: Any, arguments: Any, is_here: bool) -> Run:
    if importlib.util.find_spec("parallax") is None:
        raise NotThere("not installed: pip install google-parallax")
    if not is_here:
        raise NotThere("predicts nothing")
    import parallax

    state, batch = example(arguments)
    with jax.set_mesh(parallax.auto_mesh()):
        try:
            compiled = parallax.jit(step, strategy=parallax.ShardingStrategy.AUTO).lower(state, batch).compile()
        except Exception as error:  # its own, or JAX's of the shardings that it found
            raise NotThere(f"google-parallax cannot read this step: {type(error).__name__} {error}"[:120]) from None
    shardings = compiled.input_shardings[0]
    return Run(_turning(compiled, *jax.device_put((state, batch), shardings)), None, _compiled_bytes(compiled))


def _compiled_bytes(compiled: Any) -> int:
    found = compiled.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes


def _turning(step: Callable[..., Any], state: Any, batch: Any) -> Callable[[], None]:
    """One step after the other, each waited for."""
    held = [state]

    def once() -> None:
        held[0], loss = step(held[0], batch)
        jax.block_until_ready(loss)
        jax.tree.map(lambda leaf: leaf.block_until_ready() if hasattr(leaf, "block_until_ready") else leaf, held[0])

    return once
