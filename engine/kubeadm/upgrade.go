package kubeadm

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

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
		ImagePullSerial       *bool    `yaml:"imagePullSerial,omitempty"`
		IgnorePreflightErrors []string `yaml:"ignorePreflightErrors,omitempty"`
		SkipPhases            []string `yaml:"skipPhases,omitempty"`
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

// HostPatches returns the directory with the patches of the host whose file system is below root;
// empty if it has none.
func HostPatches(root string) (string, error) {
	dir := filepath.Join(root, PatchesDir)
	switch info, err := os.Stat(dir); {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("read patches for kubeadm: %w", err)
	case !info.IsDir():
		return "", fmt.Errorf("read patches for kubeadm: %s is not a directory", dir)
	}
	return dir, nil
}

// UpgradeFile is where a host keeps its own UpgradeConfiguration of kubeadm; see [Config.WithHost].
const UpgradeFile = "/etc/kubernetes/kubeadm-upgrade.yaml"

// maxUpgradeFile bounds the size of [UpgradeFile].
const maxUpgradeFile = 64 << 10

// WithPatches returns c with the patches in a directory: kubeadm applies them to what it
// writes when it initializes, joins or upgrades the host. Without them an upgrade would write the
// manifests as if the user had never patched them.
func (c Config) WithPatches(dir string) Config {
	if dir == "" {
		return c
	}
	if c.Init != nil {
		init := *c.Init
		init.Patches = &Patches{dir}
		c.Init = &init
	}
	if c.Join != nil {
		join := *c.Join
		join.Patches = &Patches{dir}
		c.Join = &join
	}
	if c.Upgrade != nil {
		u := *c.Upgrade
		u.Apply.Patches, u.Node.Patches = &Patches{dir}, &Patches{dir}
		c.Upgrade = &u
	}
	return c
}

// hostUpgrade has the fields of an UpgradeConfiguration that a host may set.
type hostUpgrade struct {
	TypeMeta `yaml:",inline"`
	Apply    *hostPart `yaml:"apply"`
	Node     *hostPart `yaml:"node"`
}

// hostPart has the fields of the part of a verb. Absent ones keep our values.
type hostPart struct {
	CertificateRenewal    *bool    `yaml:"certificateRenewal"`
	EtcdUpgrade           *bool    `yaml:"etcdUpgrade"`
	ImagePullPolicy       string   `yaml:"imagePullPolicy"`
	ImagePullSerial       *bool    `yaml:"imagePullSerial"`
	IgnorePreflightErrors []string `yaml:"ignorePreflightErrors"`
	SkipPhases            []string `yaml:"skipPhases"`
	Patches               *Patches `yaml:"patches"`
}

// WithHost returns c, whose upgrade has the options of a host's own UpgradeConfiguration, the
// content of [UpgradeFile]. The version is never among them. Unknown fields are errors: ignored,
// the upgrade would undo what the user wanted to keep.
func (c Config) WithHost(doc []byte) (Config, error) {
	if c.Upgrade == nil {
		return c, nil
	}
	h, err := parseHostUpgrade(doc)
	if err != nil {
		return c, err
	}
	u := *c.Upgrade
	if err := errors.Join(
		h.Apply.change("apply", &u.Apply.UpgradeNodeConfiguration),
		h.Node.change("node", &u.Node),
	); err != nil {
		return c, err
	}
	c.Upgrade = &u
	return c, nil
}

func parseHostUpgrade(doc []byte) (h hostUpgrade, err error) {
	if len(doc) > maxUpgradeFile {
		return h, fmt.Errorf("it has %d bytes, the limit is %d", len(doc), maxUpgradeFile)
	}
	d := yaml.NewDecoder(bytes.NewReader(doc))
	d.KnownFields(true)
	if err := d.Decode(&h); errors.Is(err, io.EOF) {
		return h, errors.New("it is empty: delete it")
	} else if err != nil {
		return h, fmt.Errorf("parse it: %w", err)
	}
	if want := (TypeMeta{apiVersion, "UpgradeConfiguration"}); h.TypeMeta != want {
		return h, fmt.Errorf("it has apiVersion %.64q and kind %.64q, want %s and %s", h.APIVersion, h.Kind, want.APIVersion, want.Kind)
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return h, errors.New("it has more than one document")
	}
	return h, nil
}

