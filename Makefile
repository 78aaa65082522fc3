# Everything one has to remember: make demo, make test, make check.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
RANKS  ?= 2
OUT    ?= runs/gpu

export OMP_NUM_THREADS ?= 1

.PHONY: demo test gpu check types lint format pytest install clean

demo: install  ## train a small language model under stages 0 to 3 on two ranks and compare
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=$(RANKS) examples/finetune.py --compare --out runs/demo

test: check pytest  ## lint, types and all tests

gpu:  ## tests and benchmarks that need a GPU, with the packages that $(PYTHON) has
	PYTHONPATH=. $(PYTHON) -m pytest -q -m gpu
	PYTHONPATH=. $(PYTHON) benchmarks/kernels.py --json $(OUT)/kernels.json

check: lint types

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

pytest: install
	$(BIN)/python -m pytest -q

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed

# torch comes first and pinned: an open range may fetch gigabytes of CUDA that a CPU run never uses.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info runs
