"""A real browser without a window: what a page looks like, and what its elements measure."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_SECONDS

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


def find_browser() -> str | None:
    """The path of a Chromium; None: there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def _run(page: Path, *flags: str, width: int, height: int) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = [
            find_browser() or "",
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            *flags,
        ]
        done = subprocess.run(
            [*command, page.as_uri()], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
        )
    return done.stdout


def screenshot(page: Path, image: Path, *flags: str, width: int = 1010, height: int = 1400) -> None:
    """Take a picture of a page."""
    _run(page, f"--screenshot={image}", *flags, width=width, height=height)


def evaluate(page: Path, script: str, *flags: str, width: int = 1010, height: int = 1400) -> Any:
    """What a script, the body of a function, returns when the page is loaded."""
    probe = page.with_suffix(".probe.html")
    write = f"out.textContent = JSON.stringify((() => {{{script}}})())"
    element = '<script id="probe" type="text/plain"></script>'
    probe.write_text(
        page.read_text(encoding="utf-8").replace(
            "</body>", f"{element}<script>const out = document.getElementById('probe'); {write}</script></body>"
        ),
        encoding="utf-8",
    )
    dom = _run(probe, "--dump-dom", *flags, width=width, height=height)
    found = re.search(r'<script id="probe"[^>]*>(.*?)</script>', dom, re.DOTALL)
    assert found and found[1], "the script has failed"
    return json.loads(html.unescape(found[1]))
