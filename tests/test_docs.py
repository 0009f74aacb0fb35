"""What documents say holds: what they quote is what the program writes, their code runs, and the site has every name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import autopar

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
HOW_IT_WORKS = DOCS / "how-it-works.md"
PASSES = ROOT / "tests" / "golden" / "passes"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
NOTEBOOKS = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.ipynb"))
CODE = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$|^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)


def test_quoted_passes():
    """The lines of the scanned MLP's passes; `search/test_dumped.py` holds that these are what planning writes."""
    blocks = re.findall(r"^```\n(\d\d_\w+)\.txt\n(.*?)^```", HOW_IT_WORKS.read_text(), re.MULTILINE | re.DOTALL)
    names = [name for name, _ in blocks]
    assert len(names) == 6 and names == sorted(names)
    for name, text in blocks:
        written = (PASSES / f"scanned_{name}.txt").read_text().splitlines()
        plain = [line.split("  # ")[0].rstrip() for line in written]
        missing = [line for line in text.splitlines() if line not in plain]
        assert not missing, f"{HOW_IT_WORKS.name} quotes what scanned_{name}.txt does not say: {missing}"


def test_named_files():
    """Files of the package that a document names are there."""
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(DOCS / page for page in PAGES)):
        text = document.read_text()
        named = re.findall(r"`(?:autopar/)?((?:\w+/)+\w+\.py)`", text)
        places = [(ROOT / folder / path) for path in named for folder in ("autopar", ".")]
        missing = [path for path in named if not any(place.exists() for place in places if str(place).endswith(path))]
        assert not missing, f"{document.name} names {missing}"


def pieces_of(text: str) -> list[tuple[int, str]]:
    """(line, code) of a document's Python, what its readers do not see (`<!-- setup`) included."""
    found = []
    for match in CODE.finditer(text):
        group = "setup" if match["setup"] is not None else "code"
        found.append((text.count("\n", 0, match.start(group)), textwrap.dedent(match[group])))
    return found


def pages_with_code():
    for page in ("../README.md", *PAGES):
        text = (DOCS / page).read_text()
        if "```python" in text:
            yield pytest.param(page, marks=[pytest.mark.ray] if "<!-- needs ray -->" in text else [])


@pytest.mark.parametrize("page", list(pages_with_code()))
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """From top to bottom, as a reader would type it."""
    text = (DOCS / page).read_text()
    for module in re.findall(r"^<!-- needs (\w+) -->$", text, re.M):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install {module}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr("webbrowser.open", lambda url: True)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    before = os.environ.copy()
    if "<!-- needs ray -->" in text:
        importlib.import_module("ray").shutdown()  # that of tests before, if it still runs
    try:
        for line, code in pieces_of(text):
            exec(compile("\n" * line + code, f"docs/{page}", "exec", dont_inherit=True), module.__dict__)
    finally:
        if "<!-- needs ray -->" in text:
            importlib.import_module("ray").shutdown()
        os.environ.clear()  # what a page sets there is for its reader's process
        os.environ.update(before)


def test_a_page_that_is_wrong_fails():
    page = "<!-- setup\nx = 1\n-->\ntext\n\n- a list\n\n    ```python\n    y = x + 1\n    ```\n\n```sh\nls\n```\n"
    assert pieces_of(page) == [(1, "x = 1\n"), (8, "y = x + 1\n")]


@pytest.fixture(scope="module")
def hook():
    """docs/notebooks.py, which MkDocs imports by its path."""
    for module in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(module, reason="no notebooks: pip install nbformat nbclient ipykernel")
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: pip install 'autopar[docs]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("notebooks")


@pytest.fixture(scope="module")
def kernel(hook):
    """One for all notebooks: JAX starts once in it, with the devices and flags of these tests, whatever a cell sets after."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.delenv("AUTOPAR_DOCS", raising=False)
        kernel = hook.start_kernel()
        run_cell(hook, kernel, "import jax; jax.devices()")
        yield kernel
        hook.end_kernel(kernel)


def run_cell(hook, kernel, code):
    hook.execute(hook.nbformat.v4.new_notebook(cells=[hook.nbformat.v4.new_code_cell(code)]), kernel)


def test_a_kernel_says_nothing(hook, capfd):
    """What `make docs` prints is of the site."""
    hook.execute(hook.nbformat.v4.new_notebook())
    hook.end_kernel(hook.start_kernel())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_notebook(page, hook, kernel):
    """Committed as it is before it runs; runs to its end, with nothing that another defined, and shows what it should."""
    if "cluster" in page:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")
    committed = hook.nbformat.read(DOCS / page, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in committed.cells)
    run_cell(hook, kernel, "get_ipython().run_line_magic('reset', '-f')")
    notebook = hook.executed(DOCS / page, kernel)
    shown = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "data" in output and "text/html" in output.data
    ]
    for picture in PICTURES.get(Path(page).stem, ()):
        assert any(picture in page for page in shown), picture
    assert hook.page_of(notebook).count("<iframe") == sum("<progress" not in page for page in shown)


PICTURES = {
    "reading_a_plan": (
        "Where the time goes",
        "The pipeline&#x27;s timetable",
        "Memory over the step",
        "How each tensor lies",
        "The model, and where it is cut",
        "Two plans of",
        "predicted and measured",
    ),
    "choosing_a_machine": ("Where the time goes",),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with its warnings as errors; what notebooks show is left to their own test."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers", "nbclient"):
        if importlib.util.find_spec(module) is None:
            pytest.skip("MkDocs is not installed: pip install 'autopar[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "AUTOPAR_DOCS": "unexecuted", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def test_site_needs_no_network(site):
    """Nothing that a page shows is loaded from elsewhere; links may lead there."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\s\">]+)", text)
        loaded += re.findall(r"<link[^>]* href=\"?(https?:[^\s\">]+)", text)
        assert not loaded, f"{page.relative_to(site)} loads {loaded}"


def test_reference_has_every_public_name():
    """And each has a docstring, and so has each of its methods."""
    names = re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(), re.M)
    named = {name: found for name in names if (found := found_under(name)) is not None}
    wanted = [getattr(autopar, name) for name in autopar.__all__]
    wanted += [getattr(autopar.checkpoint, name) for name in autopar.checkpoint.__all__]
    wanted += [found for of in (autopar.errors, autopar.loggers) for found in vars(of).values() if made_in(of, found)]
    of_ours = {id(found) for found in vars(autopar.errors).values() if isinstance(found, FunctionType)}
    wanted = [found for found in wanted if not isinstance(found, ModuleType) and id(found) not in of_ours]
    assert [found for found in wanted if not any(found is other for other in named.values())] == []
    assert len(names) == len(set(names))
    undocumented = []
    for name, found in named.items():
        undocumented += [name] * (not inspect.getdoc(found))
        if inspect.isclass(found):
            for member, value in vars(found).items():
                documentable = inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
                if not member.startswith("_") and documentable and not inspect.getdoc(getattr(found, member)):
                    undocumented.append(f"{name}.{member}")
    assert undocumented == []


def made_in(module: ModuleType, found: object) -> bool:
    public = inspect.isclass(found) or (inspect.isfunction(found) and not found.__name__.startswith("_"))
    return public and found.__module__ == module.__name__


def found_under(name: str) -> object | None:
    """The object; None: what it belongs to is not installed."""
    for cut in range(len(parts := name.split(".")) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("autopar"):
                return None
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)
