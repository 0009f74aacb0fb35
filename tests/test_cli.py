"""The command line, called as a function: what it prints and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import pytest

import autopar
from autopar.cli import main
from autopar.verify import targets, verify

MODULE = """
import jax, jax.numpy as jnp
import autopar
from autopar import Cluster, Device, Link, ShardParallel

LINK = Link(1e-6, 1e6)
CLUSTER = Cluster(hosts=1, devices_per_host=8, device=Device("toy", 40e6, 1e6, 1e9), intra=LINK, inter=LINK)

@autopar.parallelize(cluster=CLUSTER, method=ShardParallel(mesh_shape=(8,)))
def train_step(state, x):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {"w": state["w"] - grads}, loss

@autopar.parallelize(cluster=CLUSTER, method=autopar.PipelineParallel(num_stages=2, num_microbatches=2, schedule="1f1b"))
def pipeline_step(state, x):
    def loss_fn(w):
        return jnp.mean((jnp.tanh(x @ w) @ w.T) ** 2)
    loss, grads = jax.value_and_grad(loss_fn)(state["w"])
    return {"w": state["w"] - grads}, loss

def plain_step(state, x):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {"w": state["w"] - grads}, loss

def arguments(batch=64):
    return {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)}, jax.ShapeDtypeStruct((batch, 16), jnp.float32)

