# make check: the house rules; make test: everything; make bench: times and sizes; make fmt: formats the sources.
LLAMA := $(or $(SPARKGUARD_TEST_CACHE),/var/cache/sparkguard-tests)/llama

.PHONY: check test bench fmt

.venv/bin/pytest:
	scripts/test.sh --collect-only --quiet >/dev/null

check: .venv/bin/pytest
	.venv/bin/pytest tests/unit/test_house.py

test:
	scripts/test.sh

bench: .venv/bin/pytest
	.venv/bin/python bench/guard.py
	.venv/bin/python bench/gguf.py
	tests/tools/llama-server.sh $(LLAMA)
	.venv/bin/python bench/runners.py --engine $(LLAMA)/engine/llama-server

fmt: .venv/bin/pytest
	.venv/bin/ruff check --fix --exit-zero
	.venv/bin/ruff format
