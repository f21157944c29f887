//go:build linux

package kubeadm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"constellation/engine/version"
	"constellation/internal/testneeds"
)

// scriptEnv makes the test binary behave as a kubeadm; its value says which.
const scriptEnv = "TEST_KUBEADM"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == GateArgument {
		Gate()
	}
	if s := os.Getenv(scriptEnv); s != "" {
		os.Exit(scripted(s))
	}
	os.Exit(m.Run())
}

func scripted(script string) int {
	var config string
	for _, a := range os.Args {
		if f, ok := strings.CutPrefix(a, "--config="); ok {
			b, err := os.ReadFile(f)
			if err != nil {
				fmt.Println("error: ", err)
				return 9
			}
			config = string(b)
			for _, p := range []string{f, filepath.Dir(f)} {
				if i, err := os.Stat(p); err != nil || i.Mode().Perm()&0o077 != 0 {
					fmt.Printf("error: %s is %s\n", p, i.Mode())
					return 9
				}
			}
		}
	}
	switch script {
	case "good":
		fmt.Println("[init] Using Kubernetes version: v1.35.4")
		fmt.Fprintln(os.Stderr, "\t[WARNING Service-Kubelet]: kubelet service is not enabled")
		fmt.Println("\x1b[1m[certs]\x1b[0m Generating \"ca\" certificate and key\r")
		fmt.Println("I1121 10:00:00.000000     123 checks.go:43] looking")
		fmt.Println("")
		fmt.Print("[kubelet-start] no newline at the end")
	case "args":
		fmt.Println(strings.Join(os.Args[1:], " "))
	case "leak":
		// Whatever kubeadm would say: the configuration, a join command, an error.
		fmt.Println(config)
		fmt.Println("kubeadm join 10.42.0.1:6443 --token zyxwvu.9876543210zyxwvu --certificate-key " + strings.Repeat("ab", 32))
		fmt.Fprintln(os.Stderr, "error execution phase preflight: token \""+joinToken+"\" is not known")
		return 1
	case "preflight":
		fmt.Fprintln(os.Stderr, "error execution phase preflight: [preflight] Some fatal errors occurred:")
		fmt.Fprintln(os.Stderr, "\t[ERROR Port-6443]: Port 6443 is in use")
		fmt.Fprintln(os.Stderr, "[preflight] If you know what you are doing, you can make a check non-fatal")
		fmt.Fprintln(os.Stderr, "To see the stack trace of this error execute with --v=5 or higher")
		return 2
	case "flood":
		for i := range 3000 {
			fmt.Println(i, strings.Repeat("x", 100))
		}
		fmt.Println(strings.Repeat("long ", 1<<20))
	case "version":
		fmt.Println("v1.35.4")
	case "hang":
		c := exec.Command("sleep", "300") // a grandchild that holds the output open
		c.Stdout = os.Stdout
		if err := c.Start(); err != nil {
			return 8
		}
		fmt.Println("pids", os.Getpid(), c.Process.Pid)
		time.Sleep(5 * time.Minute)
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("pids", os.Getpid(), os.Getpid())
		time.Sleep(5 * time.Minute)
	case "spell": // starts a kubeadm that outlives it, and prints its process ID
		os.Setenv(scriptEnv, "slow")
		d := Detached{Path: os.Args[0], Dir: os.Args[1]}
		if _, err := d.Start(UpgradeNode, Config{Upgrade: &UpgradeConfiguration{}}, func(p Process) error {
			return json.NewEncoder(os.Stdout).Encode(p)
		}); err != nil {
			fmt.Println(err)
			return 1
		}
	case "slow": // goes on when the test says so
		fmt.Println("[upgrade] one")
		dir := ""
		for _, a := range os.Args {
			if f, ok := strings.CutPrefix(a, "--config="); ok {
				dir = filepath.Dir(f)
			}
		}
		for _, err := os.Stat(filepath.Join(dir, "go")); err != nil; _, err = os.Stat(filepath.Join(dir, "go")) {
			time.Sleep(5 * time.Millisecond)
		}
		fmt.Println("[upgrade] two")
	case "parent": // a caller of kubeadm that is killed
		os.Setenv(scriptEnv, "hang")
		Runner{Path: os.Args[0], Dir: os.TempDir()}.Reset(context.Background(), func(l Line) { fmt.Println(l.Text) })
	}
	return 0
}

// runner runs the test binary as kubeadm with a script.
func runner(t *testing.T, script string) Runner {
	t.Helper()
	t.Setenv(scriptEnv, script)
	return Runner{Path: os.Args[0], Dir: t.TempDir()}
}

