// Package providers is the registry of the clouds that this program can use. Nothing
// else in the tree names a cloud: configuration, state, charts, remedies and daemons
// take what they need from the entry.
//
// # A new cloud
//
// A cloud is a package below engine/cloud and an entry, a [Provider], of [All]. The
// package implements three views of the cloud:
//
//   - [Metadata]: what a machine may ask about itself. The bootstrapper uses it
//     before the machine is a node, the join service on control planes.
//   - [Control]: groups and machines, as the operator on a control plane reaches
//     them, with the credentials of that machine.
//   - [Console]: what the console on the user's computer asks before init and
//     before an upgrade.
//
// Errors wrap those of package cloud, and [constellation/engine/cloud/cloudtest]
// has the tests that every Control must pass. CONTRIBUTING.md lists all that a cloud
// must implement.
package providers

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/section"
	"constellation/engine/component"
	"constellation/engine/version"
)

// Metadata is what a machine may ask its cloud about itself. It is safe for
// concurrent use.
type Metadata interface {
	// Self returns the machine that asks.
	Self(context.Context) (cloud.Instance, error)
	// Peers returns all machines of the cluster, this one included. The list may lag.
	Peers(context.Context) ([]cloud.Instance, error)
	// LoadBalancer returns the host, without a port, of the load balancer in front of
	// the control planes.
	LoadBalancer(context.Context) (string, error)
	// InitSecretHash returns the SHA-256 of the init secret, 32 bytes.
	InitSecretHash(context.Context) ([]byte, error)
}

// Control creates and deletes machines. It is safe for concurrent use. After an
// error, whether the request took effect is unknown.
type Control interface {
	// Groups returns the scaling groups. With an error that wraps cloud.ErrPartial the
	// list lacks some.
	Groups(context.Context) ([]cloud.Group, error)
	// Instances returns the machines of all groups, also those that are being
	// deleted. The list may lag, and may be partial as that of Groups.
	Instances(context.Context) ([]cloud.Instance, error)
	// Instance returns the current state of one machine. The error wraps
	// cloud.ErrNotFound if the cloud does not know the key, or no longer, even if another
	// incarnation of the machine exists.
	Instance(ctx context.Context, key string) (cloud.Instance, error)
	// SetGroupImage sets the image of machines that the group will create.
	SetGroupImage(ctx context.Context, groupID, image string) error
	// CreateInstances creates a machine for each token and returns them in the order
	// of the tokens, before they have booted. A token never makes a second machine:
	// a repeated one returns the first machine, with state cloud.Terminated after its
	// deletion, for cloud.TokenMemory at least. Tokens are 24 hexadecimal digits; the operator's have a
	// hyphen and 16 more digits.
	CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error)
	// DeleteInstances starts to delete the machines with these keys. Those that do not exist
	// are no error. Another incarnation of a machine is not deleted.
	DeleteInstances(ctx context.Context, keys []string) error
}

// Console is the view that the console has from the user's computer. It changes nothing
// and is safe for concurrent use.
type Console interface {
	// Describe returns what the machines belong to.
	Describe(context.Context) (cloud.Info, error)
	// Groups returns the scaling groups.
	Groups(context.Context) ([]cloud.Group, error)
	// Machines returns all machines, also those that are being deleted.
	Machines(context.Context) ([]cloud.Machine, error)
	// Images returns the catalogue of OS images; none for a cloud with Provider.NoImages.
	Images(context.Context) ([]cloud.Image, error)
	// Components returns what a node must have installed for a Kubernetes version, with
	// the statement that vouches for it. The error wraps cloud.ErrNotFound and names the
	// versions that there are.
	Components(context.Context, version.Version) (component.Signed, error)
}

