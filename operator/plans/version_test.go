package plans

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"

	"constellation/operator/api/upgradev1"
)

// known is the hash of system-upgrade-controller for a Plan with this version and account.
const known = "fbc94f26bc8c9660d2b79485a64bf51284fc4a3e2bd662b2e261d6fc"

func planOf(change ...func(*upgradev1.Plan)) *upgradev1.Plan {
	p := &upgradev1.Plan{
		ObjectMeta: metav1.ObjectMeta{Name: "k3s-server", Namespace: "system-upgrade", UID: "plan-uid", Generation: 1},
		Spec: upgradev1.PlanSpec{
			Concurrency: 1, Version: "v1.36.3", ServiceAccountName: "system-upgrade", NodeSelector: &metav1.LabelSelector{},
			Upgrade: &upgradev1.ContainerSpec{Image: "rancher/k3s-upgrade", Args: []string{"one", "two"}},
		},
	}
	for _, f := range change {
		f(p)
	}
	return p
}

func TestHashMatchesSystemUpgradeController(t *testing.T) {
	digest := func(paths string) func(*upgradev1.Plan) {
		return func(p *upgradev1.Plan) { p.Annotations = map[string]string{upgradev1.AnnotationDigest: paths} }
	}
	secret := func(name string) (string, error) { return "<" + name + ">", nil }
	// plain is a hash over text that was put together by hand.
	plain := func(text string) string { return sum224(text) }
	const base = "v1.36.3system-upgrade"
	for _, tt := range []struct {
		name   string
		change func(*upgradev1.Plan)
		want   string
	}{
		{name: "version and account", change: func(*upgradev1.Plan) {}, want: known},
		{name: "image, arguments and selector are not hashed", change: func(p *upgradev1.Plan) {
			p.Spec.Upgrade.Image, p.Spec.Upgrade.Args, p.Spec.NodeSelector, p.Spec.Cordon = "other", nil, nil, true
		}, want: known},
		{name: "an empty digest adds nothing", change: digest(""), want: known},
		{name: "a number is written as it is", change: func(p *upgradev1.Plan) { p.Spec.Concurrency = 1000000; digest("spec.concurrency")(p) }, want: plain(base + "1000000")},
		{name: "only the first element of a list is hashed", change: digest("spec.upgrade.args"), want: plain(base + "one")},
		{name: "paths through a list match nothing", change: digest("spec.upgrade.args.0"), want: known},
		{name: "paths are not trimmed", change: digest("spec.concurrency, spec.upgrade.image"), want: plain(base + "1")},
		{name: "two paths", change: digest("spec.concurrency,spec.upgrade.image"), want: plain(base + "1rancher/k3s-upgrade")},
		{name: "a map is written as Go does", change: digest("spec.upgrade"), want: plain(base + "map[args:[one two] image:rancher/k3s-upgrade]")},
		{name: "a first element that is a map", change: func(p *upgradev1.Plan) {
			p.Spec.Upgrade.Env = []corev1.EnvVar{{Name: "A", Value: "b"}, {Name: "C"}}
			digest("spec.upgrade.envs")(p)
		}, want: plain(base + "map[name:A value:b]")},
		{name: "durations are written as durations", change: func(p *upgradev1.Plan) {
			p.Spec.PostCompleteDelay = new(upgradev1.Duration("90s"))
			digest("spec.postCompleteDelay")(p)
		}, want: plain(base + "1m30s")},
		{name: "secrets are hashed in their order, without ignored ones", change: func(p *upgradev1.Plan) {
			p.Spec.Secrets = []upgradev1.SecretSpec{{Name: "b"}, {Name: "x", IgnoreUpdates: true}, {Name: "a"}}
		}, want: plain(base + "<b><a>")},
		{name: "a rerun is another hash", change: func(p *upgradev1.Plan) { p.Spec.Constellation = &upgradev1.Rollout{Rerun: "1"} }, want: plain(base + "\x001")},
		{name: "other settings of spec.constellation are not hashed", change: func(p *upgradev1.Plan) {
			p.Spec.Constellation = &upgradev1.Rollout{Retries: 3, Alone: true, State: upgradev1.Paused}
		}, want: known},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := latestHash(planOf(tt.change), "v1.36.3", secret)
			if err != nil || got != tt.want {
				t.Errorf("%s, %v; want %s", got, err, tt.want)
			}
		})
	}
	missing := errors.New("missing")
	if _, err := latestHash(planOf(func(p *upgradev1.Plan) { p.Spec.Secrets = []upgradev1.SecretSpec{{Name: "s"}} }), "v", func(string) (string, error) { return "", missing }); !errors.Is(err, missing) {
		t.Errorf("a secret that is missing: %v", err)
	}
	// As kubectl's hash of generated Secrets has it: ten characters of few letters.
	sum, err := secretHash(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s", Labels: map[string]string{"not": "counted"}}, Type: corev1.SecretTypeOpaque, Data: map[string][]byte{"k": []byte("v")}})
	if err != nil || len(sum) != 10 || strings.ContainsAny(sum, "013ae") {
		t.Errorf("hash of a Secret: %q, %v", sum, err)
	}
}