func initConfig(t *testing.T) Config {
	t.Helper()
	c, err := NewInit(exampleCluster("v1.35.4"), exampleNode())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestLinesArriveInOrderAndClean(t *testing.T) {
	r := runner(t, "good")
	var got []Line
	if err := r.Init(t.Context(), initConfig(t), func(l Line) { got = append(got, l) }); err != nil {
		t.Fatal(err)
	}
	want := []Line{
		{slog.LevelInfo, "init", "Using Kubernetes version: v1.35.4"},
		{slog.LevelWarn, "", "[WARNING Service-Kubelet]: kubelet service is not enabled"},
		{slog.LevelInfo, "certs", `Generating "ca" certificate and key`},
		{slog.LevelDebug, "", "looking"},
		{slog.LevelInfo, "kubelet-start", "no newline at the end"},
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got\n%v\nwant\n%v", got, want)
	}
	if left, _ := os.ReadDir(r.Dir); len(left) != 0 {
		t.Errorf("configuration was left: %v", left)
	}
}

func TestKubeadmIsCalledAsItsManualSays(t *testing.T) {
	r := runner(t, "args")
	c := initConfig(t)
	for want, call := range map[string]func(func(Line)) error{
		"init --skip-token-print":       func(f func(Line)) error { return r.Init(t.Context(), c, f) },
		"init phase certs ca":           func(f func(Line)) error { return r.CreateCA(t.Context(), c, f) },
		"join":                          func(f func(Line)) error { return r.Join(t.Context(), c, f) },
		"reset --force --cri-socket=un": func(f func(Line)) error { return r.Reset(t.Context(), f) },
	} {
		var got string
		if err := call(func(l Line) { got = l.Text }); err != nil || !strings.HasPrefix(got, want) {
			t.Errorf("got %q, %v; want %q", got, err, want)
		}
		if strings.Contains(got, c.Init.BootstrapTokens[0].Token) {
			t.Errorf("a token in the arguments: %s", got)
		}
	}
}

func TestSecretsNeverGetOut(t *testing.T) {
	r := runner(t, "leak")
	join, err := NewJoin(exampleJoin(true), exampleNode())
	if err != nil {
		t.Fatal(err)
	}
	init := initConfig(t)
	for _, run := range []func(f func(Line)) error{
		func(f func(Line)) error { return r.Join(t.Context(), join, f) },
		func(f func(Line)) error { return r.Init(t.Context(), init, f) },
	} {
		var all strings.Builder
		err := run(func(l Line) { fmt.Fprintln(&all, l) })
		if err == nil {
			t.Fatal("no error")
		}
		fmt.Fprintln(&all, err)
		if !strings.Contains(all.String(), "caCertHashes") && !strings.Contains(all.String(), "bootstrapTokens") {
			t.Fatal("the script did not print its configuration")
		}
		for _, secret := range []string{joinToken, init.Init.BootstrapTokens[0].Token, "zyxwvu.9876543210zyxwvu", strings.Repeat("ab", 32)} {
			if strings.Contains(all.String(), secret) {
				t.Errorf("%q got out:\n%s", secret, all.String())
			}
		}
	}
}

func TestFailuresSayWhatKubeadmSaid(t *testing.T) {
	err := runner(t, "preflight").Init(t.Context(), initConfig(t), nil)
	var e *Error
	if !errors.As(err, &e) || !e.Preflight() || e.InvalidConfig() {
		t.Fatalf("got %#v", err)
	}
	want := "error execution phase preflight: [preflight] Some fatal errors occurred:; [ERROR Port-6443]: Port 6443 is in use"
	if e.Message != want {
		t.Errorf("got  %s\nwant %s", e.Message, want)
	}
	if want := "kubeadm init: [ERROR Port-6443]: Port 6443 is in use"; err.Error() != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}

	r := Runner{Path: filepath.Join(t.TempDir(), "absent")}
	if err := r.Reset(t.Context(), nil); !errors.Is(err, fs.ErrNotExist) || !strings.HasPrefix(err.Error(), "kubeadm reset: ") {
		t.Errorf("absent binary: %v", err)
	}
	if r.Installed() {
		t.Error("an absent binary is installed")
	}
	r = runner(t, "good")
	r.Dir = filepath.Join(t.TempDir(), "absent")
	if err := r.Init(t.Context(), initConfig(t), nil); !errors.Is(err, fs.ErrNotExist) || strings.Contains(err.Error(), "yaml") {
		t.Errorf("no place for the configuration: %v", err)
	}
}

func TestFloodsAreBoundedAndComplete(t *testing.T) {
	n, longest := 0, 0
	if err := runner(t, "flood").Reset(t.Context(), func(l Line) { n++; longest = max(longest, len(l.Text)) }); err != nil {
		t.Fatal(err)
	}
	if n != 3001 || longest > maxLine+3 {
		t.Errorf("%d lines, longest %d", n, longest)
	}
}

func TestVersion(t *testing.T) {
	v, err := runner(t, "version").Version(t.Context())
	if err != nil || !v.Equal(version.MustParse("v1.35.4")) {
		t.Errorf("got %v, %v", v, err)
	}
	if _, err := runner(t, "good").Version(t.Context()); err == nil {
		t.Error("accepted something that is no version")
	}
}

func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z") // a zombie whose parent has not looked yet
}

func waitGone(t *testing.T, pid int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); alive(pid); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("process %d is still there", pid)
		}
	}
}

