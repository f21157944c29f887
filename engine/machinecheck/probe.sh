# Prints facts of this machine, one per line: KEY VALUE. It changes nothing. $1 marks the answer. $2 is the address
# of a balancer, or absent.
# A value is printable ASCII; "-" is absent, "?" could not be read. Package machinecheck parses it.
LC_ALL=C
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export LC_ALL PATH
balancer=${2:-}

n=0
fact() {
  key=$1
  shift
  v=$*
  case $v in *[!\ -~]*) v=$(printf '%s' "$v" | tr -c ' -~' ' ') ;; esac
  if [ ${#v} -gt 400 ]; then v=$(printf '%s' "$v" | cut -c1-400); fi
  printf '%s %s\n' "$key" "${v:--}"
  n=$((n + 1))
}
# One fact for each line of $2.
facts() {
  while read -r line; do
    [ -n "$line" ] && fact "$1" "$line"
  done <<LINES
$2
LINES
}
have() { command -v "$1" >/dev/null 2>&1; }
brief() { if have timeout; then timeout 5 "$@"; else "$@"; fi 2>/dev/null; }
field() { sed -n "s/^$2=//p" "$1" 2>/dev/null | head -n 1 | tr -d "\"'"; }
# A one-way name of an ID that should stay on the machine.
hashed() {
  if [ -r "$1" ] && [ -s "$1" ]; then
    { printf 'constellation machine '; cat "$1"; } | sha256sum | cut -c1-16
  else
    echo '?'
  fi
}
unit() { if [ "$systemd" = yes ]; then brief systemctl is-active "$1" || true; else echo '?'; fi | head -n 1; }

module() {
  if [ -d "/sys/module/$1" ]; then
    state=loaded
  elif grep -qs "/$1\.ko" "/lib/modules/$kernel/modules.builtin" || grep -qsw "$1" /proc/filesystems || [ -e "$2" ]; then
    state=builtin
  elif have modprobe && modprobe -nq "$1" 2>/dev/null; then
    state=loadable
  else
    state=missing
  fi
  boot=no
  grep -qsrx "$1" /etc/modules /etc/modules-load.d /usr/lib/modules-load.d /run/modules-load.d && boot=yes
  fact module "$1" $state $boot
}

parameter() {
  value=$(cat "/proc/sys/$(echo "$1" | tr . /)" 2>/dev/null || echo -)
  boot=no
  pattern="^[[:space:]]*-?$(echo "$1" | sed 's,\.,[./],g')[[:space:]]*=[[:space:]]*1[[:space:]]*\$"
  grep -qsrE "$pattern" /etc/sysctl.conf /etc/sysctl.d /usr/lib/sysctl.d /run/sysctl.d && boot=yes
  fact sysctl "$1" "$value" $boot
}

disk() {
  [ -d "$1" ] || return 0
  space=$(df -Pk "$1" 2>/dev/null | awk 'NR == 2 { print $4, $2 }')
  inodes=$(df -Pi "$1" 2>/dev/null | awk 'NR == 2 { print $4, $2 }')
  w=no
  [ -w "$1" ] && w=yes
  case $inodes in *-*) inodes='? ?' ;; esac
  fact disk "$1" "${space:-? ?}" "${inodes:-? ?}" $w
}

program() {
  at=$(command -v "$1" 2>/dev/null) || return 0
  package=-
  have dpkg && package=$(brief dpkg -S "$at" | head -n 1 | cut -d: -f1)
  fact program "$1" "$at" "$(unit "$2")" "${package:--}" "$(brief "$at" $3 </dev/null | head -n 1)"
}