// Provider is a cloud.
type Provider struct {
	// Name is the value of --provider, of CONSTELLATION_PROVIDER and of the charts'
	// value provider, and the key of the cloud's section in configuration and state.
	Name string
	// Title is what the console calls the cloud when a user chooses one.
	Title string
	// Config and State describe the cloud's section in the two files; nil if it has no
	// fields there.
	Config, State section.Schema
	// About describes the cloud in the comment of a generated configuration.
	About string
	// Example returns the section of a generated configuration for a cluster's name.
	Example func(cluster string) section.Values
	// Find finds what the user's computer knows of the cloud; nil: nothing. It changes nothing.
	Find func() Found
	// Advice is how the cloud is named to users, and what to do when it fails.
	Advice Advice
	// Inventory is whether the machines are a list in the configuration, which `adopt` writes for a
	// cluster that exists. Such an entry has no Metadata: no machine can be made or joined.
	Inventory bool
	// Enrolled is whether the machines are a list in the configuration that `machine add` fills. Groups
	// follow from the list, and are upgraded in place. The authority of the workspace certifies the
	// machines.
	Enrolled bool
	// NoJoin is whether machines become nodes by other means than the join service, such as kubeadm's own
	// tokens. The cluster gets no join service then, its approvals of certificates stay as they are, and the
	// policies bound our own accounts only.
	NoJoin bool
	// Infra is whether `infra create` makes the machines and what they need. The console alone has the code: package
	// engine/infra.
	Infra bool
	// NoImages is whether machines run no image that the cloud selects. The field image of
	// the configuration is optional then.
	NoImages bool
	// ImageVersion returns the version that the reference of an OS image contains; empty if it
	// contains none. Nil: references of this cloud never do, and Console.Images alone has the
	// versions.
	ImageVersion func(reference string) string
	// GroupName returns the name of the group that the ID of a group of this cloud contains; empty for
	// the ID of another cloud. Nil: IDs of this cloud contain no names. ScalingGroups, Console.Groups
	// and Console.Machines have the names then.
	GroupName func(id string) string
	// Simulated reports whether the machines of a state only imitate machines; nil: never.
	Simulated func(state section.Values) bool
	// Fixed returns why nothing on the machines of a state can be changed, with a remedy.
	// An empty reason means that it can; so does nil.
	Fixed func(state section.Values) (reason, remedy string)
	// MachinePage returns the address of a machine's page in the console of the vendor; empty for the provider ID of another cloud.
	// Nil: the cloud has no such pages.
	MachinePage func(providerID string) string
	// Console returns the view of the console. It sends nothing yet.
	Console func(config, state section.Values) (Console, error)

	// MetadataAddress and ControlAddress are the default addresses of the two services;
	// see the package of the cloud for their formats.
	MetadataAddress, ControlAddress string
	// Attestation is how machines prove what they booted. The bootstrapper, the join service and
	// the console use it alike, from an entry that At or On returned.
	Attestation attestation.Method
	// Judge returns Attestation for the console and the machines of a state; nil: it is the same for all.
	Judge func(state section.Values) attestation.Method
	// OnMachine returns Attestation for a program on a machine whose metadata server and TPM have these addresses. Its
	// error means that no machine of the cloud has them. Nil: Attestation is the same for all.
	OnMachine func(metadata, tpm string) (attestation.Method, error)
	// Roots returns the certificates, in PEM, of the authorities that vouch for machines of the cloud itself; nil: each
	// cluster has others.
	Roots func() []byte
	// KubeletCloudProvider is the value of the kubelet's flag --cloud-provider; empty: the flag is
	// not set. With "external", a new Node is tainted until the cloud controller manager of this
	// cloud has initialized it. Metadata.Self can demand another one for its machine.
	KubeletCloudProvider string
	// TPMAddress is the address of a machine's TPM in pods; see attestation.OpenTPM.
	TPMAddress string
	// TPMDir is the directory of a machine that pods see as /run/tpm, with the socket of its
	// TPM. TPMDevice is the device of its TPM instead, in machines without a socket. The CA
	// signer is privileged then: other containers get no device of the host.
	TPMDir, TPMDevice string
	// EventLogDir is the directory of a machine with the event log of its TPM, which pods see at the same path; empty: the
	// log is beside the socket of the TPM, or evidence contains none.
	EventLogDir string
	// Certifier is whether new clusters get the keys of a certifier, which vouches for answers of the cloud's API. Images of this
	// cloud start it on control planes.
	Certifier bool
	// SealsKeys is whether control planes of new clusters get the keys that encrypt Secrets in etcd: each machine has a TPM, which
	// seals them, and images of this cloud start the key service.
	SealsKeys bool
	// IdentityDir is the directory of a machine with its identity, in the place of both; see
	// attestation.EnrolledMethod. Pods see it at the same path. Some machines have a TPM, others have none: the
	// CA signer gets the devices of its machine, and is privileged, only if the configuration lists a control
	// plane that uses one.
	IdentityDir string
	// DividePods is whether no cloud routes addresses of pods to machines: Kubernetes gives each Node a
	// range of them, and the owner installs a network plugin.
	DividePods bool
	// AutoscalerStandIn is whether the operator's chart installs a Deployment in the place
	// of the cluster autoscaler, which knows no groups of this cloud.
	AutoscalerStandIn bool
	// Parts returns the charts of third-party software that a configuration of this cloud switches on; nil: there are
	// none. Its error is for the user who wrote the configuration.
	Parts func(ClusterOf) ([]Part, error)
	// Sandbox returns the sections of configuration and state for machines of a sandbox; nil: no sandbox is this
	// cloud, or emulates it.
	Sandbox func(SandboxOf) (config, state section.Values)
	// Emulator returns the addresses of the emulator that a state names. It reports false for machines of the cloud itself;
	// so does nil.
	Emulator func(state section.Values) (Emulator, bool)
	// Metadata returns a client of the metadata server at address. It sends nothing yet.
	Metadata func(address string) Metadata
	// Control returns a client of the control API at address for a control plane whose
	// metadata server has the credentials. It sends nothing yet.
	Control func(metadata, address string) Control
}

