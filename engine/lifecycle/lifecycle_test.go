package lifecycle

import (
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"constellation/engine/version"
)

func TestFilesAreValid(t *testing.T) {
	d, err := parse(files)
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range d.minors {
		if i > 0 && m.number <= d.minors[i-1].number {
			t.Errorf("%s comes after %s", m.Kubernetes, d.minors[i-1].Kubernetes)
		}
	}
}

// Each defect of a file is an error, so that a file with it fails the tests.
func TestDefectsOfFilesAreErrors(t *testing.T) {
	sound := "kubernetes: v1.99\nsources: {s: a page}\nflags:\n  - { component: kubelet, removed: [a], source: s }\n"
	etcd := "sources: {s: a page}\netcd:\n  - { version: v3.9, from: v3.8.1, source: s }\n"
	for _, tt := range []struct{ name, minor, etcd, want string }{
		{name: "sound", minor: sound, etcd: etcd, want: ""},
		{name: "unknown field", minor: sound + "gate: []\n", etcd: etcd, want: "field gate not found"},
		{name: "unknown field of a row", minor: strings.Replace(sound, "component", "name", 1), etcd: etcd, want: "field name not found"},
		{name: "no source", minor: strings.Replace(sound, ", source: s", "", 1), etcd: etcd, want: `row 1 of flags: source "" is not listed`},
		{name: "unlisted source", minor: strings.Replace(sound, "source: s", "source: t", 1), etcd: etcd, want: `row 1 of flags: source "t" is not listed`},
		{name: "unused source", minor: strings.Replace(sound, "{s: a page}", "{s: a page, u: another}", 1), etcd: etcd, want: `source "u" has no row`},
		{name: "empty row", minor: strings.Replace(sound, "[a]", "[]", 1), etcd: etcd, want: "row 1 of flags: fields are missing"},
		{name: "twice", minor: strings.Replace(sound, "[a]", "[a, b, a]", 1), etcd: etcd, want: `name "a" is empty, padded or listed twice`},
		{name: "a default of another flag", minor: strings.Replace(sound, "[a]", "[a], defaults: {b: x}", 1), etcd: etcd, want: "row 1 of flags: fields are missing"},
		{name: "an action without a way to detect it", minor: sound + "actions:\n  - { title: t, remedy: r, source: s }\n", etcd: etcd, want: "row 1 of actions: fields are missing"},
		{name: "an action with two ways", minor: sound + "actions:\n  - { title: t, remedy: r, permission: nodes/log, undetected: why, source: s }\n", etcd: etcd, want: "row 1 of actions: fields are missing"},
		{name: "an action with half a way", minor: sound + "actions:\n  - { title: t, remedy: r, flag: f, source: s }\n", etcd: etcd, want: "row 1 of actions: fields are missing"},
		{name: "a sound action", minor: sound + "actions:\n  - { title: t, remedy: r, objects: a.b, containing: x, source: s }\n", etcd: etcd, want: ""},
		{name: "another minor", minor: strings.Replace(sound, "v1.99", "v1.98", 1), etcd: etcd, want: "read data/v1.99.yaml: it is of v1.98"},
		{name: "no minor", minor: strings.Replace(sound, "v1.99", "1.99.0", 1), etcd: etcd, want: `kubernetes is "1.99.0"`},
		{name: "invalid floor", minor: sound, etcd: strings.Replace(etcd, "v3.8.1", "newest", 1), want: "parse version"},
		{name: "etcd without a source", minor: sound, etcd: strings.Replace(etcd, ", source: s", "", 1), want: `row 1 of etcd: source "" is not listed`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parse(fstest.MapFS{"data/v1.99.yaml": {Data: []byte(tt.minor)}, "data/etcd.yaml": {Data: []byte(tt.etcd)}})
			if tt.want == "" && err == nil {
				return
			}
			if err == nil || tt.want == "" || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("the error is %v, want %q", err, tt.want)
			}
		})
	}
	if _, err := fs.Stat(files, "data/etcd.yaml"); err != nil {
		t.Error(err)
	}
}

