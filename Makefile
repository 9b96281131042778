# One command for each verb. Each makes its own virtual environment when there is none.
#   make demo    train a real model on real data: one server, four workers
#   make test    run the whole test suite        make check   ruff and mypy --strict
#   make fuzz    hostile sessions and frames at a server, half a minute
#   make sanitize  test compiled code, built with sanitizers of addresses and of C's rules, and fuzz it for a minute
#   make bench   all benchmarks (ARGS=--quick)   make docs    regenerate the generated pages
#   make pictures  draw the live page for its guide, by Chromium
#   make types-public  the types of public names, by another checker
#   make golden  write the kernels' agreed texts again, when a change of them is meant

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

SOURCES := $(sort $(wildcard aiops/compiled/*.[ch]))

.PHONY: demo test check types-public fuzz sanitize bench docs site pictures golden clean
.DELETE_ON_ERROR:

# The demo needs little, so it installs little; the development tools come when they are asked for.
$(VENV)/.demo: pyproject.toml constraints.txt $(SOURCES)
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing aiops for the demo"
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(SOURCES)
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing aiops for development, with PyTorch, JAX and Ray (0.5 GB); a few minutes, once"
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@$(BIN)/aiops demo $(ARGS)

# The tests start hundreds of processes: byte code is kept, whatever the environment says of it.
test: $(VENV)/.dev
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# Half a minute, and a package that nothing else needs.
types-public: $(VENV)/.dev
	@$(PIP) basedpyright
	@$(BIN)/python -m docs._tools.api.types

# The same seeds each time: new ones are for `aiops torture` with a larger --count.
fuzz: $(VENV)/.dev
	@$(BIN)/aiops torture sessions --count 100000 --seed 1
	@$(BIN)/aiops torture frames --count 100000 --seed 1

# Python's own allocator would hide what is read beyond an end, and Python itself leaks at its end.
SANITIZERS := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
sanitize: $(VENV)/.dev
	@CC=gcc $(BIN)/python hatch_build.py build/sanitized $(SANITIZERS)
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc AIOPS_SEEDS=$(or $(AIOPS_SEEDS),10) \
		$(BIN)/python -m pytest -n 0 -p tests.sanitized tests/client/sync/test_compiled_exchange.py tests/client/sync/test_compiled_increments.py tests/client/asyncio tests/compiled \
		tests/engine/test_steady.py tests/engine/test_coded_answers.py tests/engine/test_compiled_answers.py tests/engine/test_compiled_journal.py tests/engine/test_server_calls.py tests/net/test_socket_poller.py \
		tests/net/test_mailboxes.py tests/net/test_lent_answers.py tests/client/sync/test_mailbox.py tests/client/sync/test_lent_answers.py $(ARGS)
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
		$(BIN)/python -m tests.sanitized torture frames --only steady --jobs 1 --seed 1 --seconds $(or $(FUZZ),60)
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
		$(BIN)/python -m tests.sanitized torture mailboxes --jobs 1 --seed 1 --seconds $(or $(FUZZ),60)

bench: $(VENV)/.dev
	@$(BIN)/aiops bench all $(ARGS)

docs: $(VENV)/.dev
	@$(BIN)/python -m docs._tools.wire docs/wire.md
	@$(BIN)/python -m docs._tools.state docs/state.md
	@$(BIN)/python -m docs._tools.metrics docs/guide-monitoring.md
	@$(BIN)/python -m docs._tools.pages docs/algorithms
	@$(BIN)/python -m docs._tools.api docs/api.md

site: $(VENV)/.dev
	@$(PIP) --editable ".[docs]"
	@$(BIN)/python -m docs._tools.site build/site

pictures: $(VENV)/.dev
	@AIOPS_PICTURES=docs $(BIN)/python -m pytest -n 0 tests/dashboard/test_page.py -k pictures

golden: $(VENV)/.dev
	@$(BIN)/python -m tests.kernels.test_numba_source
	@$(BIN)/python -m tests.kernels.test_cuda_source

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