func pids(s string) (a, b int) {
	f := strings.Fields(s)
	if len(f) == 3 && f[0] == "pids" {
		a, _ = strconv.Atoi(f[1])
		b, _ = strconv.Atoi(f[2])
	}
	return a, b
}

func TestEndOfContextStopsTheWholeGroup(t *testing.T) {
	for _, script := range []string{"hang", "stubborn"} {
		t.Run(script, func(t *testing.T) {
			r := runner(t, script)
			r.Grace = 500 * time.Millisecond
			cause := errors.New("the machine shuts down")
			ctx, cancel := context.WithCancelCause(t.Context())
			var a, b int
			start := time.Now()
			err := r.Init(ctx, initConfig(t), func(l Line) {
				a, b = pids(l.Text)
				cancel(cause)
			})
			if !errors.Is(err, cause) || a == 0 || b == 0 {
				t.Errorf("got %v, processes %d %d", err, a, b)
			}
			if took := time.Since(start); took > 10*time.Second {
				t.Errorf("took %s", took)
			}
			waitGone(t, a)
			waitGone(t, b)
			if left, _ := os.ReadDir(r.Dir); len(left) != 0 {
				t.Errorf("configuration was left: %v", left)
			}
		})
	}
}

func TestManyCausesAreOneLine(t *testing.T) {
	const pull = `	[ERROR ImagePull]: failed to pull image registry.k8s.io/kube-apiserver:v1.35.4: not found`
	far := strings.Repeat("x", 1000)
	for _, tt := range []struct {
		name  string
		lines []string
		want  string
	}{
		{name: "nothing", want: ""},
		{name: "one error", lines: []string{"[init] Using Kubernetes", "error: it broke"}, want: "error: it broke"},
		{name: "short errors without a check", lines: []string{"error: it broke", "error: so it ends"}, want: "error: it broke; error: so it ends"},
		{name: "no error", lines: []string{"killed"}, want: "killed"},
		{
			name:  "checks of kubeadm 1.35",
			lines: []string{"[preflight] Some fatal errors occurred:", pull, pull, pull, "error: error execution phase preflight: preflight checks failed"},
			want:  strings.TrimSpace(pull) + ", and 2 more",
		},
		{
			name:  "more checks than are kept",
			lines: []string{"error execution phase preflight: [preflight] Some fatal errors occurred:", pull, pull, pull, pull, pull, pull, pull, pull, pull, pull},
			want:  strings.TrimSpace(pull) + ", and 9 more",
		},
		{
			name:  "a check with several causes",
			lines: []string{"[ERROR ImagePull]: [failed to pull image a, b: not found, failed to pull image c: not found, failed to pull image d: not found]", "error: it broke"},
			want:  "[ERROR ImagePull]: failed to pull image a, b: not found, and 2 more",
		},
		{name: "a check with one cause in brackets", lines: []string{"[ERROR CRI]: [not, running]"}, want: "[ERROR CRI]: not, running"},
		{name: "a long check", lines: []string{"[ERROR ImagePull]: " + far + ": not found"}, want: "[ERROR ImagePull]: " + far[:131] + " ... " + far[:139] + ": not found"},
		{name: "long errors", lines: []string{"error: it broke", "error: " + far}, want: "error: it broke, and 1 more"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var last tail
			for _, l := range tt.lines {
				last.add(parseLine(l, nil))
			}
			if got := last.brief(); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func TestKubeadmDiesWithItsCaller(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), scriptEnv+"=parent")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var a, b int
	if _, err := fmt.Fscanf(out, "pids %d %d\n", &a, &b); err != nil {
		t.Fatal(err)
	}
	if !alive(a) {
		t.Fatal("kubeadm does not run")
	}
	defer syscall.Kill(b, syscall.SIGKILL) // systemd takes grandchildren with the unit
	cmd.Process.Kill()
	cmd.Wait()
	waitGone(t, a)
}

// realKubeadm returns the binary of the cache that package sandbox/build fills.
func realKubeadm(t *testing.T, v string) string {
	t.Helper()
	return filepath.Join(testneeds.Kubernetes(t, v), "kubeadm")
}

func TestRealKubeadmAcceptsTheConfiguration(t *testing.T) {
	for _, v := range []string{"v1.35.4", "v1.36.4", "v1.37.2"} {
		t.Run(v, func(t *testing.T) {
			r := Runner{Path: realKubeadm(t, v), Dir: t.TempDir()}
			if got, err := r.Version(t.Context()); err != nil || got.String() != v {
				t.Errorf("version %s, %v", got, err)
			}
			for name, c := range configs(t) {
				if strings.HasPrefix(name, "init-") && name != "init-"+v && name != "init-"+v+"-etcd" && name != "init-"+v+"-plain" {
					continue
				}
				if err := r.Validate(t.Context(), c); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			bad := initConfig(t)
			bad.Cluster.EncryptionAlgorithm = "ROT-13"
			if err := r.Validate(t.Context(), bad); err == nil {
				t.Error("kubeadm accepts anything: this test proves nothing")
			}
		})
	}
}
