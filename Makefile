# Every target makes its own .venv from the pinned constraints, once.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test unit integration quick check docs clean

# The demo needs less than the tests do: a newcomer waits only for what it uses. pip compiles with one core,
# compileall with all of them, and leaves out what few programs import: tests of packages, and families of
# models. torch has one file that needs a newer Python.
.venv/demo .venv/dev: pyproject.toml constraints.txt
	@echo "installing into .venv: about 2 GB, some minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(@F)]'
	$(BIN)/python -m compileall -qq -j 0 -x 'py312|/tests?/|transformers/models' .venv/lib
	touch $@

demo: .venv/demo
	$(BIN)/minilm-cache demo

# Compiled modules are kept whatever the shell says: tests start the command often.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile

# Shapes and types of all arguments are checked in the tests of units. Tests of whole commands make the same
# calls many thousand times, and took a fifth longer with these checks, those of trainings three times as long.
# They also wait for processes and disks, so that a third process has a core to itself a fifth of the time.
SHAPES := --jaxtyping-packages=minilm_cache,beartype.beartype

test: unit integration

unit: .venv/dev
	$(PYTEST) -n 2 $(SHAPES) tests/unit

integration: .venv/dev
	$(PYTEST) -n 3 --no-loadscope-reorder tests/integration

# While you work: the tests of one file a room, and of the way from a text to a student.
quick: .venv/dev
	$(PYTEST) -n 2 $(SHAPES) -q -m "not slow" tests/unit tests/integration/signals \
		tests/integration/store/test_golden_cache.py

check: .venv/dev
	$(BIN)/python tests/style.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation site, in build/site. A link to nowhere is an error.
docs: .venv/dev
	$(BIN)/python docs/site.py

clean:
	rm -rf .venv build dist *.egg-info
