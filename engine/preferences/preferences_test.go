package preferences

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
)

func envOf(dir string) func(string) string {
	return func(k string) string { return map[string]string{"XDG_CONFIG_HOME": dir}[k] }
}

func TestParse(t *testing.T) {
	p, err := Parse([]byte("# mine\ntheme: light\nguards:\n- context: prod-*\n- context: \"*live*\"\n- {server: \"https://api.example:6443/\"}\nlimits: {answer: 3s}\n"))
	if err != nil || p.Theme != ThemeLight || time.Duration(p.Limits.Answer) != 3*time.Second || p.Limits.Parallel != Default().Limits.Parallel {
		t.Fatalf("%+v, %v", p, err)
	}
	for _, tt := range []struct {
		name, server string
		want         bool
	}{
		{name: "prod-eu", server: "", want: true},
		{name: "staging", server: "", want: false},
		{name: "staging", server: "https://API.example:6443", want: true},
		{name: "eu-prod-1", server: "https://x", want: false},
		{name: "arn:aws:eks:eu-west-1:1:cluster/live", server: "", want: true},
		{name: "default/api-live:6443/admin", server: "", want: true},
		{name: "prod-a/b", server: "", want: true},
	} {
		if got := p.Guarded(tt.name, tt.server); got != tt.want {
			t.Errorf("guarded %s %s: %v", tt.name, tt.server, got)
		}
	}
	if p, err := Parse(nil); err != nil || !reflect.DeepEqual(p, Default()) {
		t.Errorf("an empty file: %+v, %v", p, err)
	}
}

// Each mistake is refused with the name of the field.
func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"theme: light\nthemes: x":           `line 2: unknown field "themes", want guards, limits, recent, theme or updateNotice`,
		"limits: {anwser: 1s}":              `line 1: unknown field "limits.anwser"`,
		"guards: [{context: a, name: b}]":   `unknown field "guards[0].name", want context or server`,
		"theme: pink":                       `theme is "pink", want auto, dark, light or mono`,
		"guards: [{}]":                      "guards[0]: want either context or server",
		"guards: [{context: '[a'}]":         `guards[0].context: pattern "[a" is not valid`,
		"guards: prod":                      "line 1: guards: want a list",
		"limits: {answer: 1h}":              "limits.answer is 1h0m0s, want 100ms to 30s",
		"limits: {answer: soon}":            "want a time such as 1.5s",
		"limits: {parallel: 0}":             "limits.parallel is 0, want 1 to 256",
		"updateNotice: never":               "cannot unmarshal",
		"- a":                               "line 1: the file: want fields and values",
		"theme: [":                          "line 1",
		"recent: [{context: a, opened: b}]": "cannot parse",
	} {
		if _, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

// Every field of the file is listed, and every listed field is one of the file.
func TestFieldsAreComplete(t *testing.T) {
	var names []string
	for _, f := range Default().Fields() {
		names = append(names, f.Name)
		if f.About == "" {
			t.Errorf("%s has no description", f.Name)
		}
	}
	var want []string
	for name, sub := range shape {
		if _, list := sub["[]"]; sub == nil || list {
			want = append(want, name)
			continue
		}
		for s := range sub {
			want = append(want, name+"."+s)
		}
	}
	if len(names) != len(want) {
		t.Errorf("fields %q, want %q", names, want)
	}
	for _, w := range want {
		if !strings.Contains("\n"+strings.Join(names, "\n")+"\n", "\n"+w+"\n") {
			t.Errorf("%s is not listed", w)
		}
	}
}

func TestOpened(t *testing.T) {
	dir := t.TempDir()
	env := envOf(dir)
	now := time.Date(2026, 11, 24, 1, 2, 3, 4, time.UTC)
	if err := Opened(env, "a", now); err != nil { // there is no file
		t.Fatal(err)
	}
	file := filepath.Join(dir, "constellation", "preferences.yaml")
	text := "# my preferences\ntheme: dark # at night\nlimits: {recent: 2}\n"
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b", "c", "b"} {
		if err := Opened(env, name, now); err != nil {
			t.Fatal(err)
		}
	}
	p, err := Read(env)
	if err != nil || len(p.Recent) != 2 || p.Recent[0].Context != "b" || p.Recent[1].Context != "c" || p.Theme != ThemeDark {
		t.Errorf("%+v, %v", p, err)
	}
	b, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(b), "# my preferences") || !strings.Contains(string(b), "# at night") {
		t.Errorf("comments are lost: %s, %v", b, err)
	}
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if st, err := os.Stat(filepath.Dir(file)); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("mode of the folder %v, %v", st.Mode(), err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "constellation", ".preferences-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if err := os.WriteFile(file, []byte("themes: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Opened(env, "a", now); err == nil || !strings.Contains(err.Error(), "themes") {
		t.Errorf("a file with an unknown field was replaced: %v", err)
	}
}

// A reader sees the whole file at any time.
func TestWriteIsAtomic(t *testing.T) {
	env := envOf(t.TempDir())
	var wg sync.WaitGroup
	for _, name := range []string{"a", "b"} {
		wg.Go(func() {
			for range 50 {
				if err := Opened(env, name, time.Now()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 200 {
		if p, err := Read(env); err != nil || len(p.Recent) > 2 {
			t.Errorf("%+v, %v", p, err)
		}
	}
	wg.Wait()
}
