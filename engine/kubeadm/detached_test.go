//go:build linux

package kubeadm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/version"
)

func upgradeConfig(t *testing.T) Config {
	t.Helper()
	c, err := NewUpgrade(Upgrade{Version: version.MustParse("v1.36.3")})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// detached runs the test binary as kubeadm with a script.
func detached(t *testing.T, script string) Detached {
	t.Helper()
	t.Setenv(scriptEnv, script)
	return Detached{Path: os.Args[0], Dir: closedDir(t)}
}

// closedDir is a directory that others cannot enter, as the stand-in demands.
func closedDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func noted(Process) error { return nil }

func TestDetachedKubeadmIsCalledAsItsManualSays(t *testing.T) {
	d := detached(t, "args")
	for verb, want := range map[string]string{
		UpgradePlan:  "upgrade plan --config=" + d.Dir + "/kubeadm.yaml",
		UpgradeApply: "upgrade apply --yes --config=" + d.Dir + "/kubeadm.yaml",
		UpgradeNode:  "upgrade node --config=" + d.Dir + "/kubeadm.yaml",
	} {
		p, err := d.Start(verb, upgradeConfig(t), noted)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		if err := d.Wait(t.Context(), p, 0, func(l Line, _ int64) { got = append(got, l.Text) }); err != nil || !slices.Equal(got, []string{want}) {
			t.Errorf("got %q, %v; want %q", got, err, want)
		}
	}
	if _, err := d.Start("diff", upgradeConfig(t), noted); err == nil {
		t.Error("started a verb that it does not have")
	}
	if i, err := os.Stat(filepath.Join(d.Dir, configFile)); err != nil || i.Mode().Perm() != 0o600 {
		t.Errorf("configuration: %v, %v", i, err)
	}
}

func TestNoKubeadmRunsThatIsNotWrittenDown(t *testing.T) {
	d := detached(t, "good")
	var noted Process
	_, err := d.Start(UpgradePlan, upgradeConfig(t), func(p Process) error {
		noted = p
		if !p.Running() {
			t.Error("the recorded process does not run")
		}
		return errors.New("disk full")
	})
	if err == nil || !strings.Contains(err.Error(), "disk full") {
		t.Errorf("got %v", err)
	}
	if noted.Running() {
		t.Error("it runs")
	}
	if b, err := os.ReadFile(filepath.Join(d.Dir, outputFile)); err != nil || len(b) != 0 {
		t.Errorf("it said %q, %v", b, err)
	}
}

func TestDetachedFailuresSayWhatKubeadmSaid(t *testing.T) {
	d := detached(t, "preflight")
	p, err := d.Start(UpgradeApply, upgradeConfig(t), noted)
	if err != nil {
		t.Fatal(err)
	}
	err = d.Wait(t.Context(), p, 0, nil)
	var e *Error
	if !errors.As(err, &e) || e.Code != 2 || !strings.HasPrefix(err.Error(), "kubeadm upgrade apply: ") || !strings.Contains(err.Error(), "[ERROR Port-6443]: Port 6443 is in use") {
		t.Errorf("got %v", err)
	}
	d.Path = filepath.Join(d.Dir, "absent")
	if p, err = d.Start(UpgradeApply, upgradeConfig(t), noted); err != nil {
		t.Fatal(err)
	}
	if err := d.Wait(t.Context(), p, 0, nil); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("absent binary: %v", err)
	}
}

func TestDetachedKubeadmOutlivesItsParent(t *testing.T) {
	dir := closedDir(t)
	cmd := exec.Command(os.Args[0], dir)
	cmd.Env = append(os.Environ(), scriptEnv+"=spell")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var p Process
	if err := json.Unmarshal(out, &p); err != nil {
		t.Fatal(err)
	}
	for name, other := range map[string]Process{
		"another start": {PID: p.PID, Start: p.Start + 1, Boot: p.Boot},
		"another boot":  {PID: p.PID, Start: p.Start, Boot: "another"},
		"no process":    {Boot: p.Boot},
	} {
		if other.Running() {
			t.Errorf("%s: taken for it", name)
		}
	}
	if !p.Running() {
		t.Fatal("it ended with its parent")
	}
	// A first follower leaves in the middle; the next goes on where it was.
	d := Detached{Dir: dir}
	ctx, leave := context.WithCancel(t.Context())
	var first, rest []string
	var next int64
	if err := d.Wait(ctx, &p, 0, func(l Line, n int64) {
		first, next = append(first, l.Text), n
		leave()
	}); !errors.Is(err, context.Canceled) || !p.Running() {
		t.Fatalf("left with %v, running %t", err, p.Running())
	}
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err = d.Wait(t.Context(), &p, next, func(l Line, _ int64) { rest = append(rest, l.Text) })
	if !errors.Is(err, ErrOutcomeUnknown) || fmt.Sprint(first, rest) != "[one] [two]" {
		t.Errorf("%v, %v, then %v", err, first, rest)
	}
	if p.Running() {
		t.Error("it still runs")
	}
}

