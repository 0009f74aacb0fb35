"""Writes and reads checkpoints with orbax; the only file that imports it, at the first use.

In:     a pytree of arrays and numbers that orbax supports; a folder.
Out:    the folder, written while the program continues; the pytree, each array in its wanted sharding.
Method: orbax's own pytree format. Arrays are marked as NumPy arrays, since orbax can then read them anywhere: marked as JAX
        arrays, they record their devices, and another machine refuses them unless a sharding is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.checkpoint.apart import CHUNK_BYTES, write_apart
from autopar.checkpoint.leaves import path_of
from autopar.errors import CheckpointError
from autopar.runtime.digest import Digest
from autopar.runtime.ray.driver.saves import Taken


def start_writing(tree: Any, folder: Path) -> Callable[[], dict[str, Digest]]:
    """Copy the arrays to the host, and start to write them to a new folder; on return, they may be overwritten.

    Returns a function that waits until everything is written, and returns the digests of the files of other processes.
    """
    ocp = _orbax()
    if not jax.tree.leaves(tree):  # orbax refuses a tree without leaves
        folder.mkdir()
        return dict
    digests: dict[str, Digest] = {}
    checkpointer = ocp.AsyncCheckpointer(_handler(ocp, digests))
    options = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    try:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, save_args=options))
    except BaseException:
        checkpointer.close()
        raise

    def finish() -> dict[str, Digest]:
        try:
            checkpointer.wait_until_finished()
        finally:
            checkpointer.close()
        return digests

    return finish


def read(folder: Path, wanted: Mapping[tuple[str, ...], Any]) -> dict[tuple[str, ...], Any]:
    """Read some of the arrays and numbers that `start_writing` has written, by path.

    `wanted`: for each array to read a `jax.ShapeDtypeStruct`, without a sharding to get a NumPy array; for each number its
    class.
    """
    if not wanted:
        return {}
    ocp = _orbax()

    def option(leaf: Any) -> Any:
        if leaf is ocp.PLACEHOLDER:
            return ocp.RestoreArgs()
        if isinstance(leaf, type):
            return ocp.RestoreArgs(restore_type=leaf)
        if leaf.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=leaf.sharding, global_shape=leaf.shape)

    with ocp.Checkpointer(_handler(ocp, {})) as checkpointer:
        saved = checkpointer.metadata(folder).item_metadata.tree
        tree = jax.tree_util.tree_map_with_path(lambda keys, _: wanted.get(path_of(keys), ocp.PLACEHOLDER), saved)
        arguments = ocp.args.PyTreeRestore(tree, restore_args=jax.tree.map(option, tree))
        found = jax.tree_util.tree_flatten_with_path(checkpointer.restore(folder, args=arguments))[0]
    return {path_of(keys): leaf for keys, leaf in found if leaf is not ocp.PLACEHOLDER}


def _handler(ocp: Any, digests: dict[str, Digest]) -> Any:
    kinds = ocp.type_handlers

    arrays = kinds.ArrayHandler(enable_write_sharding_file=False)
    arrays.typestr = kinds.NumpyHandler().typestr
    registry = kinds.create_type_handler_registry(
        (jax.Array, arrays),
        (Taken, _taken_handler(ocp, digests)),
        (np.ndarray, kinds.NumpyHandler()),
        (int, kinds.ScalarHandler()),
        (float, kinds.ScalarHandler()),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _taken_handler(ocp: Any, digests: dict[str, Digest]) -> Any:
    """A handler that presents `Taken` arrays to orbax as NumPy arrays, has workers write them, and records the digests."""

    class TakenHandler(ocp.type_handlers.NumpyHandler):
        async def serialize(self, values: Sequence[Taken], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
            async def write() -> None:
                for info in infos:
                    await info.await_path_creation()
                names, folder = [info.name for info in infos], Path(infos[0].parent_dir)
                digests.update(write_apart(values, names, folder))

            return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="autopar-write-apart")]

    return TakenHandler()


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ModuleNotFoundError as error:
        if error.name not in ("orbax", "orbax.checkpoint"):
            raise
        raise CheckpointError(
            "checkpoints need orbax.",
            given="autopar.checkpoint",
            wrong="orbax-checkpoint is not installed.",
            do="pip install 'autopar[checkpoint]'",
        ) from error
    return orbax.checkpoint
