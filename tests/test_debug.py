"""Dumps: off unless asked for, numbered in order."""

from __future__ import annotations

from autopar.debug import dump


def test_off(monkeypatch):
    monkeypatch.delenv("AUTOPAR_DUMP", raising=False)
    assert dump("trace", lambda: 1 / 0) is None


def test_numbered(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPAR_DUMP", str(tmp_path / "passes"))
    dump("trace", "a program")
    dump("sharding", lambda: "a plan\n")
    files = sorted((tmp_path / "passes").iterdir())
    assert [file.name for file in files] == ["01_trace.txt", "02_sharding.txt"]
    assert [file.read_text() for file in files] == ["a program\n", "a plan\n"]
