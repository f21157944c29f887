#!/usr/bin/env bash
# Checks the messages of all commits since the rules exist. Older history is not judged.
set -euo pipefail
cd "$(dirname "$0")/.."
since=$(cat .ci/commits-since)
if ! git merge-base --is-ancestor "$since" HEAD 2>/dev/null; then
  echo "commit ${since:0:12} is not in this clone: messages are not checked"
  exit 0
fi
rc=0 file=$(mktemp)
trap 'rm -f "$file"' EXIT
for c in $(git rev-list --no-merges "$since"..HEAD); do
  git log -1 --format=%B "$c" >"$file"
  .ci/commit-msg "$file" || { echo "  in commit $(git rev-parse --short "$c")" >&2 && rc=1; }
done
exit "$rc"
