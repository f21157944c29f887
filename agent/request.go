//go:build linux

package agent

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"constellation/agent/upgradeproto"
	"constellation/engine/component"
	"constellation/engine/component/componentproto"
	"constellation/engine/kubeadm"
	"constellation/engine/release"
	"constellation/engine/version"
)

// place is the destination of a component.
type place struct {
	path    string
	extract bool
}

// places are the components that an upgrade may install, with their destinations in releases.
var places = map[string]place{
	"kubeadm":     {"/usr/local/bin/kubeadm", false},
	"kubelet":     {"/usr/local/bin/kubelet", false},
	"kubectl":     {"/usr/local/bin/kubectl", false},
	"crictl":      {"/usr/local/bin", true},
	"cni-plugins": {"/opt/cni/bin", true},
}

// order is a valid request.
type order struct {
	proto   *upgradeproto.UpgradeRequest // without its position in the stream
	version version.Version
	config  kubeadm.Config
	// first is kubeadm, rest are the others.
	first, rest component.List
	// list is both in the order of the request, which was signed.
	list component.List
	// addons are the phases of kubeadm that upgrade the requested add-ons, in kubeadm's order.
	addons []addon
}

// addon is an add-on of kubeadm, and the verb that upgrades it.
type addon struct{ name, verb string }

var addons = []addon{{kubeadm.CoreDNS, kubeadm.UpgradeCoreDNS}, {kubeadm.KubeProxy, kubeadm.UpgradeKubeProxy}}

// parseOrder validates a request without access to the host.
func parseOrder(req *upgradeproto.UpgradeRequest) (*order, error) {
	o := &order{proto: proto.CloneOf(req)}
	o.proto.After = 0
	if t := req.GetToken(); t == "" || len(t) > 128 || strings.ContainsFunc(t, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("token: want 1 to 128 printable ASCII characters")
	}
	err := o.parseWhat(req)
	if err != nil {
		return nil, err
	}
	if o.version, err = version.Parse(req.GetKubernetesVersion()); err != nil {
		return nil, fmt.Errorf("kubernetes version: %w", err)
	}
	if s := o.version.String(); s != req.GetKubernetesVersion() || strings.ContainsRune(s, '+') {
		return nil, fmt.Errorf("kubernetes version: %q is not in canonical form %s", req.GetKubernetesVersion(), o.version)
	}
	o.config, err = kubeadm.NewUpgrade(kubeadm.Upgrade{
		Version: o.version, IgnorePreflightErrors: req.GetConfiguration().GetIgnorePreflightErrors(), ImagePullPolicy: req.GetConfiguration().GetImagePullPolicy(),
	})
	if err != nil {
		return nil, err
	}
	if len(req.GetComponents()) > len(places) {
		return nil, fmt.Errorf("more than %d components", len(places))
	}
	l, err := component.FromProto(req.GetComponents())
	if err != nil {
		return nil, err
	}
	o.list = l
	for _, c := range l {
		p, ok := places[c.Name]
		switch {
		case !ok:
			return nil, fmt.Errorf("component %s is not one that an upgrade installs", c.Name)
		case c.Path != p.path || c.Extract != p.extract:
			return nil, fmt.Errorf("component %s: path is %s, want %s", c.Name, c.Path, p.path)
		case !p.extract && c.Mode != 0 && c.Mode != 0o755:
			return nil, fmt.Errorf("component %s: mode is %#o, want 0755", c.Name, c.Mode)
		}
		if c.Name == "kubeadm" {
			o.first = component.List{c}
		} else {
			o.rest = append(o.rest, c)
		}
	}
	if _, ok := o.rest.ByName("kubelet"); !ok || len(o.first) == 0 {
		return nil, errors.New("components: kubeadm or kubelet is missing")
	}
	return o, nil
}

// parseWhat validates what is upgraded.
func (o *order) parseWhat(req *upgradeproto.UpgradeRequest) error {
	for _, a := range addons {
		if slices.Contains(req.GetAddons(), a.name) {
			o.addons = append(o.addons, a)
		}
	}
	some := len(o.addons) > 0
	switch w := req.GetWhat(); {
	case w != upgradeproto.What_APPLY && w != upgradeproto.What_NODE && w != upgradeproto.What_ADDONS:
		return errors.New("what: want APPLY, NODE or ADDONS")
	case len(req.GetAddons()) != len(o.addons):
		return fmt.Errorf("addons: want %s, %s or both, each once", kubeadm.CoreDNS, kubeadm.KubeProxy)
	case some != (w == upgradeproto.What_ADDONS):
		return errors.New("addons: want some for ADDONS, and none for APPLY and NODE")
	case req.GetKeepKubelet() && w != upgradeproto.What_APPLY:
		return errors.New("keep_kubelet: want it for APPLY only")
	case req.GetUpgradePackages() && (w == upgradeproto.What_ADDONS || req.GetKeepKubelet()):
		return errors.New("upgrade_packages: want it for NODE, or for APPLY without keep_kubelet")
	}
	return nil
}

