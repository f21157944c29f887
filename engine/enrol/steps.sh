# Steps of an enrolment on this machine, run by root as: sh -c SCRIPT sh STEP STATE LOCK TOKEN [ARGUMENT ...]
# Package enrol sends it. Lists come by stdin, one item per line; paths and names have no spaces.
set -eu
umask 077
LC_ALL=C
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
DEBIAN_FRONTEND=noninteractive
export LC_ALL PATH DEBIAN_FRONTEND
step=$1 state=$2 lock=$3 token=$4
shift 4

stop() {
  code=$1
  shift
  printf '%s\n' "$*" >&2
  exit "$code"
}

# Holds the lock until stdin ends, also by a lost connection. $1 is who holds it, $2 since when.
hold() {
  exec 8>>"$lock"
  if ! flock -n 8; then
    printf '\n%s held %s\n' "$token" "$(sed -n 2p "$lock")"
    exit 0
  fi
  printf '%s\n%s since %s\n' "$token" "$1" "$2" >"$lock"
  trap ': >"$lock"' EXIT
  trap 'exit 1' HUP INT TERM
  printf '\n%s locked\n' "$token"
  cat >/dev/null
}

# Begins a change: it waits for a change that a lost connection left behind, and ends if another console
# has the lock by now.
fence() {
  mkdir -p "$state"
  exec 9>>"$lock.step"
  flock -w 100 9 || stop 96 "a step of an earlier connection still runs"
  [ "$(sed -n 1p "$lock" 2>/dev/null)" = "$token" ] || stop 98 "another console has the lock"
}

answer() { printf '%s %s\n' "$token" "$*"; }

entry() {
  if [ -L "$1" ]; then
    printf 'link %s' "$(readlink "$1")"
  elif [ -f "$1" ]; then
    sum=$(sha256sum <"$1")
    printf 'file %s %s' "$(stat -c '%a %u:%g' "$1")" "${sum%% *}"
  elif [ -d "$1" ]; then
    printf 'folder %s' "$(stat -c '%a %u:%g' "$1")"
  elif [ -e "$1" ]; then
    printf other
  else
    printf absent
  fi
}

# Whether the configuration file $2 is that of the package $1, as it was installed.
default() {
  want=$(dpkg-query -W -f '${Conffiles}\n' "$1" 2>/dev/null | awk -v f="$2" '$1 == f { print $2 }') || want=
  if [ -n "$want" ] && [ "$(md5sum <"$2" 2>/dev/null | cut -d' ' -f1)" = "$want" ]; then echo default; else echo changed; fi
}

unit() {
  if [ "$(systemctl show -p LoadState --value "$1" 2>/dev/null)" = loaded ]; then
    printf 'known %s %s' "$(systemctl is-enabled "$1" 2>/dev/null | head -n 1 || true)" "$(systemctl is-active "$1" 2>/dev/null | head -n 1 || true)"
  else
    printf unknown
  fi
}

# Prints the state of what is on stdin.
look() {
  while read -r kind name other; do
    case $kind in
    entry) answer "$(entry "$name")" ;;
    default) answer "$(default "$other" "$name")" ;;
    unit) answer "$(unit "$name")" ;;
    esac
  done
  answer end
}

journal() { if [ -e "$state/journal.json" ]; then cat "$state/journal.json"; fi; }

# Replaces the journal by stdin. $1 is its digest: a connection that ends in between writes nothing.
write() {
  fence
  chmod 700 "$state"
  cat >"$state/journal.new"
  sum=$(sha256sum <"$state/journal.new")
  [ "${sum%% *}" = "$1" ] || stop 97 "the journal came incomplete"
  sync "$state/journal.new"
  mv -f "$state/journal.new" "$state/journal.json"
  sync "$state"
}

