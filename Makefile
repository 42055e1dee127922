# make train: install, then train two replica groups on this machine. ARGS=max_duration=300ba and
# the like change its config.
# make test: install, then test. make test-alone: the tests that measure time in seconds.
# make test-pages: install, then run the commands of the pages as they stand.
# make check: lint, types and the quick tests, in a minute on two cores.
# make test-torch-new: the same tests with Composer on a torch past its pin.
# make test-hf: the tests of Hugging Face, TRL, Lightning and accelerate, with the newest torch.
# make test-ray: the test of the example for Ray Train.
# make gpu-check: the tests and benchmarks that need a GPU, in six minutes; run again, it goes on.
# make chaos: trains under injected faults (CONTRIBUTING.md). ARGS="--duration 180 --seed 1 --kinds
# kill,hang --replicas 3" and the like; with a config or -- and a command in place of the quickstart.
# make docs: builds the site from docs/ into build/docs.
# make release-check: builds sdist and wheel, and tries the wheel with the newest torch and with 2.7.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LLMFOUNDRY := .venv-llmfoundry
HF := .venv-hf
RAY := .venv-ray
TORCH_NEW := .venv-torch-new
RELEASE := .venv-release
DOCS := .venv-docs

# Where Python may not keep what it compiles, each of some hundred processes compiles it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-alone test-pages check check-tests chaos gpu-check lint test-torch-new test-llmfoundry test-hf test-ray docs release-check clean

train: $(VENV)/.installed
	$(BIN)/composer-replication launch configs/quickstart.yaml --replicas 2 $(ARGS)

# Three workers a core: most tests wait for other processes.
WORKERS ?= $(shell expr 3 \* $$(nproc))
PYTEST := $(BIN)/python -m pytest
test: $(VENV)/.installed-dev
	$(PYTEST) -n $(WORKERS) --maxprocesses 16 --dist worksteal -m 'not alone and not pages'

# What measures time runs apart from what computes. Two at a time, they mostly wait.
test-alone: $(VENV)/.installed-dev
	$(PYTEST) -n 2 --dist worksteal -m alone

# Two pages at a time, but not two with the same port.
test-pages: $(VENV)/.installed-dev
	$(PYTEST) -n 2 --dist loadgroup -m pages tests/test_pages.py

test-torch-new: $(TORCH_NEW)/.installed
	$(MAKE) --no-print-directory -o $(VENV)/.installed-dev test test-alone \
		PYTEST='$(TORCH_NEW)/bin/python -m pytest -rs'

# What starts no group, and is quick; beside it, lint.
check: $(VENV)/.installed-dev
	$(MAKE) --jobs 2 --output-sync=target lint check-tests

# One worker more than cores: some tests wait.
check-tests:
	$(PYTEST) -q -n $(shell expr 1 + $$(nproc)) --dist worksteal -m 'not integration and not slow and not alone'

chaos: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos $(ARGS)

# On a machine with a GPU; PYTHON_GPU is one that has torch for it, ours by default.
PYTHON_GPU ?= $(BIN)/python
gpu-check: $(if $(findstring $(BIN),$(PYTHON_GPU)),$(VENV)/.installed-dev)
	$(PYTHON_GPU) benchmarks/gpu_check.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/.installed: pyproject.toml
	@echo "Installing Composer, torch and torchft into $(VENV): about 5 GB, some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[all]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# Composer past its pin of torch: docs/newer-torch.md.
$(TORCH_NEW)/.installed: tests/torch_new/requirements.txt pyproject.toml
	@echo "Installing torch 2.13 and Composer into $(TORCH_NEW): about 5 GB, some minutes."
	$(PYTHON) -m venv $(TORCH_NEW)
	$(TORCH_NEW)/bin/python -m pip install --quiet --disable-pip-version-check \
		-r tests/torch_new/requirements.txt --editable '.[composer-side,coordinator,launch,test]'
	$(TORCH_NEW)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps mosaicml==0.32.1
	touch $@

# llm-foundry pins much of its own: an environment of its own, minutes to install.
test-llmfoundry: $(LLMFOUNDRY)/.installed
	$(LLMFOUNDRY)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[all]'
	$(LLMFOUNDRY)/bin/python -m pytest tests/llmfoundry tests/composer_parts -m llmfoundry
	$(LLMFOUNDRY)/bin/python -m pytest tests/training/test_examples.py
	$(LLMFOUNDRY)/bin/python -m pytest tests/test_pages.py -m llmfoundry

$(LLMFOUNDRY)/.installed: tests/llmfoundry/requirements.txt
	@echo "Installing llm-foundry into $(LLMFOUNDRY): about 7 GB, some minutes."
	$(PYTHON) -m venv $(LLMFOUNDRY)
	$(LLMFOUNDRY)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/llmfoundry/requirements.txt
	touch $@

test-hf: $(HF)/.installed
	$(HF)/bin/python -m pytest -rs -n $(WORKERS) --maxprocesses 16 --dist worksteal tests/hosts

# Without Composer, which holds torch at 2.7.
$(HF)/.installed: pyproject.toml
	@echo "Installing transformers, TRL, Lightning and the newest torch into $(HF): about 5 GB, some minutes."
	$(PYTHON) -m venv $(HF)
	$(HF)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test-hf]'
	touch $@

# Ray starts some ten processes, which other tests would make wait.
test-ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest tests/deploy/test_ray.py -rs

$(RAY)/.installed: pyproject.toml
	@echo "Installing Composer, torch and Ray into $(RAY): about 5 GB, some minutes."
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[all,ray,test]'
	touch $@

# -W: a warning is an error; -n: so is a link without a target. Needs no network.
# Anew, else a page that is gone stays.
docs: $(DOCS)/.installed
	rm -rf build/docs
	$(DOCS)/bin/python -m sphinx -W --keep-going -n -q docs build/docs
	@echo "The site is in build/docs/index.html."

# The reference imports the package, and with it Composer and torch.
$(DOCS)/.installed: pyproject.toml
	@echo "Installing Composer, torch and Sphinx into $(DOCS): about 5 GB, some minutes."
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[all,docs]'
	touch $@

# CHANGELOG, sdist, and the wheel: spike 008 and a first launch, with two torches: some minutes.
release-check: $(RELEASE)/.installed
	PATH=$(CURDIR)/$(RELEASE)/bin:$$PATH python .ci/release_check.py

$(RELEASE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check build cffconvert twine
	touch $@

clean:
	rm -rf $(VENV) $(TORCH_NEW) $(LLMFOUNDRY) $(HF) $(RAY) $(DOCS) $(RELEASE) dist build