// FuzzHash compares the hash with an independent implementation.
func FuzzHash(f *testing.F) {
	f.Add("v1.36.3", "system-upgrade", "")
	f.Add("v1", "", "spec.concurrency,spec.upgrade.args,spec.upgrade.args.0, spec.version,metadata..name,.")
	f.Add("v1", "a", "spec,status,spec.drain,spec.window.days,spec.tolerations,spec.secrets")
	f.Fuzz(func(t *testing.T, version, account, paths string) {
		if !utf8.ValidString(version + account + paths) {
			t.Skip("the API server would not store it")
		}
		p := planOf(func(p *upgradev1.Plan) {
			p.Spec.Version, p.Spec.ServiceAccountName = version, account
			p.Spec.Window, p.Spec.Tolerations = &upgradev1.TimeWindowSpec{Days: []upgradev1.Day{"mo"}}, []corev1.Toleration{{Key: "a"}}
			p.Annotations = map[string]string{upgradev1.AnnotationDigest: paths}
		})
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(p)
		if err != nil {
			t.Fatal(err)
		}
		text := version + account
		for _, path := range strings.Split(paths, ",") {
			is, found, err := unstructured.NestedFieldNoCopy(fields, strings.Split(path, ".")...)
			if l, ok := is.([]any); ok && len(l) > 0 {
				is = l[0]
			} else if ok {
				continue
			}
			if found && err == nil && is != nil {
				text += strings.TrimSpace(fmt.Sprint(is))
			}
		}
		got, err := latestHash(p, version, nil)
		if want := sum224(text); err != nil || got != want {
			t.Errorf("%s, %v; want %s, of %q", got, err, want, text)
		}
	})
}

