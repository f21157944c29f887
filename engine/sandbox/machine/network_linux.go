package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// bridgeName is the bridge's name in the sandbox's network namespace.
const bridgeName = "machines"

// The sysctls of our own network namespaces. A new namespace inherits some of
// this computer's values, so all relevant ones are set.
var (
	hubSysctls = map[string]string{
		"net/ipv4/ip_forward":                  "1", // between the machines' pod ranges
		"net/ipv4/conf/all/rp_filter":          "0",
		"net/ipv4/conf/default/rp_filter":      "0",
		"net/ipv4/conf/all/send_redirects":     "0", // the cloud manages routes
		"net/ipv4/conf/default/send_redirects": "0",
	}
	machineSysctls = map[string]string{
		"net/ipv4/ip_forward":             "1",
		"net/ipv4/conf/all/rp_filter":     "0",
		"net/ipv4/conf/default/rp_filter": "0",
	}
)

// inNamespace runs f on a thread in the network namespace that is mounted on path. It can
// be unmounted while f runs.
func inNamespace(path string, f func() error) error {
	target, err := netns.GetFromPath(path)
	if err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	done := make(chan error, 1)
	// A separate goroutine: if its thread cannot return to its namespace, the thread ends
	// with it, since it stays locked.
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err == nil {
			defer home.Close()
			err = netns.Set(target)
		}
		// Otherwise a pending connection in a machine would keep it from being switched off.
		_ = target.Close()
		if err != nil {
			done <- fmt.Errorf("enter network namespace: %w", err)
			return
		}
		err = f()
		if netns.Set(home) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// createNamespace makes a network namespace and mounts it on the file path, which
// keeps it alive without a process.
func createNamespace(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o600)
	if err != nil {
		return fmt.Errorf("create network namespace: %w", err)
	}
	_ = f.Close()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends here
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	if err := <-done; err != nil {
		_ = os.Remove(path)
		return fmt.Errorf("create network namespace: %w", err)
	}
	return nil
}

// isNamespace reports whether a namespace is mounted on path.
func isNamespace(path string) (bool, error) {
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at %s: %w", path, err)
	}
	return st.Type == unix.NSFS_MAGIC, nil
}

// removeNamespace unmounts a namespace. The kernel destroys it a little later, after its last
// process and socket are gone.
func removeNamespace(ctx context.Context, path string) error {
	if err := unmount(ctx, path); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove network namespace: %w", err)
	}
	return nil
}

// setSysctls writes sysctls of the network namespace on path. The kernel shows each
// thread those of its own namespace. Sysctls outside net are refused, because they
// belong to the whole computer.
func setSysctls(path string, values map[string]string) error {
	return inNamespace(path, func() error {
		root, err := os.OpenRoot("/proc/sys/net")
		if err != nil {
			return err
		}
		defer root.Close()
		for name, value := range values {
			name, err := filepath.Rel("net", name)
			if err != nil {
				return err
			}
			f, err := root.OpenFile(name, os.O_WRONLY, 0)
			if err != nil {
				return fmt.Errorf("set sysctl: %w", err)
			}
			_, err = f.WriteString(value)
			if err := errors.Join(err, f.Close()); err != nil {
				return fmt.Errorf("set sysctl: %w", err)
			}
		}
		return nil
	})
}

// handleAt opens a netlink connection into the namespace on path. It moves a thread
// only for that time.
func handleAt(path string) (*netlink.Handle, netns.NsHandle, error) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return nil, 0, fmt.Errorf("open network namespace: %w", err)
	}
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		_ = ns.Close()
		return nil, 0, fmt.Errorf("open network namespace: %w", err)
	}
	return h, ns, nil
}

