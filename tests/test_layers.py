"""The shape of the house: imports point one way, and two doors are kept (JAX's internals, Ray)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

PACKAGE = Path(__file__).parent.parent / "autopar"

# Left to right: a layer imports itself and what stands before it.
LAYERS = (
    ("errors", "options", "_jax", "debug", "markup", "entry", "tuning", "grouping"),
    ("ir",),
    ("mesh",),
    ("cost",),
    ("intra_op",),
    ("inter_op",),
    ("streams",),
    ("plan",),
    ("report",),
    ("search",),
    ("partition",),
    ("runtime",),
    ("verify", "calibrate"),
    ("frameworks",),
    ("direct", "compiled", "create", "step", "api", "follow"),
    ("adapters",),
    ("checkpoint",),
    ("loggers", "fit", "compare", "doctor"),
    ("cli", "__init__", "__main__"),
)
# The rooms of the engine: each imports the engine itself (its files that stand in no room), and these.
ROOMS = {"microbatches": (), "layers": (), "sorted_rows": (), "rounds": ("microbatches", "sorted_rows")}
ENGINE = "autopar.ir.split"
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
ONLY_IN = {
    "jax.extend": ("_jax/",),
    "jax._src": ("_jax/",),
    "orbax": ("checkpoint/storage.py",),
    "flax": ("adapters/nnx.py",),
    "equinox": ("adapters/equinox.py",),
    "keras": ("adapters/keras.py",),
    "ray": (  # machines, actors, waiting for them, its pickler
        "mesh/ray_nodes.py",
        "runtime/ray/driver/actors.py",
        "runtime/ray/driver/calls.py",
        "runtime/ray/functions.py",
    ),
}
NEVER_AT_IMPORT = ("ray", "cupy", "orbax", "tensorstore", "tensorboardX", "torch")
FILES = sorted(PACKAGE.rglob("*.py"))


def layer_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(file: Path, *, nested: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import; `from a import b` gives `a.b`, for `b` may be a module.

    Args:
        file: Python source.
        nested: Also those inside functions, which do not run when the module is imported.
    """
    package = ("autopar", *file.relative_to(PACKAGE).parent.parts)
    pending = list(ast.parse(file.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (above, node.module)))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif nested or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += ast.iter_child_nodes(node)


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports(file: Path):
    """Layers point leftwards, and the guarded modules are imported where they may be."""
    here = layer_of(file)
    assert here in RANK, f"{file.name} stands in no layer: add {here!r} to LAYERS where it belongs"
    wrong = []
    for line, name in imported_modules(file):
        if is_within(name, "autopar"):
            there = name.split(".")[1] if "." in name else "__init__"
            if RANK.get(there, RANK["api"]) > RANK[here]:  # an unknown name comes from the package itself
                wrong.append(f"line {line}: {here} imports {name}, which stands to its right")
        for module, doors in ONLY_IN.items():
            if is_within(name, module) and not file.relative_to(PACKAGE).as_posix().startswith(doors):
                wrong.append(f"line {line}: imports {name}; only {' and '.join(doors)} may")
    for line, name in imported_modules(file, nested=False):
        wrong += [f"line {line}: imports {name} at import" for module in NEVER_AT_IMPORT if is_within(name, module)]
    assert not wrong, "\n".join(wrong)


def imported_files(file: Path) -> set[Path]:
    """The files of the package that `file` imports, at any depth of it."""
    found = set()
    for _, name in imported_modules(file):
        parts = name.split(".")[1:]
        for end in (len(parts), len(parts) - 1):  # the last word may be a name of the module, and no module
            path = PACKAGE.joinpath(*parts[:end])
            candidates = [path.with_suffix(".py"), path / "__init__.py"] if end and is_within(name, "autopar") else []
            there = next((candidate for candidate in candidates if candidate.exists()), None)
            if there is not None:
                found.add(there)
                break
    return found - {file}


def test_no_circles():
    """No module imports itself by way of others, at import or later."""
    graph = networkx.DiGraph((file, other) for file in FILES for other in imported_files(file))
    circles = [sorted(map(str, knot)) for knot in networkx.strongly_connected_components(graph) if len(knot) > 1]
    assert not circles, f"modules that import each other: {circles}"


def room_of(name: str) -> str:
    """The room of the engine in which a module stands; "": in none, it is the engine's own."""
    first = name.removeprefix(ENGINE).lstrip(".").split(".")[0]
    return first if first in ROOMS else ""


@pytest.mark.parametrize("file", sorted((PACKAGE / "ir" / "split").rglob("*.py")), ids=lambda file: file.stem)
def test_rooms_of_the_engine(file: Path):
    """What holds for every axis asks for no use of one; one use asks for those it is made of."""
    here = room_of(".".join(["autopar", *file.relative_to(PACKAGE).with_suffix("").parts]))
    there = {room_of(name) for _, name in imported_modules(file) if is_within(name, ENGINE)} - {here, ""}
    allowed = ROOMS.get(here, ())
    assert there.issubset(allowed), f"{here or 'the engine'} imports {sorted(there)}, and may import {allowed}"


def test_the_checks_see_what_they_forbid(tmp_path, monkeypatch):
    """The walker finds imports at any depth, relative ones too."""
    file = tmp_path / "cost" / "sample.py"
    file.parent.mkdir()
    file.write_text(
        "from ..report import text\ndef f():\n    import jax._src.core\ntry:\n    import ray\nexcept E: pass\n"
    )
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert sorted(imported_modules(file)) == [(1, "autopar.report.text"), (3, "jax._src.core"), (5, "ray")]
    assert sorted(imported_modules(file, nested=False)) == [(1, "autopar.report.text"), (5, "ray")]
