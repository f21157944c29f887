#!/usr/bin/env bash
# Builds the release of one target twice, in two clones in two folders, and compares all files. Then the system's own tools
# install, upgrade and remove its packages, if root runs this on Linux. KEY signs; without it a key is made for this run.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -n "${KEY:-}" ] || { KEY=$work/release.key; CGO_ENABLED=0 go run -trimpath . release key new "$KEY" >/dev/null; }
KEY=$(realpath -- "$KEY")
for n in one two/deeper; do
  git clone --quiet --no-hardlinks "$root" "$work/$n"
  mkdir -p "$work/$n/bin"
  [ ! -d bin/tools ] || cp -R bin/tools "$work/$n/bin/tools"
  make -C "$work/$n" release TARGET="${TARGET:-linux_amd64}" KEY="$KEY" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
done
# Not for users: both name the time or the folder of the build.
compare() { (cd "$work/$1/bin/release" && find . -type f ! -name config.yaml ! -name metadata.json ! -name artifacts.json -print0 | sort -z | xargs -0 sha256sum); }
diff <(compare one) <(compare two/deeper) || { echo "two builds of one commit differ" >&2; exit 1; }
compare one | wc -l | xargs printf 'reproducible: %s files are equal\n'
rm -rf "$work/two"
CONSTELLATION_PACKAGES=$work/one/bin/release CONSTELLATION_PACKAGES_KEY=$KEY.pub CGO_ENABLED=0 GOFLAGS=-trimpath go test -count=1 -run '^TestPackages$' -v . | grep -v '=== ATTR'
