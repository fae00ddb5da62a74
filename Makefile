# Everything this repository can do; `make` alone lists it. Nothing asks a question, everything can be run again.
#
# Variables: PYTHON=/path/to/python3.12 for a new environment, VENV=.venv, PIP_ARGS for pip,
# LAB_ARGS for JupyterLab, PYTEST_ARGS for pytest, WORKERS=0 for tests one after another (as --pdb
# needs), SLIDES_ARGS such as --lessons=02,05, MKREF_APT=no to leave the system's packages alone.

SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
export PYTHON PIP_ARGS MKREF_APT

# "gpu" where an NVIDIA GPU answers, else nothing.
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo gpu)
comma := ,
GPU_EXTRA := $(if $(GPU),$(comma)gpu)

# One stamp for each set of extras, so that a changed lock or pyproject.toml, or a new GPU, installs again.
LAB_READY := $(VENV)/.ready-lab$(GPU)
TEST_READY := $(VENV)/.ready-lab-test$(GPU)
SETUP := requirements.lock pyproject.toml scripts/setup.sh

FIRST_LESSON := notebooks/00_start_here.ipynb
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
NBVAL := $(if $(NOTEBOOKS),$(NOTEBOOKS) --nbval --nbval-current-env --nbval-sanitize-with=tests/nbval.cfg \
	--nbval-cell-timeout=120 --nbval-kernel-startup-timeout=60)
PYTEST_ARGS ?= tests mkref $(NBVAL)
WORKERS ?= 2

# A window to open a browser in: a display, a Mac, or an editor that set BROWSER.
NO_BROWSER := $(shell [ -n "$$DISPLAY$$WAYLAND_DISPLAY$$BROWSER" ] || [ "$$(uname)" = Darwin ] || echo --no-browser)
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

.DEFAULT_GOAL := help
.PHONY: help lab test check notebooks slides bench test-gpu lock clean

help: ## this list
	@echo "make TARGET, where TARGET is"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

$(LAB_READY): $(SETUP)
	@scripts/setup.sh $(VENV) lab,serve$(GPU_EXTRA)
	@touch $@

$(TEST_READY): $(SETUP)
	@scripts/setup.sh $(VENV) lab,serve,test$(GPU_EXTRA)
	@touch $@ $(LAB_READY)

lab: $(LAB_READY) ## open the workbook in JupyterLab
	@echo "lab: starting JupyterLab$(if $(NO_BROWSER), without a browser: open the address that it prints); Ctrl-C twice ends it"
	@exec $(PY) -m jupyterlab --ServerApp.root_dir=$(CURDIR) --LabApp.default_url=/lab/tree/$(FIRST_LESSON) \
	  $(NO_BROWSER) $(AS_ROOT) --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate $(LAB_ARGS)

# One thread each: tiny models are faster so, and times do not jump on a busy machine.
test: export OMP_NUM_THREADS := 1
test: export PYTEST_TIMEOUT := 600
test: export MKREF_PROGRESS := off
test: export MKREF_MEASURE := off
test: $(TEST_READY) ## run every test that needs no GPU, and the notebooks
	@scripts/system_extras.sh
	$(PY) -m pytest -m "not gpu" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

check: $(TEST_READY) ## lint, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

notebooks: $(TEST_READY) ## run the notebooks in place, so that their stored outputs are this version's
	$(PY) scripts/run_notebooks.py

slides: $(LAB_READY) ## the figures of the notebooks as slides, in build/slides.html
	@$(PY) scripts/export_slides.py $(SLIDES_ARGS)

ifeq ($(GPU),)
bench test-gpu:
	@echo "$@: needs an NVIDIA GPU, and nvidia-smi lists none here; nothing was run. Recorded runs: bench/LOG.md, bench/results/"
else
bench: $(TEST_READY)
	$(PY) bench/run.py $(BENCH_ARGS)

test-gpu: $(TEST_READY)
	$(PY) scripts/gpu_record.py
endif
bench: ## measure on an NVIDIA GPU (says so without one)
test-gpu: ## run the GPU tests and record the result (says so without a GPU)

lock: ## resolve requirements.lock anew from pyproject.toml
	$(if $(wildcard $(PY)),$(PY),$(or $(PYTHON),python3)) scripts/lock.py

clean: ## remove caches and build products; the environment stays (rm -r .venv removes it)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	find mkref scripts tests notebooks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
