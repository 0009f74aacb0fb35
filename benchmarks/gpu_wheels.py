"""Downloads the wheels that `make gpu` needs besides JAX for GPUs and its dependencies, on a machine with a network.

    make gpu-wheels        or    python benchmarks/gpu_wheels.py wheels [--python 3.12] [--also optax,chex]

In:     the Python version of the machine with the GPUs (Linux, x86-64), and further packages that it lacks.
Out:    one folder, of at most 60 MiB, to be copied to that machine; `make gpu` installs from it, for its own use only.
Method: each wheel is named, and downloaded without dependencies: the machine must have NumPy, SciPy, optax, rich and pytest, or
        `--also` names them. CuPy, for NCCL between processes, is too large to copy; without it, its test is left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

NEEDED = ("pulp>=3.3,<4", "highspy")
"""What states integer programs, with CBC inside and without needs of its own, as PuLP 4 has; what solves them."""
MOST_BYTES = 60 * 2**20
PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in (12, 17, 24, 27, 28)))


def command(names: list[str], folder: Path, python: str) -> list[str]:
    """What downloads wheels, and nothing that they depend on."""
    tags = [part for tag in PLATFORMS for part in ("--platform", f"{tag}_x86_64")]
    chosen = ["--only-binary=:all:", "--no-deps", "--python-version", python, "--implementation", "cp", *tags]
    return [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *chosen, *names]


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each wheel.

    Raises:
        SystemExit: They are more than can be carried.
    """
    found = {wheel.name: wheel.stat().st_size for wheel in sorted(folder.glob("*.whl"))}
    if sum(found.values()) > MOST_BYTES:
        largest = max(found, key=lambda name: found[name])
        raise SystemExit(f"{sum(found.values()) / 2**20:.0f} MiB are more than {MOST_BYTES >> 20}: leave out {largest}")
    return found


def main() -> None:
    """Fill the folder, and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPUs")
    parser.add_argument("--also", default="", help="further packages that it lacks, with commas between")
    chosen = parser.parse_args()
    names = [*NEEDED, *filter(None, chosen.also.split(","))]
    chosen.folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(command(names, chosen.folder, chosen.python), check=True)
    found = sizes(chosen.folder)
    for name, size in found.items():
        print(f"{size / 2**20:6.1f} MiB  {name}")
    print(f"{sum(found.values()) / 2**20:6.1f} MiB  in {chosen.folder}, for Python {chosen.python}")


if __name__ == "__main__":
    main()
