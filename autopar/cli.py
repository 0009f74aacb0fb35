"""The command line: makes, reads, compares, explains and checks plans; examines and measures this machine.

In:     plan files; or a step and its arguments, each as `module:name`, the arguments a tuple or a function that returns
        one (arrays or `jax.ShapeDtypeStruct`s).
Out:    text. Exit status 0; 1 if plans differ, a plan is not verified, or the machine lacks something necessary; 2 if the
        command cannot be carried out.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import jax

from autopar import __version__
from autopar.api import parallelize
from autopar.calibrate import calibrate
from autopar.calibrate.words import profile_text
from autopar.compare import Sort, compare
from autopar.doctor import examine
from autopar.doctor.findings import print_report
from autopar.errors import AutoparError, PlanFileError, StalePlanError, check_number
from autopar.mesh import Cluster
from autopar.plan.stale import contradictions
from autopar.plan.words import seconds_text
from autopar.report.plan import Plan
from autopar.report.show import show, write_page
from autopar.search.method_names import method_of
from autopar.step import ParallelStep

STEP_HELP = "the step, as module:name (train:step is `step` in ./train.py); parallelized or not"
ARGS_HELP = "its arguments, as module:name: a tuple, or a function that returns one"
CLUSTER_HELP = 'a machine, which need not be there: "8 h100", "8x8 h200", "v5p-64"'
METHOD_HELP = 'how to split: "auto", "fsdp", "PipelineParallel(num_stages=4)"; else the step\'s own'
TARGET_HELP = "compile every program for this device, which need not be there: h100, h200, a100, b200, tpu-v5e"
PRICE_HELP = "a TOML file of the user's: for each device a table such as [h100] with per_hour = 2.5 and watts = 700"
EXAMPLES = """examples, for `step` in train.py and the types of its arguments, `arguments`, there:
  autopar doctor                                                       what this machine can do
  autopar calibrate --save machine.json                                measure it, for Cluster.local(profile="machine.json")
  autopar plan --step train:step --args train:arguments                how the step would be split here
  autopar plan --step train:step --args train:arguments --cluster "8x8 h100" --method fsdp --save plan.json
  autopar plan plan.json                                               read it
  autopar explain plan.json "state/params/*" --step train:step --args train:arguments --cluster "8x8 h100"
  autopar verify plan.json --step train:step --args train:arguments --cluster "8x8 h100" --target h100    as XLA sees it
  autopar compare train:step --args train:arguments --cluster "8 h100" "16 a100-80" v5p-64 --method auto fsdp
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. `argv`: its words; None: those of this process."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.version:
        return _version()
    if options.command is None:
        parser.print_help()
        return 0
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `autopar plan ... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autopar",
        description="Make, read, compare, explain and check parallel plans.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the versions of autopar, JAX and Python")
    commands = parser.add_subparsers(dest="command")
    for add in (
        _add_plan,
        _add_compare,
        _add_diff,
        _add_explain,
        _add_verify,
        _add_simulate,
        _add_doctor,
        _add_calibrate,
    ):
        add(commands)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], words: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=words, description=f"{words[0].upper()}{words[1:]}."
    )
    command.set_defaults(run=run)
    return command


def _version() -> int:
    print(f"autopar {__version__}, JAX {jax.__version__}, Python {platform.python_version()}")
    return 0


def _add_plan(commands: Any) -> None:
    command = _command(commands, "plan", _plan, "print a plan file; or plan a step and print, perhaps save, its plan")
    command.add_argument("file", nargs="?", help="a plan file")
    _add_step(command)
    command.add_argument("--save", metavar="FILE", help="write the plan")
    command.add_argument("--html", metavar="FILE", help="write a page of pictures, for a browser")


def _add_step(command: Any, required: bool = False, why: str = "") -> None:
    command.add_argument("--step", required=required, help=STEP_HELP + why)
    command.add_argument("--args", required=required, help=ARGS_HELP)
    command.add_argument("--cluster", help=CLUSTER_HELP + "; else the step's own")
    command.add_argument("--method", help=METHOD_HELP)


def _plan(options: argparse.Namespace) -> int:
    if (options.file is None) == (options.step is None):
        raise AutoparError(
            "there must be one plan to print.",
            given=f"file={options.file}, --step={options.step}",
            wrong="neither or both are named.",
            do="name a plan file, or --step and --args.",
        )
    if options.file is not None and (options.cluster or options.method):
        raise AutoparError(
            "a plan in a file has its cluster and method.",
            given=f"{options.file}, --cluster={options.cluster}, --method={options.method}",
            wrong="a plan for others must be made anew.",
            do="name --step and --args instead of the file.",
        )
    if options.file is not None:
        plan = Plan.load(options.file)
    else:
        step, args = _replanned(options)
        plan = step.plan(*args)
    if options.save:
        plan.save(options.save)
    if options.html:
        show(plan, path=options.html)
    print(plan)
    return 0


def _add_compare(commands: Any) -> None:
    command = _command(commands, "compare", _compare, "plan a step for several clusters, and print one table")
    command.add_argument("step", help=STEP_HELP)
    command.add_argument("--args", required=True, help=ARGS_HELP)
    command.add_argument("--cluster", nargs="+", required=True, help=CLUSTER_HELP)
    command.add_argument("--method", nargs="+", help=METHOD_HELP)
    command.add_argument("--price", metavar="FILE", help=PRICE_HELP)
    command.add_argument("--html", metavar="FILE", help="write a page with bars, too")
    command.add_argument("--sort", choices=get_args(Sort), default="step", help="order of rows (step)")


def _compare(options: argparse.Namespace) -> int:
    step, args = _step_and_args(options)
    found = compare(step, args, options.cluster, options.method, prices=options.price, sort=options.sort)
    if options.html:
        found.save_html(options.html)
    print(found)
    return 0


def _add_diff(commands: Any) -> None:
    command = _command(commands, "diff", _diff, "what differs between two plan files; exit status 1 if anything does")
    command.add_argument("this", help="a plan file")
    command.add_argument("other", help="the plan file to hold beside it")
    command.add_argument("--html", metavar="FILE", help="write both, beside each other, as a page of pictures")


def _diff(options: argparse.Namespace) -> int:
    this, other = Plan.load(options.this), Plan.load(options.other)
    text = this.diff(other)
    print(text or "the plans are equal")
    if options.html:
        show(this, other, path=options.html)
    return 1 if text else 0


def _add_explain(commands: Any) -> None:
    command = _command(commands, "explain", _explain, "why an argument or operation is sharded as it is")
    command.add_argument("file", help="a plan file")
    command.add_argument(
        "name",
        help='path of an argument, a glob, or part of an operation such as "dot_general at train.py:12"; or "compute": '
        'where the step\'s time goes; or "stages": why a pipeline is cut where it is',
    )
    _add_step(command, required=True, why=": a file holds what was decided, not the alternatives")


def _explain(options: argparse.Namespace) -> int:
    plan = Plan.load(options.file)
    options.method = options.method or _readable(plan.method)
    step, args = _replanned(options)
    print(step.attach(*args, plan=plan).explain(options.name))
    return 0


def _readable(method: str) -> str | None:
    """A plan's method as text that `--method` accepts; None: its settings cannot be written as text."""
    try:
        method_of(method)
    except AutoparError:
        return None
    return method


def _add_verify(commands: Any) -> None:
    command = _command(
        commands,
        "verify",
        _verify,
        "check a plan file: that it agrees with itself, with its step if one is named, and with XLA's compiler if a "
        "target is; exit status 1 if anything does not",
    )
    command.add_argument("file", help="a plan file")
    _add_step(command)
    command.add_argument("--target", metavar="DEVICE", help=TARGET_HELP)
    command.add_argument("--html", metavar="FILE", help="write what the compiler says as a page, too")


def _verify(options: argparse.Namespace) -> int:
    """Check that the file is consistent, and with a step, that lowering its choices gives what the file lists."""
    plan = Plan.load(options.file)
    problems = contradictions(plan)
    found = None
    if (options.step or options.target) and not problems:
        step, args = _replanned(options)
        try:
            plan = step.attach(*args, plan=plan)
            found = plan.verify(options.target) if options.target else None
        except (StalePlanError, PlanFileError) as error:
            problems.append(str(error))
    for problem in problems:
        print(f"not verified: {problem}")
    if not problems:
        checked = (
            "the file agrees with itself and with the step"
            if options.step
            else "the file agrees with itself; name --step and --args to check it against its program"
        )
        print(f"verified: {checked}")
    if found is not None:
        print(f"\n{found}")
        if options.html:
            found.save_html(options.html)
    return 1 if problems or (found is not None and not found.ok) else 0


def _add_simulate(commands: Any) -> None:
    command = _command(commands, "simulate", _simulate, "the step of a plan file on a clock")
    command.add_argument("file", help="a plan file")
    command.add_argument("--trace", metavar="FILE", help="write it as a Chrome trace, for ui.perfetto.dev")


def _simulate(options: argparse.Namespace) -> int:
    plan = Plan.load(options.file)
    timeline = plan.timeline()
    if not timeline.events:
        print(f"one program is the whole step: {seconds_text(plan.cost.step_seconds)}")
    else:
        print(f"{timeline}\n\n{seconds_text(timeline.seconds)} a step, by {plan.schedule}")
    if options.trace:
        write_page(options.trace, timeline.json())
    return 0


def _add_doctor(commands: Any) -> None:
    command = _command(
        commands, "doctor", _doctor, "what this machine can do; exit status 1 if something necessary fails"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="end a silent probe (60)")
    command.add_argument("--ray-address", metavar="HOST:PORT", help="of a Ray cluster; else the one `ray status` finds")


def _doctor(options: argparse.Namespace) -> int:
    return print_report(examine(options.timeout, options.ray_address), options.json)


def _add_calibrate(commands: Any) -> None:
    command = _command(commands, "calibrate", _calibrate, "measure this machine, for Cluster.local(profile=...)")
    command.add_argument("--save", metavar="FILE", help="write the profile as JSON")
    command.add_argument("--devices", type=int, metavar="N", help="how many; on CPU so many virtual ones (else all)")
    command.add_argument("--seconds", type=float, default=120.0, help="about how long it may take (120)")


def _calibrate(options: argparse.Namespace) -> int:
    if options.devices is not None:
        check_number("", "--devices", options.devices, least=1, is_whole=True)
    if options.devices is not None and not os.environ.get("XLA_FLAGS"):  # read when JAX starts: GPUs do not mind it
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
        os.environ.setdefault("PJRT_NPROC", str(max(32, options.devices)))
    devices = jax.local_devices()
    if options.devices is not None and len(devices) < options.devices:
        raise AutoparError(
            "there are not so many devices.",
            given=f"--devices {options.devices}",
            wrong=f"there are {len(devices)} of kind {devices[0].device_kind!r} here.",
            do="ask for fewer; on CPU, leave XLA_FLAGS unset, which else says how many.",
        )
    profile = calibrate(devices[: options.devices], seconds=options.seconds, save=options.save, show_progress=True)
    print(profile_text(profile))
    if options.save:
        print(f'\nwritten: {options.save}; plan with it: Cluster.local(profile="{options.save}")')
    return 0


def _step_and_args(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    if options.step is None or options.args is None:
        raise AutoparError(
            "a step needs its arguments.",
            given=f"--step={options.step}, --args={options.args}",
            wrong="one of the two is missing.",
            do="pass both, each as module:name.",
        )
    step, args = _named(options.step), _named(options.args)
    if not isinstance(step, ParallelStep):
        if not callable(step) or isinstance(step, type):
            raise AutoparError(
                "this is no step.",
                given=options.step,
                wrong=f"it is {step!r:.100}." if isinstance(step, type) else f"it is of type {type(step).__name__}.",
                do="name a function of arrays, with or without @autopar.parallelize.",
            )
        step = parallelize(step)
    args = args() if callable(args) else args
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    try:
        inspect.signature(step).bind(*args)
    except TypeError as error:
        raise AutoparError(
            "these are not the arguments of the step.",
            given=f"--args {options.args}, which is {', '.join(type(each).__name__ for each in args)}",
            wrong=f"`{options.step}` takes {inspect.signature(step)}: {error}.",
            do="name a tuple of all of its arguments, or a function that returns one.",
        ) from error
    return step, args


def _replanned(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """The step, to be planned for the cluster and by the method of the options, and its arguments."""
    step, args = _step_and_args(options)
    cluster = Cluster.of(options.cluster) if options.cluster else None
    return step.replan(cluster, method_of(options.method) if options.method else None), args


def _named(text: str) -> Any:
    """Import the object named by `module:name`; modules may be in the current directory."""
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise _no_name(text, f"{text!r} is no module and no name in it.")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module imports something that is not there
        raise _no_name(text, f"{error}.") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise _no_name(text, f"{error}.") from error
    return found


def _no_name(text: str, wrong: str) -> AutoparError:
    return AutoparError(
        "there is nothing of this name.",
        given=text,
        wrong=wrong,
        do="name it as module:name, such as train:step for `step` in train.py.",
    )


if __name__ == "__main__":
    sys.exit(main())
