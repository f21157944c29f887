# `make help` lists the targets.
SHELL      := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

RELEASE    := v1.1.0
RELEASES   := v1.0.0 $(RELEASE)
# Versions of demo, tests and CI, see the file.
KUBERNETES := $(shell sed -n 's/.*DefaultVersion *= "\([^"]*\)".*/\1/p' engine/sandbox/build/pair.go)
DAEMONS    := bootstrapper agent joinservice operator
ARGS       ?=
KEEP       ?=
# Private key and target of `make release`; see .ci/release.sh.
KEY        ?=
TARGET     ?=
# Workspace of `make demo`. The demo never deletes a folder that it did not create.
DEMO_DIR   ?= $(CURDIR)/.demo
TESTFLAGS  ?=
BENCH      ?= .
# Maximum number of states that `make explore` visits in each model.
STATES     ?= 150000
# Number of seeds of `make sim`, and the first seed.
SEEDS      ?= 2000
SEED       ?= 1

# Number of drills, kind of machines, and number of control planes of `make drills`. FROM and TO
# are its versions of Kubernetes.
N          ?= 40
MACHINES   ?= hollow
CONTROL_PLANES ?=

export CGO_ENABLED := 0
export GOFLAGS := $(shell .ci/goflags)
GO_BUILD = go build -trimpath -buildvcs=false
TOOL     = go tool -modfile=.ci/go.mod

.PHONY: help
help: ## list all targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: binaries bin/kubectl ## build all binaries into bin/, and kubectl of the default Kubernetes

.PHONY: binaries
binaries:
	@echo "building bin/constellation, bin/constellation-sandbox and the daemons of $(RELEASES)"
	@$(GO_BUILD) -ldflags "-s -w -X constellation/engine/version.Release=$(RELEASE)" -o bin/constellation .
	@$(GO_BUILD) -ldflags "-s -w -X constellation/engine/version.Release=$(RELEASE)" -o bin/constellation-sandbox ./engine/sandbox/cmd
	@for r in $(RELEASES); do for d in $(DAEMONS); do \
	  $(GO_BUILD) -ldflags "-s -w -X constellation/engine/version.Release=$$r" -o bin/releases/$$r/$$d ./$$d/cmd; done; done

# A single daemon, for development.
bin/%: FORCE
	$(GO_BUILD) -ldflags "-s -w -X constellation/engine/version.Release=$(RELEASE)" -o $@ ./$*/cmd
.PHONY: FORCE
FORCE:

bin/kubectl: FORCE
	@go run ./engine/sandbox/build/cmd -only kubectl -o $@

.PHONY: release
release: ## build packages, archives and charts into bin/release; KEY=file signs, TARGET=linux_amd64 builds one
	@RELEASE='$(RELEASE)' KEY='$(KEY)' TARGET='$(TARGET)' .ci/release.sh

.PHONY: man
man: ## write a manual page for each verb into bin/man
	@go run -ldflags "-X constellation/engine/version.Release=$(RELEASE)" ./tui/man -o bin/man

.PHONY: demo
demo: binaries ## create a cluster in a sandbox; ARGS=--non-interactive for scripts
	@DEMO_DIR='$(DEMO_DIR)' KEEP='$(KEEP)' KUBERNETES='$(KUBERNETES)' .ci/demo.sh $(ARGS)

.PHONY: check
check: ## build, vet, lint what changed, run the tests that need no cluster and no root
	@.ci/check.sh $(TESTFLAGS)

.PHONY: test
test: build ## run all tests; as root also those on real machines
	@.ci/test.sh $(TESTFLAGS)

.PHONY: soak
soak: build ## run what takes hours: fuzzing, mutations, 100,000 seeds, opt-in tests, drills; STEPS=mutated selects
	@.ci/soak.sh

.PHONY: golden
golden: ## rewrite golden files and show what changed
	@.ci/golden.sh $(TESTFLAGS)

