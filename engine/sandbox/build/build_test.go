package build

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/internal/testneeds"
)

// The tests build pause, which is the smallest program and needs no network: it goes
// the way of all the others.

func needGo(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the Go toolchain")
	}
}

func TestBinaryIsBuiltOnce(t *testing.T) {
	testneeds.Time(t, "10 s: it runs the compiler")
	needGo(t)
	cache := t.TempDir()
	var stages []Stage
	path, err := Binary(t.Context(), cache, "v1.35.4", "pause", func(p Progress) {
		if len(stages) == 0 || stages[len(stages)-1] != p.Stage {
			stages = append(stages, p.Stage)
		}
		if p.Current > p.Total || p.Text == "" {
			t.Errorf("progress is %+v", p)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(stages); got != "[load compile link]" {
		t.Errorf("the stages are %s, want load, compile and link", got)
	}
	out, err := exec.Command(path, "-v").Output()
	if err != nil || string(out) != "pause 3.10.1\n" {
		t.Errorf("pause -v says %q, %v, want the version in its tag and success", out, err)
	}
	s, err := openStore(cache, "v1.35.4")
	if err != nil {
		t.Fatal(err)
	}
	if r := s.files["bin/pause"]; len(r.From) != 1 || !strings.HasPrefix(r.From[0], "go1.") {
		t.Errorf("the record does not say which Go made it: %+v", r)
	}
	again, err := Binary(t.Context(), cache, "v1.35.4", "pause", func(p Progress) {
		t.Errorf("a finished binary is worked on: %s", p.Text)
	})
	if err != nil || again != path {
		t.Errorf("the second call gives %s, %v", again, err)
	}

	// Made again elsewhere, it is the same file: nothing of this computer is in it.
	elsewhere := filepath.Join(t.TempDir(), "another", "cache")
	other, err := Binary(t.Context(), elsewhere, "v1.35.4", "pause", nil)
	if err != nil {
		t.Fatal(err)
	}
	a, _, errA := digestFile(path)
	b, _, errB := digestFile(other)
	if a != b || errors.Join(errA, errB) != nil {
		t.Errorf("two builds differ: %s and %s (%v, %v)", a, b, errA, errB)
	}

	// A damaged one is made again.
	if err := os.Truncate(path, 100); err != nil {
		t.Fatal(err)
	}
	if _, err := Binary(t.Context(), cache, "v1.35.4", "pause", nil); err != nil {
		t.Fatal(err)
	}
	if mended, _, err := digestFile(path); err != nil || mended != a {
		t.Errorf("a damaged binary became %s, %v, want %s", mended, err, a)
	}
}

// A program with the same recipe in another version is copied. It is compiled if that one is damaged.
func TestVersionsShareEqualPrograms(t *testing.T) {
	testneeds.Time(t, "10 s: it runs the compiler")
	needGo(t)
	cache := t.TempDir()
	build := func(version string) (path string, linked bool) {
		t.Helper()
		path, err := Binary(t.Context(), cache, version, "pause", func(p Progress) {
			linked = linked || strings.HasPrefix(p.Text, "linked ")
		})
		if err != nil {
			t.Fatal(err)
		}
		return path, linked
	}
	first, linked := build("v1.36.3")
	if !linked {
		t.Error("the first version did not link pause")
	}
	second, linked := build("v1.36.4")
	if linked || first == second {
		t.Errorf("the second version linked the same pause again, or is %s", second)
	}
	a, _, errA := digestFile(first)
	b, _, errB := digestFile(second)
	if a != b || errors.Join(errA, errB) != nil {
		t.Errorf("the programs differ: %s and %s (%v, %v)", a, b, errA, errB)
	}
	var records []record
	for _, v := range []string{"v1.36.3", "v1.36.4"} {
		s, err := openStore(cache, v)
		if err != nil {
			t.Fatal(err)
		}
		r := s.files["bin/pause"]
		r.Modified = time.Time{}
		records = append(records, r)
	}
	if diff := cmp.Diff(records[0], records[1]); diff != "" {
		t.Errorf("the records differ:\n%s", diff)
	}
	if _, linked := build("v1.35.4"); !linked {
		t.Error("another pause was copied")
	}
	if err := errors.Join(os.Truncate(first, 100), os.Truncate(second, 100)); err != nil {
		t.Fatal(err)
	}
	if _, linked := build("v1.37.2"); !linked {
		t.Error("a damaged pause was copied")
	}
}

func TestTwoBuildersTakeTurns(t *testing.T) {
	needGo(t)
	cache := t.TempDir()
	var mu sync.Mutex
	linked := 0
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			_, err := Binary(t.Context(), cache, "v1.35.4", "pause", func(p Progress) {
				mu.Lock()
				defer mu.Unlock()
				if p.Stage == StageLink && strings.HasPrefix(p.Text, "linked 1 of 1") {
					linked++
				}
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if linked != 1 {
		t.Errorf("%d builders linked, want one for all", linked)
	}
}

func TestBuildGoesOnAfterItWasStopped(t *testing.T) {
	testneeds.Time(t, "10 s: it runs the compiler")
	needGo(t)
	cache := t.TempDir()
	for _, at := range []Stage{StageLoad, StageCompile} {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := Binary(ctx, cache, "v1.35.4", "pause", func(p Progress) {
			if p.Stage == at {
				cancel()
			}
		})
		cancel()
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("stopped at %s, the build gives %v, want the end of the context", at, err)
		}
		if err := errors.Unwrap(err); err != nil && strings.Contains(err.Error(), "Remedy") {
			t.Errorf("a stop on request has a remedy: %v", err)
		}
	}
	if _, err := Binary(t.Context(), cache, "v1.35.4", "pause", nil); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(cache, "kubernetes", "*", stagePrefix+"*"))
	if err != nil || len(left) > 0 {
		t.Errorf("unfinished work was left: %v, %v", left, err)
	}
}

func TestFailuresNameTheRemedy(t *testing.T) {
	needGo(t)
	for _, tt := range []struct {
		name       string
		env        map[string]string
		op, remedy string
	}{
		{name: "no go command", env: map[string]string{"PATH": "/nonexistent"}, op: "find the Go toolchain", remedy: "install Go 1.26"},
		{name: "no network", env: map[string]string{"GOMODCACHE": "", "GOPROXY": "http://127.0.0.1:1", "GOSUMDB": "off"}, op: "load the sources", remedy: "connect this computer to the network"},
		{name: "module proxy switched off", env: map[string]string{"GOMODCACHE": "", "GOPROXY": "off"}, op: "load the sources", remedy: "set GOPROXY"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for k, v := range tt.env {
				if k == "GOMODCACHE" {
					v = t.TempDir() // as on a new computer
				}
				t.Setenv(k, v)
			}
			_, err := Binary(t.Context(), t.TempDir(), "v1.35.4", "kubectl", nil)
			var known *Error
			if !errors.As(err, &known) {
				t.Fatalf("the error is %v, want one with a remedy", err)
			}
			if !strings.Contains(known.Op, tt.op) || !strings.Contains(known.Remedy, tt.remedy) || !strings.Contains(known.Remedy, "`constellation sandbox fetch v1.35.4`") {
				t.Errorf("the error is %q, its remedy %q; want %q and %q", known, known.Remedy, tt.op, tt.remedy)
			}
		})
	}
}

func TestRemedyFitsTheCause(t *testing.T) {
	for _, tt := range []struct {
		err    error
		remedy string
	}{
		{&fs.PathError{Op: "write", Path: "/x", Err: syscall.ENOSPC}, "free some space"},
		{&fs.PathError{Op: "mkdir", Path: "/x", Err: syscall.EACCES}, "set XDG_CACHE_HOME"},
		{errors.New("go build: exit status 1: write /tmp/go-build1/b001/_pkg_.a: no space left on device"), "free some space"},
		{errors.New("go list: exit status 1: go: go.mod requires go >= 1.26.0 (running go 1.25.1; GOTOOLCHAIN=local)"), "update Go"},
		{errors.New("go list: exit status 1: verifying k8s.io/api@v0.35.4: checksum mismatch; SECURITY ERROR"), "does not match its pinned digest"},
		{errors.New("apt-get -q: exit status 100: E: Failed to fetch http://deb.debian.org/x  Could not connect"), "connect this computer"},
		{errors.New("go build: exit status 1: link: signal: killed"), "out of memory"},
		{errors.New("something else"), "see the cause"},
	} {
		var known *Error
		if err := withRemedy("do it", tt.err, "again"); !errors.As(err, &known) || !strings.Contains(known.Remedy, tt.remedy) || !errors.Is(err, tt.err) {
			t.Errorf("%v gives %v with %+v, want the remedy %q", tt.err, err, known, tt.remedy)
		}
	}
}

func TestUnknownAndMissingVersions(t *testing.T) {
	cache := t.TempDir()
	for _, tt := range []struct {
		name, version, remedy string
		notCached             bool
	}{
		{name: "a version without recipe names those that have one", version: "v1.30.0", remedy: "v1.35.4, v1.35.8, v1.36.3, v1.36.4, v1.37.2"},
		{name: "the v is part of the name", version: "1.35.4", remedy: "v1.35.4"},
		{name: "a path is no version", version: "../x", remedy: "v1.35.4"},
		{name: "a version that was not built names the command", version: "v1.36.3", remedy: "run `constellation sandbox fetch v1.36.3`", notCached: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if Cached(cache, tt.version) {
				t.Error("it is in an empty cache")
			}
			_, err := Load(cache, tt.version)
			var known *Error
			if !errors.As(err, &known) || !strings.Contains(known.Remedy, tt.remedy) || errors.Is(err, ErrNotCached) != tt.notCached {
				t.Errorf("the error is %v with %+v, want the remedy %q", err, known, tt.remedy)
			}
		})
	}
	if _, err := Binary(t.Context(), cache, DefaultVersion, "kubelets", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not a program gives %v", err)
	}
	if entries, err := os.ReadDir(cache); err != nil || len(entries) > 0 {
		t.Errorf("asking has left %v, %v in the cache", entries, err)
	}
}

func TestMissingIsShort(t *testing.T) {
	r := recipes[0]
	p := r.programs()
	for _, tt := range []struct {
		m    missing
		want string
	}{
		{missing{programs: p[:1]}, "kubeadm"},
		{missing{tools: true}, "kube-proxy's tools"},
		{missing{programs: p[:2], images: r.images()[:1]}, "kubeadm, kubelet, image kube-apiserver"},
		{missing{programs: p}, "kubeadm, kubelet and 10 more"},
	} {
		if got := tt.m.String(); got != tt.want {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}

func TestLeft(t *testing.T) {
	for _, tt := range []struct {
		name            string
		packages, units int64
		pace            time.Duration
		cores           int
		want            time.Duration
	}{
		{name: "nothing", cores: 2},
		{name: "all, by what it costs elsewhere", packages: 3000, units: 200, cores: 2, want: 5*time.Minute + 20*time.Second},
		{name: "more cores, less time", packages: 3000, units: 200, cores: 8, want: 80 * time.Second},
		{name: "half, at the pace of this computer", packages: 1500, units: 200, pace: 400 * time.Millisecond, cores: 2, want: 10*time.Minute + 20*time.Second},
		{name: "links and images", units: 200, cores: 2, want: 20 * time.Second},
	} {
		if got := left(tt.packages, tt.units, tt.pace, tt.cores); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestMeterBeatsAndStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []string
		m := newMeter(time.Now(), func(p Progress) {
			got = append(got, fmt.Sprintf("%s %d/%d %v %v", p.Text, p.Current, p.Total, p.Took, p.Left))
		})
		m.plan(costLink)
		m.say(StageLoad, "load")
		m.planPackages(100)
		time.Sleep(time.Second)
		for n := range 40 { // too fast to tell each
			m.compiled(1, fmt.Sprint("package ", n))
			time.Sleep(20 * time.Millisecond)
		}
		m.compiled(60, "compiled")
		m.advance(costLink, StageLink, "linked")
		time.Sleep(heartbeat + time.Millisecond)
		synctest.Wait()
		m.stop()
		m.say(StageImage, "late")
		time.Sleep(10 * heartbeat)
		if len(got) < 6 || len(got) > 12 || !strings.HasPrefix(got[0], "load 0/15 0s") {
			t.Errorf("reports are\n%s", strings.Join(got, "\n"))
		}
		if last := got[len(got)-1]; !strings.HasPrefix(last, "linked 115/115") || !strings.HasSuffix(last, " 0s") || last[:10] != got[len(got)-2][:10] {
			t.Errorf("the last report is %q, want a heartbeat of what was last done", last)
		}
	})
}

func TestLinesAreWhole(t *testing.T) {
	var got []string
	w := &lineWriter{line: func(l string) { got = append(got, l) }}
	for _, part := range []string{"a", "b\nc\n", "", "\nd"} {
		if n, err := w.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatalf("Write(%q) gives %d, %v", part, n, err)
		}
	}
	w.flush()
	if s := strings.Join(got, "|"); s != "ab|c||d" {
		t.Errorf("lines are %q", s)
	}
}