# Of a configuration of containerd, the settings that a node needs. Others may be credentials.
settings() {
  awk '
    /^[ \t]*\[/ { table = $0; next }
    /^[ \t]*(imports|disabled_plugins|bin_dirs?|default_runtime_name|SystemdCgroup|systemd_cgroup)[ \t]*=/ {
      if (table != "") print table
      table = ""
      print
    }' | head -n 300
}

# The file of Debian's package is replaced by an enrolment, so nothing in it matters.
runtime() {
  f=/etc/containerd/config.toml
  [ -e "$f" ] || return 0
  want=
  have dpkg-query && want=$(brief dpkg-query -W -f '${Conffiles}\n' containerd | awk -v f="$f" '$1 == f { print $2 }')
  if [ -n "$want" ] && [ "$(md5sum <"$f" 2>/dev/null | cut -d' ' -f1)" = "$want" ]; then
    fact containerd.config package
    return
  elif have containerd && text=$(brief containerd --config "$f" config dump) && [ -n "$text" ]; then
    fact containerd.config containerd
  elif ! have containerd && text=$(cat "$f" 2>/dev/null); then
    fact containerd.config file
  else
    fact containerd.config '?'
    return
  fi
  facts containerd.line "$(printf '%s\n' "$text" | settings)"
}

listening() {
  if have ss; then
    brief ss -Hltnp | sed -n 's/^LISTEN  *[0-9]*  *[0-9]*  *[^ ]*:\([0-9][0-9]*\)  *[^ ]*  *users:(("\([^"]*\)".*$/\1 \2/p; t
s/^LISTEN  *[0-9]*  *[0-9]*  *[^ ]*:\([0-9][0-9]*\)  *.*$/\1 ?/p'
    return
  fi
  cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | while read -r _ local _ state _; do
    [ "$state" = 0A ] && echo "$((0x${local##*:})) ?"
  done
}

firewalls() {
  have ufw && case $(brief ufw status) in *'Status: active'*) fact firewall ufw active ;; esac
  [ "$(unit firewalld)" = active ] && fact firewall firewalld active
  if have nft; then
    if [ "$uid" != 0 ] || ! chains=$(brief nft list chains); then
      fact firewall nftables '?'
    else
      for hook in input forward; do
        printf '%s\n' "$chains" | grep -q "hook $hook .*policy drop" && fact firewall nftables $hook-drop
      done
    fi
  fi
  # Listing the chains of iptables-legacy would load its module, so it is listed only if it is loaded.
  if [ "$uid" = 0 ] && grep -qsx filter /proc/net/ip_tables_names && have iptables-legacy; then
    for chain in INPUT FORWARD; do
      [ "$(brief iptables-legacy -S $chain | head -n 1)" = "-P $chain DROP" ] && fact firewall iptables "$(echo $chain | tr A-Z a-z)-drop"
    done
  fi
}

