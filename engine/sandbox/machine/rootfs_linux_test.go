package machine

import "testing"

// TestTextsOfChangesStay keeps the keys of root file systems in the caches of users.
func TestTextsOfChangesStay(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change change
		want   string
	}{
		{"a file", newFile{"etc/fstab", []byte("none\n"), 0o644}, `"etc/fstab" "none\n" false "" false 644` + "\n"},
		{"an empty file", newFile{"etc/machine-id", []byte{}, 0o444}, `"etc/machine-id" "" false "" false 444` + "\n"},
		{"a link", newLink{"init", "/lib/systemd/systemd"}, `"init" "" true "/lib/systemd/systemd" false 0` + "\n"},
		{"a directory", newDir{"var/log", 0o755}, `"var/log" "" true "" true 755` + "\n"},
		{"a removed path", removed{"etc/hosts"}, `"etc/hosts" "" true "" false 0` + "\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.change.String(); got != tt.want {
				t.Errorf("text %q, want %q", got, tt.want)
			}
		})
	}
}
