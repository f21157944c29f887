#!/usr/bin/env bash
# Runs what takes hours: fuzzing, many seeds, opt-in tests on real machines, drills. Not part of CI.
#   STEPS     regular expression that selects steps, such as 'mutated' (default: all)
#   FUZZTIME  time for each fuzz target (default 2m)
#   MUTATIONS  mutations of each kind of evidence, and of feeds, bundles, statements, archives and backups (default 100000)
#   SEEDS     seeds of the simulator (default 100000)
#   DRILLS    drills of hollow machines (default 20)
#   SIMULATED  drills of simulated machines (default 3)
#   IN_PLACE  drills of simulated machines that are upgraded in place (default 5)
#   REAL      drills of real machines that are upgraded in place (default 1)
set -uo pipefail
cd "$(dirname "$0")/.."
failed=()
step() { # step NAME COMMAND...
  [[ $1 =~ ${STEPS:-.} ]] || return 0
  printf '\n=== %s (%s)\n' "$1" "$(date -u +%H:%M:%SZ)"
  "${@:2}" || failed+=("$1")
}

fuzz() { # fuzz each target of each package
  local rc=0 file target
  while IFS=: read -r file target; do
    printf '== %s %s for %s\n' "$(dirname "$file")" "$target" "${FUZZTIME:-2m}"
    go test "./$(dirname "$file")" -run '^$' -fuzz "^$target\$" -fuzztime "${FUZZTIME:-2m}" || rc=1
  done < <(git grep -oE '^func Fuzz[A-Za-z0-9_]+' -- '*_test.go' | sed 's/func //')
  return "$rc"
}
optin() {
  bin/constellation sandbox fetch v1.35.4 || return # clusters of older programs, and two minors in one sitting
  CONSTELLATION_E2E_ADOPT=1 CONSTELLATION_E2E_BALANCER=1 CONSTELLATION_E2E_CANARY=1 CONSTELLATION_E2E_CONFORMANCE=1 CONSTELLATION_E2E_DRILL=1 CONSTELLATION_E2E_ENCRYPTION=1 CONSTELLATION_E2E_ENROL=1 CONSTELLATION_E2E_ENROL_TPM=1+2 CONSTELLATION_E2E_GCP=1 CONSTELLATION_E2E_REGISTRY=1 CONSTELLATION_E2E_ROLLOUT=1 CONSTELLATION_E2E_UPGRADE=1 CONSTELLATION_E2E_BACKUP=1 CONSTELLATION_E2E_STRANGER=1 CONSTELLATION_E2E_VM=1 CONSTELLATION_TEST_NETWORK=1 .ci/test.sh -timeout 6h
}
trixie() { # machines of Debian 13
  CONSTELLATION_E2E_ENROL=trixie CONSTELLATION_TEST_NETWORK=1 go test -count=1 -v -run '^TestEnrolledMachinesBecomeACluster$' -timeout 60m .
}

packages() {
  make release TARGET="$(go env GOHOSTOS)_$(go env GOHOSTARCH)" || return
  CONSTELLATION_PACKAGES=$PWD/bin/release CONSTELLATION_E2E_PACKAGES=1 go test -count=1 -v -run '^Test(Packages|ClusterFromPackage)$' -timeout 30m .
}

evidence() { # 100,000 mutations of each kind of evidence, and of each part of recorded evidence
  CONSTELLATION_EVIDENCE_MUTATIONS="${MUTATIONS:-100000}" go test -count=1 -v ./engine/cloud/gcp/attest ./engine/attestation/... ./engine/atls -run '^TestMutated' -timeout 2h
}

feeds() { # 100,000 mutations each of a feed, a bundle, a statement and an archive
  CONSTELLATION_FEED_MUTATIONS="${MUTATIONS:-100000}" go test -count=1 -v ./engine/release ./engine/component -run '^TestMutated' -timeout 2h
}

backups() { # 100,000 mutations of each kind of backup
  CONSTELLATION_BACKUP_MUTATIONS="${MUTATIONS:-100000}" go test -count=1 -v ./engine/backup -run '^TestMutated' -timeout 2h
}

step "fuzzing" fuzz
step "mutated evidence" evidence
step "mutated feeds" feeds
step "mutated backups" backups
step "simulator" make sim SEEDS="${SEEDS:-100000}"
step "model check" make explore
step "tests, the opt-in ones too" optin
step "enrolled machines of Debian 13" trixie
step "packages" packages
step "release, built twice" .ci/reproducible.sh
step "drills" bin/constellation -C bin/drills sandbox drill --machines=hollow --results bin/drills.jsonl --until "${DRILLS:-20}"
step "drills of simulated machines" bin/constellation -C bin/drills sandbox drill --machines=simulated --results bin/drills.jsonl --until "${SIMULATED:-3}"
step "drills in place" bin/constellation -C bin/drills sandbox drill --machines=simulated --in-place --results bin/drills.jsonl --until "${IN_PLACE:-5}"
step "drills of real machines in place" bin/constellation -C bin/drills sandbox drill --machines=real --in-place --results bin/drills.jsonl --until "${REAL:-1}"
if [ ${#failed[@]} -gt 0 ]; then
  printf '\nfailed: %s\n' "${failed[*]}" >&2
  exit 1
fi
printf '\nall passed\n'
