//go:build linux

package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"constellation/agent/upgradeproto"
	"constellation/engine/release"
)

// Paths below the root of a host that somebody else made.
const (
	setupJournal = "var/lib/constellation/setup.json"
	unitPath     = "etc/systemd/system/constellation-agent.service"
	dropInPath   = "etc/systemd/system/kubelet.service.d/90-constellation.conf"
	toolsDir     = "usr/local/bin"
)

// unit starts the agent on such a host.
const unit = `# Upgrades Kubernetes on this host when the operator requests it. Written by constellation adopt.
[Unit]
Description=Constellation upgrade agent
After=containerd.service
StartLimitIntervalSec=0

[Service]
ExecStart=/` + programPath + ` -operator 65532
Restart=always
RestartSec=1s
RuntimeDirectory=constellation-agent
RuntimeDirectoryMode=0711
RuntimeDirectoryPreserve=yes
StateDirectory=constellation
StateDirectoryMode=0700
TimeoutStopSec=10s
KillMode=process
# What it starts, such as kubeadm and apt, works on the mounts of the host, so it gets none of its own.
NoNewPrivileges=yes
CapabilityBoundingSet=~CAP_AUDIT_CONTROL CAP_AUDIT_READ CAP_BLOCK_SUSPEND CAP_BPF CAP_CHECKPOINT_RESTORE CAP_LEASE CAP_MAC_ADMIN CAP_MAC_OVERRIDE CAP_PERFMON CAP_SYSLOG CAP_SYS_MODULE CAP_SYS_PACCT CAP_SYS_RAWIO CAP_SYS_TIME CAP_SYS_TTY_CONFIG CAP_WAKE_ALARM CAP_SYS_BOOT
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service @mount
SystemCallErrorNumber=EPERM
LimitCORE=0

[Install]
WantedBy=multi-user.target
`

// setupTimeout bounds the start of the installed agent.
const setupTimeout = time.Minute

// Setup installs the agent on a host that somebody else made, and removes it again. A journal on the
// host has every file that it wrote, so an interrupted installation or removal is repeated by the same
// call. Its calls must not overlap.
//
// The agent installs kubeadm, kubelet and kubectl in /usr/local/bin. Where the kubelet's unit starts
// another one, as that of Kubernetes' packages does, Setup copies the three programs there and adds a
// drop-in that starts the copy with the same arguments. The running kubelet is not restarted.
type Setup struct {
	// Root is the root of the host's file system.
	Root string
	// Program is the path of the agent to install, Keys are the public keys in PEM of those who sign
	// the components of this host.
	Program string
	Keys    []byte
	// systemctl executes systemctl on the host; nil means that of Root.
	systemctl func(ctx context.Context, args ...string) (string, error)
	// answers waits for the installed agent; nil means its socket.
	answers func(ctx context.Context) error
	// running returns an error while an upgrade is in progress; nil asks the agent.
	running func(ctx context.Context) error
}

// written is one file of the journal.
type written struct {
	Path   string `json:"path"` // below the root
	SHA256 string `json:"sha256"`
}

// setup is the journal.
type setup struct {
	Schema string    `json:"schema"`
	Files  []written `json:"files"`
	// Dirs are the directories that were made, the deepest last.
	Dirs []string `json:"dirs"`
	// Removing is whether a removal began: the agent may be gone.
	Removing bool `json:"removing,omitempty"`
}

func (s *Setup) path(p string) string { return filepath.Join(s.Root, p) }

// Install installs the agent and returns when it answers. The error names what of the host is in the
// way; nothing is changed then.
func (s *Setup) Install(ctx context.Context) error {
	if _, err := release.ParseKeys("release-keys", s.Keys); err != nil {
		return err
	}
	j, known, err := s.journal()
	if err != nil {
		return err
	}
	if _, err := os.Lstat(s.path(programPath)); err == nil && !known {
		return fmt.Errorf("/%s exists and is not of an adoption: this machine has an agent already", programPath)
	}
	program, err := os.ReadFile(s.Program)
	if err != nil {
		return fmt.Errorf("read the agent: %w", err)
	}
	files, err := s.kubelet(ctx)
	if err != nil {
		return err
	}
	files = append(files,
		hostFile{release.MachineKeys, s.Keys, 0o644},
		hostFile{programPath, program, 0o755},
		hostFile{unitPath, []byte(unit), 0o644},
	)
	// The journal is on disk before the first file.
	j.Removing = false
	for _, f := range files {
		j.add(s, f)
	}
	if err := s.write(&j); err != nil {
		return err
	}
	for _, f := range files {
		if b, err := os.ReadFile(s.path(f.path)); err == nil && string(b) == string(f.content) {
			continue
		}
		if err := putWhole(s.path(f.path), f.content, f.mode); err != nil {
			return readOnlyHint(err)
		}
	}
	for _, args := range [][]string{{"daemon-reload"}, {"enable", filepath.Base(unitPath)}, {"restart", filepath.Base(unitPath)}} {
		if _, err := s.call(ctx, args...); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, setupTimeout, fmt.Errorf("the agent has not answered within %s; `journalctl -u constellation-agent` on the machine has its log", setupTimeout))
	defer cancel()
	if s.answers != nil {
		return s.answers(ctx)
	}
	return s.answered(ctx)
}

