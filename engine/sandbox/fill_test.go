package sandbox

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/internal/testneeds"
)

func fillInfo(t *testing.T) workspace.SandboxInfo {
	info := testInfo(t, Dirs{State: t.TempDir()})
	info.Measurements = map[uint32]string{4: strings.Repeat("a4", 32), 9: strings.Repeat("a9", 32), 11: strings.Repeat("ab", 32)}
	return info
}

// generated returns what `config generate sandbox` writes before a sandbox exists.
func generated(t *testing.T, o workspace.GenerateOptions) string {
	t.Helper()
	b, err := workspace.GenerateConfig("sandbox", o)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestGeneratedConfigurationGetsWhatOnlyTheSandboxKnows(t *testing.T) {
	info := fillInfo(t)
	all := []string{"provider.sandbox.name", "attestation.tpm2.measurements", "attestation.tpm2.trustRoots"}
	pem := firstOfPEM(info.TrustRoots)
	for _, tt := range []struct {
		name    string
		edit    func(string) string
		filled  []string
		differs []string
		keeps   []string
	}{
		{name: "as it was generated", edit: func(s string) string { return s }, filled: all, keeps: []string{"# Name of the cluster", "name: shop", "count: 3", "# releases:"}},
		{name: "with comments of the user's", edit: func(s string) string {
			return strings.Replace(strings.Replace(s, `trustRoots: ""`, `trustRoots: "" # ask Ann`, 1), "name: shop", "name: shop # mine", 1)
		}, filled: all, keeps: []string{"# ask Ann", "name: shop # mine"}},
		{name: "with the line ends of Windows", edit: func(s string) string { return strings.ReplaceAll(s, "\n", "\r\n") }, filled: all, keeps: []string{"name: shop\r\n", "-----END CERTIFICATE-----\r\n"}},
		{name: "without a register", edit: func(s string) string { return cutLines(s, "      9:\n", 3) }, filled: all, keeps: []string{strings.Repeat("a9", 32)}},
		{name: "with a register that the sandbox has not", edit: func(s string) string {
			return strings.Replace(s, "      11:\n", "      10:\n        expected: \""+strings.Repeat("1234", 16)+"\"\n        warnOnly: false\n      11:\n", 1)
		}, filled: all},
		{name: "with a register of the user's own", edit: func(s string) string {
			return strings.Replace(s, strings.Repeat("1234", 16), strings.Repeat("77", 32), 1)
		}, filled: all, differs: []string{"attestation.tpm2.measurements.4.expected"}, keeps: []string{strings.Repeat("77", 32)}},
		{name: "with all values of the user's own", edit: func(string) string {
			other := fillInfo(t) // of another certificate authority
			other.Name, other.Measurements[9] = "other", strings.Repeat("99", 32)
			return generated(t, workspace.GenerateOptions{Name: "shop", Sandbox: &other})
		}, differs: []string{"provider.sandbox.name", "attestation.tpm2.measurements.9.expected", "attestation.tpm2.trustRoots"}},
		{name: "of the sandbox", edit: func(string) string { return generated(t, workspace.GenerateOptions{Name: "shop", Sandbox: &info}) }, keeps: []string{pem}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := tt.edit(generated(t, workspace.GenerateOptions{Name: "shop", ControlPlanes: 3}))
			dir := t.TempDir()
			file := filepath.Join(dir, workspace.ConfigFile)
			if err := os.WriteFile(file, []byte(before), 0o640); err != nil {
				t.Fatal(err)
			}
			ws, err := workspace.OpenWorkspace(dir)
			if err != nil {
				t.Fatal(err)
			}
			if err := ws.CheckForSandbox(workspace.SandboxInfo{Name: info.Name}); err != nil {
				t.Errorf("refused before there is a sandbox: %v", err)
			}
			filled, differs, err := ws.FillConfig(info)
			if err != nil || !slices.Equal(filled, tt.filled) || !slices.Equal(differs, tt.differs) {
				t.Errorf("filled %q, differs %q, %v; want %q, %q", filled, differs, err, tt.filled, tt.differs)
			}
			after, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, k := range tt.keeps {
				if !strings.Contains(string(after), k) {
					t.Errorf("no %q in\n%s", k, after)
				}
			}
			if len(tt.filled) == 0 && string(after) != before {
				t.Error("it was changed")
			}
			if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o640 {
				t.Errorf("mode %v, %v", st.Mode(), err)
			}
			c, err := ws.Config()
			if err != nil {
				t.Fatal(err)
			}
			if len(tt.differs) == 0 {
				got := map[uint32]string{}
				for r, m := range c.Attestation.TPM2.Measurements {
					got[r] = string(m.Expected)
				}
				want := map[uint32]string{4: strings.Repeat("\xa4", 32), 9: strings.Repeat("\xa9", 32), 11: strings.Repeat("\xab", 32)}
				if !maps.Equal(got, want) || c.Provider.Section.Text("name") != info.Name || strings.TrimSpace(c.Attestation.TPM2.TrustRoots) != strings.TrimSpace(info.TrustRoots) {
					t.Errorf("got %+v", c)
				}
			}
			if filled, _, err := ws.FillConfig(info); err != nil || len(filled) != 0 {
				t.Errorf("again: filled %q, %v", filled, err)
			}
		})
	}
}