func TestNamesOfJobs(t *testing.T) {
	for _, tt := range []struct{ name, plan, node, hash, want string }{
		{name: "same as system-upgrade-controller", plan: "k3s-server", node: "node1", hash: known, want: "apply-k3s-server-on-node1-with-fbc94f26bc8c9660d2b79485a6-c7898"},
		{name: "the part of a node's name before the dot", plan: "k3s-server", node: "node1.example.org", hash: known, want: "apply-k3s-server-on-node1-with-fbc94f26bc8c9660d2b79485a6-c7898"},
		{name: "short enough", plan: "p", node: "n", hash: "abc", want: "apply-p-on-n-with-abc"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := jobName(tt.plan, tt.node, tt.hash); got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
	// Of 64 characters the 57th is no letter: one less is kept, and one more of the hash.
	long := strings.Repeat("a", 56) + "." + strings.Repeat("b", 20)
	if got := safeName(long); len(got) != 63 || !strings.HasPrefix(got, strings.Repeat("a", 56)+"-") {
		t.Errorf("%s has %d characters", got, len(got))
	}
	if got := safeName(strings.Repeat("a", 63)); got != strings.Repeat("a", 63) {
		t.Errorf("63 characters are cut: %s", got)
	}
}

func FuzzNames(f *testing.F) {
	f.Add("k3s-server", "node1", known)
	f.Add("a.b", strings.Repeat("n", 80), "")
	f.Fuzz(func(t *testing.T, plan, node, hash string) {
		if len(validation.IsDNS1123Subdomain(plan)) > 0 || len(validation.IsDNS1123Subdomain(node)) > 0 || len(validation.IsDNS1123Label(hash)) > 0 {
			t.Skip("no names")
		}
		name := jobName(plan, node, hash)
		if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 || len(name) > 63 {
			t.Errorf("%s (%d characters): %v", name, len(name), errs)
		}
	})
}

func FuzzLabelValue(f *testing.F) {
	for _, s := range []string{"v1.36.3", "v1+k3s1", "", "-", strings.Repeat("ä", 40), "a/b:c"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := labelValue(s)
		if errs := validation.IsValidLabelValue(got); len(errs) > 0 {
			t.Errorf("%q becomes %q: %v", s, got, errs)
		}
		if len(validation.IsValidLabelValue(s)) == 0 && got != s {
			t.Errorf("%q becomes %q without need", s, got)
		}
	})
}

func TestWindow(t *testing.T) {
	night := upgradev1.TimeWindowSpec{Days: []upgradev1.Day{"mon"}, StartTime: "22:00", EndTime: "02:00"}
	noon := upgradev1.TimeWindowSpec{Days: []upgradev1.Day{"0", "sat"}, StartTime: "12pm", EndTime: "13:30:30"}
	zone := upgradev1.TimeWindowSpec{Days: []upgradev1.Day{"sunday"}, StartTime: "01:30", EndTime: "03:30", TimeZone: "Europe/Berlin"}
	for _, tt := range []struct {
		name   string
		window upgradev1.TimeWindowSpec
		at     string
		open   bool
		until  string
	}{
		{name: "before the window", window: night, at: "2026-11-23T21:59:59Z", until: "2026-11-23T22:00:00Z"}, // a Monday
		{name: "when the window opens", window: night, at: "2026-11-23T22:00:00Z", open: true, until: "2026-11-24T02:00:01Z"},
		{name: "after midnight in Monday's window", window: night, at: "2026-11-24T01:00:00Z", open: true, until: "2026-11-24T02:00:01Z"},
		{name: "in the last second of the window", window: night, at: "2026-11-24T02:00:00.9Z", open: true, until: "2026-11-24T02:00:01Z"},
		{name: "after the window", window: night, at: "2026-11-24T02:00:01Z", until: "2026-11-30T22:00:00Z"},
		{name: "Monday's early hours belong to Sunday", window: night, at: "2026-11-23T01:00:00Z", until: "2026-11-23T22:00:00Z"},
		{name: "on one of two days", window: noon, at: "2026-11-22T12:30:00Z", open: true, until: "2026-11-22T13:30:31Z"},
		{name: "between two days", window: noon, at: "2026-11-23T12:30:00Z", until: "2026-11-28T12:00:00Z"},
		{name: "in another zone", window: zone, at: "2026-07-05T00:00:00Z", open: true, until: "2026-07-05T01:30:01Z"},
		{name: "on the day on which clocks go forward", window: zone, at: "2026-03-29T00:45:00Z", open: true, until: "2026-03-29T01:30:01Z"},
		{name: "on the day on which clocks go back", window: zone, at: "2026-10-25T02:15:00Z", open: true, until: "2026-10-25T02:30:01Z"},
		{name: "no days", window: upgradev1.TimeWindowSpec{StartTime: "1", EndTime: "2"}, at: "2026-11-23T01:30:00Z"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, err := parseWindow(tt.window)
			if err != nil {
				t.Fatal(err)
			}
			at, err := time.Parse(time.RFC3339Nano, tt.at)
			if err != nil {
				t.Fatal(err)
			}
			open, until := w.open(at)
			text := ""
			if !until.IsZero() {
				text = until.UTC().Format(time.RFC3339)
			}
			if open != tt.open || text != tt.until {
				t.Errorf("open is %t until %s, want %t until %s", open, text, tt.open, tt.until)
			}
		})
	}
	for _, bad := range []upgradev1.TimeWindowSpec{
		{Days: []upgradev1.Day{"mon"}},
		{Days: []upgradev1.Day{"mon"}, StartTime: "25:00", EndTime: "1"},
		{Days: []upgradev1.Day{"mon"}, StartTime: "1", EndTime: "2", TimeZone: "Nowhere/Else"},
		{Days: []upgradev1.Day{"noday"}, StartTime: "1", EndTime: "2"},
	} {
		if _, err := parseWindow(bad); err == nil {
			t.Errorf("%+v is a window", bad)
		}
	}
}

