package release

import (
	"context"
	"time"

	"constellation/engine/version"
)

// Kinds of services.
const (
	// OfRelease is a service with a version of its own: it changes with the release.
	OfRelease = "release"
	// OfKubernetes is a service whose version follows from that of Kubernetes, see
	// [KubernetesSummary.Service].
	OfKubernetes = "kubernetes"
)

// Summary has the facts about a release that decide on upgrades to it.
type Summary struct {
	Version version.Version `json:"version"`
	// UpgradeFrom is the oldest release that can be upgraded to this one; zero if none can.
	UpgradeFrom version.Version `json:"upgradeFrom,omitzero"`
	// Faulty is the reason why upgrades to this release are refused; empty if it is fine.
	Faulty string `json:"faulty,omitempty"`
	// Published is zero if unknown.
	Published time.Time `json:"published,omitzero"`
	// Kubernetes are the patches that it offers, oldest first.
	Kubernetes []KubernetesSummary `json:"kubernetes"`
	// DefaultKubernetes is the version of new clusters without a configured one.
	DefaultKubernetes version.Version `json:"defaultKubernetes"`
	Services          []Service       `json:"services"`
	// CLI lists the downloads of this release's program by platform; empty if unknown.
	CLI []Download `json:"cli,omitempty"`
}

// KubernetesSummary is a patch release of Kubernetes that a release offers.
type KubernetesSummary struct {
	Version version.Version `json:"version"`
	// Etcd and CoreDNS are the tags of the images that kubeadm deploys: 3.6.6-0, v1.13.1.
	// Autoscaler is that of the cluster-autoscaler for this minor, such as v1.35.1; empty if the
	// release names none.
	Etcd       string `json:"etcd"`
	CoreDNS    string `json:"coredns"`
	Autoscaler string `json:"autoscaler,omitempty"`
	// Faulty is the reason why upgrades to this patch are refused; empty if it is fine.
	Faulty string `json:"faulty,omitempty"`
	// Unpinned is why the release has no digests of its components; empty if it has them.
	Unpinned string `json:"unpinned,omitempty"`
}

// Service returns the version of a service that is bound to Kubernetes, such as v1.13.1 for
// coredns; empty if unknown.
func (k KubernetesSummary) Service(name string) string {
	switch name {
	case "kube-proxy":
		return k.Version.String()
	case "coredns":
		return k.CoreDNS
	case "cluster-autoscaler":
		return k.Autoscaler
	}
	return ""
}

// Download is a file for users.
type Download struct {
	OS   string `json:"os" yaml:"os"`     // linux, darwin
	Arch string `json:"arch" yaml:"arch"` // amd64, arm64
	URL  string `json:"url" yaml:"url"`
	// Digest is sha256: and 64 hex digits; empty if unknown.
	Digest string `json:"digest,omitempty" yaml:"digest"`
}

// Source provides releases. *[Feed] is one, [Join] creates another. Methods may be called
// concurrently. Their results are shared and must not be changed.
type Source interface {
	// Summaries returns all releases, oldest first.
	Summaries(context.Context) ([]Summary, error)
	// Release returns one release. The error wraps ErrNotOffered if there is none.
	Release(context.Context, version.Version) (*Release, error)
	// Measurements returns the expected measurements of a provider's machine that booted the
	// image of a release: PCR index to 64 hex digits. The error wraps ErrNotOffered if the source
	// lacks them.
	Measurements(ctx context.Context, v version.Version, provider string) (map[uint32]string, error)
	// Images returns the images of a release. The error wraps ErrNotOffered if the source lacks
	// them.
	Images(ctx context.Context, v version.Version) (*Images, error)
	// State returns the origin and the age of the data.
	State() State
}

// State is the origin of the releases, and their freshness.
type State struct {
	// Source is "embedded", a directory or an address.
	Source string `json:"source"`
	// Fetched is when the source last confirmed the data; zero for embedded.
	Fetched time.Time `json:"fetched,omitzero"`
	// Stale is whether an older copy is used, and Problem why.
	Stale   bool   `json:"stale,omitempty"`
	Problem string `json:"problem,omitempty"`
	// Err is Problem as an error, for errors.Is.
	Err error `json:"-"`
	// Signer is the key that signed; empty for embedded, which is part of the program.
	Signer string `json:"signer,omitempty"`
	// Sequence counts the publications of a feed; Expires is when this one expires.
	Sequence uint64    `json:"sequence,omitempty"`
	Expires  time.Time `json:"expires,omitzero"`
	// Root is the version of the feed's root; zero if it has none.
	Root uint64 `json:"root,omitempty"`
	// Warning is a weakness of the feed, which is used nevertheless.
	Warning string `json:"warning,omitempty"`
}

// Summary returns the facts about r that decide on upgrades to it.
func (r *Release) Summary() Summary {
	s := Summary{
		Version: r.Version, UpgradeFrom: r.UpgradeFrom, Faulty: r.Faulty, Published: r.Published,
		DefaultKubernetes: r.DefaultKubernetes, Services: r.Services, CLI: r.CLI,
	}
	for _, k := range r.Kubernetes {
		s.Kubernetes = append(s.Kubernetes, KubernetesSummary{Version: k.Version, Etcd: k.Etcd, CoreDNS: k.CoreDNS, Autoscaler: k.Autoscaler, Faulty: k.Faulty, Unpinned: k.Unpinned})
	}
	return s
}
