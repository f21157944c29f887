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

// place is where a component may go.
type place struct {
	path    string
	extract bool
}

// places are the components that an upgrade may install, and where releases put them.
var places = map[string]place{
	"kubeadm":     {"/usr/local/bin/kubeadm", false},
	"kubelet":     {"/usr/local/bin/kubelet", false},
	"kubectl":     {"/usr/local/bin/kubectl", false},
	"crictl":      {"/usr/local/bin", true},
	"cni-plugins": {"/opt/cni/bin", true},
}

// order is a request that was found to be in order.
type order struct {
	proto   *upgradeproto.UpgradeRequest // without its place in the stream
	version version.Version
	config  kubeadm.Config
	// first is kubeadm, rest are the others.
	first, rest component.List
	// list is both in the order of the request, which is the one that was signed.
	list component.List
}

// parseOrder checks what can be checked without a look at the host.
func parseOrder(req *upgradeproto.UpgradeRequest) (*order, error) {
	o := &order{proto: proto.CloneOf(req)}
	o.proto.After = 0
	slices.SortFunc(o.proto.Components, func(a, b *componentproto.Component) int { return strings.Compare(a.GetName(), b.GetName()) })
	if t := req.GetToken(); t == "" || len(t) > 128 || strings.ContainsFunc(t, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("token: want 1 to 128 printable ASCII characters")
	}
	if w := req.GetWhat(); w != upgradeproto.What_APPLY && w != upgradeproto.What_NODE {
		return nil, errors.New("what: want APPLY or NODE")
	}
	var err error
	if o.version, err = version.Parse(req.GetKubernetesVersion()); err != nil {
		return nil, fmt.Errorf("kubernetes version: %w", err)
	}
	if s := o.version.String(); s != req.GetKubernetesVersion() || strings.ContainsRune(s, '+') {
		return nil, fmt.Errorf("kubernetes version: %q is not written as %s", req.GetKubernetesVersion(), o.version)
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
			return nil, fmt.Errorf("component %s: path %s is not its place, %s", c.Name, c.Path, p.path)
		case !p.extract && c.Mode != 0 && c.Mode != 0o755:
			return nil, fmt.Errorf("component %s: mode %#o is not 0755", c.Name, c.Mode)
		}
		if c.Name == "kubeadm" {
			o.first = component.List{c}
		} else {
			o.rest = append(o.rest, c)
		}
	}
	if _, ok := o.rest.ByName("kubelet"); !ok || len(o.first) == 0 {
		return nil, errors.New("components: kubeadm and kubelet must be among them")
	}
	return o, nil
}

// vouched returns nil if a release builder whom this host trusts vouches for o's
// components as those of its version. The caller alone must not decide what runs as root.
func (h Host) vouched(o *order) error {
	trust, err := release.MachineTrust(h.Root)
	if err != nil {
		return err
	}
	return trust.Verify(o.proto.GetComponentsStatement(), o.version, runtime.GOARCH, o.list)
}

// same reports whether two requests ask for the same thing, whatever their tokens, and
// whatever vouches for it.
func same(a, b *upgradeproto.UpgradeRequest) bool {
	a, b = proto.CloneOf(a), proto.CloneOf(b)
	a.Token, b.Token = "", ""
	a.ComponentsStatement, b.ComponentsStatement = "", ""
	return proto.Equal(a, b)
}

// words says what a request asks for.
func words(r *upgradeproto.UpgradeRequest) string {
	what := "node"
	if r.GetWhat() == upgradeproto.What_APPLY {
		what = "control plane"
	}
	return fmt.Sprintf("upgrade of the %s to %s (%s)", what, r.GetKubernetesVersion(), r.GetToken())
}

// admit says whether this host may be brought to o's version. What counts is what
// runs: the kubelet and, on a control plane, its static pods. kubeadm may be of
// another version since a run that did not come far.
func (h Host) admit(ctx context.Context, o *order) error {
	s, err := h.Status(ctx)
	if err != nil {
		return err
	}
	switch {
	case s.GetRole() == "":
		return errors.New("the host belongs to no cluster")
	case o.proto.GetWhat() == upgradeproto.What_APPLY && s.GetRole() != "control-plane":
		return errors.New("the host is no control plane")
	case s.GetKubeletVersion() == "":
		return errors.New("the host has no kubelet")
	}
	runs := map[string]string{"kubelet": s.GetKubeletVersion()}
	for _, name := range controlPlane {
		if image := s.GetStaticPods()[name]; image != "" {
			if runs[name] = tag(image); runs[name] == "" {
				return fmt.Errorf("%s runs %s, which names no version", name, image)
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
			return fmt.Errorf("%s is %s: versions do not go down to %s", name, v, o.version)
		}
		if v.MinorDistance(o.version) > 1 {
			return fmt.Errorf("%s is %s: %s is more than one minor ahead", name, v, o.version)
		}
	}
	return nil
}

// controlPlane are the static pods whose version is that of Kubernetes.
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
