#!/usr/bin/env bash
# Checks a change: build, vet and linters of what changed, and the tests that need nothing beyond the Go toolchain. It starts no
# cluster and needs neither root nor a network (but for modules that are not in the cache). Tests of packages without a change
# since the last run are not run again.
set -euo pipefail
cd "$(dirname "$0")/.."
failed=()
step() { # step NAME COMMAND...
  local since=$SECONDS
  printf '== %s\n' "$1"
  "${@:2}" || failed+=("$1")
  printf '   %d s\n' $((SECONDS - since))
}

# What changed: commits that the upstream branch does not have, and everything that is not committed.
base=$(git merge-base HEAD "@{upstream}" 2>/dev/null || git merge-base HEAD origin/main 2>/dev/null || git rev-parse HEAD)
mapfile -t changed < <({ git diff --name-only --diff-filter=d "$base" -- '*.go'; git ls-files --others --exclude-standard -- '*.go'; } |
  { grep -v '^\.ci/' || true; } | xargs -r -n1 dirname | sort -u | sed 's|^|./|')

# At once, so that both cores compile.
tools() { (cd .ci && go build -o ../bin/tools/ ./prose ./testreport gotest.tools/gotestsum); }
linters() {
  [ ${#changed[@]} -gt 0 ] || return 0
  go build -modfile=.ci/go.mod -o bin/tools/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint &&
    bin/tools/golangci-lint run --allow-parallel-runners --new-from-rev="$base" "${changed[@]}"
}
vet() { [ ${#changed[@]} = 0 ] || go vet "${changed[@]}"; } # CI's linters vet all packages
prose() { (cd .ci && ../bin/tools/prose); }
# Some packages wait more than they compute, such as the agent's: two more than there are cores are tested at a time. The
# longest are named first, so that none of them runs alone at the end.
# Without debug information, linking a test takes 45 % less processor time. Packages without tests are compiled, too: a build
# before the tests would leave one core idle at its end.
tests() {
  local rc=0
  bin/tools/gotestsum --format pkgname --format-hide-empty-pkg --hide-summary=skipped --jsonfile bin/check.json \
    --packages "./agent ./engine ./tui . ./..." -- -p $(($(nproc) + 2)) -short -vet=off -ldflags=-w -timeout 5m "$@" || rc=1
  bin/tools/testreport -slow 5 bin/check.json || rc=1
  return "$rc"
}

mkdir -p bin
step "tools" tools
[ ${#failed[@]} = 0 ] || exit 1
step "vet: ${#changed[@]} packages that changed" vet
step "linters: new findings since $(git rev-parse --short "$base"), in ${#changed[@]} packages that changed" linters
step "prose" prose
step "commit messages" .ci/commits.sh
step "build, and tests without cluster, root, network and compiled Kubernetes" tests "$@"
if [ ${#failed[@]} -gt 0 ]; then
  printf '== FAILED after %d s:' $SECONDS
  printf ' %s;' "${failed[@]%%:*}"
  echo
  exit 1
fi
printf '== passed after %d s\n' $SECONDS