# Passwords in addresses of proxies stay on the machine.
proxies() {
  { sed -n 's/^[[:space:]]*\(export[[:space:]]\)\{0,1\}[[:space:]]*\([A-Za-z]*_[Pp][Rr][Oo][Xx][Yy]\)=/\/etc\/environment \2 /p' /etc/environment
    have apt-config && brief apt-config dump | sed -n 's/^\(Acquire::https\{0,1\}::Proxy\) /apt \1 /p'
    grep -hs DefaultEnvironment /etc/systemd/system.conf /etc/systemd/system.conf.d/*.conf | grep -i _proxy= | sed 's/^/systemd /'
  } 2>/dev/null | sed -e 's,//[^[:space:]]*@,//***@,g' -e '\,//,!s,[^[:space:]]*@,***@,g' | tr -d "\"'" | head -n 8
}

remains() {
  for f in /etc/kubernetes/manifests/*.yaml /etc/kubernetes/*.conf /etc/kubernetes/pki/ca.crt /etc/kubernetes/pki/etcd/ca.crt \
    /var/lib/kubelet/config.yaml /var/lib/kubelet/pki/kubelet-client-current.pem /var/lib/etcd/member /var/lib/constellation/node.json \
    /etc/cni/net.d/*.conf /etc/cni/net.d/*.conflist /etc/rancher/k3s /etc/rancher/rke2 /var/lib/rancher /var/lib/k0s /var/snap/microk8s; do
    [ -e "$f" ] && fact remains "$f"
  done
}

# The hardware address that answers at an address of a network of this machine. A packet has the kernel find it out. An
# old entry is confirmed or dropped within 10 s. One that was confirmed lately is believed for up to a minute, so root has
# the kernel forget it first.
holder() {
  if ! have ip || ! have bash; then
    echo '?'
    return
  fi
  device=$(ip -o neigh show to "$1" nud reachable 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p' | head -n 1)
  [ -z "$device" ] || ip neigh del "$1" dev "$device" 2>/dev/null
  bash -c 'echo >/dev/udp/$1/9' bash "$1" 2>/dev/null
  tries=0
  while [ $tries -lt 100 ]; do
    entry=$(ip -o neigh show to "$1" 2>/dev/null)
    case $entry in
    '' | *FAILED*) break ;;
    *REACHABLE* | *PERMANENT*)
      printf '%s\n' "$entry" | sed -n 's/.* lladdr \([0-9a-f:]*\).*/\1/p' | head -n 1
      return
      ;;
    esac
    sleep 0.1
    tries=$((tries + 1))
  done
  echo -
}

main() {
  uid=$(id -u)
  kernel=$(uname -r)
  systemd=no
  [ -d /run/systemd/system ] && systemd=yes
  printf 'constellation-machine-facts 1 %s\n' "$1"
  fact clock.begin "$(date +%s.%N)"
  fact user "$uid"
  fact os.id "$(field /etc/os-release ID)"
  fact os.version "$(field /etc/os-release VERSION_ID)"
  fact os.like "$(field /etc/os-release ID_LIKE)"
  fact os.name "$(field /etc/os-release PRETTY_NAME)"
  fact arch "$(uname -m)"
  fact kernel "$kernel"
  fact hostname "$(uname -n)"
  fact systemd $systemd
  if have systemd-detect-virt; then fact virtualization "$(brief systemd-detect-virt || true)"; else fact virtualization '?'; fi
  fact id.machine "$(hashed /etc/machine-id)"
  fact id.product "$(hashed /sys/class/dmi/id/product_uuid)"
  module overlay /nonexistent
  module br_netfilter /proc/sys/net/bridge
  module nf_conntrack /proc/sys/net/netfilter/nf_conntrack_max
  parameter net.ipv4.ip_forward
  parameter net.bridge.bridge-nf-call-iptables
  facts swap "$(sed 1d /proc/swaps 2>/dev/null | awk '{ print $1, $2, $3 }')"
  if grep -qsE '^[^#[:space:]]+[[:space:]]+[^[:space:]]+[[:space:]]+swap[[:space:]]' /etc/fstab; then fact swap.fstab yes; else fact swap.fstab no; fi
  fact memory "$(sed -n 's/^MemTotal: *\([0-9]*\) kB$/\1/p' /proc/meminfo)"
  fact cores "$(nproc 2>/dev/null || grep -c ^processor /proc/cpuinfo)"
  case $(stat -fc %T /sys/fs/cgroup 2>/dev/null) in
    cgroup2fs) fact cgroup v2 "$(cat /sys/fs/cgroup/cgroup.controllers 2>/dev/null)" ;;
    '') fact cgroup '?' ;;
    *) if [ -d /sys/fs/cgroup/unified ]; then fact cgroup hybrid; else fact cgroup v1; fi ;;
  esac
  disk /var/lib
  disk /var/lib/containerd
  disk /var/lib/kubelet
  disk /var/lib/etcd
  disk /usr/local/bin
  disk /etc
  facts listen "$(listening | sort -u)"
  firewalls
  case $(cat /sys/module/apparmor/parameters/enabled 2>/dev/null) in
    Y) if have apparmor_parser; then fact apparmor enabled; else fact apparmor no-parser; fi ;;
    *) fact apparmor disabled ;;
  esac
  case $(cat /sys/fs/selinux/enforce 2>/dev/null) in 1) fact selinux enforcing ;; 0) fact selinux permissive ;; *) fact selinux disabled ;; esac
  program containerd containerd --version
  program dockerd docker --version
  program crio crio --version
  program kubelet kubelet --version
  program kubeadm kubeadm 'version -o short'
  program k3s k3s --version
  program rke2 rke2-server --version
  runtime
  remains
  server=- ca=-
  if [ -e /etc/kubernetes/kubelet.conf ]; then
    server=$(sed -n 's/^ *server: *//p' /etc/kubernetes/kubelet.conf 2>/dev/null | head -n 1)
    server=${server:-?}
  fi
  if [ -e /etc/kubernetes/pki/ca.crt ]; then
    ca=$(sed -n '/BEGIN CERT/,/END CERT/p' /etc/kubernetes/pki/ca.crt 2>/dev/null | grep -v -e '^-----' | tr -d ' \r\n' | sha256sum | cut -c1-64)
  fi
  fact cluster.server "$server"
  fact cluster.ca "$ca"
  facts proxy "$(proxies)"
  for t in losetup mount cp; do if have $t; then fact tool $t yes; else fact tool $t no; fi; done
  if [ -c /dev/tpmrm0 ]; then fact tpm "$(cat /sys/class/tpm/tpm0/tpm_version_major 2>/dev/null || echo '?')"; else fact tpm -; fi
  if have ip; then
    facts address "$(ip -o addr show scope global 2>/dev/null | awk '{ print $4, $2 }')"
    if [ -n "$(ip route show default; ip -6 route show default)" ]; then fact route.default yes; else fact route.default no; fi 2>/dev/null
  else
    fact route.default '?'
  fi
  facts nameserver "$(sed -n 's/^nameserver[[:space:]]*\([^[:space:]]*\).*/\1/p' /etc/resolv.conf 2>/dev/null)"
  if [ -e /run/systemd/resolve/resolv.conf ]; then fact resolved yes; else fact resolved no; fi
  if have timedatectl && synced=$(brief timedatectl show -p NTPSynchronized --value) && [ -n "$synced" ]; then
    fact clock.synchronized "$synced"
    case $(brief timedatectl show -p NTP --value) in yes) fact clock.service yes ;; no) fact clock.service no ;; esac
  elif have chronyc && brief chronyc -n tracking | grep -q '^Leap status *: Normal'; then
    fact clock.synchronized yes
  else
    fact clock.synchronized '?'
  fi
  if [ -n "$balancer" ]; then
    fact balancer.holder "$(holder "$balancer")"
    fact balancer.cluster "$(sed -n '1s/^# Written by constellation for the cluster \([A-Za-z0-9-]*\)\..*/\1/p' /etc/keepalived/keepalived.conf 2>/dev/null)"
  fi
  fact clock.end "$(date +%s.%N)"
  printf 'end %s %s\n' "$n" "$1"
}

main "$1" </dev/null