// hostFile is a file to write.
type hostFile struct {
	path    string // below the root
	content []byte
	mode    fs.FileMode
}

func readOnlyHint(err error) error {
	if errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("%w: this distribution mounts it read-only, and the agent needs /usr/lib/constellation and /usr/local/bin", err)
	}
	return err
}

// execStart matches the only command of a unit as systemctl shows it.
var execStart = regexp.MustCompile(`^\{ path=(/[^ ;]+) ; argv\[\]=([^;]*) ; `)

// kubelet returns the files by which the unit of the kubelet starts the one in toolsDir; none if it does.
func (s *Setup) kubelet(ctx context.Context) ([]hostFile, error) {
	out, err := s.call(ctx, "show", "--property=ExecStart", "--value", "kubelet.service")
	if err != nil {
		return nil, err
	}
	m := execStart.FindStringSubmatch(strings.TrimSpace(out))
	if m == nil || strings.Contains(strings.TrimSpace(out), "\n") {
		return nil, fmt.Errorf("the unit kubelet.service does not start one kubelet: %.200q", strings.TrimSpace(out))
	}
	path, argv := m[1], strings.TrimSpace(m[2])
	want := "/" + toolsDir + "/kubelet"
	if path == want {
		return nil, nil
	}
	args := strings.TrimPrefix(argv, path)
	if args == argv {
		return nil, fmt.Errorf("the unit kubelet.service starts %s under another name: %.200q", path, argv)
	}
	var files []hostFile
	for _, name := range []string{"kubelet", "kubeadm", "kubectl"} {
		to := filepath.Join(toolsDir, name)
		b, err := os.ReadFile(s.path(filepath.Join(filepath.Dir(path), name)))
		if errors.Is(err, fs.ErrNotExist) && name == "kubectl" {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the machine's %s: %w", name, err)
		}
		switch have, err := os.ReadFile(s.path(to)); {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return nil, fmt.Errorf("read /%s: %w", to, err)
		case string(have) != string(b):
			return nil, fmt.Errorf("/%s is another one than %s/%s, which the machine uses: remove it", to, filepath.Dir(path), name)
		}
		files = append(files, hostFile{to, b, 0o755})
	}
	text := "# Starts the kubelet that the agent upgrades, with the arguments of the unit. Written by constellation adopt.\n[Service]\nExecStart=\nExecStart=" + want + args + "\n"
	return append(files, hostFile{dropInPath, []byte(text), 0o644}), nil
}

// Removed is the result of a removal. Kept are files below the root that are in use or were changed since,
// with the reason.
type Removed struct {
	Removed []string          `json:"removed"`
	Kept    map[string]string `json:"kept,omitempty"`
}

// Remove ends the agent and removes every file that Install wrote and that is not in use. Kubernetes
// stays as it is. It is an error if an upgrade is in progress.
func (s *Setup) Remove(ctx context.Context) (Removed, error) {
	out := Removed{Removed: []string{}, Kept: map[string]string{}}
	j, known, err := s.journal()
	if err != nil || !known {
		return out, err
	}
	if !j.Removing {
		if err := s.idle(ctx); err != nil {
			return out, err
		}
		j.Removing = true
		if err := s.write(&j); err != nil {
			return out, err
		}
	}
	if _, err := os.Lstat(s.path(unitPath)); err == nil {
		if _, err := s.call(ctx, "disable", "--now", filepath.Base(unitPath)); err != nil {
			return out, err
		}
	}
	// A drop-in that starts an upgraded kubelet stays, because the packages' kubelet is older.
	upgraded := slices.ContainsFunc(j.Files, func(f written) bool {
		return strings.HasPrefix(f.Path, toolsDir+"/") && s.changed(f)
	})
	for _, f := range slices.Backward(j.Files) {
		if err := os.Remove(unfinished(s.path(f.Path))); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return out, fmt.Errorf("remove what an interrupted installation left of /%s: %w", f.Path, err)
		}
		switch {
		case upgraded && (f.Path == dropInPath || strings.HasPrefix(f.Path, toolsDir+"/")):
			out.Kept["/"+f.Path] = "Kubernetes was upgraded since; the machine runs from " + "/" + toolsDir
			continue
		case s.changed(f):
			out.Kept["/"+f.Path] = "it was changed since"
			continue
		}
		switch err := os.Remove(s.path(f.Path)); {
		case err == nil:
			out.Removed = append(out.Removed, "/"+f.Path)
		case !errors.Is(err, fs.ErrNotExist):
			return out, fmt.Errorf("remove /%s: %w", f.Path, err)
		}
	}
	if _, err := s.call(ctx, "daemon-reload"); err != nil {
		return out, err
	}
	for _, d := range []string{"run/constellation-agent", "var/lib/constellation/agent"} {
		if err := os.RemoveAll(s.path(d)); err != nil {
			return out, fmt.Errorf("remove /%s: %w", d, err)
		}
	}
	for _, name := range []string{unfinished(s.path(setupJournal)), s.path(setupJournal)} {
		if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return out, fmt.Errorf("remove /%s: %w", setupJournal, err)
		}
	}
	for _, d := range slices.Backward(j.Dirs) {
		_ = os.Remove(s.path(d)) // if nothing else is in it
	}
	return out, nil
}

