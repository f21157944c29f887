package sandbox

import (
	"bufio"
	endian "encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// peerUser returns the user who opened the other end of a TCP connection on this computer.
// The kernel records it with the socket: no process can open one in another user's name.
func peerUser(c net.Conn) (uid int, err error) {
	peer, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return 0, err
	}
	self, err := netip.ParseAddrPort(c.LocalAddr().String())
	if err != nil {
		return 0, err
	}
	// An IPv6 socket can connect to an IPv4 address as well. The tables are read in pieces while
	// sockets come and go, so a missing row is searched again.
	for range 3 {
		for _, table := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
			uid, found, err := userIn(table, peer, self)
			if found || err != nil {
				return uid, err
			}
		}
	}
	return 0, fmt.Errorf("no socket of this computer is at %s", peer)
}

func userIn(table string, local, remote netip.AddrPort) (uid int, found bool, err error) {
	f, err := os.Open(table)
	if err != nil {
		return 0, false, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// number, local, remote, state, queues, timer, retransmits, uid, timeout, inode
		w := strings.Fields(lines.Text())
		if len(w) < 10 {
			continue
		}
		if l, ok := parseSocket(w[1]); !ok || l != local {
			continue
		}
		if r, ok := parseSocket(w[2]); !ok || r != remote {
			continue
		}
		// A closed socket has no owner and is shown as root's.
		if w[9] == "0" {
			continue
		}
		uid, err := strconv.Atoi(w[7])
		return uid, err == nil, err
	}
	return 0, false, lines.Err()
}

// parseSocket parses "0100007F:1F90": 4-byte words in host byte order, and a port.
func parseSocket(s string) (netip.AddrPort, bool) {
	address, port, _ := strings.Cut(s, ":")
	p, err := strconv.ParseUint(port, 16, 16)
	if err != nil || len(address)%8 != 0 {
		return netip.AddrPort{}, false
	}
	var b []byte
	for ; len(address) > 0; address = address[8:] {
		n, err := strconv.ParseUint(address[:8], 16, 32)
		if err != nil {
			return netip.AddrPort{}, false
		}
		b = endian.NativeEndian.AppendUint32(b, uint32(n))
	}
	a, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a.Unmap(), uint16(p)), ok
}
