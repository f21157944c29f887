#!/usr/bin/env bash
# Demo: start a sandbox on this computer, create a cluster in it, show its status.
# On a terminal it opens the console and keeps the sandbox. With --non-interactive it prints plain lines and deletes the
# sandbox at the end unless KEEP=1.
set -euo pipefail

dir=${DEMO_DIR:?} kubernetes=${KUBERNETES:?} keep=${KEEP:-}
bin=bin/constellation # relative, so that printed commands can be copied
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
# Without a terminal missing Debian packages are installed without a prompt.
[ -n "$interactive" ] && [ -z "${CI:-}" ] || yes=(--yes)

say() { printf '\n== %s\n' "$*"; }

if [ -e "$dir" ] && [ ! -e "$dir/.made-by-demo" ]; then
  echo "the folder $dir was not created by the demo; move it away or choose another one with DEMO_DIR=..." >&2
  exit 2
fi

remove_demo() { # deletes the sandbox of this or an earlier run and its folder
  [ -e "$dir/.made-by-demo" ] || return 0
  "$bin" sandbox down -C "$dir"
  rm -r -- "$dir"
}

say "Kubernetes $kubernetes: downloaded or built from source once, then cached"
"$bin" sandbox fetch "$kubernetes"
make --silent bin/kubectl

if [ -n "$interactive" ]; then
  mkdir -p "$dir" && touch "$dir/.made-by-demo"
  say "starting the sandbox (a local test cloud)"
  "$bin" sandbox up -C "$dir" --kubernetes "$kubernetes" "${yes[@]}"
  rc=0
  "$bin" -C "$dir" "${rest[@]}" || rc=$?
  case $rc in
    3) rc=0 ;; # nothing to do
    7) rc=0 && printf '\nThe cluster is incomplete; nothing is lost, and the console resumes where it stopped.\n' ;;
  esac
  printf '\nThe sandbox keeps running.  Back to the console:  %s\n' "$bin -C $dir"
  [ ! -e "$dir/constellation-admin.conf" ] ||
    printf '                            kubectl:              %s\n' "bin/kubectl --kubeconfig $dir/constellation-admin.conf get nodes"
  printf '                            Delete the sandbox:   %s\n' "$bin sandbox down -C $dir"
  exit "$rc"
fi

remove_demo
mkdir -p "$dir" && touch "$dir/.made-by-demo"
[ "$keep" = 1 ] || trap 'rc=$?; say "deleting the sandbox (KEEP=1 keeps it)"; remove_demo; exit $rc' EXIT
say "starting the sandbox (a local test cloud)"
"$bin" sandbox up -C "$dir" --kubernetes "$kubernetes" "${yes[@]}"
say "constellation init --non-interactive"
"$bin" init -C "$dir" --non-interactive --yes "${rest[@]}"
say "constellation status"
"$bin" status -C "$dir"
say "kubectl get nodes"
bin/kubectl --kubeconfig "$dir/constellation-admin.conf" get nodes -o wide
