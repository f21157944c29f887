package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// kubeconfigOf writes a kubeconfig with one context and returns its path.
func kubeconfigOf(t *testing.T, context, server, user string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config")
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: %[1]s
contexts: [{name: %[1]s, context: {cluster: c-%[1]s, user: u-%[1]s}}]
clusters: [{name: c-%[1]s, cluster: {server: %[2]s}}]
users: [{name: u-%[1]s, user: {%[3]s}}]
`, context, server, user)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSelect(t *testing.T) {
	a := kubeconfigOf(t, "a", "https://a.example", "token: sekret-a")
	b := kubeconfigOf(t, "b", "https://b.example", "exec: {apiVersion: client.authentication.k8s.io/v1, command: ./login, interactiveMode: Never}")
	t.Setenv("KUBECONFIG", a+string(os.PathListSeparator)+b)
	for _, tt := range []struct {
		access       cluster.Access
		context, has string
		not          string
	}{
		{access: cluster.Access{}, context: "a", has: "sekret-a", not: "login"},
		{access: cluster.Access{Context: "b"}, context: "b", has: "https://b.example", not: "sekret-a"}, // nothing of other contexts
		{access: cluster.Access{Context: "b", User: "u-a"}, context: "b", has: "sekret-a", not: "login"},
		{access: cluster.Access{As: "jane", AsGroups: []string{"ops"}}, context: "a", has: "as: jane", not: "login"},
		{access: cluster.Access{Kubeconfig: b}, context: "b", has: filepath.Join(filepath.Dir(b), "login"), not: "sekret-a"},
	} {
		got, err := Select(tt.access, "/bin/self")
		if err != nil {
			t.Fatalf("%+v: %v", tt.access, err)
		}
		if got.Context != tt.context || !strings.Contains(string(got.Kubeconfig), tt.has) || strings.Contains(string(got.Kubeconfig), tt.not) {
			t.Errorf("%+v: context %s\n%s", tt.access, got.Context, got.Kubeconfig)
		}
	}
}

// TestTwoClustersWithOneName selects a context that two files of KUBECONFIG have.
func TestTwoClustersWithOneName(t *testing.T) {
	a := kubeconfigOf(t, "admin@kubernetes", "https://a.example", "token: sekret-a")
	b := kubeconfigOf(t, "admin@kubernetes", "https://b.example", "token: sekret-b")
	same := kubeconfigOf(t, "admin@kubernetes", "https://a.example", "token: sekret-a")
	for _, tt := range []struct {
		name, files string
		access      cluster.Access
		server      string
		note        []string
	}{
		{name: "the first file", files: a + string(os.PathListSeparator) + b, access: cluster.Access{}, server: "https://a.example", note: []string{b, "https://b.example", "--kubeconfig"}},
		{name: "the other order", files: b + string(os.PathListSeparator) + a, access: cluster.Access{}, server: "https://b.example", note: []string{a, "https://a.example"}},
		{name: "a file that is named", files: a + string(os.PathListSeparator) + b, access: cluster.Access{Kubeconfig: b}, server: "https://b.example"},
		{name: "one cluster twice", files: a + string(os.PathListSeparator) + same, access: cluster.Access{}, server: "https://a.example"},
		{name: "a file that does not exist", files: a + string(os.PathListSeparator) + b + "-none", access: cluster.Access{}, server: "https://a.example"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("KUBECONFIG", tt.files)
			got, err := Select(tt.access, "")
			if err != nil || got.Server != tt.server || (got.Note == "") != (tt.note == nil) {
				t.Fatalf("%s, note %q, %v", got.Server, got.Note, err)
			}
			for _, w := range tt.note {
				if !strings.Contains(got.Note, w) {
					t.Errorf("the note has no %q: %s", w, got.Note)
				}
			}
			if strings.Contains(got.Note, "sekret") {
				t.Errorf("a secret in %q", got.Note)
			}
		})
	}
}

// TestCredentialsThatExpired checks a cluster whose credential plugin fails, and one whose plugin
// returns a credential that the API server rejects.
func TestCredentialsThatExpired(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusUnauthorized)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Unauthorized","message":"the token sekret has expired","code":401}`)
	}))
	defer s.Close()
	const old = `{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"sekret","expirationTimestamp":"2020-01-01T00:00:00Z"}}`
	for name, script := range map[string]string{"the plugin fails": "echo session expired >&2; exit 3", "the token has expired": "cat <<E\n" + old + "\nE\n"} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "login")
			if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o700); err != nil {
				t.Fatal(err)
			}
			user := fmt.Sprintf("exec: {apiVersion: client.authentication.k8s.io/v1, command: %s, interactiveMode: Never}", path)
			sel, err := Select(cluster.Access{Kubeconfig: kubeconfigOf(t, "x", s.URL, user)}, "")
			if err != nil {
				t.Fatal(err)
			}
			for verb, err := range map[string]error{
				"check": func() error {
					_, err := Clusters{}.Check(t.Context(), sel, 0, check.ForeignRequest{}, func(plan.Event) {})
					return err
				}(),
				"backup": Clusters{}.Reach(t.Context(), sel),
			} {
				if err == nil || !strings.Contains(plan.Remedy(err), "log in again") || strings.Contains(err.Error(), "does not answer") || plan.ExitCode(err) != plan.ExitFailed {
					t.Errorf("%s: exit %d, %v, remedy %q", verb, plan.ExitCode(err), err, plan.Remedy(err))
				}
			}
		})
	}
}

