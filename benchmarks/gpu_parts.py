"""The parts that `gpu.py` runs on GPUs; each has a small version that runs on a CPU (`--rehearse`).

In:     `python gpu_parts.py PART RESULT.json FOLDER [--rehearse]`; one part writes a calibration into the folder for the
        others.
Out:    figures by name, as a row of `gpu.py`. A wrong result raises; a part that this machine cannot run raises `LeftOut`.
Method: a step through autopar is compared with plain `jax.jit` of the same step, by the models and measurements of the other
        benchmarks.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import llama
import numpy as np
import overhead
import unet
import vit
import wide_resnet
from cases import Made, example
from jax.ad_checkpoint import checkpoint_name

import autopar

ROOT = Path(__file__).parent.parent
PROFILE = "gpu_machine.json"
Figures = dict[str, Any]
Part = Callable[[bool, Path], Figures]


class LeftOut(Exception):
    """A part cannot be run on this machine; says why."""


def marked_tests(small: bool, folder: Path) -> Figures:
    """`pytest -m gpu`: among them NCCL between processes, on one GPU, each passing for a host of its own."""
    files = [str(f) for f in sorted(ROOT.glob("tests/**/test_*.py")) if re.search(r"mark\.gpu\b", f.read_text())]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    last = next((line for line in reversed(done.stdout.splitlines()) if " in " in line), "")
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if done.returncode:
        raise AssertionError(done.stdout[-2000:] + done.stderr[-1000:])
    if not counts.get("passed"):
        reason = re.search(r"SKIPPED \[\d+\] (.*)", done.stdout)
        raise LeftOut(reason[1] if reason else last)
    return counts


def over_jit(small: bool, folder: Path) -> Figures:
    """A step through autopar over the same under `jax.jit`, one device."""
    sizes = ((16, 2),) if small else ((256, 4), (512, 4), (2048, 12))
    rounds, steps = (2, 2) if small else (40, 20)
    found = {f"{layers} x {width}": overhead.measure(width, layers, rounds, steps) for width, layers in sizes}
    return {name: ours / plain for name, (plain, ours) in found.items()}


def calibration(small: bool, folder: Path) -> Figures:
    """The cost model's parameters fitted to this machine; median error of each kind of kernel."""
    profile = autopar.calibrate(seconds=1 if small else 90, save=folder / PROFILE)
    return {"seconds": float(profile.machine["seconds"]), **profile.errors}


def _gpt(small: bool, **changed: Any) -> Made:
    size = (
        {"layers": 2, "width": 32, "heads": 4, "vocabulary": 64, "tokens": 16, "batch": 8} if small else {"batch": 16}
    )
    return gpt.make_step(gpt.Config(**{**size, "scanned": True, "dtype": jnp.bfloat16, **changed}))


def _llama(small: bool) -> Made:
    sizes = (2, 32, 64, 4, 2, 64, 16, 8) if small else (12, 2048, 5632, 16, 8, 32000, 2048, 8)
    return llama.make_step(llama.Llama(*sizes))


def _vit(small: bool) -> Made:
    changed = {"layers": 2, "width": 32, "heads": 4, "pixels": 32, "batch": 8} if small else {"batch": 128}
    return vit.make_step(vit.Config(**changed))


def _unet(small: bool) -> Made:
    changed: Any = {"width": 32, "multiples": (1, 2), "blocks": 1, "groups": 8, "pixels": 8, "batch": 8}
    return unet.make_step(unet.Config(**changed) if small else unet.Config(batch=64))


def _wide_resnet(small: bool) -> Made:
    if small:
        return wide_resnet.make_step(wide_resnet.Config((1, 1), width=16, classes=16, pixels=16, batch=8))
    return wide_resnet.make_step(wide_resnet.Config(batch=64))


