# The two commands to know: `make demo` and `make test`. Both work on a machine with git, make, gcc, python3 and the Rust
# toolchain that rust-toolchain.toml names; neither downloads anything but crates.

CARGO ?= cargo
PYTHON ?= python3

# cargo-nextest when it is installed, else the runner that every toolchain has. nextest runs no documentation tests, so
# those come first and its summary is the closing line.
NEXTEST := $(shell command -v cargo-nextest 2>/dev/null)
DENY := $(shell command -v cargo-deny 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test test-etcd soak admission simulation fuzz sdk prometheus bench e2e-grpc e2e-vllm e2e-vllm-grpc lint deny

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Serve a plain and a streamed chat completion through mock engines, and show the decisions
	$(PYTHON) tests/demo/demo.py

test: ## Run every test
ifdef NEXTEST
	$(CARGO) test --workspace --locked --doc
	$(CARGO) nextest run --workspace --locked --no-fail-fast
else
	$(CARGO) test --workspace --locked --no-fail-fast
endif

# For the whole workspace, as in `test`: dependencies keep their features, and only what depends on this one is built again.
ETCD := --workspace --features smg/etcd --locked --no-fail-fast --lib --bin smg --test etcd
test-etcd: ## Run the tests of the store on etcd (needs etcd: Debian's etcd-server)
ifdef NEXTEST
	$(CARGO) nextest run $(ETCD) -E 'test(etcd) | binary(etcd)'
else
	$(CARGO) test $(ETCD) etcd
endif

soak: ## Run every test in its long variant, then `admission`, `simulation` and `fuzz`; rewrites reports of docs/reports
	SMG_SOAK=1 $(MAKE) test
	$(MAKE) admission
	$(MAKE) simulation
	$(MAKE) fuzz

admission: ## Run a fleet under overload for eight minutes, with everything failing that can; rewrites docs/reports/admission.{md,svg}
	SMG_ADMISSION=1 $(CARGO) test -p smg --locked --test fleet_admission -- --nocapture no_window_is_exceeded

SEEDS ?= 1000
JOBS ?= 1
# With debug assertions: some faults show themselves in openraft's own. Without LTO: one crate's tests are not worth the minutes.
simulation: export CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS = true
simulation: export CARGO_PROFILE_RELEASE_LTO = off
simulation: ## Simulate clusters in which everything fails, SEEDS=1000 JOBS=1, in a release build; rewrites docs/reports/cluster-simulation.md
	SMG_SIMULATION=1 SMG_SEEDS=$(SEEDS) SMG_JOBS=$(JOBS) CARGO_TARGET_DIR=$${CARGO_TARGET_DIR:-target}/simulation \
		nice $(CARGO) test -p smg-store --release --locked --lib -- --nocapture clusters_survive_everything

SECONDS ?= 600
fuzz: ## Fuzz every target, SECONDS=600 each, two at a time (needs g++)
	nice $(PYTHON) fuzz/run.py $(SECONDS)

sdk: ## Run the official OpenAI and Anthropic Python clients against smg before mock engines (installs them with pip once)
	$(PYTHON) tests/sdk/sdk.py

prometheus: ## Lint the metrics of a live smg with promtool and run the documented queries in a real Prometheus
	$(PYTHON) tests/prometheus/check.py

bench: ## Measure the release build beside other gateways, docs/operations/benchmarks.md; ARGS='--quick --only small'
	@command -v $(CARGO) >/dev/null || { echo "make bench needs $(CARGO), the Rust toolchain that rust-toolchain.toml names" >&2; exit 2; }
	$(CARGO) build --release --locked -p smg -p mock-engine -p smg-bench
	$${CARGO_TARGET_DIR:-target}/release/smg-bench $(ARGS)

e2e-grpc: ## Check pairs of gRPC engines built on the published message types (installs them with pip once); rewrites docs/reports/e2e-grpc.md
	$(PYTHON) tests/e2e-grpc/e2e.py

e2e-vllm: ## Check real vLLM pairs behind the gateway, without a GPU: 6.5 GB once, half an hour; ARGS='--only nixl'
	$(PYTHON) tests/e2e-vllm/e2e.py $(ARGS)

e2e-vllm-grpc: ## Check a real vLLM pair over gRPC: after e2e-vllm, ten minutes; rewrites docs/reports/e2e-vllm-grpc.md
	$(PYTHON) tests/e2e-vllm/e2e_grpc.py $(ARGS)

lint: ## Check format and lints, and the dependency policy where cargo-deny is installed
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
ifdef DENY
	$(MAKE) deny
else
	@echo "cargo-deny is not installed: licences, bans and sources were not checked"
endif

deny: ## Check licences, banned crates and sources (needs cargo-deny)
	$(CARGO) deny --locked check bans licenses sources
