# `make demo` decodes text with the shipped model, `make test` checks what must pass, `make test-all` the slow suites too. All make .venv first.

PYTHON := .venv/bin/python

.PHONY: demo test test-all

# The device follows the build that .ci/install noted there ("$$" is the shell's "$"): with a CUDA build `auto`, which
# never takes the CPU in silence; with the CPU build `cpu`, as `auto` would refuse a GPU whose driver is too old.
demo: .venv/demo
	.venv/bin/moe-jax decode --temperature 0.7 --device $$(sed 's/cuda.*/auto/' .venv/build)

test: .venv/test
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	.venv/bin/pyrefly check --python-interpreter-path $(PYTHON)
	$(PYTHON) -m pytest -n 2 --dist loadfile -m "not slow"
	if grep -q cuda .venv/build; then $(PYTHON) -m pytest -m gpu; fi

# What `test` leaves out for its length as well.
test-all: test
	$(PYTHON) -m pytest -n 2 -m slow

# Each is the date of the last installation, made again when what is installed or how has changed.
.venv/demo: pyproject.toml .ci/install .ci/find-python .ci/find-extra
	sh .ci/install
	touch $@

.venv/test: pyproject.toml .ci/install .ci/find-python .ci/find-extra
	sh .ci/install test notebooks
	touch $@ .venv/demo
