"""Notebooks as pages of the site: executed when it is built, what they show included.

In:     docs/**/*.ipynb, committed without outputs.
Out:    for each a page; `AUTOPAR_DOCS=unexecuted` leaves out what the cells show, and takes seconds.
Method: a hook of MkDocs. A notebook is executed by a kernel in a process of its own; Markdown cells are the page, code
        cells its code, text and images what is below. HTML, such as a plan's pictures, goes into a frame: it has its own style.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from nbclient.util import run_sync

ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
SILENT = ["--IPKernelApp.log_level=CRITICAL"]  # else a kernel warns that it is spoken to unencrypted, or interrupted
FIT = "this.style.height=this.contentDocument.documentElement.scrollHeight+8+'px'"


def executed(path: Path, kernel: Any = None) -> Any:
    """The notebook with what its cells show; raises if one of them does. A kernel that is given goes on after it."""
    notebook = nbformat.read(path, as_version=4)
    if os.environ.get("AUTOPAR_DOCS") != "unexecuted":
        execute(notebook, kernel)
    return notebook


def execute(notebook: Any, kernel: Any = None) -> None:
    """Run the cells of a notebook, by a kernel of its own or by one that is running."""
    client = NotebookClient(notebook, km=kernel, timeout=600, kernel_name="python3", extra_arguments=SILENT)
    client.execute()
    if kernel is not None and client.kc is not None:
        client.kc.stop_channels()


def start_kernel() -> Any:
    """A kernel that runs several notebooks, one after the other; whoever starts it shuts it down."""
    client = NotebookClient(nbformat.v4.new_notebook(), kernel_name="python3", extra_arguments=SILENT)
    kernel = client.create_kernel_manager()
    client.start_new_kernel()
    return kernel


def end_kernel(kernel: Any) -> None:
    """Shut a kernel down."""
    run_sync(kernel.shutdown_kernel)(now=True)


def page_of(notebook: Any) -> str:
    """The notebook as Markdown."""
    return "\n\n".join("\n\n".join(_cell(cell)) for cell in notebook.cells) + "\n"


def _cell(cell: Any) -> list[str]:
    if cell.cell_type == "markdown":
        return [cell.source]
    written = "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")
    outputs = [_shown(out) for out in cell.outputs if out.output_type != "stream"]
    return [_fenced("python", cell.source), *([_fenced("text", ANSI.sub("", written))] if written else []), *outputs]


def _shown(output: Any) -> str:
    """One output of a cell, in the richest form that it has."""
    data = output.data
    if "text/html" in data and "<progress" not in data["text/html"]:
        page = html.escape(data["text/html"], quote=True)
        return f'<iframe srcdoc="{page.replace(chr(10), "&#10;")}" onload="{FIT}" style="width:100%;border:0"></iframe>'
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{data["image/png"].strip()}">'
    return "" if "text/html" in data else _fenced("text", data.get("text/plain", ""))


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def on_files(files: Files, config: Any) -> Files:
    """MkDocs: a page in the place of each notebook, at the same address as if it were one."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            text = page_of(executed(Path(config.docs_dir) / file.src_uri))
            files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs: links name notebooks as they are, so that they lead somewhere in the repository, too."""
    return re.sub(r"\]\(([\w./-]+)\.ipynb\b", r"](\1.md", markdown)


def on_config(config: Any) -> Any:
    """MkDocs: the navigation names notebooks as they are; here they become pages."""
    config.nav = _pages(config.nav)
    return config


def _pages(nav: Any) -> Any:
    match nav:
        case str():
            return re.sub(r"\.ipynb$", ".md", nav)
        case list():
            return [_pages(entry) for entry in nav]
        case dict():
            return {name: _pages(entry) for name, entry in nav.items()}
    return nav