MODELS: dict[str, Callable[[bool], Made]] = {
    "gpt": _gpt,
    "llama": _llama,
    "experts": lambda small: _gpt(small, scanned=False, experts=2 if small else 8, layers=2 if small else 6),
    "vit": _vit,
    "unet": _unet,
    "wide-resnet": _wide_resnet,
}


def seconds_of(model: str, small: bool, folder: Path) -> Figures:
    """Predicted and measured step, and memory, of a model on all devices; planned with the calibration if there is one, and
    predicted by the datasheet, too.

    Raises:
        AssertionError: The loss of a first step is not that of plain `jax.jit` on one device.
    """
    step, *types = MODELS[model](small)
    train = autopar.parallelize(step, cluster=_cluster(folder), batch_argnums=(1,), donate_argnums=(0,))
    compiled = train.compile(*types)
    arguments = example(types)
    *state, loss = compiled(*jax.device_put(arguments))
    in_use = _most_in_use()
    (_, _), measured = compiled.measure(*state, *arguments[1:], steps=3 if small else 10)
    del state
    plain, expected = _plain_seconds(jax.jit(step, donate_argnums=0), arguments, 3 if small else 10)
    assert abs(float(loss) - expected) <= 2e-2 * abs(expected), f"the loss is {float(loss)}, plain jax.jit's {expected}"
    cost = compiled.plan.cost
    by_datasheet = autopar.parallelize(step, cluster=autopar.Cluster.local(), batch_argnums=(1,), donate_argnums=(0,))
    found = {
        "plan": str(compiled.plan.mesh) if compiled.plan.schedule == "none" else f"{len(compiled.plan.stages)} stages",
        "predicted ms": cost.step_seconds * 1e3,
        "by the datasheet ms": by_datasheet.plan(*types).cost.step_seconds * 1e3,
        "measured ms": measured.step_seconds * 1e3,
        "predicted over measured": cost.step_seconds / measured.step_seconds,
        "over jax.jit": measured.step_seconds / plain,
        "loss": float(loss),
        "predicted GB": max(cost.peak_bytes) / 1e9,
        **({"in use GB": in_use / 1e9} if in_use else {}),
    }
    return found | _compiled_memory(compiled)


def _plain_seconds(step: Any, arguments: Any, steps: int) -> tuple[float, float]:
    """Median seconds of a step that donates its state, on one device; the first loss."""
    state, *batch = jax.device_put(arguments, jax.devices()[0])
    state, first = step(state, *batch)
    taken = []
    for _ in range(steps):
        started = time.perf_counter()
        state, loss = step(state, *batch)
        jax.block_until_ready((state, loss))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken), float(first)


def _most_in_use() -> int:
    """Most bytes that this process has had on one device; 0 where the platform does not say."""
    return max((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.local_devices())


def two_stages(small: bool, folder: Path) -> Figures:
    """A pipeline of two stages; of one GPU both are on it, which shows that it runs and is right, not that it is fast."""
    step, *types = _gpt(small, dtype=jnp.float32)
    devices = jax.devices()[:2] if len(jax.devices()) > 1 else jax.devices()[:1] * 2
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4)
    cluster = autopar.Cluster.local(devices, profile=_profile(folder))
    return _beside_jit(step, types, 1e-4, cluster=cluster, method=method) | {"devices": len(dict.fromkeys(devices))}


