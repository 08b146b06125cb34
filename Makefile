# make demo       set up, look at this machine, store a model's state on its drive and read it back
# make test       set up, run the tests
# make lint       ruff and mypy
# make sanitize   the engine under load, with the address, undefined-behaviour and thread sanitizers
# make clean      remove all that the above made
#
# PYTHON is the interpreter to start from, VENV the environment to make, TORCH what pip installs where there is no torch (with numpy,
# whose absence torch complains of).

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0 numpy

python := $(VENV)/bin/python
pip := $(python) -m pip --disable-pip-version-check

.PHONY: demo test lint sanitize clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(VENV)/bin/ds_report
	$(python) examples/quickstart.py

test: $(VENV)/installed-for-tests
	$(python) -m pytest -rs

lint: $(VENV)/installed-for-tests
	$(python) -m ruff check .
	$(python) -m mypy

sanitize:
	bash tests/native/run_sanitizers.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# What would fail in the end fails here, before torch is downloaded.
$(VENV)/with-torch:
	@PYTHON="$(PYTHON)" bash .ci/install_system_packages
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(python) -c "import torch" 2>/dev/null || $(pip) install $(TORCH)
	touch $@

$(VENV)/installed: $(VENV)/with-torch pyproject.toml setup.py
	$(pip) install --editable .
	touch $@

$(VENV)/installed-for-tests: $(VENV)/with-torch pyproject.toml setup.py
	$(pip) install --editable ".[test]"
	touch $@ $(VENV)/installed