// Found is what a computer knows of a cloud.
type Found struct {
	// Credentials describes the credentials that are used, without secrets; empty: none were found.
	Credentials string
	// Err is why they cannot be used, with its remedy.
	Err error
	// Config has texts for fields of the configuration.
	Config section.Values
}

// SandboxOf describes a sandbox.
type SandboxOf struct {
	Name, UID string
	// Socket is the path of its control socket.
	Socket            string
	Hollow, Simulated bool
}

// Emulator has the addresses of an emulated cloud, as machines reach it, in the place of those of the entry.
type Emulator struct{ Metadata, Control, TPM, TPMDir string }

// At returns the entry for the console and the machines of a state: with their attestation, and with the addresses of the
// emulator, if the state names one.
func (p Provider) At(state section.Values) Provider {
	if p.Judge != nil {
		p.Attestation = p.Judge(state)
	}
	if p.Emulator == nil {
		return p
	}
	e, ok := p.Emulator(state)
	if !ok {
		return p
	}
	p.MetadataAddress, p.ControlAddress, p.TPMAddress, p.TPMDir, p.TPMDevice, p.EventLogDir = e.Metadata, e.Control, e.TPM, e.TPMDir, "", ""
	p.AutoscalerStandIn = true // no cluster autoscaler reaches an emulator
	return p
}

// On returns the entry for a program on a machine, with the addresses of its metadata server and its TPM and their
// attestation. Empty addresses stand for those of the entry.
func (p Provider) On(metadata, tpm string) (Provider, error) {
	p.MetadataAddress, p.TPMAddress = cmp.Or(metadata, p.MetadataAddress), cmp.Or(tpm, p.TPMAddress)
	if p.OnMachine == nil {
		return p, nil
	}
	var err error
	if p.Attestation, err = p.OnMachine(p.MetadataAddress, p.TPMAddress); err != nil {
		return Provider{}, fmt.Errorf("provider %s: %w", p.Name, err)
	}
	return p, nil
}

// SandboxSections returns the sections of configuration and state for a sandbox that is, or emulates, the cloud of a
// provider.
func SandboxSections(provider string, s SandboxOf) (config, state section.Values) {
	p, ok := Named(provider)
	if !ok || p.Sandbox == nil {
		return nil, nil
	}
	return p.Sandbox(s)
}

// Sandboxed returns the names of the providers that a sandbox is, or emulates, sorted.
func Sandboxed() []string {
	var names []string
	for _, p := range Clouds() {
		if p.Sandbox != nil {
			names = append(names, p.Name)
		}
	}
	return names
}

// Advice has the sentences about a cloud in errors and findings. {field} stands for a
// field of the cloud's section. An empty sentence gets a general one.
type Advice struct {
	// Cloud names the cloud: "sandbox {name}".
	Cloud string
	// Unreachable is the remedy of a cloud that does not answer, Denied that of
	// credentials that do not suffice.
	Unreachable, Denied string
	// Look names the place where the user sees the machines, such as a command. Failed
	// states where the reason is found why a machine failed.
	Look, Failed string
	// Up is the verb of this program that creates the machines or starts them again;
	// empty if other programs do that. UpTitle and UpReason describe it.
	Up, UpTitle, UpReason string
	// Create is how the machines and the state file are made. Renew is how used machines
	// are replaced by unused ones. Both are imperative.
	Create, Renew string
	// Measurements states how the measurements of an image become known, Roots the same
	// of the trust roots.
	Measurements, Roots string
	// Catalogue is the command that lists the images with their measurements; empty: there is
	// none.
	Catalogue string
	// Offer is how the cloud gets the components of a Kubernetes version, Image how its
	// machines get an OS image. {version} stands for the version.
	Offer, Image string
}

