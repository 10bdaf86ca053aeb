# make demo   prepare data, train a tiny model, sample from it (minutes on two cores)
# make test   everything a change needs; make lint is its first part
# make clean  remove .venv and caches; data/ and runs/ stay

VENV := .venv/bin
CANDIDATES := python3.13 python3.12 python3.11 python3
FITS := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell for p in $(CANDIDATES); do "$$p" -c "$(FITS)" >/dev/null 2>&1 && echo "$$p" && break; done)
endif

.PHONY: demo test lint clean setup setup-dev

demo: setup
	$(VENV)/python -m moe_zoo demo

test: lint
	$(VENV)/python -m pytest -m "not slow and not gpu"

lint: setup-dev
	$(VENV)/python -m ruff check .
	$(VENV)/python -m ruff format --check .
	$(VENV)/lint-imports
	$(VENV)/python -m mypy

setup setup-dev:
	@test -n "$(PYTHON)" || { echo "error: Python: none of $(CANDIDATES) is 3.11 or newer and has venv;" \
		"moe-zoo needs one; install one, or run make PYTHON=/path/to/python" >&2; exit 2; }
	@"$(PYTHON)" .ci/bootstrap.py $(if $(filter setup-dev,$@),dev)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
