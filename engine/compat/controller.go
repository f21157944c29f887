package compat

import (
	"fmt"

	"constellation/engine/version"
)

// ControllerManager returns the newest of these minors of Kubernetes that a cloud controller manager may be built for,
// while the API servers go from one version to another. It may be one minor older than each API server, and never newer:
// https://kubernetes.io/releases/version-skew-policy/#kube-controller-manager-kube-scheduler-and-cloud-controller-manager.
// The problem is empty if there is one.
func ControllerManager(built []version.Version, from, to version.Version) (best version.Version, problem string) {
	if to.Less(from) {
		to = from
	}
	var newest version.Version
	for _, v := range built {
		if newest.IsZero() || newest.Less(v) {
			newest = v
		}
		if v.Major() != from.Major() || v.Minor() > from.Minor() || v.Minor() < to.Minor()-1 {
			continue
		}
		if best.IsZero() || best.Less(v) {
			best = v
		}
	}
	switch {
	case !best.IsZero():
		return best, ""
	case newest.IsZero():
		return best, "there is none"
	}
	problem = fmt.Sprintf("the newest is built for Kubernetes %s, and it may not be newer than %s", newest.MinorString(), from.MinorString())
	if newest.Minor() < to.Minor()-1 {
		problem = fmt.Sprintf("the newest is built for Kubernetes %s, and it may be one minor older than %s at most", newest.MinorString(), to.MinorString())
	}
	return best, problem
}
