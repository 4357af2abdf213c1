# `make` runs the checks; `make test` is what CI runs on a fresh clone.
PY := .venv/bin/python
PIP := .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
CORE := $(wildcard src/millrace/_core/*.c src/millrace/_core/*.h)

.PHONY: check setup servers test hidden demo bench bench-peers soak dist clean

check: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(PY) tools/long_files.py

# torch first and by its exact version: a bare `torch` would pull gigabytes.
setup: .venv/ready
.venv/ready: pyproject.toml constraints.txt $(CORE)
	test -x $(PY) || python3 -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev]'
	touch $@

# Tools the tests start; without root the tests that need them say so and skip.
servers:
	@if [ "$$(id -u)" = 0 ] && ! command -v fiu-run >/dev/null; then \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends fiu-utils >/dev/null; fi

test: setup servers check
	$(PY) -m pytest -n 2 -q
	$(MAKE) --no-print-directory hidden

# The core suite once more as on a platform without flock, memfd, madvise and without a compiler.
hidden: .venv/ready
	MILLRACE_TEST_HIDE=1 $(PY) -m pytest -n 2 -q tests/store tests/property tests/golden tests/view tests/gather tests/feed tests/resume

demo: setup
	.venv/bin/millrace demo

bench: setup
	$(PY) -m benchmarks.store
	$(PY) -m benchmarks.feed
	$(PY) -m benchmarks.prepare_text

# Text once more beside LitData and datatrove, which have an environment of their own.
bench-peers: setup .venv-peers/ready
	$(PY) -m benchmarks.prepare_text --peers .venv-peers/bin/python

.venv-peers/ready: constraints.txt
	python3 -m venv .venv-peers
	.venv-peers/bin/pip install --quiet -c constraints.txt torch==2.13.0
	.venv-peers/bin/pip install --quiet -c constraints.txt litdata==0.2.76 'datatrove[processing]==0.9.0' orjson tokenizers
	touch $@

# Long randomised runs: 1,000 kills; the seed is printed, MILLRACE_SEED repeats it.
soak: setup servers
	MILLRACE_SOAK=1000 $(PY) -m pytest -n 2 -q tests/faults tests/prepare/text/test_restart.py tests/prepare/text/test_lines.py --timeout 7200

dist: setup
	rm -rf dist build
	.venv/bin/python -m build --quiet --outdir dist .
	$(PY) tools/try_dist.py dist

clean:
	rm -rf .venv .venv-peers build dist src/*.egg-info src/millrace/*.so
