# `make` lists the targets. Every target does its own set-up; nothing is installed outside this folder.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
CALIBRATE_VENV := .venv-calibrate
LOCK_VENV := .venv-lock
SOURCES := entrypoint.py engine_builder verify tests benchmarks docker

# The first Python that is 3.11 or 3.12 and can make virtual environments; failing that, the first of the
# right version, so that the message can name what it lacks. Override: make PYTHON=/path/to/python smoke
VERSION_OK := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
ifndef PYTHON
PYTHON := $(shell for need in ', ensurepip, venv' ''; do \
	for python in python3.12 python3.11 python3; do \
	$$python -c "import sys$$need; $(VERSION_OK)" 2>/dev/null && { echo $$python; exit; }; done; done)
endif

# Installs exactly what a lock file lists. The lock is complete, so nothing is resolved (--no-deps); the
# source-only packages are built with the locked build.txt instead of whatever is newest.
INSTALL = -m pip install --quiet --disable-pip-version-check --no-input --no-deps --no-build-isolation \
	--require-hashes

# An environment is current while the stamp named after its Python and its lock file exists.
key = $(firstword $(shell { $(PYTHON) -VV; cat requirements/build.txt $(1); } 2>&1 | sha256sum))
RUNTIME_STAMP := $(VENV)/.rtx-$(call key,requirements/rtx.txt)
DEV_STAMP := $(VENV)/.dev-$(call key,requirements/rtx.txt requirements/dev.txt)
CALIBRATE_STAMP := $(CALIBRATE_VENV)/.calibrate-$(call key,requirements/calibrate.txt requirements/torch*.txt)
LOCK_STAMP := $(LOCK_VENV)/.lock-$(call key,requirements/lock.txt)

# The scripts in docker/ read these from the environment.
export BASE BACKEND BUILDER CALIBRATE NO_CACHE REPEAT TAG

.PHONY: faults matrix bench docs help smoke test lint bundle kubernetes calibrate-env lock clean venv venv-dev python \
	crash hostile image image-test lock-base sbom

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

smoke: $(RUNTIME_STAMP)  ## Build and verify a tiny engine (no GPU needed)
	$(VENV)/bin/python entrypoint.py recipes/smoke.yaml

test: $(DEV_STAMP)  ## Run the test suite
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(DEV_STAMP)  ## Check style, formatting and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy --strict $(SOURCES)

# Templates are to be copied first, and fp8 needs the scales files that calibration writes.
BUNDLED = recipes/smoke.yaml $(sort $(wildcard recipes/sa3-*_fp32.yaml recipes/sa3-*_fp16.yaml recipes/sa3-*_bf16.yaml))

bundle: $(RUNTIME_STAMP)  ## Gather a signed bundle for a closed site (IMAGE=image.tar KEY=site-key OUT=sa3-bundle)
	@test -n "$(IMAGE)" -a -n "$(KEY)" || { echo "make bundle IMAGE=image.tar KEY=site-key [OUT=sa3-bundle]" \
		"[RECIPES='recipes/a.yaml ...'] [MODELS=1] [SBOM=sbom.cdx.json]; docs/airgap.md explains it" >&2; exit 2; }
	$(VENV)/bin/python entrypoint.py bundle make $(or $(RECIPES),$(BUNDLED)) --image $(IMAGE) \
		--key $(KEY) --out $(or $(OUT),sa3-bundle) $(if $(MODELS),--models) $(if $(SBOM),--sbom $(SBOM))

kubernetes: $(RUNTIME_STAMP)  ## Write deploy/kubernetes anew from the recipes
	$(VENV)/bin/python entrypoint.py k8s $(sort $(wildcard recipes/sa3-*_fp16.yaml recipes/sa3-*_bf16.yaml)) \
		--sm 89,90,120 --image sa3-builder:0.1.0 --source-gb 5.8 --out deploy/kubernetes

crash: $(DEV_STAMP)  ## Kill 200 builds at random moments; every later run must be right (KILLS=200)
	$(VENV)/bin/python -m tests.crash --kills $(or $(KILLS),200)

faults: $(DEV_STAMP)  ## Break builds in 100 ways; print what catches each and what it names
	$(VENV)/bin/python benchmarks/faults.py

matrix: $(DEV_STAMP)  ## Build every good graph in every precision, over the whole sweep; print the table
	$(VENV)/bin/python benchmarks/matrix.py

hostile: $(DEV_STAMP)  ## Feed the builder hostile files; print exit code, peak memory and time of each
	$(VENV)/bin/python -m tests.hostile

image:  ## Build the image (BUILDER=docker or buildah, BASE=26.08, BACKEND=tensorrt_rtx, CALIBRATE=1, TAG=...)
	docker/image.sh

image-test:  ## Build the image on a stand-in base and an engine in it, offline (BUILDER=docker or buildah)
	docker/image-test.sh

lock-base:  ## Pin the base images' digests (where their registry can be reached)
	@python3 docker/base_images.py lock