// idle returns an error unless no upgrade was ever requested, or the agent answers that none is in progress.
func (s *Setup) idle(ctx context.Context) error {
	if _, err := os.Lstat(s.path("var/lib/constellation/agent/" + journalFile)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, programTimeout)
	defer cancel()
	if s.running != nil {
		return s.running(ctx)
	}
	r, err := s.status(ctx)
	switch {
	case err != nil:
		return fmt.Errorf("ask the agent whether an upgrade is in progress: %w; start it with `systemctl start constellation-agent`", err)
	case r.GetRun().GetState() == upgradeproto.Run_RUNNING:
		return errors.New("an upgrade of Kubernetes is in progress on this machine: wait for its end")
	}
	return nil
}

// status asks the agent at its socket.
func (s *Setup) status(ctx context.Context) (*upgradeproto.StatusResponse, error) {
	c, err := grpc.NewClient("unix:"+s.path(DefaultSocket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return upgradeproto.NewAgentClient(c).Status(ctx, &upgradeproto.StatusRequest{})
}

// changed reports whether a file has other content than Install wrote; a missing file has none.
func (s *Setup) changed(f written) bool {
	file, err := os.Open(s.path(f.Path))
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	defer file.Close()
	h := sha256.New()
	if _, err := io.Copy(h, file); err != nil {
		return true
	}
	return hex.EncodeToString(h.Sum(nil)) != f.SHA256
}

// journal reads the journal; known is false if there is none.
func (s *Setup) journal() (j setup, known bool, err error) {
	b, err := os.ReadFile(s.path(setupJournal))
	if errors.Is(err, fs.ErrNotExist) {
		return setup{Schema: "1"}, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &j)
	}
	if err != nil {
		return setup{}, false, fmt.Errorf("read /%s: %w", setupJournal, err)
	}
	return j, true, nil
}

// add notes a file. One that the host had with the same content is not ours.
func (j *setup) add(s *Setup, f hostFile) {
	sum := sha256.Sum256(f.content)
	w := written{f.path, hex.EncodeToString(sum[:])}
	i := slices.IndexFunc(j.Files, func(o written) bool { return o.Path == f.path })
	switch {
	case i >= 0:
		j.Files[i] = w
		return
	case func() bool { _, err := os.Lstat(s.path(f.path)); return err == nil }():
		return
	}
	j.Files = append(j.Files, w)
	j.addDirs(s, f.path)
}

// addDirs notes the directories of a file that do not exist yet.
func (j *setup) addDirs(s *Setup, path string) {
	var missing []string
	for d := filepath.Dir(path); d != "." && !slices.Contains(j.Dirs, d); d = filepath.Dir(d) {
		if _, err := os.Lstat(s.path(d)); err == nil {
			break
		}
		missing = append([]string{d}, missing...)
	}
	j.Dirs = append(j.Dirs, missing...)
}

func (s *Setup) write(j *setup) error {
	j.addDirs(s, setupJournal)
	b, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return fmt.Errorf("write /%s: %w", setupJournal, err)
	}
	return putWhole(s.path(setupJournal), append(b, '\n'), 0o600)
}

// call executes systemctl on the host.
func (s *Setup) call(ctx context.Context, args ...string) (string, error) {
	if s.systemctl != nil {
		return s.systemctl(ctx, args...)
	}
	for _, path := range []string{"/usr/bin/systemctl", "/bin/systemctl"} {
		if _, err := os.Stat(s.path(path)); err != nil {
			continue
		}
		c := exec.CommandContext(ctx, path, args...)
		c.Dir, c.SysProcAttr = "/", &syscall.SysProcAttr{Chroot: s.Root}
		c.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "SYSTEMD_IGNORE_CHROOT=1", "LC_ALL=C"}
		out, err := c.CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, clip(strings.ToValidUTF8(strings.TrimSpace(string(out)), "")))
		}
		return string(out), nil
	}
	return "", errors.New("this machine has no systemctl: its services are not systemd's")
}

// answered waits until the agent answers at its socket.
func (s *Setup) answered(ctx context.Context) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := s.status(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-tick.C:
		}
	}
}