// change sets what p names in the part of a verb.
func (p *hostPart) change(verb string, to *UpgradeNodeConfiguration) error {
	if p == nil {
		return nil
	}
	if p.CertificateRenewal != nil {
		to.CertificateRenewal = *p.CertificateRenewal
	}
	if p.EtcdUpgrade != nil {
		to.EtcdUpgrade = *p.EtcdUpgrade
	}
	to.ImagePullSerial = p.ImagePullSerial
	var errs []error
	if p.ImagePullPolicy != "" {
		to.ImagePullPolicy = p.ImagePullPolicy
		errs = append(errs, checkPullPolicy(p.ImagePullPolicy))
	}
	for _, c := range p.IgnorePreflightErrors {
		if !slices.Contains(to.IgnorePreflightErrors, c) {
			to.IgnorePreflightErrors = append(slices.Clone(to.IgnorePreflightErrors), c)
		}
	}
	errs = append(errs, checkIgnored(to.IgnorePreflightErrors), checkSkipped(p.SkipPhases))
	to.SkipPhases = p.SkipPhases
	if p.Patches != nil {
		if !filepath.IsAbs(p.Patches.Directory) {
			errs = append(errs, fmt.Errorf("directory of patches %.130q is not an absolute path", p.Patches.Directory))
		}
		to.Patches = p.Patches
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: %w", verb, err)
	}
	return nil
}

// The add-ons of kubeadm, by the names of their phases.
const (
	CoreDNS   = "coredns"
	KubeProxy = "kube-proxy"
)

// SkipsAddon reports whether the user's options of an upgrade skip the phase of an add-on. Those of
// both verbs count: the cluster has the add-on only once, whichever verb would upgrade it.
func (u *UpgradeConfiguration) SkipsAddon(name string) bool {
	return slices.ContainsFunc(slices.Concat(u.Apply.SkipPhases, u.Node.SkipPhases), func(phase string) bool {
		return phase == "addon" || phase == "addon/all" || phase == "addon/"+name
	})
}

var skippableRE = regexp.MustCompile(`^[a-z][a-z-]{0,63}(/[a-z][a-z-]{0,63})?$`)

// neverSkipped are phases without which kubeadm would report an upgrade that did not happen.
var neverSkipped = []string{"preflight", "control-plane", "upload-config", "upload-config/all", "upload-config/kubeadm"}

func checkSkipped(phases []string) error {
	for _, p := range phases {
		if !skippableRE.MatchString(p) {
			return fmt.Errorf("%.130q is not the name of a phase", p)
		}
		if slices.Contains(neverSkipped, p) {
			return fmt.Errorf("phase %s cannot be skipped: Kubernetes would stay as it is", p)
		}
	}
	return nil
}

func checkPullPolicy(policy string) error {
	if !slices.Contains([]string{"IfNotPresent", "Always", "Never"}, policy) {
		return fmt.Errorf("image pull policy %.130q is not IfNotPresent, Always or Never", policy)
	}
	return nil
}

func checkIgnored(checks []string) error {
	if len(checks) > maxIgnored {
		return fmt.Errorf("more than %d checks to ignore", maxIgnored)
	}
	for _, c := range checks {
		// "all" would also ignore that the control plane is broken.
		if !checkRE.MatchString(c) || strings.EqualFold(c, "all") {
			return fmt.Errorf("%.130q is not the name of one check", c)
		}
	}
	return nil
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
	pull := cmp.Or(u.ImagePullPolicy, "IfNotPresent")
	errs = append(errs, checkIgnored(u.IgnorePreflightErrors), checkPullPolicy(pull))
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
