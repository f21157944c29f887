package tui

import (
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/workspace"
	"constellation/tui/internal/enginefake"
)

// TestSetupWritesConfigurations writes what the console asks for, and reads it as every verb does.
func TestSetupWritesConfigurations(t *testing.T) {
	for _, tt := range []struct {
		name, provider string
		section        section.Values
		machines       bool
		want           func(section.Values) bool
	}{
		{name: "machines with a balancer", provider: "enrolled", section: section.Values{"endpoint": "10.0.0.10", "balancer": section.Values{"address": "10.0.0.10"}}, machines: true, want: func(v section.Values) bool {
			return v.Text("endpoint") == "10.0.0.10" && v.Map("balancer").Text("address") == "10.0.0.10"
		}},
		{name: "machines without one", provider: "enrolled", section: section.Values{"endpoint": "api.example.com"}, machines: true, want: func(v section.Values) bool {
			return v.Text("endpoint") == "api.example.com" && v.Map("balancer") == nil
		}},
		{name: "Google Cloud", provider: "gcp", section: section.Values{"project": "ours-42", "zones": []string{"europe-west3-a", "europe-west3-b"}, "serviceAccount": "", "workerServiceAccount": "w@ours-42.iam.gserviceaccount.com"}, machines: false, want: func(v section.Values) bool {
			return v.Text("project") == "ours-42" && slices.Equal(v.List("zones"), []string{"europe-west3-a", "europe-west3-b"}) && v.Text("serviceAccount") == "" && v.Text("workerServiceAccount") == "w@ours-42.iam.gserviceaccount.com"
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			s := &session{dir: dir, log: slog.New(slog.NewTextHandler(io.Discard, nil))}
			ws, err := workspace.OpenWorkspace(dir)
			if err != nil {
				t.Fatal(err)
			}
			_, m, err := consoleSetup(s, &enginefake.Engine{}, ws).Write(tt.provider, workspace.GenerateOptions{Name: "demo", Section: tt.section})
			if err != nil {
				t.Fatal(err)
			}
			if (m != nil) != tt.machines {
				t.Errorf("it has a list of machines: %t", m != nil)
			}
			b, err := os.ReadFile(filepath.Join(dir, "constellation-conf.yaml"))
			if err != nil {
				t.Fatal(err)
			}
			c, err := workspace.ParseConfig(b)
			list, ok := workspace.AsConfigErrors(err)
			if err != nil && !ok {
				t.Fatal(err)
			}
			if ok && slices.ContainsFunc(list.Errors, func(e workspace.FieldError) bool { return !strings.HasPrefix(e.Field, "attestation.") }) {
				t.Fatal(err)
			}
			if c != nil && !tt.want(c.Provider.Section) {
				t.Errorf("the section is %v", c.Provider.Section)
			}
			if c == nil && !strings.Contains(string(b), "project: ours-42") {
				t.Errorf("the file is\n%s", b)
			}
		})
	}
}

func TestSetupFindsTheLoginOfGcloud(t *testing.T) {
	home := t.TempDir()
	dir := filepath.Join(home, ".config", "gcloud")
	t.Setenv("HOME", home)
	for _, name := range []string{"GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT", "CLOUDSDK_COMPUTE_ZONE", "CLOUDSDK_COMPUTE_REGION", "CLOUDSDK_ACTIVE_CONFIG_NAME"} {
		t.Setenv(name, "")
	}
	find := func() providers.Found {
		return consoleSetup(&session{}, nil, nil).Find("gcp")
	}
	if f := find(); f.Credentials != "" || f.Err == nil || len(f.Config) != 0 {
		t.Errorf("an empty folder: %+v", f)
	}
	for name, text := range map[string]string{
		"active_config":                        "work\n",
		"configurations/config_work":           "[core]\naccount = ops@example.com\nproject = ours-42\n\n[compute]\nregion = europe-west3\n",
		"application_default_credentials.json": `{"type": "authorized_user", "client_id": "a", "client_secret": "canary-1", "refresh_token": "canary-2"}`,
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := find()
	if f.Err != nil || !strings.Contains(f.Credentials, "ops@example.com") || strings.Contains(f.Credentials, "canary") || f.Config.Text("project") != "ours-42" || f.Config.Text("zones") != "europe-west3-a" || f.Config.Text("serviceAccount") != "control-plane@ours-42.iam.gserviceaccount.com" {
		t.Errorf("found %+v, %v", f, f.Err)
	}
	t.Setenv("GOOGLE_CLOUD_PROJECT", "other-7")
	if f := find(); f.Config.Text("project") != "other-7" {
		t.Errorf("the environment does not win: %+v", f)
	}
	if err := os.WriteFile(filepath.Join(dir, "application_default_credentials.json"), []byte(`{"type": "service_account", "private_key": "canary-3", "client_email": "x@y.iam.gserviceaccount.com"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if f := find(); f.Err == nil || strings.Contains(f.Err.Error(), "canary") {
		t.Errorf("a key that does not expire: %v", f.Err)
	}
}
