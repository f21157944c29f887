#!/usr/bin/env bash
# Builds the release of one target twice, in two clones in two folders, and compares all files. Then the system's own tools
# install, upgrade and remove its packages, if root runs this on Linux. KEY signs; without it a key is made for this run.
# With the argument `programs` only the programs and their statements are built twice and compared. That finds what depends
# on a folder, a time or an order of compilation, in half of the processor time.
set -euo pipefail
only=${1:-}
cd "$(dirname "$0")/.."
root=$PWD
GOFLAGS=$(.ci/goflags)
export CGO_ENABLED=0 GOFLAGS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -n "${KEY:-}" ] || { KEY=$work/release.key; go run . release key new "$KEY" >/dev/null; }
KEY=$(realpath -- "$KEY")
for n in one two/deeper; do
  git clone --quiet --no-hardlinks "$root" "$work/$n"
  mkdir -p "$work/$n/bin"
  # Tools of the first clone are not linked again for the second one.
  for tools in "$work/one/bin/tools" bin/tools; do [ ! -d "$tools" ] || { cp -R "$tools" "$work/$n/bin/" && break; }; done
  part=; [ "$n" = one ] || part=$only
  make -C "$work/$n" release TARGET="${TARGET:-linux_amd64}" KEY="$KEY" ONLY="$part" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
done
# Not for users: both name the time or the folder of the build.
compare() { (cd "$work/$1/bin/release" && find . -type f ! -name config.yaml ! -name metadata.json ! -name artifacts.json -print0 | sort -z | xargs -0r sha256sum); }
files=$(compare two/deeper | wc -l)
[ "$files" -gt 0 ] || { echo "the second build has no files to compare" >&2; exit 1; }
if [ -z "$only" ]; then
  diff <(compare one) <(compare two/deeper) || { echo "two builds of one commit differ" >&2; exit 1; }
else # each file of the second build is in the first one
  # Not by tee /dev/stderr: it would truncate the log of a run, which is a file.
  new=$(comm -13 <(compare one | sort) <(compare two/deeper | sort))
  [ -z "$new" ] || { printf '%s\n' "$new" "two builds of one commit differ" >&2; exit 1; }
fi
echo "reproducible: $files files are equal"
rm -rf "$work/two"
CONSTELLATION_PACKAGES=$work/one/bin/release CONSTELLATION_PACKAGES_KEY=$KEY.pub go test -count=1 -run '^TestPackages$' -v . | grep -v '=== ATTR'
