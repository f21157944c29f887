package engine_test

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"constellation/engine/attestation/attestationtest"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/workspace"
)

// A check reports whether the cluster pulls images from where the configuration names, and what machines make of the change.
func TestCheckReportsAnotherRegistry(t *testing.T) {
	pem, _, err := attestationtest.CreateCA("registry")
	if err != nil {
		t.Fatal(err)
	}
	const secret = "correct-horse"
	one := registry.Registry{Address: "one.example.com/mirror"}
	login := registry.Registry{Address: one.Address, Username: "robot", Password: secret}
	trusted := registry.Registry{Address: one.Address, CABundle: string(pem)}
	for _, tt := range []struct {
		name     string
		is, want registry.Registry
		severity plan.Severity // empty: no finding
		title    string
		remedy   string
	}{
		{name: "none", severity: ""},
		{name: "the same", is: login, want: login},
		{name: "added", is: registry.Registry{}, want: one, severity: plan.Info, title: "the cluster pulls images from their publishers, and constellation-conf.yaml"},
		{name: "added with a login", is: registry.Registry{}, want: login, severity: plan.Warn, title: "names the registry one.example.com/mirror", remedy: "have machines in place replaced before"},
		{name: "added with authorities", is: registry.Registry{}, want: trusted, severity: plan.Warn, title: "from their publishers", remedy: "/etc/containerd/certs.d/one.example.com of each machine"},
		{name: "moved", is: one, want: registry.Registry{Address: "two.example.com"}, severity: plan.Info, title: "the cluster pulls images from one.example.com/mirror, and constellation-conf.yaml"},
		{name: "moved with the same login", is: login, want: registry.Registry{Address: "two.example.com", Username: "robot", Password: secret}, severity: plan.Warn, title: "names the registry two.example.com", remedy: "have machines in place replaced"},
		{name: "another login", is: login, want: registry.Registry{Address: one.Address, Username: "robot", Password: "battery-staple"}, severity: plan.Warn, title: "and the cluster differ in login of the registry one.example.com/mirror", remedy: "keep the old login valid until all machines are replaced"},
		{name: "no login any more", is: login, want: one, severity: plan.Info, title: "differ in login of"},
		{name: "another login and authorities", is: login, want: trusted, severity: plan.Warn, title: "differ in login and authorities of", remedy: "add the authorities"},
		{name: "authorities removed", is: trusted, want: one, severity: plan.Warn, title: "differ in authorities of", remedy: "use a certificate that the machines of the cluster trust"},
		{name: "removed", is: login, want: registry.Registry{}, severity: plan.Warn, title: "the cluster pulls images from one.example.com/mirror, and constellation-conf.yaml names no registry", remedy: "keep one.example.com/mirror until all machines are replaced"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			if tt.is.Address != "" {
				if _, err := s.cluster.SetRegistry(t.Context(), tt.is, true); err != nil {
					t.Fatal(err)
				}
			}
			s.registry(tt.want)
			f := s.registryFinding(t)
			if tt.severity == "" {
				if f != nil {
					t.Errorf("finding %+v", f)
				}
				return
			}
			if f == nil || f.Severity != tt.severity || !strings.Contains(f.Title, tt.title) || (f.Remedy == "") != (tt.remedy == "") || !strings.Contains(f.Remedy, tt.remedy) {
				t.Fatalf("finding %+v", f)
			}
			if strings.Contains(fmt.Sprint(f), secret) {
				t.Error("the finding contains the login")
			}
			for _, want := range []string{"the step `charts` of an upgrade", "upgrade execute --helm", "machines that exist keep"} {
				if !strings.Contains(f.Detail, want) {
					t.Errorf("detail %q lacks %q", f.Detail, want)
				}
			}
		})
	}
}

// registry writes a registry with its login into the configuration.
func (s *checkStage) registry(r registry.Registry) {
	s.Helper()
	if r.Address == "" {
		return
	}
	text := "registry:\n  address: " + r.Address + "\n"
	if r.Username != "" {
		text += "  pullSecret: registry.json\n"
		auth := base64.StdEncoding.EncodeToString([]byte(r.Username + ":" + r.Password))
		s.write("registry.json", `{"auths":{"`+r.Host()+`":{"auth":"`+auth+`"}}}`)
		if err := os.Chmod(filepath.Join(s.dir, "registry.json"), 0o600); err != nil {
			s.Fatal(err)
		}
	}
	if r.CABundle != "" {
		text += "  caBundle: |\n"
		for line := range strings.Lines(r.CABundle) {
			text += "    " + line
		}
	}
	s.write(workspace.ConfigFile, s.read(workspace.ConfigFile)+text)
}

// registryFinding checks, and returns the finding about the registry; nil without one.
func (s *checkStage) registryFinding(t *testing.T) *plan.Finding {
	t.Helper()
	c, _, err := s.check(check.Request{})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(c.Findings, func(f plan.Finding) bool { return f.ID == "registry" })
	if i < 0 {
		return nil
	}
	return &c.Findings[i]
}

// A login that cannot be read blocks. A Secret that cannot be read is not checked, unless there is nothing to compare it with.
func TestCheckReportsAnUnreadableRegistry(t *testing.T) {
	r := registry.Registry{Address: "one.example.com/mirror", Username: "robot", Password: "correct-horse"}
	s := newCheckStage(t)
	s.registry(r)
	if err := os.Chmod(filepath.Join(s.dir, "registry.json"), 0o644); err != nil {
		t.Fatal(err)
	}
	if f := s.registryFinding(t); f == nil || f.Severity != plan.Block || !strings.HasPrefix(f.Remedy, "chmod 0600 ") {
		t.Errorf("finding %+v", f)
	}
	for _, tt := range []struct {
		err  error
		r    registry.Registry
		want plan.Severity
	}{
		{err: cluster.ErrForbidden, r: r, want: plan.NotChecked},
		{err: cluster.ErrForbidden, r: registry.Registry{}, want: ""},
		{err: cluster.ErrUnreachable, r: registry.Registry{}, want: plan.NotChecked},
	} {
		s := newCheckStage(t)
		s.registry(tt.r)
		s.cluster.OnCall(func(call string) error {
			if call == "Registry" {
				return tt.err
			}
			return nil
		})
		if f := s.registryFinding(t); (f == nil) != (tt.want == "") || f != nil && f.Severity != tt.want {
			t.Errorf("%v: finding %+v", tt.err, f)
		}
	}
}