// TestSilentServerIsAskedOnce checks that the limit of one request is that of the first answer.
func TestSilentServerIsAskedOnce(t *testing.T) {
	var asked atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		<-r.Context().Done()
	}))
	defer s.Close()
	sel, err := Select(cluster.Access{Kubeconfig: kubeconfigOf(t, "x", s.URL, "token: abc"), RequestTimeout: 200 * time.Millisecond}, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := (Clusters{}).Reach(t.Context(), sel); err == nil || asked.Load() != 1 {
		t.Errorf("%d requests: %v", asked.Load(), err)
	}
}

// TestVersionIsReadTwiceAfterASlowPlugin queries a server that never answers: a second time only if
// a credential plugin may have taken the time of the first request.
func TestVersionIsReadTwiceAfterASlowPlugin(t *testing.T) {
	var asked atomic.Int32
	s := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		<-r.Context().Done()
	}))
	defer s.Close()
	login := filepath.Join(t.TempDir(), "login")
	const credential = `{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"abc"}}`
	if err := os.WriteFile(login, []byte("#!/bin/sh\ncat <<E\n"+credential+"\nE\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	for user, want := range map[string]int32{
		"token: abc": 1,
		fmt.Sprintf("exec: {apiVersion: client.authentication.k8s.io/v1, command: %s, interactiveMode: Never}", login): 2,
	} {
		text, err := os.ReadFile(kubeconfigOf(t, "x", s.URL, user))
		if err != nil {
			t.Fatal(err)
		}
		text = bytes.Replace(text, []byte("{server:"), []byte("{insecure-skip-tls-verify: true, server:"), 1)
		asked.Store(0)
		c, err := ConnectIn(cluster.WithRequestTimeout(t.Context(), 300*time.Millisecond), text, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Version(t.Context()); !errors.Is(err, cluster.ErrUnreachable) || asked.Load() != want {
			t.Errorf("%s: %d requests, want %d: %v", user, asked.Load(), want, err)
		}
	}
}

func TestSelectRefuses(t *testing.T) {
	good := kubeconfigOf(t, "prod", "https://a.example", "token: sekret")
	bad := filepath.Join(t.TempDir(), "bad")
	if err := os.WriteFile(bad, []byte("users: [{token: sekret"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "absent"))
	for _, tt := range []struct {
		access cluster.Access
		want   string
	}{
		{cluster.Access{}, "find a cluster: no context in"},
		{cluster.Access{Kubeconfig: filepath.Join(t.TempDir(), "nofile")}, "nofile: no such file"},
		{cluster.Access{Kubeconfig: bad}, "it is not a valid kubeconfig"},
		{cluster.Access{Kubeconfig: good, Context: "prid"}, `select context "prid"`},
		{cluster.Access{Kubeconfig: good, ClusterName: "x"}, `no cluster "x"`},
		{cluster.Access{Kubeconfig: good, User: "x"}, `no user "x"`},
	} {
		_, err := Select(tt.access, "")
		if err == nil || !strings.Contains(err.Error(), tt.want) || plan.ExitCode(err) != plan.ExitUsage || plan.Remedy(err) == "" {
			t.Errorf("%+v: error %v, exit %d, remedy %q, want %q", tt.access, err, plan.ExitCode(err), plan.Remedy(err), tt.want)
		}
		if err != nil && strings.Contains(err.Error()+plan.Remedy(err), "sekret") {
			t.Errorf("%+v: the error has a secret: %v", tt.access, err)
		}
		if tt.access.Context == "prid" && err != nil && !strings.Contains(plan.Remedy(err), "prod") {
			t.Errorf("the remedy does not name the contexts: %q", plan.Remedy(err))
		}
	}
}

func TestCredentialPlugin(t *testing.T) {
	run := func(limit string, args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		code := RunCredentialPlugin(args, limit, nil, &out, &errs)
		return code, out.String(), errs.String()
	}
	if code, out, errs := run("", "--", "/bin/sh", "-c", `echo '{"a":1}'; printf '\033]0;evil\007warn\n' >&2`); code != 0 || out != "{\"a\":1}\n" || errs != `\x1b]0;evil\awarn`+"\n" {
		t.Errorf("exit %d, stdout %q, stderr %q", code, out, errs)
	}
	if code, _, errs := run("", "--", "/bin/sh", "-c", "printf 'caf\303\251: Password: ' >&2"); code != 0 || errs != "café: Password: " {
		t.Errorf("a prompt: exit %d, stderr %q", code, errs)
	}
	if code, _, _ := run("", "--", "/bin/sh", "-c", "exit 3"); code != 3 {
		t.Errorf("exit %d, want the plugin's 3", code)
	}
	start := time.Now()
	code, _, errs := run("200ms", "--", "/bin/sh", "-c", "sleep 60; true") // its child keeps stderr open
	if code != 1 || !strings.Contains(errs, "no answer within 200ms") || time.Since(start) > 10*time.Second {
		t.Errorf("a plugin that hangs: exit %d after %s, %q", code, time.Since(start), errs)
	}
	if code, _, errs := run("", "--", "/nonexistent/login"); code != 1 || !strings.Contains(errs, "/nonexistent/login") {
		t.Errorf("a plugin that does not exist: exit %d, %q", code, errs)
	}
}

// TestCheckOfTroubledServers runs a whole check against API servers in trouble. These are
// simulated: a real one cannot be made to answer so.
func TestCheckOfTroubledServers(t *testing.T) {
	version := func(w http.ResponseWriter) { fmt.Fprint(w, `{"gitVersion":"v1.35.4"}`) }
	status := func(w http.ResponseWriter, code int, reason, message string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message, "code": code})
	}
	forbid := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/version" {
			version(w)
			return
		}
		status(w, http.StatusForbidden, "Forbidden", "pods is forbidden: User \"x\" cannot list")
	}
	for _, tt := range []struct {
		name    string
		serve   http.HandlerFunc
		err     string
		finding string
	}{
		{name: "forbids everything", serve: forbid, finding: "missing-rights"},
		{name: "rejects the credentials", serve: func(w http.ResponseWriter, _ *http.Request) {
			status(w, http.StatusUnauthorized, "Unauthorized", "Unauthorized")
		}, err: "denied by the API server"},
		{name: "half dead", serve: func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/version" {
				version(w)
				return
			}
			status(w, http.StatusServiceUnavailable, "ServiceUnavailable", "etcd is gone")
		}, finding: "nodes-unread"},
		{name: "slow, and forbids everything", serve: func(w http.ResponseWriter, r *http.Request) {
			select {
			case <-time.After(100 * time.Millisecond):
			case <-r.Context().Done():
			}
			forbid(w, r)
		}, finding: "missing-rights"},
		{name: "hangs", serve: func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, err: "does not answer"},
		{name: "is another program", serve: func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") }, err: "read version"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := httptest.NewServer(tt.serve)
			defer s.Close()
			sel, err := Select(cluster.Access{Kubeconfig: kubeconfigOf(t, "x", s.URL, "token: abc")}, "")
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
			defer cancel()
			k, err := Clusters{}.Check(ctx, sel, time.Second, check.ForeignRequest{}, func(plan.Event) {})
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || plan.Remedy(err) == "" {
					t.Fatalf("error %v, remedy %q, want %q", err, plan.Remedy(err), tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			unread, missing := 0, false
			for _, f := range k.Findings() {
				if f.Severity == plan.NotChecked {
					unread++
				}
				missing = missing || f.ID == tt.finding
			}
			if unread < 20 {
				t.Errorf("%d checks are not checked, want most: what could not be read is not ok", unread)
			}
			if tt.finding == "missing-rights" && (!missing || !strings.Contains(k.MissingRules, `resources: ["daemonsets"`)) {
				t.Errorf("missing rights are not listed:\n%s", k.MissingRules)
			}
		})
	}
}