// vouched returns nil if a release builder that this host trusts vouches for o's components
// for its version. The caller alone must not decide what runs as root.
func (h Host) vouched(o *order) error {
	trust, err := release.MachineTrust(h.Root)
	if err != nil {
		return err
	}
	return trust.Verify(o.proto.GetComponentsStatement(), o.version, runtime.GOARCH, o.list)
}

// same reports whether two requests are equal apart from their tokens and statements, the order of
// their components, whether the kubelet is kept, and whether packages are upgraded.
func same(a, b *upgradeproto.UpgradeRequest) bool {
	a, b = proto.CloneOf(a), proto.CloneOf(b)
	a.Token, b.Token = "", ""
	a.ComponentsStatement, b.ComponentsStatement = "", ""
	a.KeepKubelet, b.KeepKubelet = false, false
	a.UpgradePackages, b.UpgradePackages = false, false
	for _, r := range []*upgradeproto.UpgradeRequest{a, b} {
		slices.SortFunc(r.Components, func(x, y *componentproto.Component) int { return strings.Compare(x.GetName(), y.GetName()) })
	}
	return proto.Equal(a, b)
}

// words describes a request.
func words(r *upgradeproto.UpgradeRequest) string {
	what := "node"
	switch r.GetWhat() {
	case upgradeproto.What_APPLY:
		what = "control plane"
	case upgradeproto.What_ADDONS:
		what = "add-ons"
	case upgradeproto.What_NODE, upgradeproto.What_WHAT_UNSPECIFIED:
	}
	return fmt.Sprintf("upgrade of the %s to %s (%s)", what, r.GetKubernetesVersion(), r.GetToken())
}

// admit reports whether this host may be upgraded to o's version. The running versions count:
// the kubelet's and, on a control plane, those of static pods. kubeadm may be newer after an
// unfinished run.
func (h Host) admit(ctx context.Context, o *order) error {
	s, err := h.Status(ctx)
	if err != nil {
		return err
	}
	switch {
	case s.GetRole() == "":
		return errors.New("the host belongs to no cluster")
	case o.proto.GetWhat() != upgradeproto.What_NODE && s.GetRole() != "control-plane":
		return errors.New("the host is not a control plane")
	case s.GetKubeletVersion() == "":
		return errors.New("the host has no kubelet")
	}
	runs := map[string]string{"kubelet": s.GetKubeletVersion()}
	for _, name := range controlPlane {
		if image := s.GetStaticPods()[name]; image != "" {
			if runs[name] = tag(image); runs[name] == "" {
				return fmt.Errorf("%s runs %s, which has no version", name, image)
			}
		}
	}
	for _, name := range append([]string{"kubelet"}, controlPlane...) {
		if runs[name] == "" {
			continue
		}
		v, err := version.Parse(runs[name])
		if err != nil {
			return fmt.Errorf("version of %s: %w", name, err)
		}
		if o.version.Less(v) {
			return fmt.Errorf("%s is %s: downgrade to %s is not possible", name, v, o.version)
		}
		if v.MinorDistance(o.version) > 1 {
			return fmt.Errorf("%s is %s: %s is more than one minor ahead", name, v, o.version)
		}
	}
	if o.proto.GetWhat() == upgradeproto.What_ADDONS { // kube-proxy must not be newer than an API server
		if err := is("kube-apiserver", runs["kube-apiserver"], o.version); err != nil {
			return fmt.Errorf("add-ons follow the control plane: %w", err)
		}
	}
	return nil
}

// controlPlane are the static pods that have Kubernetes' version.
var controlPlane = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// tag returns the tag of an image; empty if it has none.
func tag(image string) string {
	image, _, _ = strings.Cut(image, "@")
	_, t, ok := strings.Cut(image[strings.LastIndexByte(image, '/')+1:], ":")
	if !ok {
		return ""
	}
	return t
}
