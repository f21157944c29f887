package engine

import (
	"fmt"

	"constellation/assets"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/release"
	"constellation/engine/workspace"
)

// secretsValue is the value of our charts for pull secrets. Charts of v1.0.0 lack it.
const secretsValue = "imagePullSecrets"

// readRegistry reads the registry of a configuration with its login, for services of rel.
func (e *Engine) readRegistry(c *workspace.Config, rel *release.Release) (registry.Registry, *plan.Finding) {
	r, err := e.ws.Registry(c.Registry)
	if err != nil {
		return r, blockErr("the registry's login cannot be read", err)
	}
	if c.Registry == nil {
		return r, nil
	}
	if e.simulated() {
		return r, block("simulated machines cannot use a registry of yours", "they pull no images", "remove registry, or use real machines")
	}
	for _, x := range rel.Charts {
		if x.Source != "" {
			continue
		}
		files, err := assets.ChartFor(x.Name, rel.Version.String())
		if err != nil {
			return r, blockErr("charts of release "+rel.Version.String()+" cannot be read", err)
		}
		if assets.HasValue(files, "operator") && !assets.HasValue(files, secretsValue) {
			return r, block("services "+rel.Version.String()+" cannot use a registry of yours", "their charts have no pull secrets", "write a newer microserviceVersion, or remove registry")
		}
	}
	if !c.Image.IsZero() && c.Image.Less(rel.Version) {
		return r, block("image "+c.Image.String()+" cannot use a registry of yours", "its bootstrapper does not configure containerd for one", "write image: "+rel.Version.String()+", with its measurements, or remove registry")
	}
	return r, nil
}

// imageOf returns the reference of an image of the release in the registry of the configuration.
func (f *facts) imageOf(ref string) string {
	if f.pulls == nil {
		return ref
	}
	return registry.Registry{Address: f.pulls.Address}.Image(ref)
}

// plansHere reports whether our charts carry out Plans, if others names who else does.
func (f *facts) plansHere(others string) bool { return others == "" && !f.noPlans }

// setRegistry sets the values of one of our charts for the registry of the configuration.
func (f *facts) setRegistry(values map[string]any, files []assets.File, chart string) error {
	if f.pulls == nil {
		return nil
	}
	if assets.HasValue(files, secretsValue) {
		assets.SetValue(values, []any{map[string]any{"name": registry.SecretName}}, secretsValue)
	} else if assets.HasValue(files, "operator") || assets.HasValue(files, "joinservice") {
		return &plan.Error{Op: "configure chart " + chart, Err: fmt.Errorf("it has no value %s", secretsValue), Exit: plan.ExitBlocked, Remedy: "use services of a newer release, or remove registry from " + workspace.ConfigFile}
	}
	if assets.HasValue(files, "joinservice", "registrySecret") {
		assets.SetValue(values, registry.SecretName, "joinservice", "registrySecret")
	}
	return nil
}
