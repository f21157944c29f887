// Package machines has the two providers of machines that exist already. Their machines are a list in
// the configuration. They cannot make or delete machines.
//
//   - [Name] is that of adopted clusters: `adopt` wrote the workspace, and machines join by kubeadm.
//   - [Enrolled] is that of new clusters: `machine add` prepares each machine, and it joins as the
//     machines of a cloud do.
//
// The operator and the join service read the same list from a ConfigMap, see [Inventory]. An enrolled
// machine has it in a file, see [Metadata].
package machines

import (
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"constellation/engine/cloud"
	"constellation/engine/cloud/section"
	"constellation/engine/version"
)

// Name is the name of the provider, and of the list in its section.
const Name = "machines"

// Machine is one machine of the inventory.
type Machine struct {
	// Name is the name of the machine's Node.
	Name string
	// Address is an IP address of the machine; empty if it is not known.
	Address string
	// Group is the role of the machine, control-plane or worker.
	Group cloud.Role
	// ProviderID is that of its Node; empty: the one of [ProviderID].
	ProviderID string
	// Attested is whether a TPM holds the key of an enrolled machine. EK identifies that TPM: sha256: and the
	// hash of its endorsement key in hex. TPM is its address on the machine; empty: [DefaultTPM].
	Attested bool
	EK, TPM  string
	// Vendor is the root of the certificate of that TPM, verified when the machine was enrolled; empty: none was.
	Vendor string
	// Key identifies the certified key of an enrolled machine: sha256: and the hash of the public key in hex. Empty:
	// any key that was certified for it counts.
	Key string
	// Spare is whether the machine belongs to its group only while it is assigned.
	Spare bool
	// Labels and Taints are those that the list gives to the machine's Node, see [ParseLabels] and
	// [ParseTaints].
	Labels, Taints string
}

// HardeningList is the name of the list of policies in the section; see [Hardening].
const HardeningList = "hardening"

// Hardening is a policy that clusters of `init` have and that adopted clusters get if their owner asks for it.
type Hardening struct {
	// Name is its name in the configuration and in the values of the chart of policies.
	Name string `json:"name"`
	// Effect is what it forbids, and to whom.
	Effect string `json:"effect"`
}

// Hardenings are all such policies.
func Hardenings() []Hardening {
	return []Hardening{
		{Name: "kubelet-pods", Effect: "a kubelet cannot keep pods from being deleted, and its mirror pods of kube-system cannot look like other pods"},
		{Name: "control-plane-label", Effect: "only kubeadm's administrators can set or remove the label node-role.kubernetes.io/control-plane"},
		{Name: "machine-configuration", Effect: "only administrators can write kubeadm-config, kubelet-config, kube-proxy and the lists of components"},
	}
}

// ComponentsTable is the name of the table of components.
const ComponentsTable = "components"

// ValidName reports whether a Node can have a name.
func ValidName(s string) bool { return nameRE.MatchString(s) }

var nameRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)

var digestRE = regexp.MustCompile(`^(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})$`)

// Config returns the schema of the section in the configuration.
func Config() section.Schema {
	return section.Schema{{Name: Name, Kind: section.Table, Required: true, Columns: section.Schema{
		{Name: "name", Required: true, Unique: true, Valid: nameRE.MatchString, Problem: "cannot name a node", Remedy: "write the name of its Node: `kubectl get nodes` lists them"},
		{Name: "address", Unique: true, Valid: func(s string) bool { _, err := netip.ParseAddr(s); return err == nil }, Problem: "is no IP address", Remedy: "write the address at which the machine is reached, without a port"},
		{Name: "group", Required: true, Valid: func(s string) bool { return cloud.Role(s).Valid() }, Problem: "is no group", Remedy: "write control-plane or worker"},
		{Name: "providerID", Unique: true},
	}}, {
		Name: HardeningList, Kind: section.List,
		Valid: func(s string) bool {
			return slices.ContainsFunc(Hardenings(), func(h Hardening) bool { return h.Name == s })
		},
		Problem: "is no hardening", Remedy: "write kubelet-pods, control-plane-label or machine-configuration",
	}, packagesField(), componentsField()}
}

// PackagesField is the name of the field that says what upgrades in place do with the distribution's packages of
// containerd, runc and network plugins. Absent means PackagesHeld.
const PackagesField = "packages"

// Values of PackagesField.
const (
	// PackagesHeld leaves them as they are.
	PackagesHeld = "held"
	// PackagesUpgrade has the agent upgrade them with apt, during the upgrade of each node.
	PackagesUpgrade = "upgrade"
)

// packagesField describes it.
func packagesField() section.Field {
	return section.Field{
		Name: PackagesField, Valid: func(s string) bool { return s == PackagesHeld || s == PackagesUpgrade },
		Problem: "does not say what upgrades do with packages", Remedy: "write held, or upgrade to have containerd, runc and network plugins upgraded with apt",
	}
}

// UpgradesPackages reports whether a section has upgrades in place upgrade packages.
func UpgradesPackages(v section.Values) bool { return v.Text(PackagesField) == PackagesUpgrade }

// componentsField describes the table of components.
func componentsField() section.Field {
	return section.Field{Name: ComponentsTable, Kind: section.Table, Columns: section.Schema{
		{Name: "kubernetes", Required: true, Valid: func(s string) bool { _, err := version.Parse(s); return err == nil }, Problem: "is no version of Kubernetes", Remedy: "write a version such as v1.37.2"},
		{Name: "name", Required: true, Valid: func(s string) bool { return slices.Contains(programs, s) }, Problem: "is no component", Remedy: "write kubeadm, kubelet or kubectl"},
		{Name: "url", Required: true, Valid: func(s string) bool {
			u, err := url.Parse(s)
			return err == nil && u.Host != "" && strings.HasPrefix(u.Scheme, "http")
		}, Problem: "is no address of a download", Remedy: "write the http or https address from which machines download the program"},
		{Name: "digest", Required: true, Valid: digestRE.MatchString, Problem: "is no digest", Remedy: "write sha256: and the 64 hexadecimal digits that `sha256sum` prints"},
	}}
}

// List returns the machines of a section.
func List(v section.Values) (out []Machine) {
	for _, row := range v.Table(Name) {
		out = append(out, Machine{
			Name: row.Text("name"), Address: row.Text("address"), Group: cloud.Role(row.Text("group")), ProviderID: row.Text("providerID"),
			Attested: row.Bool(Attested), EK: row.Text("ek"), TPM: row.Text("tpm"), Key: row.Text("key"), Vendor: row.Text("vendor"), Labels: row.Text("labels"), Taints: row.Text("taints"), Spare: row.Bool("spare"),
		})
	}
	return out
}

// Section returns the section of machines.
func Section(list []Machine) section.Values {
	rows := make([]section.Values, len(list))
	for i, m := range list {
		rows[i] = section.Values{"name": m.Name, "address": m.Address, "group": string(m.Group)}
		if m.ProviderID != "" {
			rows[i]["providerID"] = m.ProviderID
		}
		if m.Attested {
			rows[i][Attested] = true
		}
		if m.Spare {
			rows[i]["spare"] = true
		}
		for column, text := range map[string]string{"ek": m.EK, "tpm": m.TPM, "key": m.Key, "vendor": m.Vendor, "labels": m.Labels, "taints": m.Taints} {
			if text != "" {
				rows[i][column] = text
			}
		}
	}
	return section.Values{Name: rows}
}