.PHONY: explore
explore: ## model-check the decisions of the operator; STATES=n limits each model
	@mkdir -p bin && go test -c -o bin/explore.test ./operator/decision && cd operator/decision && \
	 GOMAXPROCS=1 ../../bin/explore.test -test.run '^TestExplore$$|^TestMutants$$' -test.timeout 30m -explore.states $(STATES) && rm ../../bin/explore.test

.PHONY: sim
sim: ## simulate random rollouts with faults; SEEDS=n SEED=s, SEED alone prints a trace
	@mkdir -p bin && go test -c -o bin/sim.test ./operator/decision && cd operator/decision && \
	 ../../bin/sim.test -test.run '^TestSimulate$$' -test.timeout 60m -test.v=$(if $(filter command line,$(origin SEED)),$(if $(filter command line,$(origin SEEDS)),false,true),false) \
	 -sim.seed $(SEED) -sim.seeds $(if $(filter command line,$(origin SEED)),$(if $(filter command line,$(origin SEEDS)),$(SEEDS),1),$(SEEDS)) && rm ../../bin/sim.test

.PHONY: drills
drills: build ## upgrade test clusters under fault injection; N=n MACHINES=hollow|simulated|real IN_PLACE=1 CONTROL_PLANES=n FROM=version TO=version CLOUD=gcp FAULTS=names
	@bin/constellation -C bin/drills sandbox drill --machines=$(MACHINES) $(if $(IN_PLACE),--in-place) $(if $(CONTROL_PLANES),--control-planes=$(CONTROL_PLANES)) $(if $(FROM),--kubernetes-from=$(FROM)) $(if $(TO),--kubernetes=$(TO)) $(if $(CLOUD),--cloud=$(CLOUD)) $(if $(FAULTS),--faults=$(FAULTS)) --results engine/sandbox/drill/testdata/drills.jsonl --until $(N)

.PHONY: bench
bench: build ## run all benchmarks and write docs/bench.md; BENCH=regexp selects sections
	@.ci/bench.sh '$(BENCH)'

.PHONY: generate
generate: ## regenerate protobuf code, deep copies, CRDs and release lists
	@mkdir -p bin/tools
	@go build -modfile=.ci/go.mod -o bin/tools/ google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc sigs.k8s.io/controller-tools/cmd/controller-gen
	@cd .ci && go build -o ../bin/tools/ ./protogen
	@bin/tools/protogen -plugins bin/tools bootstrapper/initproto joinservice/joinproto agent/upgradeproto engine/component/componentproto
	@bin/tools/controller-gen object paths=./operator/api/... crd output:crd:dir=assets/crds
	@go run ./engine/release/generate assets/releases
	@cd .ci && go run ./logs -dir .. -o ../docs/logs.md

.PHONY: next-kubernetes
next-kubernetes: ## draft the data of the next minor: make next-kubernetes FROM=v1.36.4 TO=v1.37.2
	@go run ./engine/lifecycle/next -o engine/lifecycle/data/$(TO).draft $(FROM) $(TO)
	@echo "read engine/lifecycle/data/$(TO).draft, then docs/new-kubernetes.md"

.PHONY: verify
verify: generate ## regenerate and fail if a file differs
	@go mod verify >/dev/null
	@git diff --exit-code -- '*.pb.go' '*zz_generated*' assets/crds assets/releases docs/logs.md && \
	 [ -z "$$(git ls-files --others --exclude-standard -- '*.pb.go' '*zz_generated*' assets/crds assets/releases docs/logs.md)" ] || { echo "generated code is out of date: run 'make generate' and commit" >&2; exit 1; }

.PHONY: lint
lint: ## run the linters, check formatting and language
	@$(TOOL) golangci-lint run ./...
	@cd .ci && go test ./prose ./testreport && go run ./prose
	@.ci/commits.sh

.PHONY: hooks
hooks: ## check the messages of your commits when you make them
	@ln -sf "$(CURDIR)/.ci/commit-msg" "$$(git rev-parse --git-path hooks)/commit-msg"

.PHONY: prose-baseline
prose-baseline:
	@cd .ci && go run ./prose -baseline

.PHONY: clean
clean: ## delete bin/; keeps caches and sandboxes
	@rm -rf bin
