#!/bin/sh
# Run the tests under one Python and one JAX: matrix.sh <python, 3.12> <jax, 0.11> <venv folder> [pytest arguments].
# The Python is looked for on PATH and among pyenv's versions.
set -eu
version=$1 jax=$2 venv=$3
shift 3

find_python() {
  candidates="python$version"
  if command -v pyenv >/dev/null 2>&1; then
    candidates="$candidates $(ls -d "$(pyenv root)"/versions/"$version"*/bin/python 2>/dev/null || true)"
  fi
  for candidate in $candidates; do  # a pyenv shim may stand on PATH for a version that is not active: try to run it
    if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
}

python=$(find_python)
if [ -z "$python" ]; then
  echo "test-matrix: no Python $version on PATH or among pyenv's versions: install one, then run this again." >&2
  exit 1
fi
if [ ! "$venv/.installed" -nt pyproject.toml ]; then
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet -e '.[dev]' "jax==$jax.*" "jaxlib==$jax.*"
  touch "$venv/.installed"
fi
echo "== Python $version, JAX $jax"
exec env PYTHONDONTWRITEBYTECODE= "$venv/bin/python" -m pytest -q -rs -n 3 --dist worksteal "$@"
