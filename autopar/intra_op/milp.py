"""Calls mixed-integer solvers.

In:     `Model`: costs of the columns, which of them are binary, rows of a sparse matrix between bounds; a solver's name.
Out:    `Ended`: the values found, whether they are proved optimal, and the solver's bound.
Method: HiGHS takes the arrays as they are; CBC is called through PuLP. Both run with one thread and a fixed seed. HiGHS runs
        in a thread of its own, since Python handles Ctrl-C only while its main thread runs Python; setting its time limit to
        zero makes it end by itself. Its own limit is one of wall-clock time, which passes while others have the processor;
        CBC's is one of its own processor time.
"""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from scipy.sparse import csr_array

from autopar.errors import SolverError
from autopar.intra_op.time_limit import Work
from autopar.options import Prover

if TYPE_CHECKING:
    import highspy
    import pulp

LOOK_SECONDS = 0.1
"""Interval at which the waiting main thread handles signals, on every platform."""

TOLERANCE = 1e-5
"""Error of a row and of a whole number, of their size, that solvers leave: HiGHS and CBC allow 1e-6 after scaling."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Minimize `costs @ x`, where costs are >= 0, with `lower <= matrix @ x <= upper`.

    The first `num_binary` columns are 0 or 1, the others from 0 to 1. `begin`: their values in a known solution; empty: there
    is none.
    """

    costs: np.ndarray
    num_binary: int
    matrix: csr_array
    lower: np.ndarray
    upper: np.ndarray
    begin: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """The outcome of a solver.

    Attributes:
        values: Values of the columns; None: no solution was found.
        proved: Whether they are proved optimal, to the gap requested.
        bound: Lower bound on the optimum.
    """

    values: np.ndarray | None
    proved: bool
    bound: float


def solve_model(model: Model, solver: str, seconds: float, gap: float) -> Ended:
    """Solve a model until the time limit or the gap is reached.

    What a solver leaves behind when it stops early is held against the model: some call it a solution although it is none.

    Raises `SolverError`: the solver is not known, or not installed.
    """
    match solver:
        case "highs":
            ended = _by_highs(model, seconds, gap)
        case "cbc":
            ended = _by_cbc(model, seconds, gap)
        case _:
            raise _unknown(solver)
    if ended.values is None or _is_solution(model, ended.values):
        return ended
    return Ended(None, False, ended.bound)


def _is_solution(model: Model, values: np.ndarray) -> bool:
    """Whether values satisfy the rows and are whole where they are to be, within the tolerances of solvers."""
    binary, sums = values[: model.num_binary], model.matrix @ values
    slack = TOLERANCE * (1 + abs(model.matrix).sum(axis=1))
    whole = np.abs(binary - np.round(binary)).max(initial=0.0) <= TOLERANCE
    return bool(whole and (sums >= model.lower - slack).all() and (sums <= model.upper + slack).all())


def _unknown(solver: str) -> SolverError:
    return SolverError(
        "unknown solver.",
        given=f"solver={solver!r}",
        wrong=f"autopar knows {', '.join(map(repr, get_args(Prover)))}.",
        do="name one of them.",
        solver=solver,
    )


