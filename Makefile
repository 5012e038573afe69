# make check: the house rules; make test: everything; make bench: the guard's time and size; make fmt: formats the sources.
.PHONY: check test bench fmt

.venv/bin/pytest:
	scripts/test.sh --collect-only --quiet >/dev/null

check: .venv/bin/pytest
	.venv/bin/pytest tests/unit/test_house.py

test:
	scripts/test.sh

bench: .venv/bin/pytest
	.venv/bin/python bench/guard.py

fmt: .venv/bin/pytest
	.venv/bin/ruff check --fix --exit-zero
	.venv/bin/ruff format
