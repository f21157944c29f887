#!/usr/bin/env bash
# Builds a release into bin/release, without a network if the modules are in the cache. Settings are
# variables; `make release` passes RELEASE.
#   KEY      private key that signs; `constellation release key new` creates one. None: no signatures.
#   BUILDER  URI of the builder, SOURCE of the repository, URL where the files will be downloaded from
#   TARGET   one target such as linux_amd64 instead of all
#   SKIP     further parts for goreleaser's --skip
#   ONLY     programs: no archives, packages, charts and images
# The version is that of the tag of HEAD if this is RELEASE, else a snapshot.
set -euo pipefail
cd "$(dirname "$0")/.."
export RELEASE KEY=${KEY:-} BUILDER=${BUILDER:-urn:constellation:builder:local}
export SOURCE=${SOURCE:-https://constellation.example/constellation}
export URL=${URL:-https://releases.constellation.example/$RELEASE}
GOFLAGS=$(.ci/goflags)
export CGO_ENABLED=0 GOFLAGS GORELEASER_CURRENT_TAG=$RELEASE
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct); export SOURCE_DATE_EPOCH
[ -z "$KEY" ] || KEY=$(realpath "$KEY")

mkdir -p bin/tools
go build -o bin/tools/attest ./engine/provenance/attest
(cd .ci/release && go build -o ../../bin/tools/goreleaser github.com/goreleaser/goreleaser/v2)
# The charts for any cluster, and the manifest that is rendered from the chart.
rm -rf bin/charts bin/images && mkdir -p bin/charts
go run ./assets/render/pack -release "$RELEASE" -out bin/charts constellation-plans constellation-operator
cp assets/plans/system-upgrade.yaml bin/charts/

config=.ci/release/goreleaser.yaml
if [ -n "${TARGET:-}" ]; then
  sed "s/^    targets: .*/    targets: [$TARGET]/" "$config" > bin/goreleaser.yaml
  config=bin/goreleaser.yaml
fi
args=(release --clean --config "$config" --parallelism 1) # one at a time: the order of files in an archive is that of the builds
skip=publish,announce,validate
[ -n "$KEY" ] || skip=$skip,sign
[ -z "${SKIP:-}" ] || skip=$skip,$SKIP
[ "$(git tag --points-at HEAD --list "$RELEASE")" = "$RELEASE" ] && git diff --quiet HEAD || args+=(--snapshot)
if [ "${ONLY:-}" = programs ]; then
  args[0]=build
  exec bin/tools/goreleaser "${args[@]}" --skip validate
fi
bin/tools/goreleaser "${args[@]}" --skip "$skip"

# Container images, as OCI layouts, if a target is for Linux.
if [ -d bin/images ]; then
  bin/tools/attest images -binaries bin/images -out bin/release/images -release "$RELEASE" -source "$SOURCE" \
    -commit "$(git rev-parse HEAD)" -date "$SOURCE_DATE_EPOCH" ${KEY:+-key "$KEY"}
fi

# A statement over everything that the checksums name.
cd bin/release
cp -R ../charts/. .
checksums=$(ls constellation_*_checksums.txt)
name=${checksums%_checksums.txt}
../tools/attest release -checksums "$checksums" -out "$name.intoto.json" -release "$RELEASE" -builder "$BUILDER" -source "$SOURCE" \
  -commit "$(git rev-parse HEAD)" -go "$(go env GOVERSION)" ${KEY:+-key "$KEY"}
# The list of all parts, for `constellation release mirror`.
../tools/attest contents -dir . -out "${name}_contents.json" -release "$RELEASE" ${KEY:+-key "$KEY"}
echo "wrote bin/release/$checksums; verify a file with: sha256sum --check --ignore-missing $checksums"
