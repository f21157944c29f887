package check

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// findingRegistry is the ID of findings about the registry of the configuration.
const findingRegistry = "registry"

// CompareRegistry reports whether the cluster pulls images from another registry than the
// configuration names.
func (c *Run) CompareRegistry(ctx context.Context) {
	field := "registry"
	want, err := c.Ws.Registry(c.Config.Registry)
	if err != nil {
		c.Find(plan.Finding{
			ID: findingRegistry, Field: field, Severity: plan.Block, Source: "charts", Title: "the login of the registry cannot be read", Detail: err.Error(), Remedy: plan.Remedy(err),
		})
		return
	}
	has, is, err := c.registries(ctx, want)
	switch {
	case ctx.Err() != nil:
	case errors.Is(err, cluster.ErrForbidden) && want.Address == "":
		// Few may read Secrets, and a configuration without a registry rarely replaces one with it.
	case err != nil:
		c.Find(plan.Finding{
			ID: findingRegistry, Field: field, Severity: plan.NotChecked, Source: "charts", Title: "not checked from which registry the cluster pulls images", Detail: err.Error(),
			Remedy: "use a kubeconfig that may read the Secret " + registry.SecretName + ", and check again",
		})
	case !has:
		f := RegistryFinding(is, want)
		f.Title = strings.ReplaceAll(f.Title, "{file}", workspace.ConfigFile+c.Config.At(field))
		c.Find(f)
	}
}

// registries returns whether the cluster has a registry in all places, and the one it has.
func (c *Run) registries(ctx context.Context, want registry.Registry) (has bool, is registry.Registry, err error) {
	limited, cancel := context.WithTimeout(ctx, CheckLimit)
	defer cancel()
	kubeconfig, err := c.Ws.Kubeconfig()
	if err != nil {
		return false, is, err
	}
	k, err := c.Connect(limited, kubeconfig)
	if err != nil {
		return false, is, err
	}
	if is, err = k.Registry(limited); err != nil || is != want {
		return false, is, err
	}
	if want.Address == "" {
		return true, is, nil
	}
	// Which namespaces need it depends on who carries out Plans; the charts decide that.
	has, err = k.HasRegistry(limited, want, false)
	return has, is, err
}

// RegistryFinding describes the change from one registry to another. In its title, {file} stands
// for the configuration.
func RegistryFinding(is, want registry.Registry) plan.Finding {
	f := plan.Finding{ID: findingRegistry, Field: "registry", Source: "charts", Severity: plan.Warn}
	login := want.Username != is.Username || want.Password != is.Password
	authorities := want.CABundle != is.CABundle
	applied := "the step `" + plan.StepCharts + "` of an upgrade writes it to the cluster, and `constellation upgrade execute --helm` does so without an upgrade"
	machines := "machines that join afterwards get it; machines that exist keep containerd's files of their join"
	switch {
	case want.Address == "":
		f.Title = fmt.Sprintf("the cluster pulls images from %s, and {file} names no registry", is.Address)
		f.Detail = applied + "; " + machines + " and pull images of " + registry.Upstream + " from " + is.Address + " alone"
		f.Remedy = "keep " + is.Address + " until all machines are replaced"
		return f
	case is.Address == want.Address && !login && !authorities:
		f.Severity = plan.Info
		f.Title = fmt.Sprintf("a part of the cluster does not use the registry %s yet", want.Address)
		f.Detail = "a Secret " + registry.SecretName + " or kubeadm's imageRepository lacks it; " + applied
		return f
	case is.Address == want.Address:
		var parts []string
		if login {
			parts = append(parts, "login")
		}
		if authorities {
			parts = append(parts, "authorities")
		}
		f.Title = fmt.Sprintf("{file} and the cluster differ in %s of the registry %s", words.And(parts), want.Address)
	case is.Address == "":
		f.Title = fmt.Sprintf("the cluster pulls images from their publishers, and {file} names the registry %s", want.Address)
	default:
		f.Title = fmt.Sprintf("the cluster pulls images from %s, and {file} names the registry %s", is.Address, want.Address)
	}
	moved := is.Address != want.Address
	f.Detail = applied + "; " + machines
	var todo []string
	switch {
	case authorities && want.CABundle != "" || moved && want.CABundle != "":
		f.Detail += ", so their pods cannot pull from a registry whose authorities they do not trust"
		todo = append(todo, "before, add the authorities to /etc/containerd/certs.d/"+want.Host()+" of each machine, or use a certificate that machines trust")
	case authorities: // none are wanted any more
		todo = append(todo, "use a certificate that the machines of the cluster trust without caBundle")
	}
	if want.Username != "" && (login || moved) {
		f.Detail += "; pods of our charts get the login at once, kubeadm's images are pulled with that of the machine"
		remedy := "have machines in place replaced before kubeadm upgrades them"
		if is.Username != "" && !moved {
			remedy = "keep the old login valid until all machines are replaced"
		}
		todo = append(todo, remedy)
	}
	if len(todo) == 0 {
		f.Severity = plan.Info
	}
	f.Remedy = strings.Join(todo, "; ")
	return f
}
