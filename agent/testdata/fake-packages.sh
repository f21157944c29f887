#!/bin/sh
# A fake of apt-get, apt-mark, dpkg, dpkg-query and systemctl for tests: sh fake-packages.sh STATE NAME ARGUMENT...
# The texts of failures are recorded from Debian 12. STATE has a folder for each package with the files version,
# newest, want and status, and these files that a test makes:
#   hang-STEP   the step waits while it exists    fail-STEP   the step prints it and fails with code 100
#   lock        another program has the locks     steps       what was executed, one step per line
# The steps are update, download, unpack, configure, hold, restart and mend.
state=$1 name=$2
shift 2

step() {
  echo "$1" >>"$state/steps"
  if [ -e "$state/hang-$1" ]; then
    echo $$ >"$state/hanging-$1"
    while [ -e "$state/hang-$1" ]; do sleep 0.02; done
  fi
  if [ -e "$state/fail-$1" ]; then
    cat "$state/fail-$1"
    exit 100
  fi
}

# Exits as apt-get and dpkg do while another program has the lock.
busy() {
  if [ "$name" = dpkg ]; then
    echo "dpkg: error: dpkg frontend lock was locked by another process with pid 4711"
    exit 2
  fi
  echo "E: Could not get lock $1. It is held by process 4711 (unattended-upgr)"
  echo "E: Unable to lock directory ${1%/lock*}/"
  exit 100
}

# Ends if another program has the lock: a test says so, for one call or for all.
free() {
  if [ -e "$state/lock" ]; then
    if [ "$(cat "$state/lock")" = once ]; then rm "$state/lock"; fi
    busy "$1"
  fi
}

# Takes the lock of dpkg until the end.
lock() {
  free /var/lib/dpkg/lock-frontend
  exec 9>"$state/frontend"
  flock -n 9 || busy /var/lib/dpkg/lock-frontend
}

configure() {
  for p in "$state"/*/; do
    if [ "$(cat "$p/status")" = unpacked ]; then echo installed >"$p/status"; fi
  done
}

case $name in
dpkg-query)
  missing=0
  for p in "$@"; do
    case $p in
    -*) ;;
    *)
      if [ -d "$state/$p" ]; then
        printf '%s\t%s\t%s\t%s\n' "$p" "$(cat "$state/$p/want")" "$(cat "$state/$p/status")" "$(cat "$state/$p/version")"
      elif [ "$p" != '${Package}\t${db:Status-Want}\t${db:Status-Status}\t${Version}\n' ]; then
        echo "dpkg-query: no packages found matching $p"
        missing=1
      fi
      ;;
    esac
  done
  exit $missing
  ;;
dpkg)
  case "$*" in
  --audit)
    for p in "$state"/*/; do
      if [ "$(cat "$p/status")" = unpacked ]; then
        echo "The following packages have been unpacked but not yet configured."
        echo " $(basename "$p")"
      fi
    done
    ;;
  "--force-confold --configure -a")
    lock
    step mend
    configure
    ;;
  *) echo "dpkg: error: unexpected $*" && exit 2 ;;
  esac
  ;;
apt-mark)
  [ "$1" = hold ] || exit 100
  shift
  step hold
  for p in "$@"; do echo hold >"$state/$p/want"; done
  ;;
systemctl)
  [ "$*" = "restart containerd.service" ] || exit 1
  step restart
  cat "$state/containerd/version" "$state/containerd.io/version" 2>/dev/null >"$state/runs"
  exit 0
  ;;
apt-get)
  printf '%s\n' "$*" >>"$state/arguments"
  printf '%s\n' "$DEBIAN_FRONTEND $LC_ALL $NEEDRESTART_SUSPEND" >>"$state/environment"
  download=no verb= packages=
  while [ $# -gt 0 ]; do
    case $1 in
    -o) shift ;;
    --download-only) download=yes ;;
    --allow-change-held-packages) allowed=yes ;;
    -*) ;;
    update | install) verb=$1 ;;
    *) packages="$packages $1" ;;
    esac
    shift
  done
  for p in "$state"/*/; do
    if [ "$verb" = install ] && [ "$(cat "$p/status")" = unpacked ]; then
      echo "E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct the problem."
      exit 100
    fi
  done
  if [ "$verb" = update ]; then
    free /var/lib/apt/lists/lock
    step update
    exit 0
  fi
  if [ $download = yes ]; then
    free /var/cache/apt/archives/lock
    step download
    exit 0
  fi
  lock
  step unpack
  for p in $packages; do
    if [ "$(cat "$state/$p/version")" != "$(cat "$state/$p/newest")" ]; then
      [ "$(cat "$state/$p/want")" != hold ] || [ "$allowed" = yes ] || { echo "E: Held packages were changed and -y was used without --allow-change-held-packages." && exit 100; }
      cp "$state/$p/newest" "$state/$p/version"
      echo unpacked >"$state/$p/status"
      # apt 2.6 drops the hold of a package that it installs.
      echo install >"$state/$p/want"
    fi
  done
  step configure
  configure
  ;;
esac
