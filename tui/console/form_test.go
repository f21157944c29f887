package console

import (
	"path/filepath"
	"testing"
)

func TestPathsOfForms(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	key := filepath.Join(home, ".ssh", "id_ed25519")
	for _, tt := range []struct{ value, want string }{
		{"", ""}, {" ~/.ssh/id_ed25519 ", key}, {"~", home}, {"/root/~/id", "/root/~/id"}, {"~other/id", "~other/id"}, {"id", "id"},
	} {
		f := &form{fields: []formField{{key: "--key", value: tt.value}}}
		if got := loginOf(f).Key; got != tt.want {
			t.Errorf("%q is %q, want %q", tt.value, got, tt.want)
		}
	}
	f := &form{fields: []formField{{key: wayKey, value: BySSH}, {key: "--packages", value: "~/packages"}, {key: "--tpm-roots", value: "~/roots"}, {key: "--programs", value: "~/programs"}}}
	n := (&machineAddScreen{form: f}).wanted()
	if n.Packages != filepath.Join(home, "packages") || n.TPMRoots != filepath.Join(home, "roots") || n.Programs != filepath.Join(home, "programs") {
		t.Errorf("folders %q, %q, %q", n.Packages, n.TPMRoots, n.Programs)
	}
}
