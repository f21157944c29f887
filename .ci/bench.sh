#!/usr/bin/env bash
# Runs all benchmarks, each with a reference measurement (peer) in the same run, and writes docs/bench.md. A regular
# expression as first argument selects sections (frame sizes init check anycluster joiners rollout charts backup encryption agent atls screen watch plans engine);
# the figures are then only printed, because docs/bench.md must come from one run on one machine.
# Slow figures are not an error, since the machine may be busy. Requires `make build`.
set -euo pipefail
cd "$(dirname "$0")/.."

choice=${1:-.}
out=$(mktemp -d "${TMPDIR:-/tmp}/constellation-bench.XXXXXX")
trap 'rm -r -- "$out"' EXIT
failed=0 chosen=0 complete=1

for f in bin/constellation bin/constellation-sandbox bin/kubectl; do
  [ -x "$f" ] || { echo "$f is missing: run 'make build' first" >&2; exit 2; }
done

# go_bench NAME PACKAGE BENCHMARK RUNS COUNT [FLAG...] appends the benchmark's lines to $out/NAME.
go_bench() {
  local name=$1 package=$2 benchmark=$3 runs=$4 count=$5 rc=0
  shift 5
  echo "  $package $benchmark" >&2
  go test -run '^$' -bench "$benchmark" -benchtime "$runs" -count "$count" -timeout 40m "$@" "$package" >"$out/log" 2>&1 || rc=$?
  if [ "$rc" != 0 ] || ! grep -q '^Benchmark' "$out/log"; then
    cat "$out/log" >&2
    return 1
  fi
  grep '^Benchmark' "$out/log" >>"$out/$name"
}

# value NAME BENCHMARK UNIT prints the median of a unit over the benchmark's runs.
value() {
  awk -v b="$2" -v u="$3" '$1 ~ "^Benchmark" b "(-[0-9]+)?$" { for (i = 3; i < NF; i += 2) if ($(i+1) == u) print $i }' "$out/$1" |
    sort -g | awk '{ v[NR] = $1 } END { if (!NR) exit 1; print (NR % 2) ? v[(NR+1)/2] : (v[NR/2] + v[NR/2+1]) / 2 }' ||
    { echo "no figure '$3' of benchmark $2" >&2; return 1; }
}

# number FORMAT EXPRESSION prints the value of the expression.
number() { awk "BEGIN { printf \"$1\", $2 }" </dev/null; }

# row WHAT OURS PEER RATIO TARGET
row() { printf '| %s | %s | %s | %s | %s |\n' "$@" >>"$out/table"; }

# heading NAME TITLE starts the table of a section.
heading() {
  printf '\n## %s\n\n`make bench BENCH=%s`\n\n| what | ours | peer | ours ÷ peer | target |\n|---|---|---|---|---|\n' "$2" "$1" >>"$out/table"
}
note() { printf '\n%s\n' "$*" >>"$out/table"; }

frame() {
  heading frame "First frame"
  go_bench frame . FirstFrame 31x 1 || return
  local f c v k
  f=$(value frame FirstFrame frame-ms) && c=$(value frame FirstFrame contents-ms) || return
  v=$(value frame FirstFrame version-ms) && k=$(value frame FirstFrame kubectl-ms) || return
  row "console, first frame" "$(number %.0f "$f") ms" "\`kubectl version --client\` $(number %.0f "$k") ms" "$(number %.2f "$f/$k")" "≤ 1.1"
  row "console, first frame with the contents of the folder" "$(number %.0f "$c") ms" "the same" "$(number %.2f "$c/$k")" "-"
  row "\`constellation version\`" "$(number %.0f "$v") ms" "the same" "$(number %.2f "$v/$k")" "≤ 1.1"
  note "The console is measured from exec to the end of the frame, on a pseudo terminal in an empty folder. The other programs are measured from exec to exit. Medians of 31 interleaved rounds."
}

