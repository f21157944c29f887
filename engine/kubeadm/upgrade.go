package kubeadm

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"constellation/engine/version"
)

// Upgrade has the options of all verbs of kubeadm upgrade.
type Upgrade struct {
	Version version.Version
	// IgnorePreflightErrors are names of checks, such as "NumCPU"; "all" is refused.
	IgnorePreflightErrors []string
	// ImagePullPolicy is IfNotPresent, Always or Never; empty means IfNotPresent.
	ImagePullPolicy string
}

type (
	// UpgradeConfiguration is about an upgrade; each verb reads its own part.
	UpgradeConfiguration struct {
		TypeMeta `yaml:",inline"`
		Plan     UpgradePlanConfiguration  `yaml:"plan"`
		Apply    UpgradeApplyConfiguration `yaml:"apply"`
		Node     UpgradeNodeConfiguration  `yaml:"node"`
	}
	// UpgradePlanConfiguration is for kubeadm upgrade plan.
	UpgradePlanConfiguration struct {
		KubernetesVersion     string   `yaml:"kubernetesVersion"`
		IgnorePreflightErrors []string `yaml:"ignorePreflightErrors,omitempty"`
	}
	// UpgradeApplyConfiguration is for kubeadm upgrade apply.
	UpgradeApplyConfiguration struct {
		KubernetesVersion        string `yaml:"kubernetesVersion"`
		UpgradeNodeConfiguration `yaml:",inline"`
	}
	// UpgradeNodeConfiguration is for kubeadm upgrade node, which takes the version
	// from the cluster.
	UpgradeNodeConfiguration struct {
		// CertificateRenewal and EtcdUpgrade are kubeadm's defaults. They are written so that no
		// default of another version decides.
		CertificateRenewal    bool     `yaml:"certificateRenewal"`
		EtcdUpgrade           bool     `yaml:"etcdUpgrade"`
		ImagePullPolicy       string   `yaml:"imagePullPolicy"`
		IgnorePreflightErrors []string `yaml:"ignorePreflightErrors,omitempty"`
		Patches               *Patches `yaml:"patches,omitempty"`
	}
	// Patches names a directory with patches of the static pods and of the kubelet's configuration.
	Patches struct {
		Directory string `yaml:"directory"`
	}
)

// PatchesDir is where a host keeps the patches of its control plane, by the convention of
// kubeadm's manual.
const PatchesDir = "/etc/kubernetes/patches"

// WithPatches returns c, whose upgrade applies the patches in a directory. Without
// them kubeadm would write the manifests as if the user had never patched them.
func (c Config) WithPatches(dir string) Config {
	if c.Upgrade == nil || dir == "" {
		return c
	}
	u := *c.Upgrade
	u.Apply.Patches, u.Node.Patches = &Patches{dir}, &Patches{dir}
	c.Upgrade = &u
	return c
}

var checkRE = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9-]{0,127}$`)

// maxIgnored bounds the checks that one upgrade may ignore.
const maxIgnored = 64

// NewUpgrade returns the configuration for all verbs of kubeadm upgrade. A version
// that is named keeps kubeadm from looking for releases in the network.
func NewUpgrade(u Upgrade) (Config, error) {
	var errs []error
	if u.Version.IsZero() {
		errs = append(errs, errors.New("version of Kubernetes is missing"))
	}
	if len(u.IgnorePreflightErrors) > maxIgnored {
		errs = append(errs, fmt.Errorf("more than %d checks to ignore", maxIgnored))
	}
	for _, c := range u.IgnorePreflightErrors {
		// "all" would also ignore that the control plane is broken.
		if !checkRE.MatchString(c) || strings.EqualFold(c, "all") {
			errs = append(errs, fmt.Errorf("%.130q is not the name of one check", c))
			break
		}
	}
	pull := u.ImagePullPolicy
	switch pull {
	case "":
		pull = "IfNotPresent"
	case "IfNotPresent", "Always", "Never":
	default:
		errs = append(errs, fmt.Errorf("image pull policy %.130q is not IfNotPresent, Always or Never", pull))
	}
	if err := errors.Join(errs...); err != nil {
		return Config{}, fmt.Errorf("configure kubeadm upgrade: %w", err)
	}
	v, ignore := u.Version.String(), u.IgnorePreflightErrors
	node := UpgradeNodeConfiguration{CertificateRenewal: true, EtcdUpgrade: true, ImagePullPolicy: pull, IgnorePreflightErrors: ignore}
	return Config{Upgrade: &UpgradeConfiguration{
		TypeMeta: TypeMeta{apiVersion, "UpgradeConfiguration"},
		Plan:     UpgradePlanConfiguration{v, ignore},
		Apply:    UpgradeApplyConfiguration{v, node},
		Node:     node,
	}}, nil
}