sbom: $(RUNTIME_STAMP)  ## Write sbom.cdx.json, the bill of materials of .venv (CycloneDX)
	$(VENV)/bin/python entrypoint.py sbom --lock requirements/build.txt --lock requirements/dev.txt \
		--out sbom.cdx.json

calibrate-env: $(CALIBRATE_STAMP)  ## Make .venv-calibrate, with ModelOpt and torch, for fp8 calibration

venv: $(RUNTIME_STAMP)

venv-dev: $(DEV_STAMP)

python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed and none was found on PATH." \
		"Install one (Debian 12: python3.11, Ubuntu 24.04: python3.12)," \
		"or name yours: make PYTHON=/path/to/python ..." >&2; exit 3; }
	@$(PYTHON) -c "$(VERSION_OK)" || { echo "$(PYTHON) is not Python 3.11 or 3.12." >&2; exit 3; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual" \
		"environments. On Debian and Ubuntu: apt-get install" \
		"$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 3; }

$(RUNTIME_STAMP): | python
	@echo "Installing requirements/rtx.txt into $(VENV) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(VENV)/bin/python $(INSTALL) -r requirements/build.txt
	@$(VENV)/bin/python $(INSTALL) -r requirements/rtx.txt
	@touch $@

$(DEV_STAMP): $(RUNTIME_STAMP)
	@echo "Installing requirements/dev.txt into $(VENV) ..."
	@$(VENV)/bin/python $(INSTALL) -r requirements/dev.txt
	@touch $@

$(CALIBRATE_STAMP): | python
	@echo "Installing requirements/calibrate.txt into $(CALIBRATE_VENV) ..."
	@$(PYTHON) -m venv --clear $(CALIBRATE_VENV)
	@$(CALIBRATE_VENV)/bin/python $(INSTALL) -r requirements/build.txt
	@$(CALIBRATE_VENV)/bin/python $(INSTALL) -r requirements/calibrate.txt
	@$(CALIBRATE_VENV)/bin/python $(filter-out --require-hashes,$(INSTALL)) -r requirements/torch-cpu.txt \
		2>/dev/null || { echo "No CPU-only build of torch is offered here: installing the full one" \
		"(several GB; requirements/torch-cpu.txt says how to avoid it) ..."; \
		$(CALIBRATE_VENV)/bin/python $(INSTALL) -r requirements/torch.txt; }
	@touch $@

$(LOCK_STAMP): | python
	@$(PYTHON) -m venv --clear $(LOCK_VENV)
	@$(LOCK_VENV)/bin/python $(INSTALL) -r requirements/lock.txt
	@touch $@

# One file serves Python 3.11 and 3.12 with the same versions where that is possible; hashes cover every file
# of a release. Pins that still hold are kept: `make lock UPGRADE=1` looks for newer ones.
COMPILE = UV_CUSTOM_COMPILE_COMMAND='make lock' $(LOCK_VENV)/bin/uv pip compile --quiet --universal \
	--python-version 3.11 --fork-strategy fewest --generate-hashes --no-emit-index-url --no-emit-find-links \
	$(if $(UPGRADE),--upgrade)

lock: $(LOCK_STAMP)  ## Write the lock files anew from pyproject.toml (UPGRADE=1: newest versions)
	$(COMPILE) --group lock -o requirements/lock.txt
	$(COMPILE) --group build -o requirements/build.txt
	$(COMPILE) pyproject.toml -o requirements/base.txt
	$(COMPILE) pyproject.toml --extra rtx -c requirements/base.txt -o requirements/rtx.txt
	$(COMPILE) pyproject.toml --extra gpu -c requirements/base.txt -o requirements/gpu.txt
	$(COMPILE) pyproject.toml --extra rtx --group dev -c requirements/rtx.txt -o requirements/dev.txt
	$(COMPILE) pyproject.toml --extra calibrate -c requirements/build.txt \
		--override requirements/without-cuda.overrides --no-emit-package torch -o requirements/calibrate.txt
	grep -o 'torch==[0-9.]*' pyproject.toml | $(COMPILE) - -c requirements/calibrate.txt -o requirements/torch.txt

clean:  ## Remove the virtual environments and caches (engines in out/ stay)
	rm -rf $(VENV) $(CALIBRATE_VENV) $(LOCK_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build \
		*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

docs: $(RUNTIME_STAMP)  ## Write the recipe reference and the published schema anew
	$(VENV)/bin/python -c "from engine_builder.recipe_reference import recipe_reference as r; print(r(), end='')" \
		> docs/recipe.md
	$(VENV)/bin/python entrypoint.py schema recipe > recipes/schema/recipe.schema.json

bench: $(RUNTIME_STAMP)  ## Benchmark converters side by side (BENCH_ARGS='--size medium --fp8', see benchmarks/precision.py)
	$(VENV)/bin/python benchmarks/precision.py $(BENCH_ARGS)