// firstOfPEM is the first line of base64 of a certificate.
func firstOfPEM(pem string) string { return strings.Split(pem, "\n")[1] }

// cutLines removes n lines from the one that begins at from.
func cutLines(s, from string, n int) string {
	head, tail, _ := strings.Cut(s, from)
	lines := strings.SplitAfter(from+tail, "\n")
	return head + strings.Join(lines[n:], "")
}

func TestFilesThatCannotBeUsedAreRefusedBeforeMachinesAreMade(t *testing.T) {
	info := fillInfo(t)
	for name, tt := range map[string]struct {
		prepare func(t *testing.T, dir string)
		want    string
	}{
		"a configuration that is a directory": {func(t *testing.T, dir string) { must(t, os.Mkdir(filepath.Join(dir, workspace.ConfigFile), 0o755)) }, "it is a directory, want a file"},
		"a configuration that is no YAML": {func(t *testing.T, dir string) {
			must(t, os.WriteFile(filepath.Join(dir, workspace.ConfigFile), []byte("a: [\n"), 0o644))
		}, "is not YAML"},
		"an unknown key beside placeholders": {func(t *testing.T, dir string) {
			must(t, os.WriteFile(filepath.Join(dir, workspace.ConfigFile), []byte(generated(t, workspace.GenerateOptions{})+"colour: red\n"), 0o644))
		}, "colour"},
		"a state that is no JSON or YAML": {func(t *testing.T, dir string) {
			must(t, os.WriteFile(filepath.Join(dir, workspace.StateFile), []byte("{"), 0o600))
		}, workspace.StateFile},
		"a state of a sandbox that is gone": {func(t *testing.T, dir string) {
			ws, err := workspace.OpenWorkspace(dir)
			must(t, err)
			_, err = ws.AdoptSandbox(info)
			must(t, err)
		}, "earlier sandbox"},
		"a master secret without a state": {func(t *testing.T, dir string) {
			must(t, os.WriteFile(filepath.Join(dir, workspace.MasterSecretFile), []byte("{}"), 0o600))
		}, "of another cluster would get mixed up"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			tt.prepare(t, dir)
			dirs := Dirs{Cache: filepath.Join(t.TempDir(), "cache"), State: filepath.Join(t.TempDir(), "state")}
			testneeds.Root(t, "to start a sandbox")
			_, err := New(dirs, "", discard()).Up(t.Context(), engine.SandboxSpec{Workspace: dir, Name: info.Name}, nil)
			if err == nil || !strings.Contains(err.Error(), tt.want) || plan.Remedy(err) == "" || plan.ExitCode(err) != plan.ExitUsage {
				t.Errorf("got %v (exit %d, remedy %q), want %q", err, plan.ExitCode(err), plan.Remedy(err), tt.want)
			}
			for _, d := range []string{dirs.Cache, dirs.State} {
				if _, err := os.Lstat(d); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s was made", d)
				}
			}
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