// createHub makes the namespace with the bridge, or completes it after
// a crash.
func createHub(path string) error {
	there, err := isNamespace(path)
	if err != nil {
		return err
	}
	if !there {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("create network: %w", err)
		}
		if err := createNamespace(path); err != nil {
			return err
		}
	}
	if err := setSysctls(path, hubSysctls); err != nil {
		return err
	}
	h, ns, err := handleAt(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	defer h.Close()
	if err := up(h, "lo"); err != nil {
		return err
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
	bridge.Name = bridgeName
	// A bridge without an address of its own takes one of its ports', which
	// would change while machines come and go.
	bridge.HardwareAddr = hardwareAddr(Gateway)
	if err := h.LinkAdd(bridge); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("create bridge: %w", err)
	}
	link, err := h.LinkByName(bridgeName)
	if err != nil {
		return fmt.Errorf("create bridge: %w", err)
	}
	for _, p := range []netip.Prefix{
		netip.PrefixFrom(Gateway, Nodes.Bits()),
		netip.PrefixFrom(MetadataAddr, MetadataAddr.BitLen()),
	} {
		if err := h.AddrReplace(link, &netlink.Addr{IPNet: ipNet(p)}); err != nil {
			return fmt.Errorf("give the bridge the address %s: %w", p, err)
		}
	}
	return up(h, bridgeName)
}

// port is a machine's connection to the network.
type port struct {
	hub, machine string // paths of the namespaces
	ip           netip.Addr
	podCIDR      netip.Prefix
}

// name is the name of the veth interface at the bridge.
func (p port) name() string { return fmt.Sprintf("m%x", p.ip.As4()) }

// plug makes the machine's namespace, with a veth pair to the bridge, addresses and routes.
func (p port) plug() error {
	if err := createNamespace(p.machine); err != nil {
		return err
	}
	if err := setSysctls(p.machine, machineSysctls); err != nil {
		return err
	}
	inside, insideNS, err := handleAt(p.machine)
	if err != nil {
		return err
	}
	defer insideNS.Close()
	defer inside.Close()
	h, ns, err := handleAt(p.hub)
	if err != nil {
		return err
	}
	defer ns.Close()
	defer h.Close()
	bridge, err := h.LinkByName(bridgeName)
	if err != nil {
		return fmt.Errorf("plug in %s: find bridge: %w", p.ip, err)
	}
	cable := &netlink.Veth{
		LinkAttrs:        netlink.NewLinkAttrs(),
		PeerName:         "eth0",
		PeerHardwareAddr: hardwareAddr(p.ip),
		PeerNamespace:    netlink.NsFd(insideNS),
	}
	cable.Name = p.name()
	cable.MasterIndex = bridge.Attrs().Index
	if err := h.LinkAdd(cable); err != nil {
		return fmt.Errorf("plug in %s: add cable: %w", p.ip, err)
	}
	if err := up(h, p.name()); err != nil {
		return err
	}
	if err := p.pin(h, bridge); err != nil {
		return err
	}
	if err := up(inside, "lo"); err != nil {
		return err
	}
	eth0, err := inside.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("plug in %s: %w", p.ip, err)
	}
	if err := inside.AddrAdd(eth0, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(p.ip, Nodes.Bits()))}); err != nil {
		return fmt.Errorf("plug in %s: set address: %w", p.ip, err)
	}
	if err := up(inside, "eth0"); err != nil {
		return err
	}
	if err := inside.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: Gateway.AsSlice()}); err != nil {
		return fmt.Errorf("plug in %s: set default route: %w", p.ip, err)
	}
	// A static neighbor entry for the gateway: otherwise another machine could claim its address (ARP
	// spoofing), and receive this machine's credentials.
	gateway := &netlink.Neigh{LinkIndex: eth0.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT, IP: Gateway.AsSlice(), HardwareAddr: hardwareAddr(Gateway)}
	if err := inside.NeighSet(gateway); err != nil {
		return fmt.Errorf("plug in %s: pin the gateway: %w", p.ip, err)
	}
	// Packets to an address without a pod are rejected at once. Otherwise they would loop
	// between the machine's default route and the route to the machine.
	if err := inside.RouteAdd(&netlink.Route{Dst: ipNet(p.podCIDR), Type: unix.RTN_UNREACHABLE}); err != nil {
		return fmt.Errorf("plug in %s: route %s: %w", p.ip, p.podCIDR, err)
	}
	// Like the routes of a cloud.
	if err := h.RouteReplace(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: ipNet(p.podCIDR), Gw: p.ip.AsSlice()}); err != nil {
		return fmt.Errorf("plug in %s: route %s: %w", p.ip, p.podCIDR, err)
	}
	return nil
}

