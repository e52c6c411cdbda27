PYTHON ?= python

.PHONY: all style check test quick docs docs-site mutants

# What CI runs on the code.
all: check test

# Format, and mend what can be mended.
style:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

# Formatting, lint and types, without changing a file.
check:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

# The tests, in two processes.
test:
	$(PYTHON) -m pytest -n 2

# The tests that do not train, build pipelines or start processes: at most three minutes.
quick:
	$(PYTHON) -m pytest -n 2 -m 'not every and not slow'

# Pages that are written from the code.
docs:
	$(PYTHON) docs/make_recipe_reference.py
	$(PYTHON) docs/make_method_index.py
	$(PYTHON) docs/make_pipeline_page.py
	$(PYTHON) docs/make_command_reference.py
	$(PYTHON) docs/make_standard_runs.py

# The documentation as a site, in site/; a broken link is an error.
docs-site:
	$(PYTHON) -m mkdocs build

# Does a test notice when a formula of the core is changed?
mutants:
	$(PYTHON) tests/mutants.py