# Takes the list of package files by their digests, and prints which are there.
debs() {
  fence
  mkdir -p "$state/packages"
  : >"$state/packages/SHA256SUMS"
  while read -r sum; do
    printf '%s  %s.deb\n' "$sum" "$sum" >>"$state/packages/SHA256SUMS"
    if [ "$(sha256sum 2>/dev/null "$state/packages/$sum.deb" | cut -d' ' -f1)" = "$sum" ]; then answer "$sum"; fi
  done
  for f in "$state"/packages/*.deb; do
    grep -qs "  ${f##*/}\$" "$state/packages/SHA256SUMS" || rm -f "$f" # of an earlier run
  done
  answer end
}

# Sets what apt installs instead of names, if there are package files: those of packages that the machine lacks. The
# first line of stdin is a proxy, or empty.
sources() {
  read -r proxy || proxy=
  files=
  [ -s "$state/packages/SHA256SUMS" ] || return 0
  (cd "$state/packages" && sha256sum --quiet -c SHA256SUMS) >/dev/null 2>&1 || stop 97 "the package files came incomplete"
  for f in "$state"/packages/*.deb; do
    p=$(dpkg-deb -f "$f" Package)
    case $(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null) in installed) ;; *) files="$files $f" ;; esac
  done
}

# With package files, apt ignores repositories: it would download a package that a repository has, too.
apt() {
  log=$state/packages.log
  if apt-get ${files:+-o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=/dev/null} ${proxy:+-o Acquire::http::Proxy="$proxy" -o Acquire::https::Proxy="$proxy"} -o DPkg::Lock::Timeout=120 -o Dpkg::Options::=--force-confold "$@" >>"$log" 2>&1 </dev/null 9>&-; then return 0; fi
  return 1
}

# Prints what an installation of the packages would install.
simulate() {
  fence
  sources
  if [ -n "$files" ]; then set -- $files; fi
  if ! out=$(apt-get ${files:+-o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=/dev/null} -s --no-install-recommends install "$@" 2>&1 </dev/null 9>&-); then
    if [ -n "$files" ]; then stop 1 "apt-get install: $(printf '%s' "$out" | grep -E '^E:|Depends:' | tail -n 3)"; fi
    : >"$state/packages.log"
    apt update || stop 1 "apt-get update: $(tail -n 3 "$state/packages.log")"
    out=$(apt-get -s --no-install-recommends install "$@" 2>&1 </dev/null 9>&-) || stop 1 "apt-get install: $(printf '%s' "$out" | grep '^E:' | tail -n 3)"
  fi
  # An upgrade of another package has its old version in brackets.
  printf '%s\n' "$out" | while read -r word name old _; do
    if [ "$word" = Inst ]; then case $old in \[*) ;; *) answer "$name" ;; esac; fi
    if [ "$word" = Remv ]; then stop 1 "apt-get would remove $name"; fi
  done
  answer end
}

# Installs packages and keeps the distribution from upgrading them. It goes on when the connection is lost.
install() {
  fence
  sources
  : >"$state/packages.log"
  if [ -n "$(dpkg --audit 2>/dev/null)" ]; then
    dpkg --force-confold --configure -a >>"$state/packages.log" 2>&1 </dev/null 9>&- || stop 1 "dpkg --configure -a: $(tail -n 3 "$state/packages.log")"
  fi
  missing=$(for p in "$@"; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null) in installed) ;; *) echo "$p" ;; esac
  done)
  if [ -n "$missing" ] && [ -n "$files" ]; then
    apt -y --no-install-recommends install $files || stop 1 "apt-get install: $(grep -E '^(E|W):|rror' "$state/packages.log" | tail -n 3)"
  elif [ -n "$missing" ] && ! apt -y --no-install-recommends install $missing; then
    apt update || true
    apt -y --no-install-recommends install $missing || stop 1 "apt-get install: $(grep -E '^(E|W):|rror' "$state/packages.log" | tail -n 3)"
  fi
  apt-mark hold "$@" >/dev/null 9>&-
  rm -rf "$state/packages"
}

# Makes folders, and copies what files will replace: "folder PATH", "copy NAME PATH".
prepare() {
  fence
  mkdir -p "$state/before"
  while read -r kind name path; do
    case $kind in
    folder) [ -d "$name" ] || mkdir -m 755 "$name" ;;
    copy)
      if [ ! -e "$state/before/$name" ] && [ ! -L "$state/before/$name" ]; then
        rm -rf "$state/before/new"
        cp -a "$path" "$state/before/new"
        if [ ! -L "$state/before/new" ]; then sync "$state/before/new"; fi
        mv -T "$state/before/new" "$state/before/$name"
      fi
      ;;
    esac
  done
}

# Makes links: "PATH TARGET".
links() {
  fence
  while read -r path target; do
    rm -f "$path.constellation-new"
    ln -s "$target" "$path.constellation-new"
    mv -fT "$path.constellation-new" "$path"
  done
}

# Starts units. $1 is restart or reload-or-restart if files of them may be new, else start.
start() {
  fence
  how=$1
  shift
  systemctl daemon-reload 9>&-
  for u in "$@"; do
    systemctl -q enable "$u" 9>&- || stop 1 "$u cannot be enabled"
    systemctl "$how" "$u" 9>&- || stop 1 "$u does not start: $(systemctl status --no-pager -n 5 "$u" 2>&1 | tail -n 3)"
  done
}

# Stops and disables units that did not exist before.
halt() {
  fence
  for u in "$@"; do
    systemctl stop "$u" 9>&- 2>/dev/null || [ "$(systemctl show -p LoadState --value "$u")" != loaded ] || stop 1 "$u does not stop"
    systemctl -q disable "$u" 9>&- 2>/dev/null || true
  done
}

# Gives files back: "delete PATH", "restore NAME PATH".
restore() {
  fence
  while read -r kind name path; do
    case $kind in
    delete) rm -f -- "$name" ;;
    restore)
      if [ -e "$state/before/$name" ] || [ -L "$state/before/$name" ]; then
        rm -rf "$path.constellation-new"
        cp -a "$state/before/$name" "$path.constellation-new"
        if [ ! -L "$path.constellation-new" ]; then sync "$path.constellation-new"; fi
        mv -fT "$path.constellation-new" "$path"
      fi
      ;;
    esac
  done
}

# Deletes folders that did not exist before, with what is in them.
trees() {
  fence
  for t in "$@"; do
    if awk -v d="$t/" 'index($5 "/", d) == 1 { found = 1 } END { exit !found }' /proc/self/mountinfo; then
      stop 1 "file systems are mounted below $t"
    fi
    rm -rf --one-file-system -- "$t"
    rm -f -- "${t%/*}/.${t##*/}".*.partial # of a download that did not end
  done
}

