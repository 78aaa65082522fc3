# Everything one has to remember: make demo, make test, make test-integrations, make check.
PYTHON ?= python3
VENV   ?= .venv
OTHERS ?= .venv-integrations
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
RANKS  ?= 2
OUT    ?= runs/gpu

export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-integrations gpu check types lint format pytest browser install clean

demo: install  ## train a small language model under stages 0 to 3 on two ranks and compare
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=$(RANKS) examples/finetune.py --compare --out runs/demo

test: check pytest  ## lint, types and all tests

test-integrations: $(OTHERS)/.installed  ## inside of other libraries' trainers, in an environment of their own
	cd tests/integrations && $(abspath $(OTHERS))/bin/python -m pytest -q

gpu:  ## tests and benchmarks that need a GPU, with the packages that $(PYTHON) has
	PYTHONPATH=. $(PYTHON) -m pytest -q -m gpu
	PYTHONPATH=. $(PYTHON) benchmarks/kernels.py --json $(OUT)/kernels.json
	PYTHONPATH=. $(PYTHON) benchmarks/memory.py --json $(OUT)/memory.json

check: lint types

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

browser:  ## what looks at HTML reports in the tests; they say so where it is missing
	@command -v "$${CHROMIUM:-chromium}" >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	&& apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install \
	chromium fonts-dejavu-core; } >/dev/null 2>&1 || echo "no chromium: its tests will be skipped"

pytest: install browser
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

$(OTHERS)/.installed: pyproject.toml tests/integrations/constraints.txt
	test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[integrations]" -c tests/integrations/constraints.txt
	touch $@

clean:
	rm -rf $(VENV) $(OTHERS) build dist *.egg-info runs
