# The two commands of a fresh clone are `make demo` and `make test`; each sets up .venv itself.
# Needs Python >= 3.11 and its pip, found as python3 or given as PYTHON=…

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRACES := runs/demo-$(shell date +%Y%m%d-%H%M%S)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

SEEDS ?= 2000
CHAOS_SEED ?= 1
CHAOS_SECONDS ?= 3600
# the folder of a benchmark run; name an older one to go on with it
BENCH ?= runs/bench-$(shell date +%Y%m%d-%H%M%S)
REPS ?= 5
NVRX := .venv-nvrx
NVRX_PIP := $(NVRX)/bin/python -m pip --disable-pip-version-check --no-input install --quiet
NVRX_NEEDS := numpy defusedxml grpcio httpx nvidia-ml-py packaging protobuf psutil pydantic \
  pydantic-settings pyyaml setuptools
# what the demo runs; the plan is meant to be edited
PLAN ?= examples/hsdp_demo_faults.yaml
# of the machine with a GPU that make gpu-packages is for
PYTHON_THERE ?= 3.12
# of make test: one more than two cores, as tests wait for a third of their time; four are slower
WORKERS ?= 3

.PHONY: help setup demo demo-picture timeline-picture watch-picture examples test test-long compat check types house prove chaos chaos-long bench bench-quick gpu gpu-packages docs release clean

help:
	@echo "make demo    train under the fault plan $(PLAN), then report and audit"
	@echo "make demo-picture   draw docs/demo.svg from the output of a demo"
	@echo "make examples   train every paradigm's example under its fault plan, and one table (3 minutes)"
	@echo "make test    run the tests, but for long ones (10 minutes on 2 cores)"
	@echo "make test-long   run those (an hour)"
	@echo "make compat  run torchft's own test suites with ManagerFFT for its Manager (1 minute)"
	@echo "make check   format, lint, types, import contract, the picture of the rooms, gates"
	@echo "make types   types of benchmarks, examples and tests as well (2 minutes)"
	@echo "make house   structural gates: import circles, sizes, private names of torchft, prose"
	@echo "make prove   search the model, plant known bugs, simulate $(SEEDS) seeds (10 minutes)"
	@echo "make chaos   break jobs: every fault at every phase and place, a random minute (40 minutes)"
	@echo "make chaos-long   the random part for $(CHAOS_SECONDS) s on each of the two layouts"
	@echo "make bench   FFT beside torchft and NVIDIA's in-process restart, $(REPS) repetitions (3 hours)"
	@echo "make bench-quick   some rows of it, once (5 minutes)"
	@echo "make gpu     try FFT on this machine's GPU, with the torch that it has (10 minutes)"
	@echo "make gpu-packages   what a machine with a GPU and no network may lack, for Python $(PYTHON_THERE)"
	@echo "make docs    build the documentation as a site, in site/; broken links are errors"
	@echo "make release   build wheel and sdist, install each elsewhere and run README's script there (5 minutes)"
	@echo "make setup   make $(VENV) with the fft command in it (the others do it by themselves)"
	@echo "make clean   remove $(VENV), caches and runs/"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "FFT needs Python >= 3.11, this is " + sys.version.split()[0] + "; give another one as make PYTHON=...")'
	@echo "setting up $(VENV); this installs torch and takes some minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --no-compile torch==2.13.0
	@$(PIP) install --quiet --no-compile torchft==0.2.0 -e ".[dev]"
	@$(BIN)/python -c "import torchft, fft; fft.ManagerFFT"  # compiles the files that jobs import
	@touch $@

# Report and audit come after a failed run too: that is when they are needed most.
demo: setup
	@failed=0; \
	$(BIN)/fft run --groups 2 --ranks 2 --faults $(PLAN) --trace-dir $(TRACES) \
	  --stop-after-plan 10 --min-steps 60 --timeout 270 examples/hsdp_char_lm.py || failed=1; \
	$(BIN)/fft report $(TRACES) || failed=1; \
	$(BIN)/fft audit $(TRACES) || failed=1; \
	exit $$failed

examples: setup
	@failed=0; \
	$(BIN)/python -m benchmarks.examples --dir runs/examples-$(shell date +%Y%m%d-%H%M%S) || failed=1; \
	$(BIN)/python -m tests.acceptance.live_kills collectives.py training.py --kills 6 --each 3 || failed=1; \
	exit $$failed

# docs/demo.svg, from the output of a demo
demo-picture: setup
	$(MAKE) -s demo TRACES=runs/demo | $(BIN)/python -m tools.demo_picture

