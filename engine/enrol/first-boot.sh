# Prepares this machine for a cluster at its first boot: packages, programs by their digests, files, and units that start.
# It can be interrupted at any point, and repeats no download that is complete. Generated; the lists are at the end.
set -eu
umask 077
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export PATH

fail() {
  printf 'constellation: %s\n' "$1" >&2
  exit 1
}

[ ! -e "$state/done" ] || exit 0
mkdir -p "$state/downloads"
chmod 700 "$state"
exec 7>>"$state/lock"
flock 7
[ ! -e "$state/done" ] || exit 0
lock=$state/holder
printf 'first-boot\n' >"$lock"

# Runs a step of an enrolment, as `machine add` does.
step() {
  name=$1
  shift
  sh "$state/steps.sh" "$name" "$state" "$lock" first-boot "$@" 7>&-
}

# Writes a file from stdin: PATH MODE.
put() {
  (umask 022 && mkdir -p "${1%/*}")
  cat >"$1.constellation-new"
  chmod "$2" "$1.constellation-new"
  mv -fT "$1.constellation-new" "$1"
}

digest() {
  set -- "$(sha256sum 2>/dev/null <"$1" || true)"
  printf '%s' "${1%% *}"
}

# Fetches a program: PATH DIGEST ADDRESS. An interrupted download continues.
fetch() {
  if [ -e "$1" ] && [ "$(digest "$1")" = "$2" ]; then return 0; fi
  part=$state/downloads/$2
  if [ ! -e "$part" ] || [ "$(digest "$part")" != "$2" ]; then
    code=0
    if command -v curl >/dev/null; then
      curl -fsSL --connect-timeout 10 --retry 5 --retry-delay 2 -C - -o "$part" "$3" || code=$?
    elif command -v wget >/dev/null; then
      wget -q -c --tries=5 --waitretry=2 -O "$part" "$3" || code=$?
    else
      fail 'neither curl nor wget is here'
    fi
    case $code in
    0) ;;
    8 | 22 | 33) # the server refuses: the next attempt begins anew
      rm -f "$part"
      fail "fetch $3: the server refused it"
      ;;
    *) fail "fetch $3: exit code $code" ;;
    esac
  fi
  is=$(digest "$part")
  if [ "$is" != "$2" ]; then
    rm -f "$part"
    fail "fetch $3: it has the SHA-256 $is, want $2"
  fi
  put "$1" 755 <"$part"
  sync "$1"
}
