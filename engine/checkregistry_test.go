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
		{"added", registry.Registry{}, one, plan.Info, "the cluster pulls images from their publishers, and constellation-conf.yaml", ""},
		{"added with a login", registry.Registry{}, login, plan.Warn, "names the registry one.example.com/mirror", "have machines in place replaced before"},
		{"added with authorities", registry.Registry{}, trusted, plan.Warn, "from their publishers", "/etc/containerd/certs.d/one.example.com of each machine"},
		{"moved", one, registry.Registry{Address: "two.example.com"}, plan.Info, "the cluster pulls images from one.example.com/mirror, and constellation-conf.yaml", ""},
		{"moved with the same login", login, registry.Registry{Address: "two.example.com", Username: "robot", Password: secret}, plan.Warn, "names the registry two.example.com", "have machines in place replaced"},
		{"another login", login, registry.Registry{Address: one.Address, Username: "robot", Password: "battery-staple"}, plan.Warn, "and the cluster differ in login of the registry one.example.com/mirror", "keep the old login valid until all machines are replaced"},
		{"no login any more", login, one, plan.Info, "differ in login of", ""},
		{"another login and authorities", login, trusted, plan.Warn, "differ in login and authorities of", "add the authorities"},
		{"authorities removed", trusted, one, plan.Warn, "differ in authorities of", "use a certificate that the machines of the cluster trust"},
		{"removed", login, registry.Registry{}, plan.Warn, "the cluster pulls images from one.example.com/mirror, and constellation-conf.yaml names no registry", "keep one.example.com/mirror until all machines are replaced"},
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
		{cluster.ErrForbidden, r, plan.NotChecked},
		{cluster.ErrForbidden, registry.Registry{}, ""},
		{cluster.ErrUnreachable, registry.Registry{}, plan.NotChecked},
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