func TestDetachedKubeadmThatHangsIsEnded(t *testing.T) {
	for _, script := range []string{"hang", "stubborn"} {
		t.Run(script, func(t *testing.T) {
			d := detached(t, script)
			d.Timeout, d.Grace = 500*time.Millisecond, 500*time.Millisecond
			p, err := d.Start(UpgradeApply, upgradeConfig(t), noted)
			if err != nil {
				t.Fatal(err)
			}
			var pid, child int
			err = d.Wait(t.Context(), p, 0, func(l Line, _ int64) { fmt.Sscanf(l.Text, "pids %d %d", &pid, &child) })
			if !errors.Is(err, ErrDeadline) || pid != p.PID {
				t.Fatalf("got %v, process %d, want %d", err, pid, p.PID)
			}
			for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
				state, _, err := look(child)
				if err != nil || state == 'Z' {
					break
				}
				if time.Now().After(end) {
					t.Fatal("what it started still runs")
				}
			}
		})
	}
}

func TestDetachedFloodsAreBounded(t *testing.T) {
	d := detached(t, "flood")
	p, err := d.Start(UpgradePlan, upgradeConfig(t), noted)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	if err := d.Wait(t.Context(), p, 0, func(l Line, _ int64) {
		if n++; len(l.Text) > maxLine+3 {
			t.Errorf("a line of %d bytes", len(l.Text))
		}
	}); err != nil || n < 3000 {
		t.Errorf("%d lines, %v", n, err)
	}
}

func TestUpgradeConfigurationIsChecked(t *testing.T) {
	v := version.MustParse("v1.36.3")
	for name, u := range map[string]Upgrade{
		"no version":       {},
		"all checks":       {Version: v, IgnorePreflightErrors: []string{"all"}},
		"too many checks":  {Version: v, IgnorePreflightErrors: slices.Repeat([]string{"Swap"}, maxIgnored+1)},
		"a check of words": {Version: v, IgnorePreflightErrors: []string{"Swap, Mem"}},
		"no pull policy":   {Version: v, ImagePullPolicy: "always"},
	} {
		if c, err := NewUpgrade(u); err == nil {
			t.Errorf("%s: accepted %v", name, c)
		}
	}
}

func TestWordsThatPass(t *testing.T) {
	for words, want := range map[string]bool{
		"FATAL: failed to get config map: Get \"https://10.42.0.1:6443\": context deadline exceeded": true,
		"[ERROR CreateJob]: Job upgrade-health-check did not complete in 15s":                        true,
		"dial tcp 10.42.0.1:6443: connect: connection refused":                                       true,
		"[ERROR StaticPodManifest]: manifest files not found: [etcd.yaml]":                           false,
		"[ERROR CoreDNSUnsupportedPlugins]: there are unsupported plugins":                           false,
	} {
		if got := (&Error{Message: words}).Transient(); got != want {
			t.Errorf("%s: %t", words, got)
		}
	}
}

func TestManifestsComeBackFromTheNewestBackup(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string, age time.Duration) {
		t.Helper()
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if age > 0 {
			if err := os.Chtimes(filepath.Dir(p), time.Now().Add(-age), time.Now().Add(-age)); err != nil {
				t.Fatal(err)
			}
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	restored := func(want ...string) {
		t.Helper()
		if got, err := RestoreManifests(root); err != nil || !slices.Equal(got, want) {
			t.Errorf("restored %v, %v; want %v", got, err, want)
		}
	}
	restored() // a host of no cluster
	write("etc/kubernetes/tmp/kubeadm-backup-manifests-2026-11-20-23-00-00/etcd.yaml", "oldest", 3*time.Hour)
	write("etc/kubernetes/tmp/kubeadm-backup-manifests-2026-11-21-01-00-00/etcd.yaml", "older", 2*time.Hour)
	write("etc/kubernetes/tmp/kubeadm-backup-manifests-2026-11-21-02-00-00/kube-apiserver.yaml", "newest", time.Hour)
	restored() // was a control plane once
	write("etc/kubernetes/manifests/kube-scheduler.yaml", "", 0)
	write("etc/kubernetes/manifests/kube-controller-manager.yaml", "", 0)
	restored("etcd", "kube-apiserver")
	restored()
	for name, want := range map[string]string{"etcd": "older", "kube-apiserver": "newest", "kube-scheduler": ""} {
		if b, err := os.ReadFile(filepath.Join(dir, manifestsDir, name+".yaml")); err != nil || string(b) != want {
			t.Errorf("%s is %q, %v; want %q", name, b, err, want)
		}
	}
	write("etc/kubernetes/tmp/kubeadm-backup-etcd-2026-11-21-02-00-00/db", "", 0)
	write("etc/kubernetes/tmp/somebody-elses/file", "", 5*time.Hour)
	if err := RemoveOldBackups(root); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(dir, tmpDir, "*"))
	for i := range left {
		left[i] = filepath.Base(left[i])
	}
	if want := []string{"kubeadm-backup-etcd-2026-11-21-02-00-00", "kubeadm-backup-manifests-2026-11-21-02-00-00", "somebody-elses"}; err != nil || !slices.Equal(left, want) {
		t.Errorf("left %v, %v", left, err)
	}
}
