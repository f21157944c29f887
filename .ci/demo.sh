#!/usr/bin/env bash
# The main job on a cloud on this computer: start a sandbox, make a cluster of it, look at it.
# At a terminal the console does it and the sandbox stays. With --non-interactive the script mode does, and the
# sandbox is taken down at the end unless KEEP=1.
set -euo pipefail

dir=${DEMO_DIR:?} kubernetes=${KUBERNETES:?} keep=${KEEP:-}
bin=bin/constellation # as the user would call it: what it prints can be copied
case $dir in "$PWD"/*) dir=${dir#"$PWD"/} ;; esac
interactive=1 yes=()
rest=()
for a in "$@"; do
  case $a in
    --non-interactive) interactive= ;;
    --yes | -y) yes=(--yes) ;;
    *) rest+=("$a") ;;
  esac
done
[ -t 0 ] && [ -t 1 ] || interactive=
# A script cannot be asked: missing Debian packages are named and installed. At a terminal the user is asked.
[ -n "$interactive" ] && [ -z "${CI:-}" ] || yes=(--yes)

say() { printf '\n== %s\n' "$*"; }

if [ -e "$dir" ] && [ ! -e "$dir/.made-by-demo" ]; then
  echo "the folder $dir was not made by the demo; move it away or choose another with DEMO_DIR=..." >&2
  exit 2
fi

forget() { # takes the sandbox of an earlier or this run down and removes its folder
  [ -e "$dir/.made-by-demo" ] || return 0
  "$bin" sandbox down -C "$dir"
  rm -r -- "$dir"
}

say "Kubernetes $kubernetes: built from source once, then kept in the cache"
"$bin" sandbox fetch "$kubernetes"

if [ -n "$interactive" ]; then
  mkdir -p "$dir" && touch "$dir/.made-by-demo"
  say "starting the sandbox (a cloud on this computer)"
  "$bin" sandbox up -C "$dir" --kubernetes "$kubernetes" "${yes[@]}"
  rc=0
  "$bin" -C "$dir" "${rest[@]}" || rc=$?
  case $rc in
    3) rc=0 ;; # there was nothing to do
    7) rc=0 && printf '\nYou left before the cluster was complete; nothing is lost, and the console goes on where it was.\n' ;;
  esac
  printf '\nThe sandbox runs on.  Back to the console:  %s\n' "$bin -C $dir"
  [ ! -e "$dir/constellation-admin.conf" ] ||
    printf '                      kubectl:              %s\n' "bin/kubectl --kubeconfig $dir/constellation-admin.conf get nodes"
  printf '                      Take it down:         %s\n' "$bin sandbox down -C $dir"
  exit "$rc"
fi

forget
mkdir -p "$dir" && touch "$dir/.made-by-demo"
[ "$keep" = 1 ] || trap 'rc=$?; say "taking the sandbox down (KEEP=1 keeps it)"; forget; exit $rc' EXIT
say "starting the sandbox (a cloud on this computer)"
"$bin" sandbox up -C "$dir" --kubernetes "$kubernetes" "${yes[@]}"
say "constellation init --non-interactive"
"$bin" init -C "$dir" --non-interactive --yes "${rest[@]}"
say "constellation status"
"$bin" status -C "$dir"
say "kubectl get nodes"
bin/kubectl --kubeconfig "$dir/constellation-admin.conf" get nodes -o wide
