"""In a running Jupyter kernel: what is text stays text, and a plan shows itself as HTML."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("ipykernel", reason="no Jupyter kernel: pip install ipykernel")
jupyter_client = pytest.importorskip("jupyter_client", reason="no Jupyter kernel: pip install ipykernel")

ROOT = Path(__file__).parents[2]
STEP = """
import jax, jax.numpy as jnp
import autopar

def train_step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(batch @ p["w"]) @ p["v"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

def planned(method):
    step = autopar.parallelize(train_step, cluster=autopar.Cluster.of("4 h100"), method=method)
    array = jax.ShapeDtypeStruct
    return step.plan({"w": array((64, 64), "float32"), "v": array((64, 8), "float32")}, array((256, 64), "float32"))

plan, other = planned(autopar.ShardParallel(mesh_shape=(2, 2))), planned(autopar.DataParallel(zero=3))
"""


class Kernel:
    """A kernel; `run` gives what a cell writes and what it shows, by MIME type."""

    def __init__(self, client):
        self.client = client

    def run(self, code: str) -> tuple[str, dict[str, str]]:
        written, shown = [], {}

        def hear(message):
            content = message["content"]
            if message["msg_type"] == "stream":
                written.append(content["text"])
            elif message["msg_type"] in ("execute_result", "display_data"):
                shown.update(content["data"])
            assert message["msg_type"] != "error", "\n".join(content["traceback"])

        self.client.execute_interactive(code, output_hook=hear, timeout=120)
        return "".join(written), shown


@pytest.fixture(scope="module")
def kernel():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    manager, client = jupyter_client.manager.start_new_kernel(env=env, cwd=str(ROOT))
    try:
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def session(kernel):
    kernel.run(STEP)
    return kernel


@pytest.mark.parametrize(
    "call, word",
    [
        ("str(plan)", "Plan of `train_step`"),
        ("plan.diff(other)", "DataParallel(zero=3)"),
        ("plan.explain('params/w')", "params/w"),
    ],
)
def test_text_is_returned_and_not_displayed(session, call, word):
    written, shown = session.run(f"text = {call}")
    assert (written, shown) == ("", {})
    written, _ = session.run("print(text)")
    assert word in written


def test_the_doctor_prints(session):
    written, shown = session.run("""
from autopar.doctor.findings import Finding
from autopar.doctor.report import print_report
_ = print_report([Finding("JAX", "ok", "jax 0.10")], as_json=False)
""")
    assert "jax 0.10" in written and not shown


def test_a_plan_shows_itself(session):
    _, shown = session.run("plan")
    assert "Plan of" in shown["text/html"]
