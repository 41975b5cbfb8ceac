# make test        own environment, lint, types, all tests            (about ten minutes on two cores)
# make quickstart  own environment, real model and books, train, predict (under fifteen minutes on two cores)
# make clean       forget results of the quickstart and caches of the tools; downloads and the environment stay
#
# What may be set:  PYTHON=python3.12  VENV=.venv  PYTEST_ARGS="-k layout"
#                   TORCH_INDEX_URL=…  an index with the torch build you want, for example PyTorch's CPU-only one: plain
#                   torch from the default index brings CUDA's libraries with it. pip's own variables work as usual.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BIN := $(VENV)/bin
CONFIGS := pyproject.toml constraints.txt

# An environment whose interpreter is gone (a moved folder, an upgraded system) is made anew.
ifeq ($(wildcard $(BIN)/python),)
$(shell rm -f $(VENV)/.stamp-*)
endif

.PHONY: test lint types pytest quickstart clean

test: lint types pytest

lint: $(VENV)/.stamp-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(VENV)/.stamp-dev
	$(BIN)/python -m mypy

# The tests' tensors are tiny: a second thread costs more than it brings.
pytest: $(VENV)/.stamp-dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q $(PYTEST_ARGS)

quickstart: $(VENV)/.stamp-run
	$(BIN)/python scripts/quickstart.py

clean:
	rm -rf runs/quickstart .pytest_cache .mypy_cache .ruff_cache build dist

# A stamp is written last, so an interrupted installation starts again; it is out of date when its requirements change.
$(VENV)/.stamp-run: $(CONFIGS) | $(VENV)/.stamp-python
	$(call install,.[gguf])

$(VENV)/.stamp-dev: $(CONFIGS) | $(VENV)/.stamp-python
	$(call install,.[dev])
	touch $(VENV)/.stamp-run

$(VENV)/.stamp-python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install Python 3.11 or newer, or set PYTHON="; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -c 'import platform; print(platform.python_version())'): set PYTHON="; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) has no ensurepip: install your system's python3-venv package"; exit 1; }
	@$(PYTHON) -c 'import pathlib, shutil, sys; p = pathlib.Path(sys.argv[1]).resolve(); p = next(q for q in (p, *p.parents) if q.exists()); sys.exit(shutil.disk_usage(p).free < 4e9)' $(VENV) || { \
	  echo "less than 4 GB are free for $(VENV): free some, or set VENV= to a folder on another disk"; exit 1; }
	$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@touch $@

define install
$(if $(TORCH_INDEX_URL),$(BIN)/python -m pip install --index-url $(TORCH_INDEX_URL) "$$(grep '^torch==' constraints.txt)")
@echo "installing $(1) into $(VENV) (a few minutes the first time) …"
$(BIN)/python -m pip install -c constraints.txt -e '$(1)'
@touch $@
endef
