package compat

import (
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"constellation/assets"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
)

// ours returns the summaries of the embedded releases.
func ours(t testing.TB) []release.Summary {
	t.Helper()
	name := regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+\.yaml$`)
	var out []release.Summary
	dir := assets.Releases()
	err := fs.WalkDir(dir, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !name.MatchString(d.Name()) {
			return err
		}
		b, err := fs.ReadFile(dir, path)
		if err != nil {
			return err
		}
		r, err := release.Parse(b)
		if err != nil {
			return err
		}
		out = append(out, r.Summary())
		return nil
	})
	if err != nil || len(out) < 2 {
		t.Fatalf("%d releases, %v", len(out), err)
	}
	return out
}

// two returns fixed copies of the first two embedded releases.
func two() []release.Summary {
	return []release.Summary{
		invented("v1.0.0", "", "v1.34.2=3.6.5-0", "v1.34.3=3.6.5-0", "v1.34.4=3.6.5-0", "v1.35.3", "v1.35.4"),
		invented("v1.1.0", "v1.0.0", "v1.35.4", "v1.35.6", "v1.35.8", "v1.36.0=3.6.8-0", "v1.36.3=3.6.8-0", "v1.36.4=3.6.8-0"),
	}
}

// invented returns a release. kubernetes are versions, each with "=" and an etcd tag if that
// is not 3.6.6-0, and with "!" at the end if it is faulty.
func invented(v, from string, kubernetes ...string) release.Summary {
	s := release.Summary{Version: ver(v), UpgradeFrom: ver(from)}
	for _, k := range kubernetes {
		k, faulty := strings.CutSuffix(k, "!")
		name, etcd, ok := strings.Cut(k, "=")
		if !ok {
			etcd = "3.6.6-0"
		}
		ks := release.KubernetesSummary{Version: ver(name), Etcd: etcd}
		if faulty {
			ks.Faulty = "it loses pods"
		}
		s.Kubernetes = append(s.Kubernetes, ks)
	}
	return s
}

func faulty(s release.Summary) release.Summary {
	s.Faulty = "it does not boot"
	return s
}

// ver parses a version; empty is the zero version.
func ver(s string) version.Version {
	if s == "" {
		return version.Version{}
	}
	return version.MustParse(s)
}

// span parses "v1.35.4", or "v1.35.4-v1.36.3".
func span(s string) Span {
	oldest, newest, _ := strings.Cut(s, "-v")
	if newest == "" {
		return At(ver(oldest))
	}
	return At(ver(oldest)).Add(ver(newest))
}

// at returns a cluster with uniform versions.
func at(services, image, kubernetes string) Running {
	return Running{
		Services: span(services), ControlPlaneImage: span(image), WorkerImage: span(image), Kubernetes: span(kubernetes),
		ControlPlaneKubelet: span(kubernetes), WorkerKubelet: span(kubernetes),
	}
}

// workers sets the versions of the workers.
func workers(r Running, image, kubelet string) Running {
	r.WorkerImage, r.WorkerKubelet = span(image), span(kubelet)
	return r
}

func to(services, image, kubernetes string) Planned {
	return Planned{Services: ver(services), Image: ver(image), Kubernetes: ver(kubernetes)}
}

// ids returns the rules of results of a severity.
func ids(results []*RuleResult, s plan.Severity) []string {
	var out []string
	for _, r := range results {
		if r.Severity == s {
			out = append(out, r.Rule)
		}
	}
	return out
}

const attested = `{"variant":"tpm2","measurements":{"4":"` + "1111111111111111111111111111111111111111111111111111111111111111" + `","9":{"expected":"2222222222222222222222222222222222222222222222222222222222222222","warnOnly":true}}}`

// Each rule is violated in some row, alone where possible.
func inPlace(r Running) Running { r.WorkersInPlace = true; return r }

func TestMatrixJudges(t *testing.T) {
	real, many := NewMatrix(two()), NewMatrix([]release.Summary{
		invented("v1.0.0", "", "v1.30.0=3.5.15-0", "v1.31.2=3.5.20-0", "v1.31.9=3.5.26-0", "v1.32.1=3.6.1-0"),
		invented("v1.1.0", "v1.0.0", "v1.31.9=3.5.26-0", "v1.32.1=3.6.1-0", "v1.32.2=3.6.1-0!", "v1.33.0=3.6.4-0"),
		faulty(invented("v1.1.1", "v1.0.0", "v1.32.1=3.6.1-0", "v1.33.0=3.6.4-0")),
		invented("v1.1.2-rc.1", "v1.0.0", "v1.32.1=3.6.1-0", "v1.33.0=3.6.4-0"),
		invented("v1.2.0", "v1.1.2", "v1.32.1=3.6.1-0", "v1.33.0=3.6.4-0", "v1.34.0=3.6.5-0"),
		invented("v1.3.0", "v1.2.0", "v1.34.0=3.6.5-0", "v1.35.0=3.6.6-0", "v1.36.0=3.7.0-0", "v1.36.1=4.0.0-0"),
		invented("v1.10.0", "v1.9.0", "v1.40.0=3.7.0-0"),
		invented("v2.0.0", "v1.3.0", "v1.36.0=3.7.0-0"),
	})
	no := func(version.Version) (bool, string, string) {
		return false, "the mirror has no such thing", "run `constellation sandbox fetch`"
	}
	noKubernetes := at("v1.0.0", "v1.0.0", "v1.31.2")
	noKubernetes.Kubernetes, noKubernetes.ControlPlaneKubelet, noKubernetes.WorkerKubelet = Span{}, Span{}, Span{}
	etcd := func(r Running, tag string) Running { r.Etcd = tag; return r }
	demand := func(r Running) Running { r.JoinConfig.Attestation = attested; return r }
	target := func(r Running, image, kubernetes string) Running {
		r.Target = cluster.NodeTarget{ImageVersion: image, Kubernetes: kubernetes}
		return r
	}
	attest := func(p Planned, s string) Planned { p.Attestation = s; return p }
	keep := func(p Planned) Planned { p.KeepWorkers = true; return p }
	reported := map[string]bool{} // rules that a row of the table expects to block or warn
	for _, tt := range []struct {
		name              string
		m                 *Matrix
		cli               string
		now               Running
		to                Planned
		offer             Offer
		block, warn, open []string
	}{
		{name: "nothing changes", m: real, cli: "v1.0.0", now: at("v1.0.0", "v1.0.0", "v1.34.3")},
		{name: "next minor of Kubernetes is allowed", m: real, cli: "v1.0.0", now: at("v1.0.0", "v1.0.0", "v1.34.3"), to: to("", "", "v1.35.4")},
		{name: "newer patch is allowed", m: real, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.36.0"), to: to("", "", "v1.36.4")},
		{name: "next release with its image is allowed", m: real, cli: "v1.1.0", now: at("v1.0.0", "v1.0.0", "v1.35.4"), to: to("v1.1.0", "v1.1.0", "")},
		{name: "patch outside the release may stay", m: real, cli: "v1.1.0", now: at("v1.0.0", "v1.0.0", "v1.35.99"), to: to("v1.1.0", "v1.1.0", "")},
		{name: "patch outside the release is not downgraded", m: real, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.35.99"), to: to("", "", "v1.35.8"), block: []string{"never-down"}, open: []string{"etcd-step"}},
		{name: "a cluster without workers", m: real, cli: "v1.0.0", now: workers(at("v1.0.0", "v1.0.0", "v1.34.3"), "", ""), to: to("", "", "v1.35.4")},

		{name: "an unknown release", m: real, cli: "v1.9.0", now: at("v1.8.0", "v1.8.0", "v1.36.3"), to: to("v1.9.0", "v1.9.0", ""), block: []string{"unknown-release"}},
		{name: "upgrade from an unknown release", m: real, cli: "v1.1.0", now: at("v1.0.7", "v1.0.7", "v1.35.4"), to: to("v1.1.0", "v1.1.0", "")},
		{name: "an unknown release that does not change", m: real, cli: "v1.0.7", now: at("v1.0.7", "v1.0.7", "v1.35.4"), warn: []string{"unknown-release"}},
		{name: "an unknown image", m: real, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.35.4"), to: to("", "v1.1.7", ""), block: []string{"unknown-release"}},
		{name: "downgrade to an unknown release", m: real, cli: "v1.0.1", now: at("v1.1.0", "v1.1.0", "v1.35.4"), to: to("v1.0.1", "", ""), block: []string{"unknown-release", "never-down", "cli-services", "cli-image", "image-services"}},
		{name: "a faulty release", m: many, cli: "v1.1.1", now: at("v1.1.0", "v1.1.0", "v1.32.1"), to: to("v1.1.1", "", ""), block: []string{"faulty"}},
		{name: "a faulty release that runs", m: many, cli: "v1.1.1", now: at("v1.1.1", "v1.1.1", "v1.32.1"), block: []string{"faulty"}},
		{name: "a faulty image", m: many, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.32.1"), to: to("", "v1.1.1", ""), block: []string{"faulty"}},
		{name: "a faulty image that does not change", m: many, cli: "v1.1.0", now: at("v1.1.0", "v1.1.1", "v1.32.1"), warn: []string{"faulty"}},
		{name: "a faulty patch of Kubernetes", m: many, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.32.1"), to: to("", "", "v1.32.2"), block: []string{"faulty"}},
		{name: "a faulty patch of Kubernetes that does not change", m: many, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.32.2"), warn: []string{"faulty"}},
		{name: "another major", m: many, cli: "v2.0.0", now: at("v1.3.0", "v1.3.0", "v1.36.0"), to: to("v2.0.0", "v2.0.0", ""), block: []string{"same-major"}},
		{name: "services go down", m: many, cli: "v1.1.0", now: at("v1.2.0", "v1.1.0", "v1.32.1"), to: to("v1.1.0", "", ""), block: []string{"never-down", "cli-services"}},
		{name: "the image goes down", m: many, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.32.1"), to: to("", "v1.0.0", ""), block: []string{"never-down", "cli-image"}},
		{name: "the image of workers goes down", m: many, cli: "v1.1.0", now: workers(at("v1.1.0", "v1.1.0", "v1.32.1"), "v1.1.1", "v1.32.1"), to: to("", "v1.1.0", ""), block: []string{"never-down"}},
		{name: "Kubernetes goes down", m: many, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.33.0"), to: to("", "", "v1.32.1"), block: []string{"never-down"}},
		{name: "minor v1.10 is newer than v1.9", m: many, cli: "v1.10.0", now: at("v1.9.0", "v1.9.0", "v1.40.0"), to: to("v1.10.0", "v1.10.0", "")},
		{name: "two minors of services at once", m: many, cli: "v1.3.0", now: at("v1.1.0", "v1.2.0", "v1.34.0"), to: to("v1.3.0", "v1.3.0", ""), block: []string{"minor-drift", "upgrade-from", "cli-services"}},
		{name: "two minors of the image at once", m: many, cli: "v1.2.0", now: at("v1.1.2-rc.1", "v1.0.0", "v1.32.1"), to: to("v1.2.0", "v1.2.0", ""), block: []string{"minor-drift", "upgrade-from", "image-services"}},
		{name: "services older than the release requires", m: many, cli: "v1.2.0", now: at("v1.1.0", "v1.1.0", "v1.32.1"), to: to("v1.2.0", "v1.2.0", ""), block: []string{"upgrade-from"}},
		{name: "a release for new clusters only", m: many, cli: "v1.0.0", now: at("v1.0.0-rc.1", "v1.0.0-rc.1", "v1.31.2"), to: to("v1.0.0", "v1.0.0", ""), block: []string{"upgrade-from"}},
		{name: "a pre-release belongs to its minor", m: many, cli: "v1.1.2-rc.1", now: at("v1.0.0", "v1.0.0", "v1.32.1"), to: to("v1.1.2-rc.1", "v1.1.0", "")},
		{name: "the CLI is older than the cluster", m: real, cli: "v1.0.0", now: at("v1.1.0", "v1.1.0", "v1.36.3"), block: []string{"cli-services", "cli-image"}},
		{name: "the CLI is two minors newer than the cluster", m: many, cli: "v1.2.0", now: at("v1.0.0", "v1.0.0", "v1.32.1"), block: []string{"cli-services", "cli-image"}},
		{name: "the CLI installs only its own services", m: many, cli: "v1.1.2-rc.1", now: at("v1.0.0", "v1.0.0", "v1.32.1"), to: to("v1.1.0", "v1.1.0", ""), block: []string{"cli-services"}},
		{name: "the CLI installs no image of the previous minor", m: many, cli: "v1.1.0", now: at("v1.1.0", "v1.0.0-rc.1", "v1.32.1"), to: to("", "v1.0.0", ""), block: []string{"cli-image"}},
		{name: "an image that is newer than the services", m: many, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.32.1"), to: to("", "v1.2.0", ""), block: []string{"cli-image", "image-services"}},
		{name: "workers two minors behind the services", m: many, cli: "v1.2.0", now: workers(at("v1.1.2-rc.1", "v1.1.0", "v1.32.1"), "v1.0.0", "v1.32.1"), to: to("v1.2.0", "", ""), block: []string{"upgrade-from", "image-services"}},
		{name: "the oldest image does not support the new minor", m: real, cli: "v1.1.0", now: at("v1.0.0", "v1.0.0", "v1.35.4"), to: to("v1.1.0", "v1.1.0", "v1.36.4"), block: []string{"oldest-supports-kubernetes"}},
		{name: "the oldest image is unknown", m: real, cli: "v1.1.0", now: at("v1.1.0", "v1.0.9", "v1.35.4"), to: to("v1.1.0", "v1.1.0", "v1.36.4"), block: []string{"oldest-supports-kubernetes"}},
		{name: "the new services do not support the running Kubernetes", m: real, cli: "v1.1.0", now: at("v1.0.0", "v1.0.0", "v1.34.3"), to: to("v1.1.0", "", ""), block: []string{"services-support-kubernetes"}, warn: []string{"kubernetes-offered"}},
		{name: "two minors of Kubernetes at once", m: many, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.31.9"), to: to("", "", "v1.33.0"), block: []string{"kubernetes-minor"}},
		{name: "patch outside the release", m: real, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.36.3"), to: to("", "", "v1.36.99"), block: []string{"kubernetes-offered"}, open: []string{"etcd-step"}},
		{name: "kubelets three minors behind may stay, with a warning", m: many, cli: "v1.1.0", now: workers(at("v1.1.0", "v1.1.0", "v1.32.1"), "v1.1.0", "v1.30.0"), to: keep(to("", "", "v1.33.0")), warn: []string{"kubelet-skew"}},
		{name: "kubelets three minors behind block the next minor", m: many, cli: "v1.1.0", now: workers(at("v1.1.0", "v1.1.0", "v1.32.1"), "v1.1.0", "v1.29.0"), to: to("", "", "v1.33.0"), block: []string{"kubelet-skew"}},
		{name: "kubelets before v1.25 may be two minors behind", m: NewMatrix([]release.Summary{invented("v1.0.0", "", "v1.26.0", "v1.27.0")}), cli: "v1.0.0", now: workers(at("v1.0.0", "v1.0.0", "v1.26.0"), "v1.0.0", "v1.24.0"), to: to("", "", "v1.27.0"), block: []string{"kubelet-skew", "kubeadm-floor"}},
		{name: "a kubelet that is newer than its API server", m: many, cli: "v1.1.0", now: workers(at("v1.1.0", "v1.1.0", "v1.32.1"), "v1.1.0", "v1.33.0"), block: []string{"kubelet-skew"}},
		{name: "a kubelet that is newer than one API server", m: many, cli: "v1.1.0", now: workers(at("v1.1.0", "v1.1.0", "v1.32.1-v1.33.0"), "v1.1.0", "v1.33.0"), to: to("", "", "v1.33.0"), warn: []string{"kubelet-skew", "rollout-running"}},
		{name: "a kubelet in place that skips a minor", m: many, cli: "v1.1.0", now: inPlace(workers(at("v1.1.0", "v1.1.0", "v1.32.1"), "v1.1.0", "v1.31.0")), to: to("", "", "v1.33.0"), block: []string{"kubelet-in-place"}},
		{name: "a kubelet in place that stays", m: many, cli: "v1.1.0", now: inPlace(workers(at("v1.1.0", "v1.1.0", "v1.32.1"), "v1.1.0", "v1.31.0")), to: keep(to("", "", "v1.33.0"))},
		{name: "a kubelet in place that goes up one minor", m: many, cli: "v1.1.0", now: inPlace(workers(at("v1.1.0", "v1.1.0", "v1.32.1"), "v1.1.0", "v1.32.1")), to: to("", "", "v1.33.0")},
		{name: "API servers two minors apart", m: many, cli: "v1.1.0", now: workers(at("v1.1.0", "v1.1.0", "v1.31.9-v1.33.0"), "v1.1.0", "v1.31.9"), block: []string{"control-plane-skew"}, warn: []string{"rollout-running"}},
		{name: "Kubernetes whose kubeadm is too old", m: many, cli: "v1.0.0", now: at("v1.0.0", "v1.0.0", "v1.29.0"), to: to("", "", "v1.30.0"), block: []string{"kubeadm-floor"}, open: []string{"etcd-step"}},
		{name: "etcd that is too old for v3.6", m: many, cli: "v1.0.0", now: at("v1.0.0", "v1.0.0", "v1.31.2"), to: to("", "", "v1.32.1"), block: []string{"etcd-step"}},
		{name: "observed etcd takes precedence over the matrix", m: many, cli: "v1.0.0", now: etcd(at("v1.0.0", "v1.0.0", "v1.31.2"), "3.5.27-0"), to: to("", "", "v1.32.1")},
		{name: "etcd one minor up", m: many, cli: "v1.3.0", now: etcd(at("v1.3.0", "v1.3.0", "v1.35.0"), "3.6.11-0"), to: to("", "", "v1.36.0")},
		{name: "etcd that is too old for v3.7", m: many, cli: "v1.3.0", now: etcd(at("v1.3.0", "v1.3.0", "v1.35.0"), "3.6.10-0"), to: to("", "", "v1.36.0"), block: []string{"etcd-step"}},
		{name: "etcd two minors up", m: many, cli: "v1.3.0", now: etcd(at("v1.3.0", "v1.3.0", "v1.35.0"), "3.5.27-0"), to: to("", "", "v1.36.0"), block: []string{"etcd-step"}},
		{name: "etcd of another major", m: many, cli: "v1.3.0", now: at("v1.3.0", "v1.3.0", "v1.35.0"), to: to("", "", "v1.36.1"), block: []string{"etcd-step"}},
		{name: "etcd of an older minor", m: many, cli: "v1.3.0", now: etcd(at("v1.3.0", "v1.3.0", "v1.34.0"), "3.7.0-0"), to: to("", "", "v1.35.0"), block: []string{"etcd-step"}},
		{name: "etcd tag that is not a version", m: many, cli: "v1.3.0", now: etcd(at("v1.3.0", "v1.3.0", "v1.34.0"), "latest"), to: to("", "", "v1.35.0"), open: []string{"etcd-step"}},
		{name: "an image that the provider does not offer", m: real, cli: "v1.1.0", now: at("v1.0.0", "v1.0.0", "v1.35.4"), to: to("v1.1.0", "v1.1.0", ""), offer: Offer{Images: no}, block: []string{"offered-image"}},
		{name: "Kubernetes that the provider does not offer", m: real, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.35.4"), to: to("", "", "v1.35.8"), offer: Offer{Kubernetes: no}, block: []string{"offered-kubernetes"}},
		{name: "running versions need not be offered", m: real, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.35.4"), offer: Offer{Images: no, Kubernetes: no}},
		{name: "another variant", m: real, cli: "v1.1.0", now: demand(at("v1.1.0", "v1.1.0", "v1.35.4")), to: attest(Planned{}, strings.Replace(attested, "tpm2", "none", 1)), block: []string{"variant"}},
		{name: "a register that only warns from now on", m: real, cli: "v1.1.0", now: demand(at("v1.1.0", "v1.1.0", "v1.35.4")), to: attest(Planned{}, strings.Replace(attested, `"1111111111111111111111111111111111111111111111111111111111111111"`, `{"expected":"1111111111111111111111111111111111111111111111111111111111111111","warnOnly":true}`, 1)), block: []string{"measurements-weaker"}},
		{name: "a register that is no longer enforced", m: real, cli: "v1.1.0", now: demand(at("v1.1.0", "v1.1.0", "v1.35.4")), to: attest(Planned{}, `{"variant":"tpm2","measurements":{}}`), block: []string{"measurements-weaker"}},
		{name: "other values are no weaker", m: real, cli: "v1.1.0", now: demand(at("v1.1.0", "v1.1.0", "v1.35.4")), to: attest(Planned{}, strings.ReplaceAll(attested, "1", "3"))},
		{name: "policies that cannot be parsed", m: real, cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.35.4"), to: attest(Planned{}, attested), open: []string{"variant", "measurements-weaker"}},
		{name: "a new minor during a rollout", m: real, cli: "v1.1.0", now: workers(at("v1.1.0", "v1.1.0", "v1.35.4-v1.35.8"), "v1.1.0", "v1.35.4"), to: to("", "", "v1.36.4"), block: []string{"rollout-running"}},
		{name: "the end of a rollout", m: real, cli: "v1.1.0", now: workers(at("v1.1.0", "v1.1.0", "v1.35.4-v1.36.3"), "v1.1.0", "v1.35.4"), to: to("", "", "v1.36.4"), warn: []string{"rollout-running"}},
		{name: "a rollout that has not begun", m: real, cli: "v1.1.0", now: target(at("v1.1.0", "v1.1.0", "v1.35.4"), "v1.1.0", "v1.36.3"), to: to("", "", "v1.36.4"), warn: []string{"rollout-running"}},
		{name: "below the target of a rollout", m: real, cli: "v1.1.0", now: target(at("v1.1.0", "v1.1.0", "v1.35.4"), "v1.1.0", "v1.36.3"), to: to("", "", "v1.36.0"), block: []string{"never-down"}, warn: []string{"rollout-running"}},
		{name: "an unchanged rollout of Kubernetes in progress", m: real, cli: "v1.1.0", now: workers(at("v1.1.0", "v1.1.0", "v1.35.4-v1.36.3"), "v1.1.0", "v1.35.4"), warn: []string{"rollout-running"}},
		{name: "control planes whose kubelets are not replaced yet", m: real, cli: "v1.1.0", now: func() Running {
			r := workers(at("v1.1.0", "v1.1.0", "v1.36.3"), "v1.1.0", "v1.35.4")
			r.ControlPlaneKubelet = span("v1.35.4-v1.36.3")
			return r
		}(), warn: []string{"rollout-running"}},
		{name: "the running Kubernetes is unknown", m: real, cli: "v1.0.0", now: noKubernetes, open: []string{
			"never-down", "oldest-supports-kubernetes", "services-support-kubernetes", "kubernetes-minor", "kubernetes-offered", "kubelet-skew", "control-plane-skew",
		}},
		{name: "the image of workers is unknown", m: real, cli: "v1.1.0", now: workers(at("v1.1.0", "v1.1.0", "v1.36.3"), "", "v1.36.3"), open: []string{"image-services"}},
	} {
		for _, id := range slices.Concat(tt.block, tt.warn) {
			reported[id] = true
		}
		t.Run(tt.name, func(t *testing.T) {
			got := tt.m.Check(ver(tt.cli), tt.now, tt.to, tt.offer)
			for s, want := range map[plan.Severity][]string{plan.Block: tt.block, plan.Warn: tt.warn, plan.NotChecked: tt.open} {
				if !slices.Equal(ids(got, s), want) {
					t.Errorf("%s by %v, want %v", s, ids(got, s), want)
					for _, r := range got {
						if r.Severity == s {
							t.Logf("%s: %s; %s", r.Rule, r.Title, r.Remedy)
						}
					}
				}
			}
			if len(got) != len(Rules) {
				t.Fatalf("%d results of %d rules", len(got), len(Rules))
			}
			for i, r := range got {
				if r.Rule != Rules[i].ID || r.Title == "" || r.Reference == "" || (r.Remedy != "") != (r.Severity != plan.Info) || strings.Contains(r.Title+r.Remedy, "  ") {
					t.Errorf("result %d is %+v", i, r)
				}
			}
		})
	}
	for _, r := range Rules {
		if !reported[r.ID] {
			t.Errorf("rule %s has no row that it blocks or warns about", r.ID)
		}
	}
}

// Rules have a title, a source, and a unique ID in kebab case.
func TestRuleIDs(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range Rules {
		if seen[r.ID] || !regexp.MustCompile(`^[a-z]+(-[a-z]+)+$|^[a-z]+$`).MatchString(r.ID) || r.title == "" || r.source == "" {
			t.Errorf("rule %+v", r.ID)
		}
		seen[r.ID] = true
	}
	for _, id := range static {
		if !seen[id] {
			t.Errorf("there is no rule %s", id)
		}
	}
}

func TestRuleTextsNameVersionsAndRemedy(t *testing.T) {
	m := NewMatrix(two())
	for _, tt := range []struct {
		name, cli string
		now       Running
		to        Planned
		want      RuleResult
	}{
		{name: "the image first", cli: "v1.1.0", now: at("v1.0.0", "v1.0.0", "v1.35.4"), to: to("v1.1.0", "v1.1.0", "v1.36.4"), want: RuleResult{
			"oldest-supports-kubernetes", plan.Block, "Kubernetes v1.36 needs an image that supports it on all control planes first, and image v1.0.0 supports v1.34 and v1.35", PolicyPage,
			"upgrade to release and image v1.1.0 first, and to Kubernetes v1.36 in the hop after it",
		}},
		{name: "Kubernetes first", cli: "v1.1.0", now: at("v1.0.0", "v1.0.0", "v1.34.3"), to: to("v1.1.0", "v1.1.0", ""), want: RuleResult{
			"services-support-kubernetes", plan.Block, "release v1.1.0 does not support the running Kubernetes v1.34 (supported: v1.35 and v1.36)", PolicyPage,
			"upgrade Kubernetes to v1.35 first, with constellation v1.0.0",
		}},
		{name: "a newer cluster", cli: "v1.0.0", now: at("v1.1.0", "v1.0.0", "v1.35.4"), to: Planned{}, want: RuleResult{
			"cli-services", plan.Block, "this CLI, v1.0.0, is older than the running services v1.1.0", PolicyPage, "use constellation v1.1.0 or newer",
		}},
		{name: "an impossible patch", cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.35.4"), to: to("", "", "v1.36.9"), want: RuleResult{
			"kubernetes-offered", plan.Block, "release v1.1.0 does not contain Kubernetes v1.36.9", PolicyPage, "choose v1.36.0, v1.36.3 or v1.36.4",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff([]*RuleResult{&tt.want}, Blocks(m.Check(ver(tt.cli), tt.now, tt.to, Offer{}))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestRemediesNameOnlyReachablePatches(t *testing.T) {
	only := func(have ...string) Offer {
		return Offer{Kubernetes: func(v version.Version) (bool, string, string) {
			return slices.Contains(have, v.String()), "the mirror has no " + v.String(), "fetch " + v.String()
		}}
	}
	all := two()
	faulty := two()
	for i, k := range faulty[1].Kubernetes {
		if k.Version.String() == "v1.36.4" {
			faulty[1].Kubernetes = slices.Clone(faulty[1].Kubernetes)
			faulty[1].Kubernetes[i].Faulty = "crashes"
		}
	}
	for _, tt := range []struct {
		name     string
		releases []release.Summary
		runs     string
		offer    Offer
		want     string
	}{
		{name: "all patches", releases: all, runs: "v1.35.4", offer: Offer{}, want: "choose v1.36.0, v1.36.3 or v1.36.4"},
		{name: "one is faulty", releases: faulty, runs: "v1.35.4", offer: Offer{}, want: "choose v1.36.0 or v1.36.3"},
		{name: "the provider offers two", releases: all, runs: "v1.35.4", offer: only("v1.36.0", "v1.36.4"), want: "choose v1.36.0 or v1.36.4"},
		{name: "the provider offers a faulty one", releases: faulty, runs: "v1.35.4", offer: only("v1.36.3", "v1.36.4"), want: "choose v1.36.3"},
		{name: "the provider offers none", releases: all, runs: "v1.35.4", offer: only(), want: "the mirror has no v1.36.4: fetch v1.36.4"},
		{name: "a newer one runs", releases: all, runs: "v1.36.3", offer: Offer{}, want: "choose v1.36.3 or v1.36.4"},
		{name: "the running patch is no longer offered", releases: all, runs: "v1.36.3", offer: only("v1.36.0"), want: "choose v1.36.3"},
		{name: "the running patch is in no release", releases: all, runs: "v1.36.7", offer: Offer{}, want: "wait for a newer patch of v1.36 or choose a newer minor"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			results := Blocks(NewMatrix(tt.releases).Check(ver("v1.1.0"), at("v1.1.0", "v1.1.0", tt.runs), to("", "", "v1.36.9"), tt.offer))
			i := slices.IndexFunc(results, func(r *RuleResult) bool { return r.Rule == "kubernetes-offered" })
			if i < 0 || results[i].Remedy != tt.want {
				t.Errorf("want %q, got %+v", tt.want, results)
			}
		})
	}
}

func TestReachableNamesEveryNewerVersion(t *testing.T) {
	m := NewMatrix(two())
	texts := func(r Reach) (out []string) {
		for _, v := range r.Versions {
			out = append(out, v.String())
		}
		for _, b := range r.Blocked {
			out = append(out, b.Version+" "+b.Rule)
		}
		return out
	}
	for _, tt := range []struct {
		name, cli string
		now       Running
		want      map[string][]string
		notes     []string
	}{
		{name: "the CLI of the cluster", cli: "v1.0.0", now: at("v1.0.0", "v1.0.0", "v1.34.3"), want: map[string][]string{
			"cli": {"v1.1.0 services-support-kubernetes"}, "services": {"v1.1.0 cli-services"}, "image": {"v1.1.0 cli-image"},
			"kubernetes": {
				"v1.34.4", "v1.35.3", "v1.35.4", "v1.35.6 kubernetes-offered", "v1.35.8 kubernetes-offered",
				"v1.36.0 oldest-supports-kubernetes", "v1.36.3 oldest-supports-kubernetes", "v1.36.4 oldest-supports-kubernetes",
			},
		}, notes: []string{NoteNewerCLI}},
		{name: "a newer CLI than the cluster", cli: "v1.1.0", now: at("v1.0.0", "v1.0.0", "v1.35.4"), want: map[string][]string{
			"cli": nil, "services": {"v1.1.0"}, "image": {"v1.1.0"},
			"kubernetes": {
				"v1.35.6", "v1.35.8", "v1.36.0 oldest-supports-kubernetes", "v1.36.3 oldest-supports-kubernetes", "v1.36.4 oldest-supports-kubernetes",
			},
		}},
		{name: "newer patches of the newest minor", cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.36.2"), want: map[string][]string{"cli": nil, "services": nil, "image": nil, "kubernetes": {"v1.36.3", "v1.36.4"}}},
		{name: "up to date", cli: "v1.1.0", now: at("v1.1.0", "v1.1.0", "v1.36.4"), want: map[string][]string{"cli": nil, "services": nil, "image": nil, "kubernetes": nil}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := map[string][]string{}
			for _, r := range m.Reachable(ver(tt.cli), tt.now, Offer{}) {
				got[r.Component] = texts(r)
				for _, b := range r.Blocked {
					if b.Reason == "" || b.Remedy == "" || b.Component != r.Component {
						t.Errorf("%+v", b)
					}
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
			if got := m.Notes(ver(tt.cli), tt.now); !slices.Equal(got, tt.notes) {
				t.Errorf("notes %q, want %q", got, tt.notes)
			}
		})
	}
	three := NewMatrix(append(two(), invented("v1.2.0", "v1.1.0", "v1.36.4", "v1.37.0")))
	if got := three.Notes(ver("v1.1.0"), at("v1.0.0", "v1.0.0", "v1.35.4")); !slices.Equal(got, []string{NoteNewerCLI, NoteFinishServices}) {
		t.Errorf("services behind a CLI behind another: %q", got)
	}
	if got := NewMatrix(append(two(), faulty(invented("v1.2.0", "v1.1.0", "v1.36.4")))).Notes(ver("v1.1.0"), at("v1.1.0", "v1.1.0", "v1.36.4")); got != nil {
		t.Errorf("a faulty release is advertised: %q", got)
	}
}

func TestMatrixDoesNotChangeItsInput(t *testing.T) {
	list := []release.Summary{invented("v1.1.0", "v1.0.0", "v1.36.0", "v1.35.0"), invented("v1.0.0", "", "v1.35.0")}
	NewMatrix(list)
	if list[0].Version.String() != "v1.1.0" || list[0].Kubernetes[0].Version.String() != "v1.36.0" {
		t.Errorf("the summaries are in another order: %v", list)
	}
}

func TestMatrixIsSafeForConcurrentUse(t *testing.T) {
	m := NewMatrix(two())
	now, goal := at("v1.0.0", "v1.0.0", "v1.34.3"), to("v1.1.0", "v1.1.0", "v1.36.4")
	checks := m.Check(ver("v1.1.0"), now, goal, Offer{})
	hops, _ := m.Path(now, goal, Offer{})
	paths := told(hops)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 50 {
				if diff := cmp.Diff(checks, m.Check(ver("v1.1.0"), now, goal, Offer{})); diff != "" {
					t.Error(diff)
				}
				// A check in between must not leave state in the pool.
				m.Check(ver("v1.0.0"), at("v1.1.0", "v1.1.0", "v1.36.3"), Planned{KeepWorkers: true, Attestation: attested}, Offer{})
			}
			if hops, _ := m.Path(now, goal, Offer{}); !slices.Equal(told(hops), paths) {
				t.Errorf("%q", told(hops))
			}
		})
	}
	all.Wait()
}
