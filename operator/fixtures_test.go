package operator

import (
	"time"

	"constellation/operator/api/v1alpha1"
)

// Images, components and groups of the clusters in these tests.
const (
	image1, image2 = "sandboxes/t/images/v1.0.0", "sandboxes/t/images/v1.1.0"
	refA           = "k8s-components-sha256-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	refB           = "k8s-components-sha256-bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
	cpGroup        = "sandboxes/t/groups/control-plane"
	workerGroup    = "sandboxes/t/groups/workers"
)

var testNow = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

// spec returns a target that has the second image and the first components.
func spec() v1alpha1.NodeVersionSpec {
	return v1alpha1.NodeVersionSpec{Image: image2, ImageVersion: "v1.1.0", KubernetesComponentsReference: refA, KubernetesClusterVersion: "v1.35.4"}
}

// conditionText returns the status and the reason of a condition.
func conditionText(s v1alpha1.NodeVersionStatus, kind string) string {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return string(c.Status) + " " + c.Reason
		}
	}
	return "absent"
}
