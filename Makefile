# Each target makes what it needs: a virtual environment from `python3`, with this checkout and its dev extras in it.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
VERIFY := $(VENV)/verify/.installed

.PHONY: demo test test-matrix lint docs bench bench-scripts sweep gpu gpu-wheels clean

# The console shows the plan and a live loss; the plan in pictures is train_gpt.html, the curves are train_gpt.png.
demo: $(STAMP)
	$(RUN) examples/train_gpt.py

# Tests start many processes: with bytecode at hand, none of them compiles the package again. Three workers on two cores:
# where one waits, for Ray's processes or for devices that wait for each other, there is work for both cores.
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP) $(VERIFY)
	$(RUN) -m pytest -q -rs -n 3 --dist worksteal $(PYTEST_ARGS)

# Python 3.11 with JAX 0.10, and Python 3.12 with JAX 0.11.
test-matrix:
	@sh tests/matrix.sh 3.11 0.10 .venv-3.11-jax0.10 $(PYTEST_ARGS)
	@sh tests/matrix.sh 3.12 0.11 .venv-3.12-jax0.11 $(PYTEST_ARGS)

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

# The site, into site/index.html: its notebooks are executed, no network is needed, a warning is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# The suite: PYTEST_ARGS='--cluster "8x8 h100"' predicts, --size full is for nodes of GPUs, --benchmark-json FILE keeps it.
bench: $(STAMP)
	$(RUN) -m pytest benchmarks/ -q $(PYTEST_ARGS)

# Every script of benchmarks/ that prints figures of its own; those that are for GPUs have a target below.
bench-scripts: $(STAMP)
	@for script in $$(grep -l __main__ benchmarks/*.py | grep -v /gpu); do \
	  echo "== $$script"; $(RUN) "$$script" || exit 1; done

# Every model of tests/models under every mesh and method, and as every pipeline, as tables; then a thousand random small
# programs under random plans; then, planned only, ten models by every method and by Auto(), which must not be slower on any of
# four machines. `make test` runs a sample of each. In pieces: SWEEP_ARGS="--seconds 400 --record FILE", again
# and again; what FILE says is right is left out. Or --part 1/2 of the models here and 2/2 there.
SWEEP_ARGS ?= --processes 2
sweep: $(STAMP)
	$(RUN) -m tests.sweep $(SWEEP_ARGS)
	$(RUN) -m tests.pipeline_sweep $(SWEEP_ARGS)
	$(RUN) -m tests.random_sweep $(SWEEP_ARGS)
	$(RUN) -m tests.method_sweep $(SWEEP_ARGS)

# On a machine with NVIDIA GPUs, and no network: what needs one, in parts, as a table and in gpu.json; started again it goes on.
# PYTHON is one that has JAX for GPUs. GPU_ARGS: --rehearse, --only PARTS, --again.
WHEELS ?= wheels
gpu:
	@if [ -d $(WHEELS) ]; then $(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade \
	  --target $(WHEELS)/installed $(WHEELS)/*.whl; fi
	PYTHONPATH=$(WHEELS)/installed$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) benchmarks/gpu.py $(GPU_ARGS)

# Where there is a network: what `make gpu` needs beyond JAX for GPUs, to be carried there in one folder.
gpu-wheels:
	$(PYTHON) benchmarks/gpu_wheels.py $(WHEELS) --python $(or $(GPU_PYTHON),3.12)

clean:
	rm -rf $(VENV) .venv-3.11-jax0.10 .venv-3.12-jax0.11 site

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "autopar needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -e '.[dev]'
	@touch $@

# XLA's compiler for GPUs, for tests/verify, beside the packages: as a plugin of JAX's it complains where there is no GPU.
$(VERIFY): $(STAMP)
	@echo "XLA's compiler for GPUs, into $(VENV)/verify: 480 MB"
	@$(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/verify \
	  $$($(RUN) -c 'import jax; print(*(f"jax-cuda12-{part}=={jax.__version__}" for part in ("plugin", "pjrt")))') || \
	  echo "XLA's compiler for GPUs cannot be installed here: tests/verify/test_gpu.py is skipped"
	@mkdir -p $(@D) && touch $@
