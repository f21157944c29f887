#!/usr/bin/env bash
# Rewrites the golden files of all packages that have some, and shows what changed as a terminal would. Nothing is committed.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t packages < <(git grep -l '"constellation/internal/golden"' -- '*_test.go' | xargs -n1 dirname | sort -u | grep -v '^internal/golden$' | sed 's|^|./|')
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
before=$tmp/before after=$tmp/after
mkdir "$before" "$after"
keep() { # keep DIRECTORY: copy all files that tests may rewrite
  git ls-files --cached --others --exclude-standard -- '*testdata/*' 'docs/*.md' 'assets/charts/*' | sort -u |
    while read -r f; do [ ! -f "$f" ] || printf '%s\0' "$f"; done | xargs -0 cp --parents -t "$1"
}
keep "$before"
rc=0
go test "${packages[@]}" -update "$@" || rc=$?
keep "$after"
if [ -t 1 ]; then color=always; else color=never; fi
if (cd "$tmp" && git -c core.quotePath=false diff --no-index --quiet before after); then
  echo "no golden file changed"
else
  # Frames are shown as rendered, with - and + before the lines that differ.
  (cd "$tmp" && git -c core.quotePath=false diff --no-index --color=$color --stat -p -U2 before after) || true
fi
exit "$rc"
