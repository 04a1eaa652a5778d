# What a developer and CI run. Everything lives in .venv/ and build/; a target whose inputs did not change does nothing.
#
#   make serve ARGS="--port=9000"          extra flags for the server
#   make test ARGS="-k fetch"              extra arguments for pytest
#   make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"     torch without CUDA

PYTHON ?= python3
MODEL ?= smollm2-135m-instruct
ARGS ?=
PIP_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NATIVE := $(shell find native -type f)

.PHONY: setup clients npu native serve test lint format bench wheel clean

setup: .venv/.installed

# An editable install: Python files are read from the checkout, native modules from site-packages. Copies of _vmm*.so or
# _kernels*.so inside xllm_cli/ are used by no install and packed into no wheel.
.venv/.installed: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install $(PIP_ARGS) -c constraints.txt scikit-build-core nanobind cmake ninja
	$(PIP) install $(PIP_ARGS) -c constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

# Programs that talk to a server, in an environment of their own: what they need is never mixed with the product's.
clients: .venv-clients/.installed

.venv-clients/.installed: tests/clients/requirements.txt
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip --disable-pip-version-check --quiet install $(PIP_ARGS) --no-deps --no-compile -r $<
	touch $@

# torch_npu for real, on an emulated device, in an environment that stands on .venv: nothing else may see torch_npu,
# because torch loads it by itself wherever it is installed. Compiled while it is installed: its sources make python
# warn, and in tests a warning is an error.
npu: setup .venv-npu/.installed
	home="$$(cd tests && ../$(BIN)/python -c 'import ascendcl; print(ascendcl.build_emulator())')" && \
	LD_LIBRARY_PATH="$$home/lib64" OMP_NUM_THREADS=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
	.venv-npu/bin/python -m pytest -m npu -n 2 --dist loadfile tests/npu $(ARGS)

.venv-npu/.installed: tests/npu/requirements.txt .venv/.installed
	test -x .venv-npu/bin/python || $(PYTHON) -m venv .venv-npu
	.venv-npu/bin/python -m pip --disable-pip-version-check --quiet install $(PIP_ARGS) --no-deps -r $<
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	> "$$(.venv-npu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/on_venv.pth"
	touch $@

# Only the native modules again, from build/ as it stands: seconds.
native:
	$(PIP) install --no-build-isolation --no-deps --editable .

serve: setup
	model="$$($(BIN)/xllm fetch $(MODEL) | tail -n 1)" && test -n "$$model" && \
	exec $(BIN)/xllm serve --model="$$model" --enable_vmm_kvcache=true --vmm_elastic=true $(ARGS)

# Two workers, a file of tests at a time in tests/conftest.py's order, each with one arithmetic thread: tests of threads
# set their own number.
test: setup
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/xllm bench serve $(ARGS)

wheel: setup
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	ls -l dist

clean:
	rm -rf build dist .venv/.installed .venv-npu/.installed