# programs FOLDER builds the linux/amd64 programs of the tree in the current folder, as a release has them, and prints the
# size of each program and image.
programs() {
  local package
  for package in . ./engine/sandbox/cmd ./agent/cmd ./bootstrapper/cmd ./joinservice/cmd ./operator/cmd; do
    local name=${package#./}
    case $name in .) name=constellation ;; engine/*) name=constellation-sandbox ;; *) name=${name%/cmd} ;; esac
    CGO_ENABLED=0 GOOS=linux GOARCH=amd64 go build -trimpath -buildvcs=false -ldflags "-s -w" -o "$1/linux_amd64/$name" "$package" || return
    echo "$name $(stat -c %s "$1/linux_amd64/$name")"
  done
  "$out/attest" images -binaries "$1" -out "$1/images" -release v0 | sed 's/^image \(.*\) .*: \(.*\) bytes$/image-\1 \2/'
}

sizes() {
  heading sizes "Sizes"
  # The release before is the newest tag before this commit. Until there is one, it is the first commit that `make release` built.
  local before name size old title
  before=${BEFORE:-$(git describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null || echo 31e03a0d)}
  git rev-parse --verify --quiet "$before^{commit}" >/dev/null || { note "Skipped: this clone has no commit $before."; return 0; }
  go build -o "$out/attest" ./engine/provenance/attest && programs "$out/now" >"$out/sizes" || return
  git worktree add --quiet --detach "$out/tree" "$before" || return
  (cd "$out/tree" && programs "$out/then") >"$out/sizes-before" || { git worktree remove --force "$out/tree"; return 1; }
  git worktree remove --force "$out/tree"
  while read -r name size; do
    old=$(awk -v n="$name" '$1 == n { print $2 }' "$out/sizes-before")
    title="\`$name\`" target=-
    case $name in image-*) title="image \`${name#image-}\`, compressed" target="≤ 45 MB" ;; esac
    row "$title" "$(number %.1f "$size/1e6") MB" "${old:+$(number %.1f "$old/1e6") MB}" "${old:+$(number %.2f "$size/$old")}" "$target"
  done <"$out/sizes"
  note "Peer: the same programs of $(git describe --tags --always "$before") of $(git log -1 --format=%cs "$before"), $(git tag --list 'v*' | grep -qxF "$before" && echo "the release before" || echo "because no release is published"). \`BEFORE=COMMIT make bench BENCH=sizes\` compares with another one. Programs of linux/amd64 without symbols; packing an image fails above its limit."
}

init() {
  heading init "Init of one control plane and two workers"
  if [ "$(uname -s)" != Linux ] || [ "$(id -u)" != 0 ]; then
    note "Skipped: real machines need Linux and root."
    echo "  skipped: real machines need Linux and root" >&2
    return 0
  fi
  bin/constellation sandbox fetch >&2 || return
  go_bench init . 'Init$' 3x 1 || return
  local p rest
  local -A t=()
  for p in up init init-max down own-slowest own-median evidence claim components joiners kubeadm pulls charts joins; do
    t[$p]=$(value init Init "$p-s") || return
  done
  rest=$(number %.1f "${t[kubeadm]}+${t[charts]}+${t[joins]}")
  row "\`init\`, everything cached" "$(number %.1f "${t[init]}") s (slowest $(number %.1f "${t[init-max]}") s)" "-" "-" "≤ 75 s"
  row "of that, evidence, claim and components of one machine" "slowest $(number %.1f "${t[own-slowest]}") s, median $(number %.1f "${t[own-median]}") s" "kubeadm, image pulls, charts $rest s" "$(number %.2f "${t[own-slowest]}/$rest")" "≤ 4 s"
  note "$(printf 'Medians of 3 runs on machines that had booted (`sandbox up` %.1f s, `sandbox down` %.1f s). The parts come from the events of the run. The first node was attested in %.2f s and claimed in %.2f s. It had its components %.1f s later. kubeadm took %.1f s, of which %.1f s pulled images. The charts took %.1f s. Both workers were attested and claimed, and had their components, %.1f s after the join service admitted machines. That includes the time until the load balancer has the join service as a backend. They were Ready %.1f s later.' \
    "${t[up]}" "${t[down]}" "${t[evidence]}" "${t[claim]}" "${t[components]}" "${t[kubeadm]}" "${t[pulls]}" "${t[charts]}" "${t[joiners]}" "${t[joins]}")"
}

check() {
  heading check "Upgrade check"
  go_bench check ./engine/compat '^BenchmarkMatrix$' 1000000x 3 || return
  go_bench check ./engine/compat '^BenchmarkPath$/^5-minors-of-5$' 50x 3 || return
  go_bench check ./engine/kube '^BenchmarkCheckVersions$' 40x 1 || return
  go_bench check ./engine/kube '^BenchmarkRunning$' 40x 1 || return
  go_bench check ./engine/kube/preflight '^BenchmarkPreflight$' 3x 1 || return
  go_bench check ./engine/kube/preflight '^BenchmarkEvictions$' 10x 3 || return
  local m c b p kinds name t f r q a s h target
  m=$(value check Matrix/all ns/op) && c=$(value check Matrix/all cpu-ns/op) && b=$(value check Matrix/bare ns/op) && p=$(value check Path/5-minors-of-5 ns/op) || return
  row "a million pairs of versions through all rules" "$(number %.2f "$m/1000") s (CPU time $(number %.2f "$c/1000") s)" "compared by go-version alone $(number %.2f "$b/1000") s" "$(number %.1f "$m/$b")" "≤ 1 s"
  row "upgrade path from the oldest of 25 releases to the newest" "$(number %.1f "$p/1e6") ms" "-" "-" "-"
  for kinds in 0 2000; do
    t=$(value check "CheckVersions/${kinds}_kinds" shown-ms) && q=$(value check "CheckVersions/${kinds}_kinds" requests) && f=$(value check "CheckVersions/${kinds}_kinds" feed-requests) || return
    r=$(value check "Running/${kinds}_kinds" ns/op) || return
    row "versions and path shown, a cluster with $([ "$kinds" = 0 ] && echo "no" || echo "$kinds") other CRDs" "$(number %.0f "$t") ms, $(number %.0f "$q") requests to the API server, $(number %.0f "$f") to the feed" "these requests alone $(number %.0f "$r/1e6") ms" "$(number %.1f "$t/($r/1e6)")" "≤ 150 ms, ≤ 8, ≤ 3"
  done
  for name in "100 nodes 5000 pods" "1000 nodes 20000 pods"; do
    [ "${name%% *}" = 100 ] && target="≤ 3 s" || target="≤ 10 s, ≤ 200 MB"
    s=$(value check "Preflight/${name// /_}" s/preflight) && h=$(value check "Preflight/${name// /_}" resident-MB) || return
    row "preflight without evictions, ${name/nodes /nodes and }" "$(number %.1f "$s") s, $(number %.0f "$h") MB at most" "-" "-" "$target"
  done
  r=$(value check Evictions raw/s) && a=$(value check Evictions ours/s) && q=$(value check Evictions ratio) || return
  row "evictions per second, as dry runs" "$(number %.0f "$a")" "the same requests, sent without a limit $(number %.0f "$r")" "$(number %.2f "$q")" "≥ 0.8"
  note "The pairs are all pairs of the Kubernetes versions in 20 releases. Most of them are forbidden, and each rule formats its reason. A real kube-apiserver and etcd run on the same processors. The CRDs exist before the measurement, and the API server is idle again. Each check opens new connections and reads an uncached feed on this computer. A preflight is a process of its own, and its memory is that of the whole process. Medians of 3 runs, 40 checks, 3 preflights."
}

anycluster() {
  heading anycluster "Any cluster"
  local kube_score=${KUBE_SCORE:-$PWD/bin/tools/kube-score} name s k h o f p a m x times alone ours
  if [ ! -x "$kube_score" ]; then
    GOBIN=$(dirname "$kube_score") go install github.com/zegl/kube-score/cmd/kube-score@v1.20.0 >&2 || { echo "  kube-score does not build: its row is left out" >&2; kube_score=; }
  fi
  go_bench anycluster . '^BenchmarkClusters$' 15x 1 || return
  KUBE_SCORE=$kube_score go_bench anycluster ./engine/manifests '^BenchmarkCheck$' 5x 1 || return
  go_bench anycluster ./engine/kube/preflight '^BenchmarkCheckProgram$' 5x 1 || return
  for name in "100 nodes 5000 pods" "1000 nodes 20000 pods"; do
    [ "${name%% *}" = 100 ] && x="≤ 3 s" || x="≤ 8 s, ≤ 200 MB"
    s=$(value anycluster "CheckProgram/${name// /_}" s/check) && k=$(value anycluster "CheckProgram/${name// /_}" s/kubectl) && h=$(value anycluster "CheckProgram/${name// /_}" MB) && o=$(value anycluster "CheckProgram/${name// /_}" MB-own) || return
    row "\`check\` of ${name/nodes /nodes and }" "$(number %.1f "$s") s, $(number %.0f "$h") MB at most, $(number %.0f "$o") MB of them not the executable" "\`kubectl get nodes,pods,deployments,replicasets -o json\` $(number %.1f "$k") s" "$(number %.2f "$s/$k")" "$x"
  done
  times=$(value anycluster Check times-the-yaml-library) && alone=$(value anycluster Check s-alone) && ours=$(value anycluster Check s-ours) && m=$(value anycluster Check MB-files) || return
  row "\`check --manifests\` of 1500 files with $(number %.0f "$m") MB" "$(number %.2f "$ours") s" "YAML library alone on one core $(number %.2f "$alone") s" "$(number %.2f "$ours/$alone"), $(number %.2f "$times") × as fast" "≥ 1.6 × as fast"
  if [ -n "$kube_score" ]; then
    s=$(value anycluster Check s-kube-score) || return
    row "the same" "$(number %.2f "$ours") s" "\`kube-score score\`, with other checks, $(number %.1f "$s") s" "$(number %.3f "$ours/$s")" "-"
  fi
  f=$(value anycluster Clusters frame-ms) && p=$(value anycluster Clusters kubectl-ms) && a=$(value anycluster Clusters answers-ms) && x=$(value anycluster Clusters answers-max-ms) || return
  row "console, first frame with 20 contexts, of which five never answer" "$(number %.0f "$f") ms" "\`kubectl version --client\` $(number %.0f "$p") ms" "$(number %.2f "$f/$p")" "≤ 1.1"
  row "the same, until all have answered or are not reachable" "$(number %.2f "$a/1000") s, at most $(number %.2f "$x/1000") s" "-" "-" "≤ 2 s"
  note "A real kube-apiserver and etcd run on the same processors, without kubelets. \`check\` is measured from exec to exit, without dry-run requests. Medians of 5 interleaved runs, memory of the largest. Manifests are the fastest of 5 runs in this process. The API servers of the contexts are HTTP servers of the benchmark. A cluster that does not answer is given up after 1.5 s. Medians of 15 interleaved rounds."
}

joiners() {
  heading joiners "A thousand joiners"
  go_bench joiners ./joinservice 'Tickets$' 1x 3 || return
  local mode total p50 p99 memory retries ours peer all cores retried=
  for mode in spread burst; do
    total=$(value joiners "Tickets/$mode" s-total) && p50=$(value joiners "Tickets/$mode" ms-p50) && p99=$(value joiners "Tickets/$mode" ms-p99) || return
    memory=$(value joiners "Tickets/$mode" MB-server) && retries=$(value joiners "Tickets/$mode" retries) || return
    ours=$(value joiners "Tickets/$mode" cpu-µs/ticket-joinservice) || return
    peer=$(number %.1f "($(value joiners "Tickets/$mode" cpu-µs/ticket-kube-apiserver) + $(value joiners "Tickets/$mode" cpu-µs/ticket-etcd)) / 1000") || return
    all=$(number %.1f "$(value joiners "Tickets/$mode" cpu-µs/ticket-joiners) / 1000 + $ours / 1000 + $peer") || return
    row "joiners arrive $([ "$mode" = spread ] && echo "within 5 s" || echo "at once"): time until the last ticket" "$(number %.1f "$total") s, p50 $(number %.2f "$p50/1000") s, p99 $(number %.2f "$p99/1000") s, 0 failures" "-" "-" "≤ 10 s, p99 ≤ 3 s"
    row "peak memory of the server" "$(number %.0f "$memory") MB" "-" "-" "≤ 256 MB"
    row "CPU time per ticket" "$(number %.1f "$ours/1000") ms" "kube-apiserver and etcd $peer ms" "$(number %.2f "$ours/1000/$peer")" "-"
    retried+="${retried:+, }$(number %.0f "$retries") in the $([ "$mode" = spread ] && echo first || echo second) case"
  done
  cores=$(getconf _NPROCESSORS_ONLN)
  note "Evidence from software, one server process, a real kube-apiserver and etcd. The time of a joiner starts with its first request. It includes retries while the server is busy ($retried). A failure would end the measurement. Medians of 3 runs. The joiners run on the same processors. A ticket costs all processes together $all ms of CPU time, so $cores idle cores need $(number %.1f "$all/$cores") s for a thousand tickets. That is the minimum for the last one if all arrive at once."
}

rollout() {
  heading rollout "Rollout"
  bin/constellation sandbox fetch >&2 || return
  local n k small= sizes=${BENCH_ROLLOUT_SIZES:-100 1000} # and 5000, which takes a quarter of an hour
  go_bench rollout ./engine/sandbox/hollow "Rollout$/^(${sizes// /|})$" 1x 1 || return
  for n in $sizes; do
    [ "$n" = 100 ] && k=10 || k=100
    local -A t=()
    for unit in s-makespan x-ideal writes/node join-writes/node evictions/node calls/node MB-operator cpu-ms/node ms-p50-ready-to-cordon ms-p99-ready-to-cordon ms-p50-empty-to-bind ms-p99-empty-to-bind ms-p50-event-to-request ms-p99-event-to-request ms/round; do
      t[$unit]=$(value rollout "Rollout/$n" "$unit") || return
    done
    [ -n "$small" ] || small=${t[cpu-ms/node]}
    local -A goal=()
    [ "$n" != 1000 ] || goal=([time]="≤ 1.15" [writes]="≤ 9" [calls]="≤ 0.2" [memory]="≤ 120 MB" [wait]="≤ 50 ms")
    [ "$n" != 5000 ] || goal=([cost]="≤ 1.3")
    row "$n workers replaced, $k at a time" "$(number %.0f "${t[s-makespan]}") s" "ideal: boots and drains alone $(number %.0f "${t[s-makespan]}/${t[x-ideal]}") s" "$(number %.2f "${t[x-ideal]}")" "${goal[time]:--}"
    row "writes of the operator per node, without evictions" "$(number %.1f "${t[writes/node]}")" "of the machine, to join $(number %.1f "${t[join-writes/node]}"); evictions $(number %.1f "${t[evictions/node]}")" "-" "${goal[writes]:--}"
    row "cloud API calls per node" "$(number %.2f "${t[calls/node]}")" "-" "-" "${goal[calls]:--}"
    row "peak memory of the operator" "$(number %.0f "${t[MB-operator]}") MB" "-" "-" "${goal[memory]:--}"
    row "CPU time of the operator per node" "$(number %.0f "${t[cpu-ms/node]}") ms" "with 100 workers $(number %.0f "$small") ms" "$(number %.2f "${t[cpu-ms/node]}/$small")" "${goal[cost]:--}"
    row "latency inside the operator: from the arrival of an event to the next request, p50 and p99" "$(number %.0f "${t[ms-p50-event-to-request]}") and $(number %.0f "${t[ms-p99-event-to-request]}") ms" "a round $(number %.1f "${t[ms/round]}") ms" "-" "${goal[wait]:--}"
    row "latency outside: from a replacement node's becoming Ready to the cordon of the old node, p50 and p99" "$(number %.0f "${t[ms-p50-ready-to-cordon]}") and $(number %.0f "${t[ms-p99-ready-to-cordon]}") ms" "-" "-" "-"
    row "latency outside: from the end of a node's last pod to the request that deletes its machine, p50 and p99" "$(number %.0f "${t[ms-p50-empty-to-bind]}") and $(number %.0f "${t[ms-p99-empty-to-bind]}") ms" "-" "-" "-"
  done
  note "Hollow machines take 6 s to boot, join and become Ready, and 3 s to end a pod. A deletion takes no time. Each worker has one pod of a Deployment. The binary of the operator, etcd, kube-apiserver, controllers and scheduler are real and share the processors. Three control planes are at the target already. Writes come from the audit log of the API server. CPU time is user and system time of the operator during the rollout. The control plane runs with GOGC=400, so that it spends less CPU time on garbage collection."
}

agent() {
  heading agent "The agent of a machine"
  go_bench agent ./agent '^BenchmarkInstall$' 3x 3 || return
  go_bench agent ./agent '^BenchmarkMemory$' 3x 3 || return
  local i h w r p s m idle slower
  i=$(value agent Install install-MB/s) && h=$(value agent Install sha256-MB/s) && w=$(value agent Install write-MB/s) || return
  r=$(value agent Install ratio) && p=$(value agent Install peak-MB) || return
  s=$(value agent Memory snapshot-MB/s) && m=$(value agent Memory peak-MB) && idle=$(value agent Memory idle-MB) || return
  slower=$(awk "BEGIN { print ($h < $w) ? \"SHA-256 $(number %.0f "$h") MB/s (write and fsync $(number %.0f "$w"))\" : \"write and fsync $(number %.0f "$w") MB/s (SHA-256 $(number %.0f "$h"))\" }" </dev/null)
  row "a component of 192 MiB, downloaded, verified and synced" "$(number %.0f "$i") MB/s" "the slower half alone: $slower" "$(number %.2f "$r")" "≥ 0.6"
  row "peak memory of the agent meanwhile" "$(number %.0f "$p") MB" "-" "-" "≤ 24 MB"
  row "an etcd snapshot of 256 MB, checked while it streams" "$(number %.0f "$s") MB/s" "-" "-" "-"
  row "peak memory of the agent meanwhile, with 32 connections" "$(number %.0f "$m") MB" "idle, $(number %.0f "$idle") MB" "$(number %.1f "$m/$idle")" "-"
  note "The binary of the agent downloads over loopback. Each peer does one half of that work in the same round, with the same bytes in memory. Medians of 3 runs of 3 rounds. The ratio is the median of the runs' ratios."
}

atls() {
  heading atls "Attested TLS"
  go_bench atls ./engine/atls 'Handshake$' 400x 5 || return
  local mode ours bare ratio
  for mode in one-way mutual; do
    ours=$(value atls "Handshake/$mode" atls-cpu-ns/op) && bare=$(value atls "Handshake/$mode" bare-cpu-ns/op) && ratio=$(value atls "Handshake/$mode" bare/atls) || return
    row "handshakes per second of CPU time, both ends, $mode" "$(number %.0f "1e9/$ours")" "bare TLS 1.3 $(number %.0f "1e9/$bare")" "$(number %.2f "$ratio")" "≥ 0.8"
  done
  note "The peer does the same certificate work: it creates a certificate of the same size per connection, and signs and verifies as often. Both alternate, with 400 handshakes each. Medians of 5 runs."
}

screen() {
  heading screen "Event to screen"
  go_bench screen ./tui/console 'EventToScreen$' 200x 1 || return
  go_bench screen ./tui/console 'EventToFrame$' 300x 5 || return
  local p50 p99 max frame
  p50=$(value screen EventToScreen p50-ms) && p99=$(value screen EventToScreen p99-ms) && max=$(value screen EventToScreen max-ms) || return
  frame=$(value screen EventToFrame/120x40 ns/op) || return
  row "progress event of a run to bytes on the terminal" "p50 $(number %.0f "$p50") ms, p99 $(number %.0f "$p99") ms, slowest $(number %.0f "$max") ms" "composing the frame $(number %.2f "$frame/1e6") ms" "$(number %.0f "$p50/($frame/1e6)")" "≤ 100 ms"
  note "200 events at random moments between two frames, 120x40. The difference to the frame is spent in pauses and in the scheduler's queue. The pauses batch events and limit the console to 30 frames per second."
}

watch() {
  heading watch "Watching 5,000 nodes"
  go_bench watch ./tui/console '^BenchmarkWatch$' 600x 3 || return
  go_bench watch ./tui/console '^BenchmarkWatchBurst$' 1800x 1 || return
  go_bench watch ./tui/console '^BenchmarkBoard$' 3x 3 || return
  local size target cpu bytes worst fold
  for size in 80x24 120x40 200x60 120x40-map; do
    target="-"
    [ "$size" = 120x40 ] && target="≤ 2 %, ≤ 12 kB/s"
    cpu=$(value watch "Watch/$size" %cpu) && bytes=$(value watch "Watch/$size" kB/s) || return
    row "10 updates a second, $size" "$(number %.2f "$cpu") % of a core, $(number %.1f "$bytes") kB/s to the terminal" "-" "-" "$target"
  done
  worst=$(value watch WatchBurst worst-ms) && fold=$(value watch Board ns/event) || return
  row "slowest frame with 1,000 events a second for 60 s, 120x40" "$(number %.1f "$worst") ms" "-" "-" "≤ 33 ms"
  row "event, applied to the board" "$(number %.1f "$fold/1000") µs" "-" "-" "-"
  go_bench watch . '^BenchmarkWatchCluster$' 1x 1 || return
  local w=WatchCluster wakes idle all mem own
  wakes=$(value watch $w idle-wakes/s) && idle=$(value watch $w idle-B/s) && all=$(value watch $w %cpu) && bytes=$(value watch $w kB/s) || return
  mem=$(value watch $w MB) && own=$(value watch $w MB-own) || return
  row "\`constellation watch\` of an idle cluster: wake-ups of its threads" "$(number %.1f "$wakes") a second, $(number %.0f "$idle") B/s to the terminal" "-" "-" "≤ 5"
  row "10 updates a second of 20 nodes each, the whole program" "$(number %.1f "$all") % of a core, $(number %.1f "$bytes") kB/s to the terminal" "-" "-" "≤ 2 %, ≤ 12 kB/s"
  row "peak memory, and without pages of the executable" "$(number %.0f "$mem") MB, $(number %.0f "$own") MB" "-" "-" "≤ 60 MB"
  row "meanwhile, from a key to the bytes of its effect" "p50 $(number %.0f "$(value watch $w ms-p50-key)") ms, p99 $(number %.0f "$(value watch $w ms-p99-key)") ms" "-" "-" "p99 ≤ 35 ms"
  row "from a request that changes a node to the bytes of the change" "p50 $(number %.0f "$(value watch $w ms-p50-pixel)") ms, p99 $(number %.0f "$(value watch $w ms-p99-pixel)") ms" "-" "-" "p99 ≤ 200 ms"
  note "The first six rows measure the screen alone, in the middle of a simulated rollout. The other rows measure the built program on a terminal of 120x40. It watches a real API server on the same processors, with 5,000 nodes without machines. CPU time in the first rows covers applying the updates, composing the frame and painting the changes. 600 updates, medians of 3 runs."
}

engine() {
  heading engine "Inside"
  go_bench engine ./engine '^BenchmarkEvents$' 20000x 3 || return
  go_bench engine ./tui/console 'Fold$' 200x 3 || return
  go_bench engine ./engine/component 'Install$' 2x 3 || return
  go_bench engine ./engine/attestation/internal/evidence 'Validate(BareSignatures)?$' 500x 5 || return
  local e f o t v s
  e=$(value engine Events ns/op) && f=$(value engine Fold ns/event) && o=$(value engine Install/one-pass MB/s) && t=$(value engine Install/three-pass MB/s) || return
  v=$(value engine Validate ns/op) && s=$(value engine ValidateBareSignatures ns/op) || return
  row "event, emitted and recorded" "$(number %.0f "$e/1000") µs" "-" "-" "-"
  row "event, applied to the state of the screens" "$(number %.1f "$f/1000") µs" "-" "-" "-"
  row "component, downloaded, verified and installed" "$(number %.0f "$o") MB/s" "peer that writes, reads for the digest and copies: $(number %.0f "$t") MB/s" "$(number %.2f "$o/$t")" "-"
  row "evidence of a machine, validated" "$(number %.0f "$v/1000") µs" "two signatures of P-256 $(number %.0f "$s/1000") µs" "$(number %.2f "$v/$s")" "-"
  note "Medians of 3 and 5 runs."
}

charts() {
  heading charts "Six charts"
  go_bench charts ./engine/kube '^BenchmarkCharts$' 3x 1 || return
  local six chain serial
  six=$(value charts Charts six-s) && chain=$(value charts Charts chain-s) && serial=$(value charts Charts serial-s) || return
  row "six charts that depend on each other" "$(number %.1f "$six") s" "the longest chain (three charts) alone $(number %.1f "$chain") s" "$(number %.2f "$six/$chain")" "≤ 1.2"
  row "the same" "$(number %.1f "$six") s" "one after the other $(number %.1f "$serial") s" "$(number %.2f "$six/$serial")" "-"
  note "A real kube-apiserver. The workload of each chart is ready 3 s after its creation. Means of 3 rounds of each."
}

backup() {
  heading backup "Backup and restore"
  local n=${BENCH_BACKUP_OBJECTS:-100000} o b j y m s v h small p r w k server ours cores
  BENCH_BACKUP_OBJECTS=$n go_bench backup ./engine/kube '^BenchmarkBackup$' 1x 1 || return
  BENCH_RESTORE_OBJECTS=$((n / 10)) go_bench backup ./engine/kube '^BenchmarkRestore$' 1x 1 || return
  p="Backup/${n}_objects"
  o=$(value backup "$p" ours-s) && b=$(value backup "$p" bare-s) && j=$(value backup "$p" json-s) && y=$(value backup "$p" yaml-s) && s=$(value backup "$p" MB) || return
  m=$(value backup "$p" resident-MiB) && small=$(value backup Backup/1000_objects resident-MiB) && v=$(value backup "$p" verify-MB/s) && h=$(value backup "$p" sha256-MB/s) || return
  r=$(value backup Restore objects/s) && w=$(value backup Restore raw-objects/s) && k=$(value backup Restore kubectl-objects/s) || return
  server=$(value backup Restore server-cpu-ms/object) && ours=$(value backup Restore cpu-ms/object) || return
  cores=$(getconf _NPROCESSORS_ONLN)
  row "\`backup create\` of $n objects of 1.5 kB and $((n / 50)) of 64 kB in 20 types, $(number %.0f "$s") MB" "$(number %.1f "$o") s" "\`kubectl get -o yaml\` $(number %.1f "$y") s" "$(number %.3f "$o/$y")" "≤ 0.1"
  row "the same" "$(number %.1f "$o") s" "\`kubectl get -o json\` $(number %.1f "$j") s" "$(number %.3f "$o/$j")" "≤ 0.14"
  row "the same" "$(number %.1f "$o") s" "listed in pages, gzipped and discarded $(number %.1f "$b") s" "$(number %.2f "$o/$b")" "≤ 1.5"
  row "peak memory" "$(number %.0f "$m") MiB" "with 1000 objects $(number %.0f "$small") MiB" "$(number %.2f "$m/$small")" "≤ 64 MiB"
  row "peak memory without pages of the executable" "$(number %.0f "$(value backup "$p" own-MiB)") MiB" "with 1000 objects $(number %.0f "$(value backup Backup/1000_objects own-MiB)") MiB" "-" "-"
  row "\`backup verify\`" "$(number %.0f "$v") MB/s" "SHA-256 of the same files $(number %.0f "$h") MB/s" "$(number %.2f "$v/$h")" "≥ 0.5"
  row "restored objects of 1.5 kB per second" "$(number %.0f "$r")" "16 writers that only create objects $(number %.0f "$w")" "$(number %.2f "$r/$w")" "≥ 0.9"
  row "the same" "$(number %.0f "$r")" "\`kubectl create -f\` $(number %.0f "$k")" "$(number %.1f "$r/$k")" "≥ 5"
  note "A real kube-apiserver and etcd on the same processors, asked in turn. Programs are measured from exec to exit. \`backup create\` syncs its files and reads them again before it exits. The output of kubectl goes to /dev/null. Memory is the peak resident set, including the executable. The restore has $((n / 10)) objects. kubectl creates a twentieth of them, one after the other. A restored object costs $(number %.1f "$server") ms of CPU time in API server and etcd, and $(number %.1f "$ours") ms in this program. So $cores idle cores can restore at most $(number %.0f "$cores*1000/($server+$ours)") objects a second. Velero's backup package is no peer here. It requires its own plugin manager, object store and custom resources. It also does other work, because it writes a file per object into a gzipped tar."
}

encryption() {
  heading encryption "Encryption of Secrets"
  bin/constellation sandbox fetch >&2 || return
  go_bench encryption ./engine/kms/plugin '^BenchmarkWrites$' 1x 3 || return
  local kind what target x
  for kind in secrets configmaps; do
    what="Secrets of 1 kB created per second by 16 clients" target="≥ 0.8"
    [ "$kind" = configmaps ] && what="control: the same with ConfigMaps, which neither encrypts" target="-"
    x=$(value encryption "Writes/$kind" x-rate) || return
    row "$what" "$(number %.0f "$(value encryption "Writes/$kind" writes/s)")" "without encryption $(number %.0f "$(value encryption "Writes/$kind" peer-writes/s)")" "$(number %.2f "$x")" "$target"
    row "the same: CPU time of API server and etcd per write" "$(number %.2f "$(value encryption "Writes/$kind" cpu-ms/write)") ms" "without encryption $(number %.2f "$(value encryption "Writes/$kind" peer-cpu-ms/write)") ms" "$(number %.2f "$(value encryption "Writes/$kind" x-cpu)")" "-"
  done
  note "Two API servers with an etcd each, on the same processors. The clients write to them in turn, in slices of 320 objects. Ratios are medians of 40 pairs of slices, so they differ from those of the sums. Four fifths of the ratios were between $(number %.2f "$(value encryption Writes/secrets x-rate-p10)") and $(number %.2f "$(value encryption Writes/secrets x-rate-p90)"). Medians of 3 runs. The API server called the key service $(number %.0f "$(value encryption Writes/secrets calls)") times for 12,800 Secrets, because it derives their keys from one seed."
}

plans() {
  heading plans "Plans"
  bin/constellation sandbox fetch >&2 || return
  local n=${BENCH_PLAN_NODES:-10000} took x
  BENCH_PLAN_NODES=$n go_bench plans ./operator/plans '^BenchmarkPlans(AtRest)?$' 1x 1 || return
  go_bench plans ./operator/plans '^BenchmarkDecide$' 9000x 1 || return
  go_bench plans ./operator/plans '^BenchmarkHeld$' 1x 1 || return
  took=$(value plans Plans s-makespan) && x=$(value plans Plans x-ideal) || return
  row "a Plan on $n nodes, 100 at a time, Jobs of 1 s" "$(number %.0f "$took") s" "ideal: the Jobs alone $(number %.0f "$took/$x") s" "$(number %.2f "$x")" "-"
  row "writes of the controller per node, events included" "$(number %.1f "$(value plans Plans writes/node)")" "-" "-" "≤ 10"
  row "peak memory of the controller meanwhile, and memory at the end without pages of the executable" "$(number %.0f "$(value plans Plans MB)") MB, $(number %.0f "$(value plans Plans MB-own)") MB" "-" "-" "≤ 100 MB"
  row "the same, started when all nodes are done and their Jobs still exist" "$(number %.0f "$(value plans PlansAtRest MB)") MB, $(number %.0f "$(value plans PlansAtRest MB-own)") MB" "-" "-" "≤ 100 MB"
  row "of that, informers and records, per Node and per Job" "$(number %.0f "$(value plans Held B/node)") B, $(number %.0f "$(value plans Held B/job)") B" "-" "-" "-"
  row "to observe and decide, CPU time, p99" "≤ $(number %.1f "$(value plans Plans ms-p99-cpu-decision)") ms, mean $(number %.2f "$(value plans Plans ms-mean-cpu-decision)") ms" "without an API server $(number %.2f "$(value plans Decide ms-p99-cpu)") ms" "-" "≤ 5 ms"
  row "to observe and decide, wall-clock time, p99" "≤ $(number %.1f "$(value plans Plans ms-p99-decision)") ms, mean $(number %.1f "$(value plans Plans ms-mean-decision)") ms" "-" "-" "≤ 5 ms"
  row "CPU time while only heartbeats arrive, one per node in five minutes" "$(number %.2f "$(value plans PlansAtRest %core-idle)") % of a core" "-" "-" "≤ 1 %"
  note "The nodes are hollow. The operator with role plans, etcd, kube-apiserver, controllers and scheduler are real and share the processors. Most of the time goes to their work for Jobs and pods. A decision covers observing and deciding. It excludes reads before it, such as Secrets, and writes after it. Wall-clock time includes waiting for a processor."
}

load=$(cut -d' ' -f1 /proc/loadavg 2>/dev/null || echo unknown)
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
for section in frame sizes init check anycluster joiners rollout charts backup encryption agent atls screen watch plans engine; do
  if ! [[ $section =~ $choice ]]; then
    complete=0
    continue
  fi
  chosen=1
  echo "measuring: $section" >&2
  if ! "$section"; then
    echo "section $section failed; see the error above" >&2
    failed=1
  fi
done
[ "$chosen" = 1 ] || { echo "no section matches '$choice'; sections are frame, sizes, init, check, anycluster, joiners, rollout, charts, backup, encryption, agent, atls, screen, watch, plans, engine" >&2; exit 2; }

{
  cat <<TEXT
# Figures

For those who change code that must stay fast, or compare this program with others. \`make bench\` measures the figures. Every figure has its peer in the same run, so ratios carry over to other machines better than times do.

| | |
|---|---|
| processor | $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1 | grep . || echo unknown), $(getconf _NPROCESSORS_ONLN) cores |
| memory | $(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo 2>/dev/null | grep . || echo unknown) |
| kernel | $(uname -sr) |
| date | $(date -u +%Y-%m-%d), commit $commit |
| Go | $(go env GOVERSION) |
| load of other programs at the start | $load |
TEXT
  cat "$out/table"
} >"$out/bench.md"
if [ "$failed" = 0 ] && [ "$complete" = 1 ]; then
  mkdir -p docs
  cp -- "$out/bench.md" docs/bench.md
  echo "written: docs/bench.md" >&2
fi
cat "$out/bench.md"
exit "$failed"
