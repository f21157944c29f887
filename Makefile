# Targets that people use; `make help` lists them.
SHELL      := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

RELEASE    := v1.1.0
RELEASES   := v1.0.0 $(RELEASE)
KUBERNETES := v1.35.4
DAEMONS    := bootstrapper agent joinservice operator
ARGS       ?=
KEEP       ?=
# Where `make demo` keeps its cluster's files. A folder that the demo did not make is never removed.
DEMO_DIR   ?= $(CURDIR)/.demo
TESTFLAGS  ?=
BENCH      ?= .
# How many states of each small world `make explore` visits at most.
STATES     ?= 150000
# How many seeds `make sim` lives through, and which is the first.
SEEDS      ?= 2000
SEED       ?= 1

# How many drills there shall be, of which machines, and with how many control planes.
N          ?= 40
MACHINES   ?= hollow
CONTROL_PLANES ?=

export CGO_ENABLED := 0
GO_BUILD = go build -trimpath -buildvcs=false
TOOL     = go tool -modfile=.ci/go.mod

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: binaries bin/kubectl ## build every binary into bin/, and the kubectl of the default Kubernetes

.PHONY: binaries
binaries:
	@echo "building bin/constellation and the daemons of $(RELEASES)"
	@$(GO_BUILD) -ldflags "-s -w -X constellation/engine/version.Release=$(RELEASE)" -o bin/constellation .
	@for r in $(RELEASES); do for d in $(DAEMONS); do \
	  $(GO_BUILD) -ldflags "-s -w -X constellation/engine/version.Release=$$r" -o bin/releases/$$r/$$d ./$$d/cmd; done; done

# A daemon alone, for development.
bin/%: FORCE
	$(GO_BUILD) -ldflags "-s -w -X constellation/engine/version.Release=$(RELEASE)" -o $@ ./$*/cmd
.PHONY: FORCE
FORCE:

bin/kubectl: FORCE
	@go run ./engine/sandbox/build/cmd -only kubectl -o $@

.PHONY: demo
demo: build ## start a sandbox and open the console on it; ARGS=--non-interactive for scripts
	@DEMO_DIR='$(DEMO_DIR)' KEEP='$(KEEP)' KUBERNETES='$(KUBERNETES)' .ci/demo.sh $(ARGS)

.PHONY: test
test: build ## all tests, on a real control plane and, as root, on real machines
	@.ci/test.sh $(TESTFLAGS)

.PHONY: explore
explore: ## search the states of small worlds for one in which the operator decides wrongly
	@mkdir -p bin && go test -c -o bin/explore.test ./operator && cd operator && \
	 GOMAXPROCS=1 ../bin/explore.test -test.run '^TestExplore$$|^TestMutants$$' -test.timeout 30m -explore.states $(STATES) && rm ../bin/explore.test

.PHONY: sim
sim: ## live through random rollouts with bad luck; SEEDS=n SEED=s, a seed alone is told as a story
	@mkdir -p bin && go test -c -o bin/sim.test ./operator && cd operator && \
	 ../bin/sim.test -test.run '^TestSimulate$$' -test.timeout 60m -test.v=$(if $(filter command line,$(origin SEED)),$(if $(filter command line,$(origin SEEDS)),false,true),false) \
	 -sim.seed $(SEED) -sim.seeds $(if $(filter command line,$(origin SEED)),$(if $(filter command line,$(origin SEEDS)),$(SEEDS),1),$(SEEDS)) && rm ../bin/sim.test

.PHONY: drills
drills: build ## upgrade throwaway clusters while things go wrong; N=drills MACHINES=hollow|simulated|real CONTROL_PLANES=n, goes on where it stopped
	@bin/constellation -C bin/drills sandbox drill --machines=$(MACHINES) $(if $(CONTROL_PLANES),--control-planes=$(CONTROL_PLANES)) --results docs/drills.jsonl --until $(N)

.PHONY: bench
bench: build ## measure, with the peers of each figure in the same run, into docs/bench.md
	@.ci/bench.sh '$(BENCH)'

.PHONY: generate
generate: ## regenerate protocol code, deep copies, CRDs and the lists of releases beside their sources
	@mkdir -p bin/tools
	@go build -modfile=.ci/go.mod -o bin/tools/ google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc github.com/bufbuild/buf/cmd/buf sigs.k8s.io/controller-tools/cmd/controller-gen
	@PATH="$(CURDIR)/bin/tools:$$PATH" buf generate --config .ci/buf.yaml --template .ci/buf.gen.yaml
	@bin/tools/controller-gen object paths=./operator/api/... crd output:crd:dir=assets/crds
	@go run ./engine/release/generate assets/releases

.PHONY: verify
verify: generate ## regenerate and fail on a difference
	@go mod verify >/dev/null
	@git diff --exit-code -- '*.pb.go' '*zz_generated*' assets/crds assets/releases && \
	 [ -z "$$(git ls-files --others --exclude-standard -- '*.pb.go' '*zz_generated*' assets/crds assets/releases)" ] || { echo "generated code differs from its source: run 'make generate' and commit" >&2; exit 1; }

.PHONY: lint
lint: ## run the linters, check formatting and language
	@$(TOOL) golangci-lint run ./...
	@cd .ci && go test ./prose && go run ./prose

.PHONY: prose-baseline
prose-baseline:
	@cd .ci && go run ./prose -baseline

.PHONY: clean
clean: ## remove what was built; caches and sandboxes stay (bin/constellation sandbox down)
	@rm -rf bin
