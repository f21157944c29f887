#!/usr/bin/env bash
# goreleaser calls this for each binary that it has built: TARGET NAME FILE. It writes the
# statement of the binary, and with the host's own console the completions.
set -euo pipefail
target=$1 name=$2 file=$3
key=(); [ -z "${KEY:-}" ] || key=(-key "$KEY")
bin/tools/attest statement -binary "$file" -name "$name" -out "bin/release/provenance/$target/$name.intoto.json" \
  -release "$RELEASE" -builder "$BUILDER" -source "$SOURCE" "${key[@]}"
# For the images, which are packed when all targets are built.
case $target/$(basename "$name") in
  linux_*/agent|linux_*/constellation|linux_*/joinservice|linux_*/operator)
    [[ $name == */* && $name != "releases/$RELEASE/"* ]] || { mkdir -p "bin/images/$target"; cp "$file" "bin/images/$target/$(basename "$name")"; } ;;
esac
if [ "$name" = constellation ] && [ "$target" = "$(go env GOHOSTOS)_$(go env GOHOSTARCH)" ]; then
  mkdir -p bin/release/completions
  for shell in bash zsh fish; do "$file" completion "$shell" > "bin/release/completions/constellation.$shell"; done
fi
# Packages take over the times of these files.
find "bin/release/provenance/$target" -exec touch -d "@$SOURCE_DATE_EPOCH" {} +
