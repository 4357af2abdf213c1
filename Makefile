# `make` runs the checks; `make test` is what CI runs on a fresh clone.
PY := .venv/bin/python
PIP := .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
# Where the environment forbids bytecode, every process of the tests would compile anew what it imports.
export PYTHONDONTWRITEBYTECODE :=
CORE := $(wildcard src/millrace/_core/*.c src/millrace/_core/*.h)

.PHONY: check setup servers test hidden sanitize valgrind demo docs bench bench-peers soak dist clean

check: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(PY) tools/long_files.py

# torch first and by its exact version: a bare `torch` would pull gigabytes. What the demo needs comes first, and is enough for it.
setup: .venv/ready
.venv/base: pyproject.toml constraints.txt $(CORE)
	test -x $(PY) || python3 -m venv .venv
	.venv/bin/pip uninstall --quiet --yes millrace 2>/dev/null  # the name of this distribution until 0.1
	$(PIP) torch==2.13.0
	$(PIP) -e '.[table,torch]' matplotlib
	$(PY) -m compileall -q src  # as pip does with a wheel: processes that tests and benchmarks start need not
	touch $@
.venv/ready: .venv/base
	$(PIP) 'millrace-data[dev]'  # it is there already: only what tests import is added
	touch $@

# Tools the tests start; without root the tests that need them say so and skip.
servers:
	@if [ "$$(id -u)" = 0 ] && ! { command -v fiu-run && command -v redis-server && command -v faketime && command -v ip && command -v chromium; } >/dev/null; then \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends fiu-utils redis-server faketime iproute2 chromium >/dev/null; fi

# The adapters have no doctests, and would bring these libraries into the processes of all tests.
ADAPTERS := $(addprefix --ignore src/millrace/,transformers.py accelerate.py jax.py)
test: setup servers check
	$(PY) -m pytest -n 2 --dist worksteal -q --ignore tests/frameworks $(ADAPTERS)
	$(PY) -m pytest -n 2 --dist loadfile -q tests/frameworks  # apart: with these libraries in it every fork of a test takes longer
	$(MAKE) --no-print-directory hidden

# The core suite once more as on a platform without flock, memfd, madvise and without a compiler.
hidden: .venv/ready
	MILLRACE_TEST_HIDE=1 $(PY) -m pytest -n 2 --dist worksteal -q tests/store tests/property tests/golden tests/order tests/view tests/gather tests/feed tests/resume

# The C core under the address and undefined-behaviour sanitizers, in a copy of the package beside the real one.
SANITIZED := build/sanitize
INCLUDE = $(shell $(PY) -c "import sysconfig; print(sysconfig.get_paths()['include'])")
SANITIZE = gcc -shared -fPIC -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	-DPy_LIMITED_API=0x030b0000 -I$(INCLUDE) src/millrace/_core/*.c -o $(SANITIZED)/millrace/_core.abi3.so
SANITIZED_TESTS = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=1:allocator_may_return_null=1:max_allocation_size_mb=4096 \
	MILLRACE_FUZZ=60000 PYTHONMALLOC=malloc PYTHONPATH=$(SANITIZED) $(PY) -m pytest -n 2 -q --timeout 600
BOTH_TESTS := tests/property/test_fuzz_core.py tests/images/test_resize.py tests/text/test_merges.py tests/text/test_documents.py $(addprefix tests/prepare/text/test_,known_hashes.py clean.py part_files.py long_documents.py framing.py)
sanitize: .venv/ready
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src/millrace $(SANITIZED)/
	$(SANITIZE)
	$(SANITIZED_TESTS) $(BOTH_TESTS)
	$(SANITIZE) -DMILLRACE_PORTABLE
	$(SANITIZED_TESTS) $(BOTH_TESTS) \
	  tests/gather tests/order/test_permute.py tests/feed/test_native.py tests/feed/test_wrong_plans.py tests/feed/test_cold.py tests/feed/test_fetch.py tests/feed/test_device.py tests/feed/test_device_feed.py tests/feed/test_slots.py

# A short run of the core under valgrind: reads and writes outside memory, and memory that nobody frees.
valgrind: .venv/ready
	$(PY) tools/valgrind.py

demo: .venv/base
	.venv/bin/millrace demo

# The site of all pages, in build/site; it loads nothing from elsewhere.
docs: .venv-docs/ready
	.venv-docs/bin/python tools/site.py .venv-docs/bin/zensical

.venv-docs/ready: constraints.txt
	python3 -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -c constraints.txt zensical
	touch $@

# All benchmarks beside the other libraries, which get environments of their own in .venv-peers. A library that does not
# install, or a benchmark that fails, is left out: the others go on, and the last lines say what and why.
bench: setup
	$(PY) -m benchmarks

# Only what other libraries take part in.
bench-peers: setup
	$(PY) -m benchmarks --only feed feed_peers feed_older records images prepare_text prepare_table

# Long randomised runs: 1,000 kills, and all that draws examples once more; the seed is printed, MILLRACE_SEED repeats it.
soak: setup servers
	MILLRACE_SOAK=1000 $(PY) -m pytest -n 2 -q tests/faults tests/prepare/text/test_restart.py tests/prepare/text/test_lines.py --timeout 7200
	MILLRACE_SOAK=100 $(PY) -m pytest -q tests/train/test_checkpoint.py -k loop --timeout 7200
	MILLRACE_SOAK=500 $(PY) -m pytest -n 2 -q tests/frameworks/test_lightning_runs.py
	MILLRACE_SOAK=1 $(PY) -m pytest -n 2 -q -m 'soak or one_way or seeded or hypothesis' --timeout 600

dist: setup
	rm -rf dist build
	.venv/bin/python -m build --quiet --outdir dist .
	$(PY) tools/try_dist.py dist

clean:
	rm -rf .venv .venv-docs .venv-peers build dist src/*.egg-info src/millrace/*.so
