package providers

import (
	"cmp"
	"errors"
	"net/netip"

	"constellation/engine/cloud/section"
)

// Part is a chart of third-party software that clusters in a cloud need, such as a network plugin. Package assets has it.
type Part struct {
	// Chart is its name, also that of the installation.
	Chart, Namespace string
	// Images are the names of images in package assets by the values of the chart that hold them. The version of the chart
	// is that of the value image.
	Images map[string]string
	// Follows is whether the version of the image follows that of the API servers. Own is an image of the user in the place
	// of those that package assets has: repository, tag and digest; empty: none.
	Follows bool
	Own     string
	// Values are the other values.
	Values map[string]any
	// Needs are parts that must be ready before.
	Needs []string
}

// ClusterOf describes a cluster to the provider of its parts.
type ClusterOf struct {
	Config, State section.Values
	PodCIDR       netip.Prefix
}

// Charts of the parts of Google Cloud.
const (
	managerChart = "gcp-cloud-controller-manager"
	disksChart   = "gcp-persistent-disks"
	flannelChart = "flannel"
)

// googleParts are the parts of Google Cloud that a configuration switches on.
func googleParts(c ClusterOf) (out []Part, err error) {
	manager, disks, plugin := c.Config.Bool("cloudControllerManagerChart"), c.Config.Bool("persistentDisksChart"), c.Config.Text("networkPlugin")
	switch external := c.Config.Bool("cloudControllerManager"); {
	case manager && !external:
		return nil, errors.New("cloudControllerManagerChart needs cloudControllerManager: true, so that kubelets wait for it")
	case plugin != "" && !external:
		return nil, errors.New("networkPlugin needs a cloud controller manager, which gives each Node the alias range of its machine")
	}
	name := "constellation-" + c.State.Text("uid")
	if manager {
		out = append(out, Part{
			Chart: managerChart, Namespace: "kube-system", Images: map[string]string{"image": "cloud-controller-manager"}, Follows: true, Own: c.Config.Text("cloudControllerManagerImage"),
			Values: map[string]any{
				"podCIDR": c.PodCIDR.String(), "clusterName": name, "project": c.State.Text("project"), "nodeTag": name,
				"network": cmp.Or(c.Config.Text("network"), name), "subnetwork": cmp.Or(c.Config.Text("subnetwork"), name),
			},
		})
	}
	if plugin == flannelChart {
		p := Part{
			Chart: flannelChart, Namespace: "kube-system", Images: map[string]string{"image": "flannel", "plugin": "flannel-cni-plugin"},
			Values: map[string]any{"podCIDR": c.PodCIDR.String(), "backend": "alloc"},
		}
		if manager {
			p.Needs = []string{managerChart}
		}
		out = append(out, p)
	}
	if disks {
		p := Part{
			Chart: disksChart, Namespace: "kube-system",
			Images: map[string]string{"image": "persistent-disks", "provisioner": "csi-provisioner", "attacher": "csi-attacher", "resizer": "csi-resizer", "registrar": "csi-node-driver-registrar"},
		}
		if manager {
			p.Needs = []string{managerChart}
		}
		out = append(out, p)
	}
	return out, nil
}