def _by_highs(model: Model, seconds: float, gap: float) -> Ended:
    try:
        import highspy
    except ImportError:
        raise _not_installed("highs", "Python does not find highspy.") from None
    count, num_rows = len(model.costs), model.matrix.shape[0]
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = count, num_rows
    lp.col_cost_ = model.costs
    lp.col_lower_, lp.col_upper_ = np.zeros(count), np.ones(count)
    lp.row_lower_, lp.row_upper_ = model.lower, model.upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = count, num_rows
    lp.a_matrix_.start_, lp.a_matrix_.index_ = model.matrix.indptr, model.matrix.indices
    lp.a_matrix_.value_ = model.matrix.data
    kinds = [highspy.HighsVarType.kInteger] * model.num_binary
    lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (count - model.num_binary)
    highs = highspy._Highs()  # `Highs` of release 1.16 prints its name before it can be told not to
    options = {
        "output_flag": False,
        "mip_rel_gap": gap,
        "threads": 1,
        "random_seed": 0,
        "parallel": "off",
        # Symmetry detection has a wall-clock limit, so that ties would depend on the load of the machine.
        "mip_detect_symmetry": False,
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    if len(model.begin):
        highs.setSolution(len(model.begin), np.arange(len(model.begin), dtype=np.int32), model.begin)
    run_stoppable(highs, seconds)
    solved = highs.getInfo()
    found = solved.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    proved = found and highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    values = np.array(highs.getSolution().col_value) if found else None
    return Ended(values, proved, float(solved.mip_dual_bound))


def run_stoppable(highs: highspy.Highs, seconds: float) -> None:
    """Run the solver on its model until it is done, or has worked for so many seconds."""
    worker, work = threading.Thread(target=highs.run, name="highs", daemon=True), Work()
    worker.start()
    try:
        while worker.is_alive():
            worker.join(LOOK_SECONDS)
            if work.seconds > seconds:
                break
    finally:
        if worker.is_alive():
            highs.setOptionValue("time_limit", 0.0)
            worker.join()


def _by_cbc(model: Model, seconds: float, gap: float) -> Ended:
    import pulp  # it imports all solvers, which takes as long as a small plan

    solver = _cbc(msg=False, timeLimit=seconds, timeMode="cpu", gapRel=gap, threads=1, options=["randomSeed 1"])
    if not solver.available():
        raise _not_installed("cbc", "PuLP does not find it.")
    problem, matrix = pulp.LpProblem("sharding", pulp.LpMinimize), model.matrix
    columns = [
        problem.add_variable(f"x{k}", cat=pulp.LpBinary)
        if k < model.num_binary
        else problem.add_variable(f"x{k}", lowBound=0, upBound=1)
        for k in range(len(model.costs))
    ]
    for row in range(matrix.shape[0]):
        inside = slice(matrix.indptr[row], matrix.indptr[row + 1])
        terms = [(columns[k], float(v)) for k, v in zip(matrix.indices[inside], matrix.data[inside], strict=True)]
        low, high, total = float(model.lower[row]), float(model.upper[row]), _expression(terms)
        if low == high:
            problem += total == low
            continue
        if np.isfinite(low):
            problem += total >= low
        if np.isfinite(high):
            problem += total <= high
    problem.setObjective(_expression([(x, float(c)) for x, c in zip(columns, model.costs, strict=True) if c]))
    outcome = problem.solve(solver)
    if hasattr(outcome, "best_bound"):  # PuLP 4: optimal is 1, and -7 that the gap asked for was reached
        found, proved, bound = outcome.has_solution, int(outcome.status) in (1, -7), outcome.best_bound or 0.0
    else:
        # A CBC that stops early leaves values of the relaxation, which PuLP assigns all the same.
        found, bound = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible), 0.0
        proved = problem.sol_status == pulp.LpSolutionOptimal
    return Ended(np.array([x.varValue or 0.0 for x in columns]) if found else None, proved, float(bound))


def _not_installed(name: str, wrong: str) -> SolverError:
    return SolverError(
        f"solver {name!r} is not installed.",
        given=f"solver={name!r}",
        wrong=wrong,
        do='pip install "pulp[cbc,highs]", or name another solver.',
        solver=name,
    )


def _cbc(**settings: Any) -> Any:
    """CBC as PuLP finds it: its own copy (PuLP 3), or the one that `cbcbox` installs (PuLP 4)."""
    import pulp

    for kind in ("PULP_CBC_CMD", "COIN_CMD"):
        made = getattr(pulp, kind, None)
        if made is not None and made(msg=False).available():
            return made(**settings)
    try:
        path = importlib.import_module("cbcbox").cbc_bin_path()
    except (ImportError, AttributeError):
        path = "cbc"
    return pulp.COIN_CMD(path=path, **settings)


def _expression(terms: list[tuple[Any, float]]) -> pulp.LpAffineExpression:
    """The sum of (variable, factor) terms, in PuLP 3 and 4."""
    import pulp

    make = getattr(pulp.LpAffineExpression, "from_list", pulp.LpAffineExpression)
    return make(terms)
