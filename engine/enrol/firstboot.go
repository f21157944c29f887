package enrol

import (
	_ "embed" // the script
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"constellation/assets"
)

//go:embed first-boot.sh
var firstBoot string

// Paths of a first boot. The state is 0700.
const (
	firstBootState  = "/var/lib/constellation-first-boot"
	firstBootScript = "/usr/lib/constellation/first-boot"
	firstBootUnit   = "constellation-first-boot.service"
	endOfText       = "END-OF-CONSTELLATION"
)

// maxFirstBoot is the most that clouds accept as one text, in bytes: 256 KiB at Google.
const maxFirstBoot = 256 << 10

// FirstBoot is how new machines of a cloud get what a node needs without a login: at their first boot, and all of a group
// alike. Both texts do the same. Everybody who reads the metadata of a machine can read them, such as its pods. So they
// have no secret, and NewFirstBoot gets none.
type FirstBoot struct {
	// CloudInit is user data for cloud-init.
	CloudInit string
	// Script is for images that run a script at each boot instead. It does nothing after the first one.
	Script string
}

// Sources are where new machines get the programs of a release.
type Sources struct {
	// Address is the URL of a folder with linux_amd64/bootstrapper and so on.
	Address string
	// Programs are the same files on this computer, by the names of `uname -m`. Their digests are what machines accept.
	Programs map[string]Programs
	// Reread are units of the image, as patterns, that read their files again.
	Reread []string

	state string // folder on the machine; empty: the default
}

// addressRE matches addresses that need no quotes in a shell.
var addressRE = regexp.MustCompile(`^https?://[A-Za-z0-9._~:/%+-]+$`)

// ValidSource reports whether an address can be that of Sources. An address with a login is refused: everybody can read it.
func ValidSource(address string) bool {
	u, err := url.Parse(address)
	return err == nil && addressRE.MatchString(address) && u.Hostname() != "" && u.User == nil && len(address) <= 1000
}

// kernelFiles are what a node needs of the kernel. `machine check` looks for the same.
var kernelFiles = []File{
	{Path: "/etc/modules-load.d/constellation.conf", Mode: 0o644, Data: []byte("br_netfilter\nnf_conntrack\noverlay\n")},
	{Path: "/etc/sysctl.d/90-constellation.conf", Mode: 0o644, Data: []byte("net.bridge.bridge-nf-call-iptables = 1\nnet.ipv4.ip_forward = 1\n")},
}

// stockPackages are what kubeadm, kubelet and network plugins need beside those of Node, and what small images lack.
var stockPackages = []Package{{"conntrack", "/usr/sbin/conntrack"}, {"ethtool", "/usr/sbin/ethtool"}, {"iptables", "/usr/sbin/iptables"}, {"nftables", "/usr/sbin/nft"}}

// StockNode completes the Spec of machines with a stock image, as Node does, and adds what the image lacks.
func StockNode(s Spec, from *Sources) (Spec, error) {
	if len(from.Programs) == 0 {
		return Spec{}, errors.New("prepare a first boot: there are no programs")
	}
	s.Machine = "a new machine"
	s.Files = append(slices.Clone(s.Files), kernelFiles...)
	s, err := Node(s, from.Programs[slices.Sorted(maps.Keys(from.Programs))[0]]) // NewFirstBoot takes those of each architecture
	if err != nil {
		return Spec{}, err
	}
	for _, starter := range keyUnits { // the bootstrapper's program has the processes
		for _, unit := range []string{starter, strings.TrimSuffix(starter, ".path") + ".service"} {
			b, err := fs.ReadFile(assets.Systemd(), unit)
			if err != nil {
				return Spec{}, fmt.Errorf("read unit: %w", err)
			}
			s.Files = append(s.Files, File{Path: unitsDir + unit, Mode: 0o644, Data: b})
		}
		s.Units = append(s.Units, Unit{Name: starter, Start: true})
	}
	s.Packages = append(s.Packages, stockPackages...)
	from.Reread = append([]string{"systemd-modules-load.service", "systemd-sysctl.service"}, from.Reread...)
	return s, nil
}

// NewFirstBoot returns the texts that bring a Spec to machines. Its files are written as they are, without regard to those
// of the image: no machine with a history boots with them.
func NewFirstBoot(s Spec, from Sources) (FirstBoot, error) {
	op := "prepare a first boot"
	if err := s.validate(); err != nil {
		return FirstBoot{}, err
	}
	if !ValidSource(from.Address) {
		return FirstBoot{}, fmt.Errorf("%s: the address of programs is no http:// or https:// address without a login", op)
	}
	state := from.state
	if state == "" {
		state = firstBootState
	}
	body, err := s.firstBoot(from, state)
	if err != nil {
		return FirstBoot{}, fmt.Errorf("%s: %w", op, err)
	}
	unit := fmt.Sprintf(`# Repeats the preparation of this machine until it succeeded once.
[Unit]
Description=Constellation first boot
Wants=network-online.target
After=network-online.target
ConditionPathExists=!%s/done
StartLimitIntervalSec=0

[Service]
Type=oneshot
ExecStart=/bin/sh %s
Restart=on-failure
RestartSec=10s

[Install]
WantedBy=multi-user.target
`, state, firstBootScript)

	var c strings.Builder
	c.WriteString("#cloud-config\n# Prepares this machine for a cluster. It contains no secret: programs of the machine can read it.\nwrite_files:\n")
	for _, f := range []struct{ path, mode, text string }{{firstBootScript, "0700", body}, {unitsDir + firstBootUnit, "0644", unit}} {
		fmt.Fprintf(&c, "  - path: %s\n    owner: root:root\n    permissions: \"%s\"\n    content: |\n%s", f.path, f.mode, indented(f.text, "      "))
	}
	fmt.Fprintf(&c, "runcmd:\n  - [systemctl, daemon-reload]\n  - [systemctl, enable, --now, --no-block, %s]\n", firstBootUnit)

	var b strings.Builder
	fmt.Fprintf(&b, `#!/bin/sh
# Prepares this machine for a cluster, where cloud-init did not do it. It contains no secret: programs of the machine can
# read it.
set -eu
[ ! -e %[1]s/done ] || exit 0
if [ ! -e %[2]s ]; then
  (umask 022 && mkdir -p %[3]s)
  cat >%[4]s.constellation-new <<'OUTER-%[5]s'
%[6]sOUTER-%[5]s
  chmod 700 %[4]s.constellation-new
  mv -f %[4]s.constellation-new %[4]s
  cat >%[2]s.constellation-new <<'OUTER-%[5]s'
%[7]sOUTER-%[5]s
  mv -f %[2]s.constellation-new %[2]s
fi
systemctl daemon-reload
systemctl enable --now --no-block %[8]s
`, state, unitsDir+firstBootUnit, path.Dir(firstBootScript), firstBootScript, endOfText, body, unit, firstBootUnit)
	out := FirstBoot{CloudInit: c.String(), Script: b.String()}
	if n := max(len(out.CloudInit), len(out.Script)); n > maxFirstBoot {
		return FirstBoot{}, fmt.Errorf("%s: the text has %d bytes, limit is %d", op, n, maxFirstBoot)
	}
	return out, nil
}