# Removes packages with their configuration.
purge() {
  fence
  proxy=
  : >"$state/packages.log"
  set -- $(for p in "$@"; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null) in '' | not-installed) ;; *) echo "$p" ;; esac
  done)
  if [ $# -eq 0 ]; then return 0; fi
  apt-mark unhold "$@" >/dev/null 9>&-
  apt -y purge "$@" || stop 1 "apt-get purge: $(grep -E '^(E|W):|rror' "$state/packages.log" | tail -n 3)"
}

# Deletes empty folders, the deepest first, and gives units their state back: "folder PATH", "unit NAME enabled|disabled active|inactive".
settle() {
  fence
  systemctl daemon-reload 9>&-
  while read -r kind name enabled active; do
    case $kind in
    folder) rmdir "$name" 2>/dev/null || true ;;
    unit)
      if [ "$enabled" = enabled ]; then systemctl -q enable "$name" 9>&-; else systemctl -q disable "$name" 9>&- || true; fi
      if [ "$active" = active ]; then systemctl restart "$name" 9>&-; else systemctl stop "$name" 9>&-; fi
      ;;
    esac
  done
  systemctl reset-failed 2>/dev/null 9>&- || true
}

# Deletes the journal, after everything else.
forget() {
  fence
  rm -rf "$state/before" "$state/packages.log"
  rm -rf "$state"
  rm -f "$lock.step"
}

"$step" "$@"
