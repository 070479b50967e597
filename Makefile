# make venv | demo | train | test | test-repeat | coverage | soak | fuzz | bench | test-gpu | test-xla |
# test-browser | test-integrations | test-peers | site | pages | promises | dist | test-matrix | clean: everything happens in .venv,
# what needs XLA in .venv-xla and the trainers of others in .venv-integrations.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Ranks and commands of the tests start faster from compiled files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo train test lint types unit test-repeat coverage soak fuzz bits bits-compare bench test-gpu test-nccl test-xla xla_receipts \
	test-browser test-integrations test-peers site pages promises dist test-matrix clean

venv: $(STAMP)

# torch comes first and pinned, so that the package's range is already met.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 numpy
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[cli,dev,bench]"
	touch $@

# The stress harness on 2 ranks: 1000 steps of the two classic scenarios in the layouts of whole
# parameters (each by itself, without overlap), 50 of everything else.
demo: venv
	$(PY) -m samestep stress --lanes 3 --steps 1000 --other-steps 50 \
		--out out/demo

# A small GPT with AdamW and with MuonAdamW: table, JSON and picture.
train: venv
	$(PY) -m examples.demo --out out/train

# mypy runs beside the tests, as the second core would wait for it; it says what it has found in the
# end. By itself: make types.
test: lint
	@told=$$(mktemp); $(PY) -m mypy >$$told 2>&1 & types=$$!; \
	trap 'kill $$types; rm -f $$told; exit 130' INT TERM; \
	$(MAKE) --no-print-directory unit; unit=$$?; \
	wait $$types; found=$$?; echo "mypy:"; cat $$told; rm -f $$told; \
	exit $$((unit != 0 ? unit : found))

lint: venv
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(VENV)/bin/lint-imports --no-cache

types: venv
	$(PY) -m mypy

# Three at a time even on two cores: ranks wait for each other a third of the time.
AT_A_TIME := --lanes 3
unit: venv
	$(PY) -m pytest $(AT_A_TIME)

# The tests N times in random order: what was not the same each time, and how long each took.
# BUSY=1 runs two loops beside them that keep two cores busy.
N ?= 5
BUSY ?=
test-repeat: venv
	$(PY) -m tests.repeat --times $(N) --busy $(if $(BUSY),2,0) $(AT_A_TIME) -q

# The same tests, a quarter slower, with the share of lines and branches that they reach.
coverage: venv
	$(PY) -m pytest $(AT_A_TIME) --cov --cov-report=term

# Too slow for every commit: everything for 1000 steps on SOAK_RANKS ranks, whose receipts are
# committed, and many more examples of every property. It takes about 15 core-hours: on 16 cores say
# SOAK_LANES=6. What was interrupted goes on where it was, also one number of ranks: make soak_8.
SOAK_RANKS ?= 2 3 4 8
SOAK_LANES ?= 2
soak: fuzz $(foreach n,$(SOAK_RANKS),soak_$n copies_$n copies_conditional_$n)
	SAMESTEP_SOAK=1 $(PY) -m pytest

# Random trainings in random layouts, the first part of it: a case from each seed. Seeds that were
# fine are remembered (remove out/fuzz to run them again); those that were not are printed as scripts.
FUZZ_FIRST ?= 0
FUZZ_SEEDS ?= 1000
fuzz: venv
	$(PY) -m tests.fuzz --first $(FUZZ_FIRST) --count $(FUZZ_SEEDS) --out out/fuzz/seeds

# The same of DTensors whose copies the optimizer averages, in the scenarios that tell most.
copies_conditional_%: SCENARIOS := expert_stacks,conditional_compute,megatron_conditional
copies_conditional_%: venv
	$(COPIES)
copies_%: SCENARIOS := dist_adamw_muon,normuon_cautious
copies_%: venv
	$(COPIES)

define COPIES
$(PY) -m samestep stress --continue --scenario $(SCENARIOS) --layout copies --world-size $* \
	--lanes $(SOAK_LANES) --watchdog 60 --out out/$@
