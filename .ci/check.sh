#!/usr/bin/env bash
# Checks a change in about a minute: build, vet, linters of what changed, and the tests that need nothing beyond the Go
# toolchain. It starts no cluster and needs no root. Packages without a change since the last run are not tested again.
set -euo pipefail
cd "$(dirname "$0")/.."
began=$SECONDS
step() { printf '%s\n' "== $*"; }
took() { printf '   %d s\n' $((SECONDS - since)); }

# What changed: everything that the main branch of the origin does not have, and what is not committed.
base=$(git merge-base HEAD "@{upstream}" 2>/dev/null || git merge-base HEAD origin/main 2>/dev/null || git rev-parse HEAD)
mapfile -t packages < <({ git diff --name-only --diff-filter=d "$base" -- '*.go'; git ls-files --others --exclude-standard -- '*.go'; } |
  grep -v '^\.ci/' | xargs -r -n1 dirname | sort -u | sed 's|^|./|')

since=$SECONDS
step "build"
go build ./...
took

since=$SECONDS
step "vet"
go vet ./...
took

since=$SECONDS
if [ ${#packages[@]} -gt 0 ]; then
  step "linters: new findings since $(git rev-parse --short "$base") in ${#packages[@]} packages"
  go build -modfile=.ci/go.mod -o bin/tools/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint
  bin/tools/golangci-lint run --new-from-rev="$base" "${packages[@]}"
else
  step "linters: no Go file changed since $(git rev-parse --short "$base")"
fi
step "prose"
(cd .ci && go run ./prose)
step "commit messages"
.ci/commits.sh
took

since=$SECONDS
step "tests without cluster, root, network and compiled Kubernetes"
mkdir -p bin
rc=0
go tool -modfile=.ci/go.mod gotestsum --format pkgname --format-hide-empty-pkg --hide-summary=skipped --jsonfile bin/check.json --packages ./... -- -short -vet=off -timeout 5m "$@" || rc=$?
(cd .ci && go run ./testreport -slow 5 ../bin/check.json)
took
printf '== %s after %d s\n' "$([ "$rc" = 0 ] && echo passed || echo FAILED)" $((SECONDS - began))
exit "$rc"
