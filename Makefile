# mktts needs Python 3.11 to 3.14 and make; everything else is installed into .venv by the first target you run.
# Settings: CPU=1 (PyTorch without CUDA, which saves gigabytes), TORCH_INDEX=URL (another PyTorch wheel index, for
# another CUDA version), EXTRAS=server,gpu (of pyproject.toml, and no more than these), PYTHON=python3.12 (which Python),
# RUN_ARGS / BENCH_ARGS / LOAD_ARGS / PYTEST_ARGS (passed on), VENV=folder.

# A system's python3 may be older, or so new that packages have no wheels for it: any other that fits is taken then.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$name -c '$(FITS)' 2>/dev/null && echo $$name && exit; done; echo python3)
VENV ?= .venv
CPU ?=
EXTRAS ?=
TORCH_INDEX ?= $(if $(filter 1,$(CPU)),https://download.pytorch.org/whl/cpu)
RUN_ARGS ?=
BENCH_ARGS ?=
LOAD_ARGS ?= --engine batch --listeners 8,16,20 --seconds 90
PYTEST_ARGS ?=
GPU_TESTS ?= outputs/gpu_tests.json
GPU_FOLDER ?= outputs/reference/h200
GPU_RECORDS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip
PYTEST := $(BIN)/python -m pytest -q
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)
NOTEBOOKS := notebooks/*.ipynb
LANGUAGE_INFO := codemirror_mode file_extension mimetype nbconvert_exporter pygments_lexer version
STRIP := -m nbstripout --keep-id --extra-keys "metadata.papermill metadata.widgets cell.metadata.papermill \
  cell.metadata.execution $(LANGUAGE_INFO:%=metadata.language_info.%)"
CLEAN = p="$(abspath $(BIN))/python"; if [ -x "$$p" ]; then "$$p" $(STRIP); else cat; fi
REFERENCE_RUNS := outputs/reference-runs
SPOKEN := This voice comes with the program. Its model is small enough for two processor cores, and it begins to speak \
  long before the sentence has been computed. Every eighty milliseconds it chooses sixteen numbers, and they become \
  sound. The notebooks show how that works, step by step, from the first word down to one kernel on a graphics card.

.DEFAULT_GOAL := help
.PHONY: help setup run test test-slow test-gpu reference-gpu sanitize size lab site lint format docs bench load clean-nb
.PHONY: bare reference

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile | expand -t 20

# In a checkout, git is told what it keeps of a notebook that JupyterLab has saved: its source (.gitattributes).
setup: $(STAMP) ## the virtual environment with the pinned requirements
	@[ ! -e .git ] || git config filter.notebook.clean '$(CLEAN)' 2>/dev/null || true

# The stamp is written last, so an interrupted installation is taken up again instead of being taken as done.
# A PyTorch index is asked for PyTorch only: what PyTorch needs comes with the rest.
$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c '$(FITS)' 2>/dev/null || { \
	  echo "mktts needs Python 3.11 to 3.14, found: $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install your system's package for them (Debian: python3-venv)," >&2; \
	  echo "or name another Python: make PYTHON=/path/to/python3 ..." >&2; \
	  exit 1; }
	@rm -f $(STAMP)
	@$(BIN)/python -c '$(FITS)' 2>/dev/null && $(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(if $(TORCH_INDEX),$(PIP) install --no-deps --index-url "$(TORCH_INDEX)" "$(TORCH)")
	$(if $(EXTRAS),sed '/^-e/d; s/\[.*\]==/==/' requirements.txt > $(VENV)/pins.txt)
	$(PIP) install $(if $(EXTRAS),-c $(VENV)/pins.txt -e ".[$(EXTRAS)]",-r requirements.txt)
	@touch $(STAMP)

run: $(STAMP) ## every notebook in order; results under outputs/
	$(BIN)/python -m mktts run $(NOTEBOOKS) $(RUN_ARGS)

# worksteal gives each process files as a whole first, so that a file's fixtures are made once.
test: $(STAMP) ## the tests, on every core; GPU tests skip themselves where there is no GPU
	$(PYTEST) -n auto --maxprocesses 8 --dist worksteal -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP) ## the full-size tests: minutes and gigabytes
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-gpu: $(STAMP) ## the tests that need a GPU, and what came of them as GPU_TESTS=file
	$(BIN)/python tests/gpu_record.py $(GPU_TESTS) $(PYTEST_ARGS)

reference-gpu: $(STAMP) ## measure an H200 anew, or another GPU with GPU_FOLDER=folder; GPU_RECORDS="bench trace": some of it
	$(BIN)/python tests/gpu_reference.py $(GPU_FOLDER) $(GPU_RECORDS)

sanitize: $(STAMP) ## the kernels under NVIDIA's compute-sanitizer: needs a CUDA device and the CUDA toolkit
	$(PYTEST) -k sanitizer tests/kernel/test_megakernel.py tests/batch/cuda/test_sanitized.py $(PYTEST_ARGS)

size: ## lines, Python tokens and files by folder, into outputs/reference/size.json
	$(PYTHON) tests/size.py

lab: setup ## JupyterLab on the notebooks
	$(BIN)/python -m jupyterlab --LabApp.app_settings_dir=notebooks/.lab notebooks/README.md

site: $(STAMP) ## executed notebooks as one static site, with sound: outputs/site/index.html
	$(BIN)/python -m mktts lab site --out outputs/site

load: $(STAMP) ## real-time listeners of the voice in the box on this CPU, into outputs/reference/load_cpu.json
	$(BIN)/python -m mktts bench --load --checkpoint small --device cpu --into outputs/reference/load_cpu.json $(LOAD_ARGS)

bench: $(STAMP) ## timings: a table, then one JSON line
	$(BIN)/python -m mktts bench $(BENCH_ARGS)

# The first page lists every module instead of going to that of `mktts`.
docs: $(STAMP) ## the pages of the library, from its docstrings: outputs/docs/index.html
	@mkdir -p outputs/docs
	@echo '{% set root_module_name = false %}{% extends "default/index.html.jinja2" %}' > outputs/docs/index.html.jinja2
	$(BIN)/python -W ignore -m pdoc $$($(BIN)/python -W ignore tests/documented.py) -t outputs/docs -o outputs/docs

lint: $(STAMP) ## ruff over Python files and notebooks
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(STAMP) ## ruff, changing files
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean-nb: $(STAMP) ## take outputs and run metadata out of the notebooks
	$(BIN)/python $(STRIP) $(NOTEBOOKS)

# Outside the checkout, of which git has to clone what is committed.
bare: ## 01 and 04 as Colab runs them, in a fresh environment with pip alone: minutes, and its PyTorch
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && cd "$$folder" && $(PYTHON) -m venv . && \
	bin/python -m pip install --quiet "$(TORCH)" ipykernel papermill && \
	for name in 01_one_frame 04_streaming; do env -u PYTHONPATH bin/python -m papermill "$(CURDIR)/notebooks/$$name.ipynb" \
	  $$name.ipynb -p REPOSITORY "$(CURDIR)" -k python3 || exit 1; done

# The grid runs first, so that 10_report has it to report on.
reference: $(STAMP) ## replace the notebooks' reference results, what the README shows and its figures by new ones
	rm -rf $(REFERENCE_RUNS)
	$(BIN)/python -m mktts run notebooks/05_metrics.ipynb --out $(REFERENCE_RUNS)/runs \
	  --set CHECKPOINT=small,random:tiny --set 'SCHEDULE=1,"1,1,2,4,8",8' --set THREADS=1,2 --set REPEATS=3
	$(BIN)/python -m mktts run $(NOTEBOOKS) --out $(REFERENCE_RUNS)/runs --publish outputs/reference $(RUN_ARGS)
	$(BIN)/python -m mktts say "$(SPOKEN)" --speaker michael --seed 0 -o outputs/reference/spoken.mp3
	PYTHONPATH=tests $(BIN)/python tests/agent/agent_picture.py outputs/reference/agent_page.png
	$(BIN)/python tests/readme_figures.py
