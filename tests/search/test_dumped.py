"""The golden text of every pass: an MLP of two layers as a pipeline of two stages, unrolled and scanned."""

import jax
import jax.numpy as jnp
import pytest

import autopar

CLUSTER = autopar.Cluster.of("1x4 h100")


def train_step(params, batch):
    def loss_fn(params):
        if isinstance(params, dict):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["w"])
        else:
            x = batch["x"]
            for w in params:
                x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def types(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="golden text is of JAX 0.10")
@pytest.mark.parametrize("kind, params", [("unrolled", [types(8, 8)] * 2), ("scanned", {"w": types(2, 8, 8)})])
def test_passes(kind, params, tmp_path, monkeypatch, golden):
    monkeypatch.setenv("AUTOPAR_DUMP", str(tmp_path))
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    autopar.parallelize(train_step, cluster=CLUSTER, method=method).plan(params, {"x": types(8, 8), "y": types(8, 8)})
    files = sorted(tmp_path.iterdir())
    names = ["program", "rewritten", "microbatches", "segments", "stage0", "stage1", "streams"]
    assert [file.stem.split("_")[1] for file in files] == names
    for file in files:
        golden(f"passes/{kind}_{file.stem}", file.read_text())
