package enrol

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"constellation/engine/plan"
)

// PackageFiles are the Debian packages in a folder for the architecture that `uname -m` calls arch, as files that a
// Spec can have. If the folder has a SHA256SUMS, each of them must have its digest there.
func PackageFiles(dir, arch string) ([]File, error) {
	usage := func(err error, remedy string) error {
		return &plan.Error{Op: "read packages in " + dir, Err: err, Remedy: remedy, Exit: plan.ExitUsage}
	}
	suffix := "_unknown.deb"
	for _, a := range architectures {
		if a.uname == arch {
			suffix = "_" + a.name + ".deb"
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, usage(err, "name a folder with --packages")
	}
	sums, err := os.ReadFile(filepath.Join(dir, "SHA256SUMS"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, usage(err, "make the file readable")
	}
	pinned := map[string]string{}
	for line := range strings.Lines(string(sums)) {
		if sum, name, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			pinned[strings.TrimLeft(name, " *./")] = sum
		}
	}
	var out []File
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), suffix) && !strings.HasSuffix(e.Name(), "_all.deb") {
			continue
		}
		f := File{Local: filepath.Join(dir, e.Name()), Mode: 0o600}
		sum, err := f.digest()
		if err != nil {
			return nil, usage(err, "make the file readable")
		}
		if want := pinned[e.Name()]; len(sums) > 0 && sum != want {
			return nil, usage(fmt.Errorf("%s has the SHA-256 %s, and SHA256SUMS %q", e.Name(), sum, want), "copy the package again, or correct SHA256SUMS")
		}
		f.Path = "/" + sum + ".deb" // in a folder of the machine
		out = append(out, f)
	}
	if len(out) == 0 {
		return nil, usage(fmt.Errorf("there is no file *%s or *_all.deb", suffix), "download them on a machine of the same distribution: `apt-get download containerd runc containernetworking-plugins`, and what they depend on")
	}
	return out, nil
}

// Proxy returns the files by which containerd, agent and bootstrapper use an HTTP proxy, except for these destinations:
// names, addresses and networks.
func Proxy(address string, except []string) []File {
	text := fmt.Sprintf("HTTP_PROXY=%s\nHTTPS_PROXY=%[1]s\nNO_PROXY=%s\n", address, strings.Join(append([]string{"localhost", "127.0.0.0/8", "::1", ".svc", ".cluster.local"}, except...), ","))
	out := []File{{Path: proxyFile, Mode: 0o644, Data: []byte(text)}}
	for _, unit := range []string{"containerd.service", "constellation-agent.service", bootstrapperUnit} {
		out = append(out, File{Path: unitsDir + unit + ".d/50-constellation-proxy.conf", Mode: 0o644, Data: []byte("# Written by constellation: machine add --proxy.\n[Service]\nEnvironmentFile=" + proxyFile + "\n")})
	}
	return out
}

// proxyFile has the settings of a proxy.
const proxyFile = "/etc/constellation/proxy"

// ValidProxy reports whether an address is that of an HTTP proxy. One with a password is refused: arguments and files
// of the machine would show it.
func ValidProxy(address string) bool {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || u.Path != "" && u.Path != "/" {
		return false
	}
	if _, _, err := net.SplitHostPort(u.Host); err != nil || u.Hostname() == "" {
		return false
	}
	_, err = netip.ParseAddr(u.Hostname())
	return err == nil || nameRE.MatchString(u.Hostname())
}

// bring sends the packages of this computer that the machine does not have yet. Those of an earlier run are forgotten.
func (c *remote) bring(ctx context.Context, debs []File, p *progress) error {
	var in bytes.Buffer
	for _, f := range debs {
		fmt.Fprintf(&in, "%s\n", strings.TrimSuffix(strings.TrimPrefix(f.Path, "/"), ".deb"))
	}
	out, err := c.run(ctx, limit, "debs", in.Bytes())
	if err != nil {
		return err
	}
	have, err := c.answers(out)
	if err != nil {
		return err
	}
	for _, f := range debs {
		if slices.Contains(have, strings.TrimSuffix(strings.TrimPrefix(f.Path, "/"), ".deb")) {
			continue
		}
		p.next("send " + filepath.Base(f.Local))
		f.Path = c.state + "/" + debsDir + f.Path
		if err := c.send(ctx, f); err != nil {
			return err
		}
	}
	return nil
}