other_arguments = arguments(32)
not_a_step = 3
"""
STEP, ARGS = "--step=cli_example:train_step", "--args=cli_example:arguments"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run(words...)` -> (status, out, err), where cli_example.py is."""
    (tmp_path / "cli_example.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def run(*words):
        status = main(words)
        return (status, *capsys.readouterr())

    yield run
    sys.modules.pop("cli_example", None)


@pytest.fixture
def saved(run):
    assert run("plan", STEP, ARGS, "--save=a.json")[0] == 0
    return run


def test_plan(run, tmp_path):
    status, planned, _ = run("plan", STEP, ARGS, "--save=a.json", "--html=a.html")
    assert status == 0 and "state/w" in planned
    assert run("plan", "a.json") == (0, planned, "")
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")


def test_diff(saved, tmp_path):
    assert saved("diff", "a.json", "a.json")[:2] == (0, "the plans are equal\n")
    saved("plan", STEP, "--args=cli_example:other_arguments", "--save=b.json")
    status, out, _ = saved("diff", "a.json", "b.json", "--html=both.html")
    assert status == 1 and "float32[32,16]" in out
    assert "Two plans of" in (tmp_path / "both.html").read_text()


def test_explain(saved):
    status, out, _ = saved("explain", "a.json", "w", STEP, ARGS)
    assert status == 0 and out.startswith("state/w") and "Alternatives" in out
    status, _, err = saved("explain", "a.json", "qqq", STEP, ARGS)
    assert status == 2 and "no such argument" in err


def test_alternatives_of_a_plan_by_another_method_are_those_of_that_method(saved):
    """Of ZeRO-3 nothing is kept whole, whatever the step's own method would allow."""
    assert saved("plan", STEP, ARGS, "--method=fsdp", "--save=fsdp.json")[0] == 0
    text = saved("explain", "fsdp.json", "w", STEP, ARGS)[1]
    assert text.startswith("state/w") and "the method, DataParallel(zero=3)" in text


def test_each_command_says_what_it_does(run, capsys):
    with pytest.raises(SystemExit):
        run("explain", "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "Why an argument or operation is sharded as it is." in text and '"compute"' in text and '"stages"' in text


def test_a_plan_for_a_machine_that_is_not_there(run):
    """The sequence that `autopar` alone prints."""
    there = ("--cluster=4 h100", STEP, ARGS)
    assert run("plan", *there, "--method=fsdp", "--save=a.json")[0] == 0
    status, out, _ = run("explain", "a.json", "state/w", *there)
    assert status == 0 and "Alternatives" in out
    assert run("verify", "a.json", *there)[:2] == (0, "verified: the file agrees with itself and with the step\n")
    status, _, err = run("explain", "a.json", "state/w", STEP, ARGS)
    assert status == 2 and "--cluster" in err


def test_verify(saved, tmp_path):
    assert saved("verify", "a.json")[:2] == (
        0,
        "verified: the file agrees with itself; name --step and --args to check it against its program\n",
    )
    assert saved("verify", "a.json", STEP, ARGS)[:2] == (0, "verified: the file agrees with itself and with the step\n")
    status, out, _ = saved("verify", "a.json", STEP, "--args=cli_example:other_arguments")
    assert status == 1 and "stale" in out
    record = json.loads((tmp_path / "a.json").read_text())
    record["cost"].update(step_seconds=1e-9, argument_bytes=1)
    (tmp_path / "a.json").write_text(json.dumps(record))
    status, out, _ = saved("verify", "a.json")
    assert status == 1 and out.count("not verified") == 2


def test_verify_for_a_target(saved, monkeypatch, tmp_path):
    words = ("verify", "a.json", STEP, ARGS, "--target=h100", "--html=found.html")
    monkeypatch.setattr(targets, "_is_there", lambda module: False)
    status, _, err = saved(*words)
    assert status == 2 and "pip install 'autopar[verify]'" in err
    here = targets.Target("this machine", tuple(jax.devices()), {})
    monkeypatch.setattr(verify, "find_target", lambda name, cluster: here)
    status, out, _ = saved(*words)
    assert status == 0 and "compiled for this machine: the compiler agrees" in out
    assert "the compiler agrees" in (tmp_path / "found.html").read_text()
    monkeypatch.setattr(verify, "_peaks", lambda plan, programs: ((1,), (10**9,)))
    status, out, _ = saved(*words)
    assert status == 1 and "over the budget" in out


@pytest.mark.parametrize(
    "words, message",
    [
        (["plan", "absent.json"], "No such file"),
        (["plan"], "one plan to print"),
        (["plan", STEP], "a step needs its arguments"),
        (["plan", STEP, "--args=cli_example:CLUSTER"], "missing a required argument: 'x'"),
        (["plan", STEP, ARGS, "--method=PipelineParallel(stages=2)"], "settings are num_stages, schedule"),
        (["plan", "--step=nowhere:f", ARGS], "nothing of this name"),
        (["plan", "--step=cli_example:nothing", ARGS], "nothing of this name"),
        (["plan", "--step=cli_example:not_a_step", ARGS], "this is no step"),
        (["plan", "--step", "./cli_example.py:train_step", ARGS], "for `step` in train.py"),
        (["plan", "--step=cli_example", ARGS], "name it as module:name"),
        (["plan", "--step=cli_example.train_step:f", ARGS], "nothing of this name"),
        (["plan", STEP, ARGS, "--html=no/x.html"], "No such file or directory"),
        (["plan", STEP, ARGS, "--save=no/x.json"], "No such file or directory"),
        (["doctor", "--timeout", "-1"], "more than 0"),
        (["doctor", "--timeout", "inf"], "more than 0"),
    ],
)
def test_mistakes(run, words, message):
    status, _, err = run(*words)
    assert status == 2 and message in err and "do:" in err


def test_errors_of_the_users_module_pass(run, tmp_path):
    for line, error in (("import nowhere", ModuleNotFoundError), ("int('x')", ValueError), ("None.x", AttributeError)):
        (tmp_path / "cli_broken.py").write_text(line)
        with pytest.raises(error):
            run("plan", "--step=cli_broken:step", ARGS)


def test_usage(run):
    with pytest.raises(SystemExit):
        run("explode")


def test_simulate(saved, tmp_path):
    status, out, _ = saved("simulate", "a.json", "--trace=trace.json")
    assert status == 0 and out.startswith("one program is the whole step: ")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
    status, _, err = saved("simulate", "a.json", "--trace=no/trace.json")
    assert status == 2 and "given:  no/trace.json" in err
    assert saved("plan", "--step=cli_example:pipeline_step", ARGS, "--save=p.json")[0] == 0
    status, out, _ = saved("simulate", "p.json", "--trace=trace.json")
    assert status == 0 and out.startswith("mesh 0  F0") and "a step, by 1f1b" in out
    assert {e["args"].get("kind") for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]} >= {
        "F",
        "B",
    }


def test_alone_it_prints_help_with_examples(run):
    status, out, _ = run()
    assert status == 0 and "autopar compare train:step" in out and "doctor" in out
    status, out, _ = run("--version")
    assert status == 0 and out.startswith(f"autopar {autopar.__version__}, JAX {jax.__version__}, Python 3.")


def test_a_reader_that_goes_away(run, tmp_path):
    """As `autopar plan ... | head -1`: no traceback, and what was to be saved is."""
    saved = tmp_path / "plan.json"
    words = [sys.executable, "-c", "import sys; from autopar.cli import main; sys.exit(main(sys.argv[1:]))"]
    words += ["plan", STEP, ARGS, f"--save={saved}"]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 0 and said == "" and saved.exists()


def test_plan_for_another_cluster(run):
    for step in (
        STEP,
        "--step=cli_example:plain_step",
    ):  # undecorated, too: which machine comes before any line of ours
        status, out, _ = run("plan", step, ARGS, "--cluster=2xh100", "--method=fsdp")
        assert status == 0 and "2 H100" in out and "DataParallel(zero=3)" in out
    for words, message in (
        (["plan", "a.json", "--cluster=2 h100"], "made anew"),
        (["plan", STEP, ARGS, "--cluster=h100 x 2"], 'did you mean "2 h100"?'),
        (["plan", STEP, ARGS, "--method=zero"], "did you mean zero1, zero2 or zero3"),
    ):
        status, _, err = run(*words)
        assert status == 2 and message in err


def test_compare(run, tmp_path):
    (tmp_path / "prices.toml").write_text('currency = "EUR"\n[h100]\nper_hour = 2.0\nwatts = 700\n[l4]\nper_hour = 0.5')
    words = ["compare", "cli_example:train_step", ARGS, "--method", "fsdp", "ddp", "--price=prices.toml"]
    status, out, _ = run(*words, "--cluster", "4 h100", "2xl4")
    lines = out.splitlines()
    assert status == 0 and lines[0] == "train_step, one step" and "EUR per million" in lines[1] and "kWh" in lines[1]
    assert sorted(line[:6] for line in lines[2:]) == ["2xl4  "] * 2 + ["4 h100"] * 2
    assert not any(line.endswith("?") for line in lines[2:]), "where the file states no watts, the catalog does"
    status, out, _ = run(*words, "--cluster", "4 h100", "2xl4", "--sort=price")
    assert out.splitlines()[2].startswith("2xl4")
    for words, message in (
        (["--cluster", "4 h100", "--price=none.toml"], "No such file"),
        (["--cluster", "four"], "unreadable cluster"),
    ):
        status, _, err = run("compare", "cli_example:train_step", ARGS, *words)
        assert status == 2 and message in err