// OfferOf returns the sentence Offer about a version of Kubernetes.
func (a Advice) OfferOf(v string) string { return strings.ReplaceAll(a.Offer, "{version}", v) }

// ImageOf returns the sentence Image about a version of the OS image.
func (a Advice) ImageOf(v string) string { return strings.ReplaceAll(a.Image, "{version}", v) }

// or returns a with the sentences of b where a has none.
func (a Advice) or(b Advice) Advice {
	return Advice{
		Cloud: cmp.Or(a.Cloud, b.Cloud), Unreachable: cmp.Or(a.Unreachable, b.Unreachable), Denied: cmp.Or(a.Denied, b.Denied),
		Look: cmp.Or(a.Look, b.Look), Failed: cmp.Or(a.Failed, b.Failed), Up: a.Up, UpTitle: a.UpTitle, UpReason: a.UpReason, Create: cmp.Or(a.Create, b.Create), Renew: cmp.Or(a.Renew, b.Renew),
		Measurements: cmp.Or(a.Measurements, b.Measurements), Catalogue: a.Catalogue, Roots: cmp.Or(a.Roots, b.Roots), Offer: cmp.Or(a.Offer, b.Offer), Image: cmp.Or(a.Image, b.Image),
	}
}

// general is the advice about a cloud that has none of its own.
var general = Advice{
	Cloud:        "the cloud",
	Unreachable:  "check the network and the status page of the cloud, then run the same command again",
	Denied:       "use credentials that may read the machines of this cluster",
	Look:         "the list of machines in the cloud",
	Failed:       "the cloud shows why, in the log of the machine's console",
	Create:       "create the machines and write the state file",
	Renew:        "delete the machines and create them again",
	Measurements: "copy the value that belongs to the image",
	Roots:        "paste the PEM certificates of the cloud that certifies attestation keys, after a |",
	Offer:        "have the cloud offer the components of Kubernetes {version}",
	Image:        "create the machines from image {version}",
}

// AdviceFor returns the advice of a provider with its section filled in. A provider
// that is not registered gets general advice.
func AdviceFor(name string, values section.Values) Advice {
	p, ok := Named(name)
	if !ok {
		return general
	}
	a := p.Advice.or(Advice{Cloud: "cloud " + name}).or(general)
	return Advice{
		Cloud: values.Expand(a.Cloud), Unreachable: values.Expand(a.Unreachable), Denied: values.Expand(a.Denied),
		Look: values.Expand(a.Look), Failed: values.Expand(a.Failed), Up: a.Up, UpTitle: a.UpTitle, UpReason: a.UpReason, Create: values.Expand(a.Create), Renew: values.Expand(a.Renew),
		Measurements: values.Expand(a.Measurements), Catalogue: values.Expand(a.Catalogue), Roots: values.Expand(a.Roots), Offer: values.Expand(a.Offer), Image: values.Expand(a.Image),
	}
}

// Start returns how a workspace gets machines and a configuration: the commands of all
// providers, for a user who has named none.
func Start() string {
	var ways []string
	for _, p := range All() {
		if p.Advice.Up != "" {
			ways = append(ways, p.Advice.Create+", which makes machines and writes the files")
		}
	}
	names := Names()
	for i, name := range names {
		if name == machines.Enrolled { // the word for it is easier to find
			names[i] = machines.Name
		}
	}
	return strings.Join(append(ways, "`constellation config generate "+strings.Join(names, "|")+"` writes a configuration"), "; ")
}

// ImageVersion returns the version that the reference of an OS image of any provider contains; empty
// if it contains none.
func ImageVersion(reference string) string {
	for _, p := range All() {
		if p.ImageVersion == nil {
			continue
		}
		if v := p.ImageVersion(reference); v != "" {
			return v
		}
	}
	return ""
}

// GroupName returns the name that the ID of a group of any provider contains; empty if it contains
// none.
func GroupName(id string) string {
	for _, p := range All() {
		if p.GroupName == nil {
			continue
		}
		if name := p.GroupName(id); name != "" {
			return name
		}
	}
	return ""
}

// inventory is the ConfigMap with the machines; empty for clouds that have an API.
func (p Provider) inventory() string {
	if !p.Inventory && !p.Enrolled {
		return ""
	}
	return machines.InventoryConfigMap
}