// firstBoot returns the script of a machine.
func (s *Spec) firstBoot(from Sources, state string) (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "#!/bin/sh\nstate=%s\n%s\n", state, firstBoot)
	if err := heredoc(&b, fmt.Sprintf("put %s/steps.sh 600", state), []byte(script)); err != nil {
		return "", err
	}
	if s.Proxy != "" {
		fmt.Fprintf(&b, "\nproxy=%[1]s\nhttp_proxy=$proxy https_proxy=$proxy no_proxy=localhost\nexport http_proxy https_proxy no_proxy\n", s.Proxy)
	} else {
		b.WriteString("\nproxy=\n")
	}

	b.WriteString("\nset --\n")
	for _, p := range s.Packages {
		fmt.Fprintf(&b, "[ -e %s ] || set -- \"$@\" %s\n", p.Program, p.Name)
	}
	b.WriteString("if [ $# -gt 0 ]; then printf '%s\\n' \"$proxy\" | step install \"$@\" || fail \"install $*\"; fi\n")

	b.WriteString("\ncase $(uname -m) in\n")
	for _, a := range architectures {
		p, ok := from.Programs[a.uname]
		if !ok {
			continue
		}
		fmt.Fprintf(&b, "%s)\n", a.uname)
		for _, f := range s.Files {
			if f.Local == "" {
				continue
			}
			name := path.Base(f.Path)
			local := File{Local: map[string]string{path.Base(Bootstrapper): p.Bootstrapper, path.Base(Agent): p.Agent}[name]}
			sum, err := local.digest()
			if err != nil {
				return "", err
			}
			fmt.Fprintf(&b, "  fetch %s \\\n    %s \\\n    %s/linux_%s/%s\n", f.Path, sum, strings.TrimRight(from.Address, "/"), a.name, name)
		}
		b.WriteString("  ;;\n")
	}
	b.WriteString("*) fail \"there is no program for $(uname -m)\" ;;\nesac\n\n")

	var links strings.Builder
	var folders []string
	for _, f := range s.Files {
		switch {
		case f.Local != "":
			continue
		case f.Link == "":
			if err := heredoc(&b, fmt.Sprintf("put %s %o", f.Path, f.Mode), f.Data); err != nil {
				return "", fmt.Errorf("write %s: %w", f.Path, err)
			}
			continue
		case f.Keep:
			fmt.Fprintf(&links, "  [ -e %s ] ||", f.Path)
		}
		fmt.Fprintf(&links, "  printf '%%s %%s\\n' %s %s\n", f.Path, f.Link)
		if dir := path.Dir(f.Path); !slices.Contains(folders, dir) {
			folders = append(folders, dir)
		}
	}
	if links.Len() > 0 {
		fmt.Fprintf(&b, "\n(umask 022 && mkdir -p %s)\n{\n%s} | step links\n", strings.Join(folders, " "), links.String())
	}

	b.WriteString("\n")
	for _, u := range from.Reread {
		fmt.Fprintf(&b, "systemctl try-restart '%s' || echo 'constellation: %[1]s cannot be restarted' >&2\n", u)
	}
	for _, reload := range []bool{false, true} {
		if units := s.started(reload); len(units) > 0 {
			how := map[bool]string{false: "restart", true: "reload-or-restart"}[reload]
			fmt.Fprintf(&b, "step start %s %s\n", how, strings.Join(units, " "))
		}
	}
	b.WriteString("rm -rf \"$state/downloads\"\n: >\"$state/done\"\nsync \"$state\"\n")
	return b.String(), nil
}

// heredoc writes a command with a text as its stdin.
func heredoc(b *strings.Builder, command string, text []byte) error {
	s := string(text)
	switch {
	case !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' }):
		return errors.New("it is no text")
	case !strings.HasSuffix(s, "\n") && s != "":
		return errors.New("it does not end with a line")
	case strings.Contains(s, endOfText):
		return errors.New("it contains " + endOfText)
	}
	fmt.Fprintf(b, "%s <<'%s'\n%s%[2]s\n", command, endOfText, s)
	return nil
}

func indented(text, by string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if line != "\n" {
			b.WriteString(by)
		}
		b.WriteString(line)
	}
	return b.String()
}