mkdir -p receipts/$@
cp out/$@/receipt.json receipts/$@/
endef

soak_%: venv
	$(PY) -m samestep stress --continue --world-size $* --lanes $(SOAK_LANES) --watchdog 60 \
		--out out/soak_$*
	mkdir -p receipts/soak_$*
	cp out/soak_$*/receipt.json receipts/soak_$*/

# Digests of parameters and state after 100 steps, of every scenario and layout on 1 to 4 ranks, to
# compare two versions of the code on one machine.
OUT ?= out/bits
LANES ?= 2
bits: venv
	$(PY) -m tests.bits make $(OUT) --lanes $(LANES)

bits-compare: venv
	$(PY) -m tests.bits compare $(A) $(B)

# What needs a GPU, where there is one.
test-gpu: venv
	SAMESTEP_GPU=1 $(PY) -m pytest -m gpu -n 4 --dist worksteal

# What needs NCCL with several ranks: a GPU for each of four, or NCCL 2.30 on one GPU that they share
# (docs/dev/kernels.md). Says why where it cannot run.
test-nccl: venv
	SAMESTEP_GPU=1 $(PY) -m pytest -m gpu -rs -n 0 tests/nccl

# What needs XLA: torch 2.9 and torch_xla, on virtual devices of the CPU; and the core with that
# torch, which is the oldest that it runs with. Programs are compiled half as long without XLA's
# optimizations, which the receipts have.
XLA_PYTHON ?= python3.11
XLA_VENV := .venv-xla
XLA_PY := $(XLA_VENV)/bin/python
XLA_STAMP := $(XLA_VENV)/.installed
XLA_HERE = { [ "$$(uname -sm)" = "Linux x86_64" ] || \
	{ echo "$@: torch_xla has wheels for Linux on x86_64 alone, and this is $$(uname -sm)" >&2; exit 1; }; } && \
	{ $(XLA_PYTHON) --version >/dev/null 2>&1 || \
	{ echo "$@: torch_xla has wheels for CPython 3.11, and there is no $(XLA_PYTHON) (XLA_PYTHON=...)" >&2; exit 1; }; }
CORE_TESTS := tests/test_replicated.py tests/test_flat.py tests/test_sharded.py tests/test_state_dict.py
test-xla:
	@$(XLA_HERE)
	@$(MAKE) --no-print-directory $(XLA_STAMP)
	XLA_FLAGS=--xla_backend_optimization_level=0 $(XLA_PY) -m pytest tests/xla $(CORE_TESTS)

# From torch's own index without CUDA, if it can be reached.
$(XLA_STAMP): pyproject.toml
	$(XLA_PYTHON) -m venv $(XLA_VENV)
	$(XLA_PY) -m pip install --quiet --retries 0 torch==2.9.0 --index-url https://download.pytorch.org/whl/cpu || \
		$(XLA_PY) -m pip install --quiet torch==2.9.0
	$(XLA_PY) -m pip install --quiet torch==2.9.0 torch_xla==2.9.0 -e ".[cli]" pytest pytest-timeout pytest-xdist hypothesis
	touch $@

# 1000 steps of the classic scenarios on 1, 2, 4 and 8 devices, the hybrid mesh on 8, and the mutants.
xla_receipts:
	@$(XLA_HERE)
	@$(MAKE) --no-print-directory $(XLA_STAMP)
	for n in 1 2 4 8; do $(XLA_PY) -m samestep stress --device xla --world-size $$n --continue \
		--scenario dist_adamw_muon,dist_adamw_muon_random --out out/xla_$$n && \
		mkdir -p receipts/xla_$$n && cp out/xla_$$n/receipt.json receipts/xla_$$n/ || exit 1; done
	XLA_FLAGS=--xla_backend_optimization_level=0 $(XLA_PY) -m samestep stress --device xla --world-size 8 \
		--scenario hybrid_gpt --layout xla_hybrid_tp_sp_ep --steps 10 --sample-every 5 --continue --out out/xla_hybrid_8
	mkdir -p receipts/xla_hybrid_8 && cp out/xla_hybrid_8/receipt.json receipts/xla_hybrid_8/
	$(XLA_PY) -m samestep stress --device xla --mutants --out out/xla_mutants
	mkdir -p receipts/xla_mutants && cp out/xla_mutants/receipt.json receipts/xla_mutants/