// ChartValues returns the values of our charts that depend on the provider and on its section of the
// configuration, by path. A chart that lacks one of them is of an older release and has it built in.
func (p Provider) ChartValues(config section.Values) map[string]any {
	hardening := []any{} // as a file of values has it
	for _, name := range config.List(machines.HardeningList) {
		hardening = append(hardening, name)
	}
	sockets, device := []any{}, false
	if p.IdentityDir != "" {
		var dirs []string
		dirs, device = machines.TPMs(config)
		for _, dir := range dirs {
			sockets = append(sockets, dir)
		}
	}
	out := map[string]any{
		"hardening":                   hardening,
		"provider":                    p.Name,
		"metadataURL":                 p.MetadataAddress,
		"cloudURL":                    p.ControlAddress,
		"joinservice.tpm":             p.TPMAddress,
		"joinservice.tpmDir":          p.TPMDir,
		"joinservice.tpmDevice":       p.TPMDevice,
		"joinservice.eventLogDir":     p.EventLogDir,
		"joinservice.identityDir":     p.IdentityDir,
		"joinservice.tpmSocketDirs":   sockets,
		"joinservice.tpmDevices":      device,
		"operator.autoscaler.standIn": p.AutoscalerStandIn,
		"operator.inventory":          p.inventory(),
		"joinservice.inventory":       p.inventory(),
		"ownAccountsOnly":             p.NoJoin,
	}
	if p.Enrolled {
		out["joinservice.apiServerPort"] = machines.EndpointPort(config)
	}
	return out
}

// LocalValues returns the values of our charts for the provider [Local]. Hollow
// clusters, which have no state file, are rendered with them.
func LocalValues() map[string]any { return sandbox().ChartValues(nil) }

var registry = struct {
	sync.Mutex
	list []Provider
}{list: []Provider{enrolled(), googleCloud(), inventory(), sandbox()}}

// Register adds a provider to the registry, and returns what removes it again. A test
// registers a cloud of its own this way. It panics if the name is taken.
func Register(p Provider) (remove func()) {
	registry.Lock()
	defer registry.Unlock()
	has := func(x Provider) bool { return x.Name == p.Name }
	if p.Name == "" || slices.ContainsFunc(registry.list, has) {
		panic(fmt.Sprintf("register provider %q: name is empty or taken", p.Name))
	}
	registry.list = append(registry.list, p)
	slices.SortFunc(registry.list, func(a, b Provider) int { return cmp.Compare(a.Name, b.Name) })
	return func() {
		registry.Lock()
		defer registry.Unlock()
		registry.list = slices.DeleteFunc(registry.list, has)
	}
}

// All returns the providers of this program, sorted by name, with those that only adopted clusters
// have.
func All() []Provider {
	registry.Lock()
	defer registry.Unlock()
	return slices.Clone(registry.list)
}

// MachinePage returns the address of the page of a machine in the console of its vendor; empty if it has none.
func MachinePage(providerID string) string {
	for _, p := range All() {
		if p.MachinePage != nil {
			if page := p.MachinePage(providerID); page != "" {
				return page
			}
		}
	}
	return ""
}

// Clouds returns the providers that can make a cluster, sorted by name.
func Clouds() []Provider {
	return slices.DeleteFunc(All(), func(p Provider) bool { return p.Inventory })
}

// Names returns the names of the providers that can make a cluster, sorted.
func Names() []string {
	var names []string
	for _, p := range Clouds() {
		names = append(names, p.Name)
	}
	return names
}

// Named returns the provider of a name, which need not be able to make a cluster.
func Named(name string) (p Provider, ok bool) {
	all := All()
	if n := slices.IndexFunc(all, func(p Provider) bool { return p.Name == name }); n >= 0 {
		return all[n], true
	}
	return Provider{}, false
}

// Known returns the provider of a name, which need not be able to make a cluster. The error lists the names that
// there are.
func Known(name string) (Provider, error) {
	if p, ok := Named(name); ok {
		return p, nil
	}
	return Find(name)
}

// Find returns the provider of a name that can make a cluster. The error lists the names that there
// are.
func Find(name string) (Provider, error) {
	p, ok := Named(name)
	switch {
	case ok && p.Inventory:
		return Provider{}, fmt.Errorf("provider %s cannot make, delete or join machines: only adopted clusters have it", name)
	case ok:
		return p, nil
	case name == "":
		return Provider{}, fmt.Errorf("no provider is named: use %s", strings.Join(Names(), " or "))
	}
	return Provider{}, fmt.Errorf("provider %q is not known: use %s", name, strings.Join(Names(), " or "))
}