// pin binds the machine's addresses to its port, as the network of a cloud does: the metadata
// service identifies machines by address, and root in a machine may set any address. Replies to
// a control plane go to its own port, even if another machine claims its address.
func (p port) pin(h *netlink.Handle, bridge netlink.Link) error {
	cable, err := h.LinkByName(p.name())
	if err != nil {
		return fmt.Errorf("pin addresses of %s: %w", p.ip, err)
	}
	if err := h.LinkSetLearning(cable, false); err != nil {
		return fmt.Errorf("pin addresses of %s: stop learning: %w", p.ip, err)
	}
	for _, n := range []*netlink.Neigh{
		{ // static; permanent would be an address of the bridge itself
			LinkIndex: cable.Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER,
			State: netlink.NUD_NOARP, HardwareAddr: hardwareAddr(p.ip),
		},
		{LinkIndex: bridge.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT, IP: p.ip.AsSlice(), HardwareAddr: hardwareAddr(p.ip)},
	} {
		if err := h.NeighSet(n); err != nil {
			return fmt.Errorf("pin addresses of %s: %w", p.ip, err)
		}
	}
	return nil
}

// unplug removes all of this, including the remains of a crash. The bridge's interface
// goes first: a namespace is destroyed later, and until then the name is taken.
func (p port) unplug(ctx context.Context) error {
	there, err := isNamespace(p.hub)
	if err != nil {
		return err
	}
	if there && p.ip.IsValid() {
		h, ns, err := handleAt(p.hub)
		if err != nil {
			return err
		}
		defer ns.Close()
		defer h.Close()
		bridge, err := h.LinkByName(bridgeName)
		if err == nil {
			err = h.RouteDel(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: ipNet(p.podCIDR), Gw: p.ip.AsSlice()})
			if err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("unplug %s: %w", p.ip, err)
			}
			err = h.NeighDel(&netlink.Neigh{LinkIndex: bridge.Attrs().Index, Family: unix.AF_INET, IP: p.ip.AsSlice()})
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("unplug %s: %w", p.ip, err)
			}
		}
		cable, err := h.LinkByName(p.name())
		if err == nil {
			err = h.LinkDel(cable)
		}
		if err != nil && !errors.As(err, &netlink.LinkNotFoundError{}) {
			return fmt.Errorf("unplug %s: %w", p.ip, err)
		}
	}
	return removeNamespace(ctx, p.machine)
}

func up(h *netlink.Handle, name string) error {
	link, err := h.LinkByName(name)
	if err == nil {
		err = h.LinkSetUp(link)
	}
	if err != nil {
		return fmt.Errorf("switch on %s: %w", name, err)
	}
	return nil
}

// hardwareAddr derives a machine's hardware address from its IP, so that a later owner
// of the IP is reachable without waiting for neighbor entries to expire.
func hardwareAddr(ip netip.Addr) net.HardwareAddr {
	b := ip.As4()
	return net.HardwareAddr{0x02, 0x42, b[0], b[1], b[2], b[3]} // 02: locally administered
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// literal refuses addresses that need name resolution: the resolver would run on
// another thread, in this computer's network.
func literal(address string) error {
	if _, err := netip.ParseAddrPort(address); err != nil {
		return fmt.Errorf("the address must be an IP and a port: %w", err)
	}
	return nil
}

// Listen listens on an IP address and port inside the sandbox's network, which
// [Host.Network] has made. The listener has no restrictions.
func (h *Host) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	if err := literal(address); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	var l net.Listener
	err := inNamespace(h.hub(), func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, network, address)
		return err
	})
	return l, err
}

// Dial connects to an IP address and port from inside of the sandbox's network. It
// has the type of http.Transport's DialContext.
func (h *Host) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	if err := literal(address); err != nil {
		return nil, fmt.Errorf("dial %s: %w", address, err)
	}
	var c net.Conn
	err := inNamespace(h.hub(), func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// DialFrom connects to an IP address and port from inside a machine, like a process in
// its network, including services of its cluster.
func (h *Host) DialFrom(ctx context.Context, name, network, address string) (net.Conn, error) {
	if err := literal(address); err != nil {
		return nil, fmt.Errorf("dial %s from machine %s: %w", address, name, err)
	}
	var c net.Conn
	err := inNamespace(h.namespace(name), func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return c, err
}
