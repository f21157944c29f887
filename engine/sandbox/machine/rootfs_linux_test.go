package machine

import "testing"

// TestTextsOfChangesStay keeps the keys of root file systems in the caches of users.
func TestTextsOfChangesStay(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change change
		want   string
	}{
		{name: "a file", change: newFile{"etc/fstab", []byte("none\n"), 0o644}, want: `"etc/fstab" "none\n" false "" false 644` + "\n"},
		{name: "an empty file", change: newFile{"etc/machine-id", []byte{}, 0o444}, want: `"etc/machine-id" "" false "" false 444` + "\n"},
		{name: "a link", change: newLink{"init", "/lib/systemd/systemd"}, want: `"init" "" true "/lib/systemd/systemd" false 0` + "\n"},
		{name: "a directory", change: newDir{"var/log", 0o755}, want: `"var/log" "" true "" true 755` + "\n"},
		{name: "a removed path", change: removed{"etc/hosts"}, want: `"etc/hosts" "" true "" false 0` + "\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.change.String(); got != tt.want {
				t.Errorf("text %q, want %q", got, tt.want)
			}
		})
	}
}
