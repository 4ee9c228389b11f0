# make demo    replay a recorded run with real engines and show the pages; ONCE=1 exits at the end, ENGINE=sglang: one that SGLang sampled
# make collapses  make the missing runs of examples/collapses; RUNS=10: the next ten. Long: nice -n 19 make collapses
# make closed-loop  make the missing runs of examples/closed_loop, as above
# make test    what CI runs: ruff, mypy, import contracts and the quick tests; WORKERS=2 for a machine with less than 16 GB
# make test-all  every test besides: both databases, all engines, frameworks and Pythons, pages in every width and theme
# make docs    build the documentation site into build/site; SERVE=1 serves it on http://localhost:8000
# make gallery take a picture of every page and every kind of run into build/gallery
# make bench-… measure one claim; prints a table and a line of key=value pairs, exits 1 if the bar is not reached

VENV   ?= .venv
PYTHON ?= python3
WORKERS ?= 3
BIN    := $(VENV)/bin
export VENV PYTHON
# Bytecode is written even if the environment forbids it: every process would otherwise compile what it imports.
export PYTHONDONTWRITEBYTECODE :=

BENCHES := bench-bad-input bench-broken-service bench-certify bench-closed-loop bench-connect bench-coverage bench-diagnosis bench-docs \
	bench-doctor bench-engines bench-exactness bench-failures bench-faults bench-house bench-ingest bench-measures \
	bench-notary bench-pages bench-queries bench-truth bench-warning

.DEFAULT_GOAL := help
.PHONY: help demo collapses closed-loop test test-all setup lint types imports pytest format $(BENCHES) docs gallery screenshot clean

help:
	@sed -n 's/^# //p' Makefile

demo:
	@scripts/setup_environment.sh demo
	@$(if $(filter sglang,$(ENGINE)),scripts/setup_sglang.sh)
	@$(BIN)/python -m examples.demo $(if $(ONCE),--once) $(if $(ENGINE),--engine $(ENGINE))

closed-loop: setup
	@$(BIN)/python -m examples.closed_loop $(if $(RUNS),--runs $(RUNS))

collapses: setup
	@$(BIN)/python -m examples.collapses $(if $(RUNS),--runs $(RUNS))

setup:  # programs by apt and the environment by pip, at the same time
	@scripts/setup_programs.sh & programs=$$!; \
	scripts/setup_environment.sh test; environment=$$?; \
	wait $$programs && exit $$environment

test: QUICK := --quick
test test-all: setup lint  # types and imports beside the tests, which wait for other processes; what they find comes last
	@mkdir -p build; date +%s > build/test_started; nice $(MAKE) --no-print-directory types imports > build/checks.txt 2>&1 & checks=$$!; \
	$(MAKE) --no-print-directory pytest QUICK=$(QUICK); tests=$$?; \
	wait $$checks; checks=$$?; cat build/checks.txt; \
	echo $$(($$(date +%s) - $$(cat build/test_started))) > build/$(subst -,_,$@)_seconds.txt; exit $$((tests | checks))

docs: setup
	@$(BIN)/python -m scripts.documentation $(if $(SERVE),--serve)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

pytest: setup  # a process of tests uses two thirds of a core, as it waits for other processes: three for two cores
	$(BIN)/python -m pytest $(QUICK) -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BENCHES): bench-%: setup
	@$(BIN)/python -m benchmarks.$(subst -,_,$*)

gallery: setup
	@$(BIN)/python -m tests.service.present.pages.gallery

screenshot: setup
	$(BIN)/python -m scripts.screenshot

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache foreshock-data
