package build

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/internal/testneeds"
)

// cached returns a version that somebody has built on this computer. Tests do not
// build one: that takes minutes.
func cached(t *testing.T, version string) *Artifacts {
	t.Helper()
	cache := filepath.Join(testneeds.Kubernetes(t, version), "..", "..", "..")
	a, err := Load(cache, version)
	if err != nil {
		t.Skipf("needs Kubernetes %s in the cache (constellation sandbox fetch %s): %v", version, version, err)
	}
	return a
}

func TestCachedVersionIsWhatItSays(t *testing.T) {
	for _, r := range recipes {
		t.Run(r.version, func(t *testing.T) {
			a := cached(t, r.version)

			out, err := exec.Command(a.Binaries["kubeadm"], "config", "images", "list", "--kubernetes-version", r.version).Output()
			if err != nil {
				t.Fatal(err)
			}
			var refs []string
			for _, i := range a.Images {
				refs = append(refs, i.Ref)
			}
			want := append(strings.Fields(string(out)), "registry.k8s.io/e2e-test-images/agnhost:"+r.agnhost)
			if r.etcdNext != "" {
				want = append(want, "registry.k8s.io/etcd:"+r.etcdNext)
			}
			slices.Sort(refs)
			slices.Sort(want)
			if diff := cmp.Diff(want, refs); diff != "" {
				t.Errorf("kubeadm wants other images than there are (-want +got):\n%s", diff)
			}

			etcd, _, _ := strings.Cut(r.etcd, "-")
			for _, tt := range []struct{ command, want string }{
				{"kubeadm version -o short", r.version},
				{"kubelet --version", "Kubernetes " + r.version},
				{"kubectl version --client", "Client Version: " + r.version},
				{"kube-apiserver --version", "Kubernetes " + r.version},
				{"kube-controller-manager --version", "Kubernetes " + r.version},
				{"kube-scheduler --version", "Kubernetes " + r.version},
				{"kube-proxy --version", "Kubernetes " + r.version},
				{"etcd --version", "etcd Version: " + etcd},
				{"coredns -version", "CoreDNS-" + strings.TrimPrefix(r.coredns, "v")},
				{"pause -v", "pause " + r.pause},
				{"agnhost --version", r.agnhost},
			} {
				args := strings.Fields(tt.command)
				out, err := exec.Command(a.Binaries[args[0]], args[1:]...).CombinedOutput()
				if err != nil || !strings.Contains(string(out), tt.want) {
					t.Errorf("%s says %q, %v, want %q", tt.command, out, err, tt.want)
				}
			}
		})
	}
}

func TestCachedImagesAreWhole(t *testing.T) {
	a := cached(t, DefaultVersion)
	for _, i := range a.Images {
		img, err := LoadImage(i.Path)
		if err != nil {
			t.Error(err)
			continue
		}
		if h, err := img.Digest(); err != nil || h.String() != i.Digest {
			t.Errorf("%s is %v, %v; the manifest of the cache says %s", i.Ref, h, err, i.Digest)
		}
		checkDigests(t, img)
	}
	for _, name := range []string{"kubeadm", "kubelet", "kubectl"} {
		if digest, _, err := digestFile(a.Binaries[name]); err != nil || digest != a.Digests[name] {
			t.Errorf("%s is %s, %v; machines get %s", name, digest, err, a.Digests[name])
		}
	}
}

func TestCachedVersionIsThereAtOnce(t *testing.T) {
	a := cached(t, DefaultVersion)
	cache := filepath.Dir(filepath.Dir(a.Dir))
	best := time.Hour // of a few: other work on the computer is not what is measured
	for range 5 {
		start := time.Now()
		_, err := Kubernetes(t.Context(), cache, DefaultVersion, Options{}, func(p Progress) { t.Errorf("work is done on it: %s", p.Text) })
		if err != nil {
			t.Fatal(err)
		}
		best = min(best, time.Since(start))
	}
	if best > 50*time.Millisecond {
		t.Errorf("a version that is whole takes %v", best)
	}
}