def attention(kernel: str, small: bool, folder: Path) -> Figures:
    """A step with an attention kernel, which two microbatches split, on all devices; over the same with plain attention."""
    attend = _attention_of(kernel, small)
    batch, tokens, heads, width = (4, 32, 2, 16) if small else (8, 2048, 16, 64)
    dtype = jnp.float32 if small else jnp.bfloat16

    def step_with(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
        def loss_fn(params: Any, batch: Any) -> jax.Array:
            q, k, v = jnp.einsum("bsd,ndhe->nbshe", batch["x"], params["qkv"])
            out = jnp.einsum("bshe,hed->bsd", attend(q, k, v), params["out"])
            return jnp.mean((out - batch["y"]).astype(jnp.float32) ** 2)

        def train_step(params: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        return train_step

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    params = {"qkv": shape(3, heads * width, heads, width), "out": shape(heads, width, heads * width)}
    types = [params, {name: shape(batch, tokens, heads * width) for name in ("x", "y")}]
    method = autopar.ShardParallel(num_microbatches=2)
    close = 1e-5 if small else 3e-2
    found = _beside_jit(step_with(attend), types, close, cluster=_cluster(folder), method=method)
    plain = _beside_jit(step_with(_attention_of("xla", small)), types, close, cluster=_cluster(folder), method=method)
    return found | {"over plain attention": found["ms"] / plain["ms"]}


def _attention_of(kernel: str, small: bool) -> Callable[..., jax.Array]:
    if kernel == "pallas":
        from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

        names = "block_q block_k block_q_dkv block_kv_dkv block_q_dq block_kv_dq".split()
        blocks = BlockSizes(**dict.fromkeys(names, 16 if small else 64))
        return partial(mha, segment_ids=None, causal=True, block_sizes=blocks, interpret=small)
    implementation: Any = "xla" if small else kernel
    return partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)


def offloaded_activations(small: bool, folder: Path) -> Figures:
    """A checkpoint policy that offloads: what then lies on the host by XLA and by the plan, and what the step takes."""
    layers, width, rows = (3, 16, 16) if small else (8, 4096, 32768)

    def step_with(policy: Any) -> Callable[..., Any]:
        def layer(x: jax.Array, w: jax.Array) -> jax.Array:
            return x + jnp.sin(checkpoint_name(jnp.tanh(x @ w), "inside"))

        def train_step(params: Any, batch: Any) -> Any:
            def loss_fn(params: Any) -> jax.Array:
                block = jax.checkpoint(layer, policy=policy)
                x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), batch["x"], params)
                return jnp.mean(x**2)

            loss, grads = jax.value_and_grad(loss_fn)(params)
            return params - 0.1 * grads, loss

        return train_step

    types = [
        jax.ShapeDtypeStruct((layers, width, width), jnp.float32),
        {"x": jax.ShapeDtypeStruct((rows, width), jnp.float32)},
    ]
    policies = jax.checkpoint_policies
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["inside"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    how = {"cluster": _cluster(folder), "method": autopar.DataParallel()}
    kept = _beside_jit(step_with(policies.save_only_these_names("inside")), types, 1e-4, **how)
    found = _beside_jit(step_with(offload), types, 1e-4, **how)
    found["kept on the device ms"] = kept["ms"]
    assert found["planned host GB"] > 0, "nothing is offloaded"
    return found | {"over what is kept on the device": found["ms"] / kept["ms"]}


def offloaded_optimizer(small: bool, folder: Path) -> Figures:
    """The optimizer's state in the host's memory, in a budget that holds the step no other way."""
    step, *types = _gpt(small, dtype=jnp.float32, batch=4)
    cluster, budget, plan = _cluster(folder), None, None
    while plan is None or not plan.offloaded:
        method = autopar.DataParallel(memory_budget_bytes=budget)
        how: Any = {"batch_argnums": (1,), "donate_argnums": (0,), "cluster": cluster, "method": method}
        plan = autopar.parallelize(step, **how).plan(*types)
        budget = 0.9 * max(plan.cost.peak_bytes)
    return _beside_jit(step, types, 1e-4, plan, cluster=cluster, method=method)


def _beside_jit(step: Any, types: list[Any], close: float, plan: autopar.Plan | None = None, **how: Any) -> Figures:
    """A step once through autopar, as planned if it is, and once through `jax.jit`; then its time, and its memory.

    Raises:
        AssertionError: They differ by more than `close` of the scale of a leaf; on GPUs, whose products round float32 operands
            to 10 bits, by more than that and twice what the leaf differs by when the arguments are rounded so.
    """
    arguments = example(types)
    plain = jax.jit(step)
    expected = plain(*arguments)
    rounded = plain(*jax.tree.map(_rounded, arguments)) if jax.default_backend() == "gpu" else expected
    noise = list(map(_error, jax.tree.leaves(rounded), jax.tree.leaves(expected)))
    compiled = autopar.parallelize(step, batch_argnums=(1,), donate_argnums=(0,), **how).compile(*types, plan=plan)
    state, *rest = compiled(*arguments)
    errors = list(map(_error, jax.tree.leaves((state, *rest)), jax.tree.leaves(expected)))
    wrong = max(zip(errors, noise, strict=True), key=lambda pair: pair[0] - 2 * pair[1])
    assert wrong[0] <= close + 2 * wrong[1], f"a leaf differs from plain jax.jit by {wrong[0]:.1e} of its scale"
    del expected, rounded
    batch, taken = jax.device_put(arguments[1:]), []
    for _ in range(6):
        started = time.perf_counter()
        state, *rest = compiled(state, *batch)
        jax.block_until_ready((state, *rest))
        taken.append(time.perf_counter() - started)
    cost = compiled.plan.cost
    found = {"error": max(errors), "ms": statistics.median(taken[1:]) * 1e3, "predicted ms": cost.step_seconds * 1e3}
    return found | {"planned host GB": cost.host_bytes / 1e9} | _compiled_memory(compiled)


def _error(got: Any, wanted: Any) -> float:
    """Largest difference as a part of the largest number."""
    got, wanted = (np.asarray(x).astype(np.float64) for x in (got, wanted))
    return float(abs(got - wanted).max() / max(abs(wanted).max(), 1e-6))


def _rounded(x: Any) -> Any:
    """float32 numbers with 10 bits behind the leading one, as GPUs' products read them."""
    if x.dtype != np.float32:
        return x
    return ((np.asarray(x).view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def _compiled_memory(compiled: Any) -> Figures:
    """What the largest program takes on a device and on the host, by XLA."""
    sizes = [program.memory_analysis() for program in compiled.programs.values()]
    peaks = [
        size.argument_size_in_bytes + size.output_size_in_bytes + size.temp_size_in_bytes - size.alias_size_in_bytes
        for size in sizes
    ]
    return {"XLA GB": max(peaks) / 1e9, "XLA host GB": max(size.host_temp_size_in_bytes for size in sizes) / 1e9}


def _profile(folder: Path) -> str | None:
    return str(folder / PROFILE) if (folder / PROFILE).exists() else None


def _cluster(folder: Path) -> autopar.Cluster:
    return autopar.Cluster.local(profile=_profile(folder))


PARTS: dict[str, Part] = {
    "tests": marked_tests,
    "over jax.jit": over_jit,
    "calibration": calibration,
    **{f"step: {model}": partial(seconds_of, model) for model in MODELS},
    "two stages": two_stages,
    "attention: cuDNN": partial(attention, "cudnn"),
    "attention: Pallas": partial(attention, "pallas"),
    "offload: activations": offloaded_activations,
    "offload: optimizer": offloaded_optimizer,
}


def run_part(name: str, small: bool, folder: Path) -> dict[str, Any]:
    """The row of one part, but for its seconds."""
    try:
        return {"state": "well", "figures": PARTS[name](small, folder), "why": ""}
    except LeftOut as why:
        return {"state": "left out", "figures": {}, "why": str(why)}
    except Exception as error:
        traceback.print_exc()
        return {"state": "wrong", "figures": {}, "why": f"{type(error).__name__}: {error}"[:400]}


def main() -> None:
    """Run one part, and write its row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("result", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    chosen = parser.parse_args()
    chosen.result.write_text(json.dumps(run_part(chosen.part, chosen.rehearse, chosen.folder)))


if __name__ == "__main__":
    main()