# All documentation as pages, in out/site; a dead link, or a page that is not in the navigation, is an
# error. What it needs is installed on demand: it would make up a third of a fresh environment's time.
SITE_STAMP := $(VENV)/.site
$(SITE_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

site: $(SITE_STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict
	@echo "out/site/index.html; with its search: python3 -m http.server --directory out/site"

# The report of `samestep stress`, and the site, in a real browser.
test-browser: site
	@command -v chromium >/dev/null || { echo "error: there is no chromium: apt-get install chromium" >&2; exit 1; }
	$(PY) -m pytest -m browser tests/browser

# The trainers of others, in an environment of their own; prints which work, with versions, and writes
# it into docs/trainers.md if all were there. torchtitan is a checkout: TORCHTITAN_PATH=...
INTEGRATIONS := .venv-integrations
export TORCHTITAN_PATH
$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		torch==2.13.0 numpy
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[dev,integrations]"
	touch $@

# Classes of other libraries beside ours, from checkouts in PEERS (dion, Megatron-LM, ...); then
# their receipt, of which docs/coming_from.md has a table.
PEERS ?=
test-peers: venv
	@test -n "$(PEERS)" || { echo "make test-peers needs PEERS=/path/to/checkouts"; exit 2; }
	SAMESTEP_PEERS=$(abspath $(PEERS)) $(PY) -m pytest -q tests/peers
	SAMESTEP_PEERS=$(abspath $(PEERS)) $(PY) -m tests.peers > receipts/peers.json

test-integrations: $(INTEGRATIONS)/.installed
	[ -z "$(TORCHTITAN_PATH)" ] || $(INTEGRATIONS)/bin/python -c "import grain, spmd_types" 2>/dev/null || \
		$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-r $(TORCHTITAN_PATH)/requirements.txt torch_checkpointing
	$(INTEGRATIONS)/bin/python -m tests.integrations.table --write

# What commands say of themselves (help and completion read it), the list of all names, and
# docs/options.md.
pages: venv
	$(PY) -m tests.pages
	$(PY) -m tests.inventory > tests/.inventory.json
	mv tests/.inventory.json tests/inventory.json
	$(PY) -m tests.options_page

# Tries what the documentation promises in every layout; if all is kept, out/ has the receipt that
# belongs into receipts/.
promises: venv
	$(PY) -m tests.promises

# sdist and wheel of the commit, into dist/: docs/dev/releasing.md.
dist: venv
	$(PY) -m tests.dist --out dist

# The wheel with other versions of torch and Python, an environment each, which is deleted:
# make test-matrix PYTHONS="3.11 3.14" TORCHES=2.13
MATRIX := .venv-matrix
PYTHONS ?= 3.11 3.12 3.13 3.14
TORCHES ?= 2.9 2.10 2.11 2.12 2.13
test-matrix: venv $(MATRIX)/.installed
	$(PY) -m tests.install_matrix --python $(PYTHONS) --torch $(TORCHES) --uv $(MATRIX)/bin/uv

$(MATRIX)/.installed:
	$(PYTHON) -m venv $(MATRIX)
	$(MATRIX)/bin/python -m pip install --quiet --disable-pip-version-check uv
	touch $@

bench: venv
	$(PY) -m benchmarks.two_ranks --out out/bench

clean:
	rm -rf $(VENV) $(XLA_VENV) $(INTEGRATIONS) $(MATRIX) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .coverage