# docs/timeline.png, from the traces of that demo; needs chromium and chromedriver
timeline-picture: setup
	$(BIN)/python -m tools.page_pictures timeline runs/demo

# docs/watch.png, from a demo that runs meanwhile
watch-picture: setup
	$(BIN)/python -m tools.page_pictures watch

test: setup
	$(BIN)/python -m pytest -q -m "not long" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# What takes about eight seconds and more and has a shorter test beside it. .ci/scheduled runs them.
test-long: setup
	$(BIN)/python -m pytest -q -m long -n 2 --dist loadfile --no-loadscope-reorder

# torchft's wheel contains its tests; the package that parameterizes them is among FFT's dev extra.
compat: setup
	$(BIN)/python -m tests.compat -q

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy fft
	$(BIN)/lint-imports
	$(BIN)/python -m tools.rooms --check
	$(BIN)/python -m tools.reference --check
	$(BIN)/python -m tools.house

# mypy on fft/ and on benchmarks, examples and tests, which takes longer than all of make check.
types: setup
	$(BIN)/mypy

# The gates alone; python -m tools.house --list GATE names the places.
house: setup
	$(BIN)/python -m tools.house

# The two teaching specs must be found splitting: their checks have to fail.
prove: setup
	$(BIN)/fft dev check hsdp
	@code=0; $(BIN)/fft dev check local_commit --property agreement --bounds processes || code=$$?; test $$code = 1
	@code=0; $(BIN)/fft dev check plain_votes --property agreement --bounds messages || code=$$?; test $$code = 1
	$(BIN)/fft dev mutants
	$(BIN)/fft dev simulate --seeds $(SEEDS) --first $$(date +%y%m%d%H%M)0

# Both parts are run even if the first finds something. The page is written in either case.
chaos: setup
	@failed=0; \
	$(BIN)/python -m tests.acceptance.chaos matrix --write || failed=1; \
	$(BIN)/python -m tests.acceptance.chaos random --seconds 60 --seed $(CHAOS_SEED) --write || failed=1; \
	echo "report: docs/chaos.md"; exit $$failed

chaos-long: setup
	$(BIN)/python -m tests.acceptance.chaos random --seconds $(CHAOS_SECONDS) --seed $(CHAOS_SEED) --write

# NVIDIA's package pins what it needs: an environment of its own. Its wheels are for Python 3.12 and glibc
# 2.39; elsewhere its Python parts are taken as they are, which is all that the in-process restart needs.
# Where that fails, too, the page says so.
$(NVRX)/.tried:
	@$(PYTHON) -m venv $(NVRX)
	@$(NVRX_PIP) torch==2.13.0 nvidia-resiliency-ext==0.7.0 \
	|| { $(NVRX_PIP) torch==2.13.0 $(NVRX_NEEDS) && $(NVRX_PIP) --no-deps --only-binary=:all: \
	  --implementation cp --python-version 3.12 --platform manylinux_2_39_x86_64 nvidia-resiliency-ext==0.7.0 \
	  --target $$($(NVRX)/bin/python -c 'import site; print(site.getsitepackages()[0])'); } \
	|| echo "nvidia-resiliency-ext cannot be installed here; the rest is measured without it"
	@touch $@

bench: setup $(NVRX)/.tried
	@$(PIP) install --quiet -e ".[bench,titan]"
	$(BIN)/python -m benchmarks.side_by_side run --dir $(BENCH) --reps $(REPS) --write
	$(BIN)/python -m benchmarks.whole_step --dir $(BENCH) --reps $(REPS) --write
	$(BIN)/python -m benchmarks.trainer_steps --reps $(REPS) --write
	$(BIN)/python -m benchmarks.diloco --dir $(BENCH)/diloco --write
	$(BIN)/python -m benchmarks.reforming --reps $(REPS) --write
	$(BIN)/python -m benchmarks.resuming --reps $(REPS) --write
	$(BIN)/python -m benchmarks.goodput --write

# On a machine with a GPU, with its own Python (PYTHON) and torch: nothing is installed.
gpu:
	$(PYTHON) -m tests.acceptance.gpu --write

# What that machine may lack, for its Python: make gpu-packages PYTHON_THERE=3.12
gpu-packages: setup
	$(BIN)/python -m tests.acceptance.gpu.packages $(PYTHON_THERE)

bench-quick: setup
	$(BIN)/python -m benchmarks.side_by_side run --dir $(BENCH) --quick

docs: setup
	@$(PIP) install --quiet -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# dist/ has what would be published
release: setup
	@$(PIP) install --quiet "build>=1.2"
	$(BIN)/python -m tools.release

clean:
	rm -rf $(VENV) $(NVRX) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist runs site
	find fft tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
