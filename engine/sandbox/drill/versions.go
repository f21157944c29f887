package drill

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/sandbox/build"
	"constellation/engine/version"
)

// Versions of Kubernetes before and after an upgrade whose drill names none.
const kubernetesFrom, kubernetesTo = build.DefaultVersion, build.NextVersion

// versions are those before and after the upgrade of a drill.
type versions struct {
	kubernetesFrom, kubernetesTo string
	releaseFrom, releaseTo       string
}

func (v versions) String() string {
	return fmt.Sprintf("from release %s and Kubernetes %s to %s and %s", v.releaseFrom, v.kubernetesFrom, v.releaseTo, v.kubernetesTo)
}

// defaults reports whether the drill names no versions.
func (v versions) defaults() bool {
	return v.kubernetesFrom == kubernetesFrom && v.kubernetesTo == kubernetesTo
}

// Versions returns spec with the versions that it does not name. See [engine.Drills].
func (d *Drills) Versions(spec engine.DrillSpec) (engine.DrillSpec, error) {
	spec.KubernetesFrom = cmp.Or(spec.KubernetesFrom, kubernetesFrom)
	if spec.Kubernetes != "" {
		return spec, nil
	}
	if spec.KubernetesFrom == kubernetesFrom {
		spec.Kubernetes = kubernetesTo
		return spec, nil
	}
	from, err := version.Parse(spec.KubernetesFrom)
	if err != nil {
		return spec, usage(err)
	}
	for _, s := range build.Versions() { // the newest last
		if v, err := version.Parse(s); err == nil && from.MinorDistance(v) == 1 {
			spec.Kubernetes = s
		}
	}
	if spec.Kubernetes == "" {
		return spec, usage(fmt.Errorf("no version of the minor after %s can be compiled here", spec.KubernetesFrom))
	}
	return spec, nil
}

// usage makes an error in the versions of a drill.
func usage(err error) error {
	return &plan.Error{
		Op: op, Err: err, Exit: plan.ExitUsage,
		Remedy: "pass two of " + strings.Join(build.Versions(), ", ") + " with --kubernetes-from and --kubernetes, of one minor or of neighbors",
	}
}

// versionsOf checks the versions in spec and finds the releases that offer them: the oldest before
// the upgrade, or the newest if nodes are upgraded in place, and the newest after it.
func versionsOf(kind string, spec engine.DrillSpec) (v versions, err error) {
	parsed := make([]version.Version, 2)
	for i, s := range []string{spec.KubernetesFrom, spec.Kubernetes} {
		if parsed[i], err = version.Parse(s); err != nil {
			return v, usage(err)
		}
	}
	from, to := parsed[0], parsed[1]
	if d := from.MinorDistance(to); to.Less(from) || d > 1 {
		return v, usage(fmt.Errorf("no upgrade goes from Kubernetes %s to %s", from, to))
	}
	if kind == hollow && from.Equal(to) {
		return v, usage(errors.New("hollow machines are only replaced for another version of Kubernetes"))
	}
	if spec.InPlace && from.Equal(to) {
		return v, usage(errors.New("nodes are only upgraded in place to another version of Kubernetes"))
	}
	catalogue, err := release.Load(assets.Releases())
	if err != nil {
		return v, &plan.Error{Op: op, Err: err}
	}
	v.kubernetesFrom, v.kubernetesTo = from.String(), to.String()
	for _, r := range catalogue.Releases() {
		// The operator of the oldest release cannot upgrade in place.
		if _, err := r.ForKubernetes(from); err == nil && (v.releaseFrom == "" || spec.InPlace) {
			v.releaseFrom = r.Version.String()
		}
		if _, err := r.ForKubernetes(to); err == nil {
			v.releaseTo = r.Version.String()
		}
	}
	if v.releaseFrom == "" || v.releaseTo == "" {
		return v, usage(fmt.Errorf("no release offers Kubernetes %s and %s", from, to))
	}
	return v, nil
}
