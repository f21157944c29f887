#!/usr/bin/env bash
# All tests. Those that start machines need root and Debian packages, those that inject faults into system calls need strace,
# one that looks at a terminal needs tmux; without them they say why they skip.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(runc debootstrap swtpm swtpm-tools strace tmux)
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  missing=()
  for p in "${packages[@]}"; do dpkg -s "$p" >/dev/null 2>&1 || missing+=("$p"); done
  if [ ${#missing[@]} -gt 0 ]; then
    echo "installing ${missing[*]} for the tests"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  fi
fi
echo "fetching the Kubernetes that the tests run: built from source once, then kept in the cache"
for version in v1.35.4 v1.36.3; do bin/constellation sandbox fetch "$version"; done # from one to the other a cluster is upgraded
echo "running all tests (machines: $([ "$(id -u)" = 0 ] && echo yes || echo "no, they need root"))"
# Other programs share the computer of a CI run, and machines that boot there wait for them. What fails is run once more,
# alone; the summary lists both results. A failure that does not come back is still one to look into.
exec go tool -modfile=.ci/go.mod gotestsum --format "${GOTESTSUM_FORMAT:-pkgname-and-test-fails}" \
  --rerun-fails=1 --rerun-fails-max-failures=3 --rerun-fails-run-root-test --packages ./... -- -timeout 60m "$@"
