package preflight

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/version"
)

const addOnsPage = "https://kubernetes.io/docs/concepts/cluster-administration/addons/"

// AddOnUse is an object that runs an add-on.
type AddOnUse struct {
	AddOn *lifecycle.AddOn
	// Version is the version of the add-on; empty if unknown.
	Version string
	// Object is "kind/namespace/name", Title "Deployment shop/web".
	Object, Title string
	// Owner is who can change it; empty if unknown.
	Owner string
	// Location is where its image stands; zero for objects of a cluster.
	Location plan.Location
}

// AddOnVersions compares the versions of add-ons with a minor of Kubernetes. There is one
// finding for each version of an add-on that does not list the minor, or of which it is
// unknown.
func AddOnVersions(uses []AddOnUse, to version.Version) (out []plan.Finding) {
	type key struct{ name, version string }
	seen := map[key]int{} // in out
	for _, u := range uses {
		if len(u.AddOn.Versions) == 0 && !u.AddOn.Follows && u.AddOn.Nodes != "" {
			continue // the data has it for what it does to nodes alone
		}
		support, row := u.AddOn.On(u.Version, to)
		if support == lifecycle.Supported {
			continue
		}
		k := key{u.AddOn.Name, u.Version}
		i, ok := seen[k]
		if !ok {
			i = len(out)
			seen[k] = i
			out = append(out, addOnFinding(u, support, row, to))
		}
		f := &out[i]
		if !slices.Contains(f.Objects, u.Object) && len(f.Objects) < maxObjects {
			f.Objects = append(f.Objects, u.Object)
		}
		if u.Location.File != "" && len(f.Locations) < 100 {
			f.Locations = append(f.Locations, u.Location)
		}
	}
	return out
}

func addOnFinding(u AddOnUse, support lifecycle.Support, row lifecycle.AddOnVersion, to version.Version) plan.Finding {
	name := strings.TrimSpace(u.AddOn.Name + " " + printable(u.Version))
	f := plan.Finding{ID: "add-on-versions", Source: "versions", Reference: cmp.Or(row.Source, addOnsPage), Owner: u.Owner}
	newest, known := u.AddOn.Newest(to)
	if known {
		f.Remedy = fmt.Sprintf("upgrade %s to %s or newer before the hop: it lists %s", u.AddOn.Name, newest.Version, newest.Range())
		f.Reference = cmp.Or(row.Source, newest.Source)
	} else {
		f.Remedy = fmt.Sprintf("no version of %s that this program knows lists %s: look for one in its documentation", u.AddOn.Name, to.MinorString())
	}
	switch support {
	case lifecycle.NotListed:
		f.Severity = plan.Warn
		f.Title = fmt.Sprintf("%s does not list Kubernetes %s", name, to.MinorString())
		f.Detail = fmt.Sprintf("version %s lists %s; first found in %s", row.Version, row.Range(), u.Title)
	default:
		f.Severity = plan.NotChecked
		f.Title = fmt.Sprintf("not checked whether %s supports Kubernetes %s", name, to.MinorString())
		f.Detail = "this program does not know this version; first found in " + u.Title
		if u.Version == "" {
			f.Detail = "its version is unknown: the image has no tag; first found in " + u.Title
		}
	}
	return f
}

// NodeActors reports add-ons that drain, reboot or remove nodes. There is one finding for each
// add-on.
func NodeActors(uses []AddOnUse) (out []plan.Finding) {
	seen := map[string]int{} // in out
	for _, u := range uses {
		if u.AddOn.Nodes == "" {
			continue
		}
		i, ok := seen[u.AddOn.Name]
		if !ok {
			i = len(out)
			seen[u.AddOn.Name] = i
			out = append(out, plan.Finding{
				ID: "node-actors", Severity: plan.Warn, Source: "actors", Reference: u.AddOn.Source, Owner: u.Owner,
				Title:  fmt.Sprintf("%s %s too: %s", u.AddOn.Name, u.AddOn.Nodes, u.Title),
				Remedy: "agree on one controller that drains nodes: pause it during the upgrade",
			})
		}
		f := &out[i]
		if !slices.Contains(f.Objects, u.Object) && len(f.Objects) < maxObjects {
			f.Objects = append(f.Objects, u.Object)
		}
		if u.Location.File != "" && len(f.Locations) < 100 {
			f.Locations = append(f.Locations, u.Location)
		}
	}
	return out
}
