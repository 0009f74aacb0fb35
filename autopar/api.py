"""`autopar.parallelize`: one line that makes a training step run on many devices.

In:     the user's step, and perhaps a cluster and a method.
Out:    `ParallelStep` (`step.py`), called like the step itself.
Method: checks everything here that can be checked without the step's arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, overload

from autopar.errors import AutoparError, ClusterError
from autopar.mesh import Cluster
from autopar.search.method_names import method_of
from autopar.search.methods import Auto, Method
from autopar.step import ParallelStep

P = ParamSpec("P")
R = TypeVar("R")


@overload
def parallelize(
    fn: Callable[P, R],
    *,
    cluster: Cluster | None = ...,
    method: Method | str | None = ...,
    batch_argnums: Any = ...,
    donate_argnums: Any = ...,
    static_argnums: int | Iterable[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
    runtime: Any = ...,
) -> ParallelStep[P, R]: ...


@overload
def parallelize(
    fn: None = None,
    *,
    cluster: Cluster | None = ...,
    method: Method | str | None = ...,
    batch_argnums: Any = ...,
    donate_argnums: Any = ...,
    static_argnums: int | Iterable[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
    runtime: Any = ...,
) -> Callable[[Callable[P, R]], ParallelStep[P, R]]: ...


def parallelize(
    fn: Callable[..., Any] | None = None,
    *,
    cluster: Cluster | None = None,
    method: Method | str | None = None,
    batch_argnums: Any = "auto",
    donate_argnums: Any = "auto",
    static_argnums: int | Iterable[int] | None = (),
    static_argnames: str | Iterable[str] | None = (),
    runtime: Any = None,
) -> Any:
    """Run a training step, written for one device, on many.

    Args:
        fn: The step: pytrees of arrays in and out as under `jax.jit`, or NNX objects as under `nnx.jit`, or Equinox
            modules as under `eqx.filter_jit`; differentiated by plain `jax.grad`. Absent: a decorator.
        cluster: The machine; None: all devices of this process.
        method: How to split; None: `Auto()`, which decides everything. Common names (`"fsdp"`, `"ddp"`) are accepted too.
        batch_argnums: Positions of the arguments that hold samples, counted as in `jax.jit`; they are not state.
            `"auto"`: arguments that are not state and share their leading dim; state is what the outputs contain with the
            same structure and shapes. A single array, after other state, may be a batch that is reconstructed: it is
            state only if there is another batch, with another leading dim.
        donate_argnums: Positions of the arguments whose memory is reused, counted likewise. `"auto"`: state.
        static_argnums: As in `jax.jit`: a parameter is static whether it is passed by position or by name.
        static_argnames: As in `jax.jit`.
        runtime: `"local"` or `"ray"`; None: the cluster's own.

    Returns:
        `ParallelStep`: called like `fn`; plans and compiles at the first call.

    Raises:
        AutoparError: `fn` is no function, an argument is of the wrong type, or there is no such static argument.
        BatchError: There is no argument of such a position, or it is static.
    """
    if fn is None:
        return functools.partial(
            parallelize,
            cluster=cluster,
            method=method,
            batch_argnums=batch_argnums,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            runtime=runtime,
        )
    _check_function(fn)
    method = method_of(method) if isinstance(method, str) else method
    _check_method(method, cluster)
    _check_runtime(runtime, cluster)
    return ParallelStep(fn, cluster, method or Auto(), batch_argnums, donate_argnums, static_argnums, static_argnames)


def _check_function(fn: Any) -> None:
    is_method = isinstance(fn, Method) or (isinstance(fn, type) and issubclass(fn, Method))
    if is_method or not callable(fn):
        raise AutoparError(
            "there is no step to parallelize.",
            given=f"parallelize({fn!r})",
            wrong=f"it is {'a method' if is_method else f'of type {type(fn).__name__}'}, no function of arrays.",
            do="pass the step; a method of planning is passed by name: @autopar.parallelize(method=...).",
        )


def _check_method(method: Any, cluster: Any) -> None:
    if method is not None and not isinstance(method, Method):
        name = getattr(method, "__name__", None)
        raise AutoparError(
            "unknown method.",
            given=f"method={name or repr(method)}",
            wrong=f"it is of type {type(method).__name__}, no method of autopar.",
            do=f"pass {name}(...), an instance."
            if isinstance(method, type) and issubclass(method, Method)
            else "pass Auto(), ShardParallel(...) or DataParallel(...).",
        )
    if cluster is not None and not isinstance(cluster, Cluster):
        raise ClusterError(
            "unknown cluster.",
            given=f"cluster={cluster!r}",
            wrong=f"it is of type {type(cluster).__name__}, not Cluster.",
            do='pass Cluster.local(), Cluster.of("8x8 h100") or Cluster(hosts=, devices_per_host=, ...).',
        )


def _check_runtime(runtime: Any, cluster: Cluster | None) -> None:
    of_cluster = "local" if cluster is None or cluster.machine is None else "ray"
    if runtime not in (None, of_cluster):
        raise ClusterError(
            "this runtime does not run on this cluster.",
            given=f"runtime={runtime!r}, cluster={'this process' if cluster is None else cluster}",
            wrong=f"the runtime of this cluster is {of_cluster!r}.",
            do="leave `runtime` out, and pass cluster=Cluster.ray(...) to run on a Ray cluster.",
        )