// FuzzWindow compares the answers with a check of each second.
func FuzzWindow(f *testing.F) {
	f.Add(uint8(2), uint32(79200), uint32(7200), int64(1795474800))
	f.Add(uint8(127), uint32(0), uint32(86399), int64(0))
	f.Fuzz(func(t *testing.T, on uint8, start, end uint32, unix int64) {
		w := window{start: time.Duration(start%86400) * time.Second, end: time.Duration(end%86400) * time.Second, zone: time.UTC}
		for d := range w.days {
			w.days[d] = on&(1<<d) != 0
		}
		at := time.Unix(unix%4e9, 0).UTC()
		// What the second of the day, and of the day before, say.
		since := at.Sub(at.Truncate(24 * time.Hour))
		today, yesterday := w.days[at.Weekday()], w.days[at.AddDate(0, 0, -1).Weekday()]
		want := today && since >= w.start && since <= w.end
		if w.end < w.start {
			want = today && since >= w.start || yesterday && since <= w.end
		}
		open, until := w.open(at)
		if open != want {
			t.Fatalf("at %s %+v is open: %t", at, w, open)
		}
		if until.IsZero() != (on&127 == 0 && !open) {
			t.Fatalf("at %s %+v changes at %s", at, w, until)
		}
		if !until.IsZero() {
			if next, _ := w.open(until); !until.After(at) || next == open && (!open || !w.full()) {
				t.Fatalf("at %s %+v changes at %s, and does not", at, w, until)
			}
		}
	})
}

// full reports whether the window of one day may reach the next one.
func (w window) full() bool {
	return w.end >= w.start && w.end-w.start >= 24*time.Hour-time.Second || w.end < w.start && w.start-w.end <= time.Second
}

func TestImagesGetTheVersionAsTag(t *testing.T) {
	for _, tt := range []struct{ image, version, want string }{
		{image: "rancher/k3s-upgrade", version: "v1", want: "rancher/k3s-upgrade:v1"},
		{image: "docker.io/library/ubuntu", version: "bionic", want: "ubuntu:bionic"},
		{image: "docker.io/rancher/k3s", version: "v1", want: "rancher/k3s:v1"},
		{image: "localhost:5000/a", version: "v1", want: "localhost:5000/a:v1"},
		{image: "localhost:5000/a:b", version: "v1", want: "localhost:5000/a:b"},
		{image: "a:latest", version: "v1", want: "a:latest"},
		{image: "a@sha256:0000000000000000000000000000000000000000000000000000000000000000", version: "v1", want: "a@sha256:0000000000000000000000000000000000000000000000000000000000000000"},
		{image: "a", version: "not a tag", want: "a"},
		{image: "", version: "v1", want: ""},
	} {
		if got := withTag(tt.image, tt.version); got != tt.want {
			t.Errorf("%s with %s is %s, want %s", tt.image, tt.version, got, tt.want)
		}
	}
}

func sum224(text string) string {
	s := sha256.Sum224([]byte(text))
	return hex.EncodeToString(s[:])
}
