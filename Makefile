# make venv | demo | test | soak | bench | clean: everything happens in .venv.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: venv demo test lint types unit soak bench clean

venv: $(STAMP)

# torch comes first and pinned, so that the package's range is already met.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 numpy
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[cli,dev,bench]"
	touch $@

demo: venv
	$(PY) -m examples.demo --out out/demo

test: lint types unit

lint: venv
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: venv
	$(PY) -m mypy

unit: venv
	$(PY) -m pytest --cov --cov-report=term

# Longer batteries, too slow for every commit: many more examples per property.
soak: venv
	SAMESTEP_SOAK=1 $(PY) -m pytest --timeout 1800

bench: venv
	$(PY) -m benchmarks.cpu_step --out out/bench

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
