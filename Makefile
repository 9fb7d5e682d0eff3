# `make quickstart` and `make test` set up everything they need. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SEED ?= 0
# For example: PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" for torch's CPU build on Linux.
PIP_FLAGS ?=

.PHONY: setup quickstart quickstart-smollm2 test test-rest test-viewer test-vllm test-agents durations test-all test-oldest lint docs bench gpu gpu-wheels clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt requirements.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"whet needs Python 3.11 or newer, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps --require-hashes --requirement requirements.txt
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	touch $(READY)

quickstart: setup
	$(BIN)/whet quickstart --seed $(SEED)

quickstart-smollm2: setup
	$(BIN)/whet quickstart --model smollm2 --seed $(SEED)

lint: setup
	$(BIN)/ruff check --no-cache .
	$(BIN)/pyright
	$(BIN)/pyright -p benchmarks

# Files of tests side by side, each process with one thread of torch's.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# About eight minutes on two cores, after lint.
test: lint
	$(PYTEST) -m "not slow and not long and not browser and not vllm and not agents"

# What `make test` leaves: whole runs, clusters and many processes.
test-rest: setup
	$(PYTEST) -m "long and not slow and not browser and not vllm and not agents"

# The viewer's page in Chromium: Debian's (apt-get install chromium) or the one that CHROMIUM names. Without one this fails, and where CI is set it is
# installed first.
test-viewer: setup
	$(BIN)/python -m pytest -m browser tests/view

# Runs against vLLM's build for CPUs, in an environment of its own (some 2 GB, half a minute to install).
VLLM := .vllm
$(VLLM)/.ready: tests/vllm/requirements.txt tests/vllm/routers.txt whet-vllm/pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet $(PIP_FLAGS) "torch==2.13.0"
	$(VLLM)/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps --requirement tests/vllm/requirements.txt
	$(VLLM)/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps --editable . --editable ./whet-vllm
	@# Routers, each in a folder of its own: two of them have a command of one name.
	while read router; do $(VLLM)/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps --target $(VLLM)/routers/$${router%==*} $$router || exit 1; \
	done < tests/vllm/routers.txt
	touch $(VLLM)/.ready

test-vllm: setup $(VLLM)/.ready
	WHET_TEST_VLLM=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm tests/vllm

# Packages of others (2 GB, minutes to install): each file of requirements in tests/agents has an environment of its own, in which games can import
# whet's, too; MCP's servers and some tokenizers need npm.
AGENTS := .agents
AGENT_ENVIRONMENTS := $(patsubst tests/agents/%.txt,$(AGENTS)/%/.ready,$(wildcard tests/agents/*.txt))
SITE := $(CURDIR)/$(VENV)/lib/python3*/site-packages
$(AGENTS)/%/.ready: tests/agents/%.txt
	$(PYTHON) -m venv $(AGENTS)/$*
	$(AGENTS)/$*/bin/python -m pip install --quiet $(PIP_FLAGS) --requirement $<
	touch $@

$(AGENTS)/games/.ready: tests/agents/games.txt tests/agents/trl.no-deps $(READY)
	$(PYTHON) -m venv $(AGENTS)/games
	$(AGENTS)/games/bin/python -m pip install --quiet $(PIP_FLAGS) --requirement tests/agents/games.txt
	$(AGENTS)/games/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps --requirement tests/agents/trl.no-deps
	printf '%s\n' $(CURDIR) $(SITE) > $$(echo $(AGENTS)/games/lib/python3*/site-packages)/beside_whet.pth
	touch $@

$(AGENTS)/node/.ready: tests/agents/package.json
	mkdir -p $(AGENTS)/node && cp $< $(AGENTS)/node && npm install --no-audit --no-fund --prefix $(AGENTS)/node
	touch $@

$(AGENTS)/.families: tests/agents/fetch_families.py
	$(PYTHON) -m tests.agents.fetch_families $(AGENTS)
	touch $@

test-agents: setup $(AGENT_ENVIRONMENTS) $(AGENTS)/node/.ready $(AGENTS)/.families
	WHET_TEST_AGENTS=$(CURDIR)/$(AGENTS) $(AGENTS)/games/bin/python -m pytest -m agents tests/agents

# Writes how long the tests of each file take.
durations: setup
	$(PYTEST) -m "not slow and not browser and not vllm and not agents" --durations-file=tests/durations.txt

test-all: lint
	$(PYTEST) -m "not browser and not vllm and not agents"
	$(MAKE) test-viewer
	$(MAKE) test-oldest

# The tests that are not slow on the oldest transformers that pyproject.toml admits, and the oldest torch that package indexes offer for CPUs alone: of
# older ones Linux has builds for CUDA only, which run on CPUs too (make test-oldest OLDEST_TORCH=2.11.0) and take gigabytes.
OLDEST := .oldest
OLDEST_TORCH ?= 2.13.0
OLDEST_TRANSFORMERS ?= 5.17.0

$(OLDEST)/.ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(OLDEST)
	grep -viE '^(torch|transformers|tokenizers|huggingface_hub|safetensors)==' constraints.txt > $(OLDEST)/constraints.txt
	printf 'torch==%s\ntransformers==%s\n' $(OLDEST_TORCH) $(OLDEST_TRANSFORMERS) >> $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet $(PIP_FLAGS) --constraint $(OLDEST)/constraints.txt --editable ".[dev]"
	touch $(OLDEST)/.ready

test-oldest: $(OLDEST)/.ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not browser and not vllm and not agents"

# Writes docs/errors.md from what the errors' tests print.
docs: setup
	WHET_WRITE_DOCS=1 $(BIN)/python -m pytest tests/errors

bench: setup
	$(BIN)/python benchmarks/quickstart_seeds.py
	$(BIN)/python benchmarks/quickstart_controls.py
	$(BIN)/python benchmarks/skip_zero_advantage.py
	$(BIN)/python benchmarks/deterministic_cost.py
	$(BIN)/python benchmarks/rollout_speed.py 3M
	$(BIN)/python benchmarks/decode_step.py 3M
	$(BIN)/python benchmarks/train_speed.py 3M
	$(BIN)/python benchmarks/roofline.py 3M
	$(BIN)/python benchmarks/parallel_bytes.py
	$(BIN)/python benchmarks/weight_sync.py
	if $(BIN)/python -c "import trl" 2>/dev/null; then $(BIN)/python benchmarks/grpo_step.py 3M; fi

# Checks one GPU in at most nine minutes, with PYTHON as it is (benchmarks/README.md). WHEELS: a folder of wheels for what PYTHON lacks.
OUT ?= benchmarks/results/gpu
gpu:
	$(PYTHON) benchmarks/check_gpu.py --out $(OUT) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(ONLY),--only $(ONLY))

# Wheels for a GPU machine without a network.
gpu-wheels: setup
	$(BIN)/python benchmarks/gpu/gather.py wheels

clean:
	rm -rf $(VENV) $(OLDEST) $(VLLM) $(AGENTS) build dist *.egg-info
