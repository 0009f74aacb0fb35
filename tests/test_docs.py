"""What documents quote is what the program writes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOW_IT_WORKS = ROOT / "docs" / "how-it-works.md"
PASSES = ROOT / "tests" / "golden" / "passes"


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
    for document in (HOW_IT_WORKS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        named = re.findall(r"`(?:autopar/)?((?:\w+/)+\w+\.py)`", document.read_text())
        places = [(ROOT / folder / path) for path in named for folder in ("autopar", ".")]
        missing = [path for path in named if not any(place.exists() for place in places if str(place).endswith(path))]
        assert not missing, f"{document.name} names {missing}"
