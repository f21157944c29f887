#!/usr/bin/env bash
# Runs all tests. Tests with real machines need root and Debian packages, tests with system call faults need strace, one
# terminal test needs tmux, the test of packages rpm, and tests of SSH openssh-server and sudo. Tests without their requirements are skipped with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(runc debootstrap swtpm swtpm-tools strace tmux rpm openssh-server sudo)
[ -z "${CONSTELLATION_E2E_VM:-}" ] || packages+=(qemu-system-x86 ovmf)
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  missing=()
  for p in "${packages[@]}"; do dpkg -s "$p" >/dev/null 2>&1 || missing+=("$p"); done
  if [ ${#missing[@]} -gt 0 ]; then
    echo "installing ${missing[*]} for the tests"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  fi
fi
echo "fetching the Kubernetes versions of the tests: built from source once, then cached"
for version in $(sed -n 's/.*Version *= "\(.*\)".*/\1/p' engine/sandbox/build/pair.go); do bin/constellation sandbox fetch "$version"; done
echo "running all tests (machines: $([ "$(id -u)" = 0 ] && echo yes || echo "no, root is required"))"
# CI machines are shared, and booting machines may time out under load. Failed tests are run once more, alone. A test that
# passes only then is added to .ci/flaky.txt, and one that is listed there fails the run.
#
# The four packages with the most clusters run first, two at a time. On two cores, API servers of three starved each other, and a
# rollout of three minutes took 18. The longest package takes as long as the other three. All others follow, three at a time.
# Debug information is left out: linking takes 45 % less processor time. The linters vet all packages.
# API servers, which take a quarter of the processor time, collect garbage less often; so does all that tests start.
export GOGC=300
CONSTELLATION_TREE=$(.ci/tree)
export CONSTELLATION_TREE
# The runtime of each busy Go program looks after its threads every 20 µs. Dozens of programs on two cores cause 10,000 timer
# interrupts a second that way, each expensive in a virtual machine. With a slack of 2 ms there are 1,000.
{ echo 2000000 >/proc/$$/timerslack_ns; } 2>/dev/null || true
tests() { # PACKAGES_AT_A_TIME RECORD PACKAGES FLAGS...
  go tool -modfile=.ci/go.mod gotestsum --format "${GOTESTSUM_FORMAT:-pkgname-and-test-fails}" --jsonfile "$2" \
    --rerun-fails=1 --rerun-fails-max-failures=10 --rerun-fails-run-root-test --packages "$3" -- -p "$1" -vet=off -ldflags=-w -timeout 60m "${@:4}"
}
clusters=(. ./engine/sandbox ./engine/kube ./operator)
others=$(go list ./... | grep -vxF "$(go list "${clusters[@]}")")
rc=0
tests 2 bin/test-clusters.json "${clusters[*]}" "$@" || rc=$?
tests 3 bin/test-others.json "${others//$'\n'/ }" "$@" || rc=$?
cat bin/test-clusters.json bin/test-others.json >bin/test.json
(cd .ci && go run ./testreport -flaky flaky.txt -slow 10 ../bin/test.json) || rc=1
exit "$rc"