func TestDemands(t *testing.T) {
	v := version.MustParse
	for kubelet, want := range map[string]int{"v1.24.9": 2, "v1.25.0": 3, "v1.37.2": 3, "v1.99.0": 3} {
		if got := KubeletSkew(v(kubelet)); got != want {
			t.Errorf("kubelets %s may be %d minors behind, want %d", kubelet, got, want)
		}
	}
	for _, tt := range []struct {
		kubeadm, config string
		want            Answer
	}{
		{kubeadm: "v1.30.1", config: "kubeadm.k8s.io/v1beta4", want: Unknown}, // older than the data
		{kubeadm: "v1.36.4", config: "kubeadm.k8s.io/v1beta3", want: Yes},
		{kubeadm: "v1.36.4", config: "kubeadm.k8s.io/v1beta4", want: Yes},
		{kubeadm: "v1.36.4", config: "kubeadm.k8s.io/v1beta2", want: No},
		{kubeadm: "v1.37.0", config: "kubeadm.k8s.io/v1beta3", want: No},
		{kubeadm: "v1.37.0", config: "kubeadm.k8s.io/v1beta4", want: Yes},
		{kubeadm: "v1.39.0", config: "kubeadm.k8s.io/v1beta3", want: No}, // dropped in v1.37
		{kubeadm: "v1.39.0", config: "kubeadm.k8s.io/v1beta4", want: Unknown},
		{kubeadm: "v1.39.0", config: "kubeadm.k8s.io/v1beta5", want: Unknown},
	} {
		if got := ReadsKubeadmConfig(v(tt.kubeadm), tt.config); got != tt.want {
			t.Errorf("kubeadm %s reads %s: %d, want %d", tt.kubeadm, tt.config, got, tt.want)
		}
	}
	if got := ReadsKubeletConfig(v("v1.37.0"), "kubelet.config.k8s.io/v1beta1"); got != Yes {
		t.Errorf("kubelets read v1beta1: %d, want %d", got, Yes)
	}
	if got := DeployedEtcd(v("v1.37.1")); got != "3.7.0-0" {
		t.Errorf("kubeadm v1.37 deploys etcd %q, want 3.7.0-0", got)
	}
	var unknown []string
	for _, m := range UnknownMinors(v("v1.36.4"), v("v1.39.0")) {
		unknown = append(unknown, m.MinorString())
	}
	if got := strings.Join(unknown, " "); got != "v1.38 v1.39" {
		t.Errorf("between v1.36 and v1.39 the data lacks %q, want v1.38 and v1.39", got)
	}
	if got := Reads("kubeadm.k8s.io/v1beta4").String(); got != "v1.31.0" {
		t.Errorf("v1beta4 is read from %s on, want v1.31.0", got)
	}
	for _, tt := range []struct{ from, to, floor string }{
		{from: "v3.5.25", to: "v3.6.6", floor: "v3.5.26"},
		{from: "v3.5.26", to: "v3.6.6", floor: ""},
		{from: "v3.6.8", to: "v3.7.0", floor: "v3.6.11"},
		{from: "v3.6.10", to: "v3.7.0", floor: "v3.6.11"},
		{from: "v3.6.11", to: "v3.7.0", floor: ""},
		{from: "v3.6.6", to: "v3.6.8", floor: ""},
		{from: "v3.7.0", to: "v3.8.0", floor: ""},
		{from: "v3.5.1", to: "v3.7.0", floor: ""}, // two minors: another rule
	} {
		s, below := BelowFloor(v(tt.from), v(tt.to))
		if got := s.From.String(); got != tt.floor || below != (tt.floor != "") {
			t.Errorf("etcd from %s to %s needs %q first, want %q", tt.from, tt.to, got, tt.floor)
		}
	}
	if got := len(EtcdFlagsRemoved(v("v3.6.8"), v("v3.7.0"))); got < 23 {
		t.Errorf("etcd v3.7 refuses %d flags of v3.6, want all --experimental-*", got)
	}
	if got := EtcdFlagsRemoved(v("v3.7.0"), v("v3.7.2")); len(got) > 0 {
		t.Errorf("a patch of etcd refuses %v", got)
	}
	for k, want := range map[string]bool{"v1.31.0": false, "v1.34.9": false, "v1.35.0": true, "v1.37.2": true, "v1.38.0": false, "v1.39.0": false} {
		if got := Known(v(k)); got != want {
			t.Errorf("all changes of %s are known: %t, want %t", k, got, want)
		}
	}
}
