"""In a running Jupyter kernel: what is text stays text, and a plan shows itself as HTML."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

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

        self.client.execute_interactive(code, output_hook=hear, timeout=PATIENCE_SECONDS)
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
from autopar.doctor.findings import print_report
_ = print_report([Finding("JAX", "ok", "jax 0.10")], as_json=False)
""")
    assert "jax 0.10" in written and not shown


def test_a_plan_shows_itself(session):
    _, shown = session.run("plan")
    assert "Plan of" in shown["text/html"]
    assert "Where the time goes" in shown["text/html"] and "<script>" in shown["text/html"]
    _, shown = session.run("autopar.show(plan, other)")
    assert "Two plans of" in shown["text/html"]


@pytest.mark.parametrize(
    "what, text, html",
    [
        ("plan.cost", "Cost(step ", "Predicted cost"),
        ("plan.mesh", "LogicalMesh(x=2, y=2)", "Logical mesh of 4 devices"),
        ("autopar.Cluster.of('4 h100')", "Cluster(4 H100)", "between hosts"),
        ("plan.timeline()", "Timeline(0 runs", "nothing runs"),
        ("autopar.parallelize(train_step)", "<parallel step train_step; Auto()", "not planned yet"),
    ],
)
def test_what_else_shows_itself(session, what, text, html):
    _, shown = session.run(what)
    assert shown["text/plain"].startswith(text) and html in shown["text/html"]


def test_cells_are_named_as_cells(session):
    written, _ = session.run("print(plan)")
    assert "at cell 1:" in written and "ipykernel" not in written


def test_progress_in_a_cell(session):
    _, shown = session.run(
        "import autopar.search.progress as progress; progress.SILENT_SECONDS = 0.0; _ = planned(autopar.Auto())"
    )
    assert "<progress" in shown["text/html"] and "sharding train_step on mesh" in shown["text/html"]
