package workspace

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"unicode"

	"gopkg.in/yaml.v3"

	"constellation/assets"
	"constellation/engine/attestation"
	"constellation/engine/backup"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/kubeadm"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/words"
)

// ConfigVersion is the format of constellation-conf.yaml that this program reads
// and writes. Release v1.0.0 wrote v1; MigrateConfig reads it.
const ConfigVersion = "v2"

// Config is the cluster that the user wants, as constellation-conf.yaml says it.
type Config struct {
	Version string `json:"version"`
	// Name of the cluster: a DNS label of at most 37 characters.
	Name string `json:"name"`
	// Image is the release of the OS image, Services that of what runs in the cluster.
	// Image is zero for a provider whose machines run no image that the cloud selects.
	Image      version.Version `json:"image,omitzero"`
	Services   version.Version `json:"microserviceVersion"`
	Kubernetes version.Version `json:"kubernetesVersion"`
	// KeepWorkers leaves workers as they are during the next upgrade; they follow with a
	// later one.
	KeepWorkers bool `json:"keepWorkers,omitempty"`

	ServiceCIDR netip.Prefix `json:"serviceCIDR"`
	PodCIDR     netip.Prefix `json:"podCIDR"`

	Provider    ProviderConfig       `json:"provider"`
	NodeGroups  map[string]NodeGroup `json:"nodeGroups"`
	Attestation AttestationConfig    `json:"attestation"`
	Releases    ReleasesConfig       `json:"releases,omitzero"`
	// Charts are installed beside those of the release, and kept at what they say.
	Charts []release.Chart `json:"charts,omitempty"`
	// Registry is where all images are pulled from; nil: from their publishers.
	Registry *RegistryConfig `json:"registry,omitempty"`
	// Plans says whether the cluster carries out Plans of upgrade.cattle.io/v1; nil is yes.
	Plans *bool `json:"plans,omitempty"`
	// Hardening switches items of [kubeadm.Items] of a new cluster off. Those that it lacks are on.
	Hardening map[string]bool `json:"hardening,omitempty"`
	// Backup says how backups are kept.
	Backup BackupConfig `json:"backup,omitzero"`
	// EncryptSecrets says whether a new cluster encrypts Secrets in etcd; nil is yes.
	EncryptSecrets *bool `json:"encryptSecrets,omitempty"`

	lines  map[string]int   // field to line, for findings that are made later
	advice providers.Advice // while the file is read
}

// ProviderConfig is the provider that machines come from, with its section.
type ProviderConfig struct {
	// Name is the name of a registered provider; empty if the configuration has none.
	Name    string
	Section section.Values
}

// MarshalJSON returns the section below the name of the provider.
func (p ProviderConfig) MarshalJSON() ([]byte, error) {
	out := map[string]section.Values{}
	if p.Name != "" {
		out[p.Name] = p.Section
	}
	return json.Marshal(out)
}

// Advice returns the sentences about the cloud of the configuration. Without a configuration, as
// in a watch with only a kubeconfig, they fit every cloud.
func (c *Config) Advice() providers.Advice {
	if c == nil {
		return providers.AdviceFor("", nil)
	}
	return providers.AdviceFor(c.Provider.Name, c.Provider.Section)
}

// NodeGroup is a group of equal machines.
type NodeGroup struct {
	Role  cloud.Role `json:"role"`
	Count int        `json:"count"`
}

// AttestationConfig says what evidence a machine must give; exactly one field is set.
type AttestationConfig struct {
	TPM2 *TPM2Config `json:"tpm2,omitempty"`
}

// TPM2Config is what a TPM's quote must show.
type TPM2Config struct {
	Measurements attestation.Measurements `json:"measurements"`
	// TrustRoots are PEM certificates; one of them must vouch for the attestation key.
	TrustRoots string `json:"trustRoots"`
}

// ReleasesConfig says who is asked about releases. The zero value is what the program
// brings with it.
type ReleasesConfig struct {
	// Feed is a directory or bundle:FILE, taken from the workspace if it is relative, or an
	// address.
	Feed string `json:"feed,omitempty"`
	// Keys are public keys in PEM; one of them must have signed the feed. If there are
	// none, it is one of the keys that the program brings with it.
	Keys string `json:"keys,omitempty"`
}

// BackupConfig says how backups are kept.
type BackupConfig struct {
	// Recipients are public keys of age to which backups are encrypted; none: they are not.
	Recipients []string `json:"recipients"`
}

// RegistryConfig is a registry with the layout of a mirror, see package registry.
type RegistryConfig struct {
	// Address is HOST[:PORT][/PATH].
	Address string `json:"address"`
	// PullSecret is a config.json of Docker with a login for the address, relative to the workspace.
	PullSecret string `json:"pullSecret,omitempty"`
	// CABundle are PEM certificates of the authorities of the registry.
	CABundle string `json:"caBundle,omitempty"`
}

// ControlPlanes returns the configured number of control planes.
func (c *Config) ControlPlanes() int { return c.count(cloud.ControlPlane) }

// Workers returns the configured number of workers.
func (c *Config) Workers() int { return c.count(cloud.Worker) }

func (c *Config) count(r cloud.Role) (n int) {
	for _, g := range c.NodeGroups {
		if g.Role == r {
			n += g.Count
		}
	}
	return n
}

// ControlPlaneGroup returns the name of the group of control planes. A configuration has exactly one.
func (c *Config) ControlPlaneGroup() string {
	for name, g := range c.NodeGroups {
		if g.Role == cloud.ControlPlane {
			return name
		}
	}
	return ""
}

// Counts returns the wanted size of each group.
func (c *Config) Counts() map[string]int {
	m := make(map[string]int, len(c.NodeGroups))
	for name, g := range c.NodeGroups {
		m[name] = g.Count
	}
	return m
}

// At returns ", line 12" for a field of the file; empty if the line is not known.
func (c *Config) At(field string) string {
	if l := c.lines[field]; l > 0 {
		return fmt.Sprintf(", line %d", l)
	}
	return ""
}

var (
	clusterNameRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,35}[a-z0-9])?$`)
	groupNameRE   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
)

// ParseConfig reads constellation-conf.yaml strictly. The error is a *ConfigErrors
// that lists everything that is wrong. Whether the versions exist and the cloud can
// serve them is the preflight's question.
func ParseConfig(b []byte) (*Config, error) {
	r, c := readConfig(b)
	if err := r.err(ConfigFile); err != nil {
		return nil, err
	}
	return c, nil
}

// readConfig reads a configuration. The reader has the errors.
func readConfig(b []byte) (*reader, *Config) {
	r := &reader{}
	c := &Config{
		ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"), PodCIDR: defaultPods,
		NodeGroups: map[string]NodeGroup{}, lines: map[string]int{},
	}
	if doc := r.document(b); doc != nil {
		c.read(r, doc)
	}
	return r, c
}

func (c *Config) read(r *reader, doc *yaml.Node) {
	// A file of another format would only give errors about every changed field.
	if n := find(doc, "version"); n != nil {
		switch v := resolve(n); {
		case v.Value == "v1":
			r.bad(v, "version", "v1 is the format of release v1.0.0", "run `constellation config migrate`")
			return
		case v.Value != ConfigVersion:
			remedy := "write " + ConfigVersion
			if m := regexp.MustCompile(`^v([0-9]+)$`).FindStringSubmatch(v.Value); m != nil {
				remedy = "use the program that wrote it, or `constellation config generate` for a new one"
			}
			r.bad(v, "version", fmt.Sprintf("%s is not a format that this program reads", kindOf(v)), remedy)
			return
		}
	}
	note := func(f field) field {
		return func(n *yaml.Node, path string) {
			c.lines[path] = n.Line
			f(n, path)
		}
	}
	always := func(string) bool { return true }
	required := []string{"version", "name", "microserviceVersion", "kubernetesVersion", "nodeGroups", "attestation"}
	p, named := namedProvider(doc)
	if p.Inventory {
		required = []string{"version", "name", "kubernetesVersion", "nodeGroups"}
		c.ServiceCIDR, c.PodCIDR = netip.Prefix{}, netip.Prefix{} // kubeadm-config has them
		c.Attestation.TPM2 = &TPM2Config{}                        // nothing is attested
	}
	if p.Enrolled {
		required = []string{"version", "name", "microserviceVersion", "kubernetesVersion"}
		c.Attestation.TPM2 = &TPM2Config{} // the authority of the workspace vouches for machines
	}
	if !p.NoImages {
		required = slices.Insert(required, 2, "image")
	}
	c.advice = providers.AdviceFor("", nil)
	if named {
		c.advice = providers.AdviceFor(p.Name, nil)
	}
	whole := r.mapping(doc, "", map[string]field{
		"version":             r.str(&c.Version, always, "", ""),
		"name":                note(c.readName(r)),
		"image":               note(r.version(&c.Image, "v1.1.0")),
		"microserviceVersion": note(r.version(&c.Services, "v1.1.0")),
		"kubernetesVersion":   note(r.version(&c.Kubernetes, "v1.35.4")),
		"serviceCIDR":         note(r.prefix(&c.ServiceCIDR, 12, 24)),
		"podCIDR":             note(r.prefix(&c.PodCIDR, 8, 22)),
		"provider":            note(c.readProvider(r)),
		"nodeGroups":          note(c.readGroups(r)),
		"attestation":         note(c.readAttestation(r)),
		"keepWorkers":         note(r.boolean(&c.KeepWorkers)),
		"releases":            note(c.readReleases(r)),
		"charts":              note(c.readCharts(r)),
		"plans":               note(readOptional(r, &c.Plans)),
		"encryptSecrets":      note(readOptional(r, &c.EncryptSecrets)),
		"registry":            note(c.readRegistry(r)),
		"backup":              note(c.readBackup(r)),
		"hardening":           note(c.readHardening(r)),
	}, required...)
	if _, has := c.lines["provider"]; whole && !has {
		r.bad(nil, "provider", "is missing", "write it with "+words.Or(providers.Names())+": below it")
	}
	if n := valueOf(doc, "image"); p.NoImages && n != nil {
		r.bad(n, "image", "is not selected by provider "+p.Name, "remove it")
	}
	switch {
	case p.Inventory:
		c.checkInventory(r, doc)
	case p.Enrolled:
		c.checkEnrolled(r, doc)
	}
	if c.PodCIDR.Overlaps(c.ServiceCIDR) {
		r.errs = append(r.errs, FieldError{
			"podCIDR", c.lines["podCIDR"],
			fmt.Sprintf("%s overlaps serviceCIDR %s", c.PodCIDR, c.ServiceCIDR), "pods and services need ranges of their own",
		})
	}
}

// checkInventory checks the machines of an adopted cluster.
func (c *Config) checkInventory(r *reader, doc *yaml.Node) {
	for _, name := range []string{"microserviceVersion", "attestation", "serviceCIDR", "podCIDR", "keepWorkers", "charts", "plans", "encryptSecrets", "hardening"} {
		if n := valueOf(doc, name); n != nil {
			r.bad(n, name, "does not apply to an adopted cluster", "remove it")
		}
	}
	for i, m := range machines.List(c.Provider.Section) {
		if _, ok := c.NodeGroups[string(m.Group)]; m.Group.Valid() && !ok {
			r.bad(find(doc, "provider"), fmt.Sprintf("provider.%s.%s[%d].group", machines.Name, machines.Name, i), string(m.Group)+" is not in nodeGroups", "add the group to nodeGroups")
		}
	}
}

// checkEnrolled checks the list of enrolled machines, from which their groups follow.
func (c *Config) checkEnrolled(r *reader, doc *yaml.Node) {
	for _, name := range []string{"nodeGroups", "attestation"} {
		if n := valueOf(doc, name); n != nil {
			r.bad(n, name, "does not apply to enrolled machines", "remove it: it follows from the list of machines")
		}
	}
	c.checkBalancer(r, doc)
	rows := map[cloud.Role]int{}
	for i, m := range machines.List(c.Provider.Section) {
		rows[m.Group]++
		if g := c.NodeGroups[string(m.Group)]; !m.Spare {
			c.NodeGroups[string(m.Group)] = NodeGroup{Role: m.Group, Count: g.Count + 1}
		}
		if ip, err := netip.ParseAddr(m.Address); err == nil && (c.PodCIDR.Contains(ip) || c.ServiceCIDR.Contains(ip)) {
			r.bad(find(doc, "provider"), fmt.Sprintf("provider.%s.%s[%d].address", machines.Enrolled, machines.Name, i), m.Address+" is in the range of pods or services", "choose serviceCIDR and podCIDR outside of the machines' network")
		}
	}
	for role, n := range machines.Sizes(c.Provider.Section) {
		if n > rows[role] {
			field := map[cloud.Role]string{cloud.ControlPlane: "controlPlanes", cloud.Worker: "workers"}[role]
			problem := fmt.Sprintf("is %d, and the list has %s of that group", n, words.Count(rows[role], "machine"))
			r.bad(find(find(doc, "provider"), machines.Enrolled), "provider."+machines.Enrolled+"."+field, problem, "add machines with `constellation machine add --spare`, or write a smaller number")
			continue
		}
		c.NodeGroups[string(role)] = NodeGroup{Role: role, Count: n}
	}
}

// checkBalancer compares the balancer of enrolled machines with the rest of the configuration.
func (c *Config) checkBalancer(r *reader, doc *yaml.Node) {
	b := machines.BalancerOf(c.Provider.Section)
	if b == nil {
		return
	}
	section := find(find(doc, "provider"), machines.Enrolled)
	at := "provider." + machines.Enrolled + "." + machines.BalancerMap
	bad := func(field, problem, remedy string) {
		r.bad(find(find(section, machines.BalancerMap), field), at+"."+field, problem, remedy)
	}
	if ip, err := netip.ParseAddr(c.Provider.Section.Text("endpoint")); err == nil && ip != b.Address {
		bad("address", fmt.Sprintf("%s is not the endpoint %s", b.Address, ip), "write the same address twice, or a DNS name of the balancer's address as endpoint")
	}
	if c.PodCIDR.Contains(b.Address) || c.ServiceCIDR.Contains(b.Address) {
		bad("address", b.Address.String()+" is in the range of pods or services", "choose an address of the machines' network")
	}
	if b.Port == machines.APIPort {
		bad("port", fmt.Sprintf("%d is the port of the API servers on the same machines", b.Port), "remove the field, or write another port")
	}
	for _, m := range machines.List(c.Provider.Section) {
		if ip, err := netip.ParseAddr(m.Address); err == nil && ip == b.Address {
			bad("address", fmt.Sprintf("%s is that of %s", b.Address, m.Name), "choose an address that no machine has: keepalived moves it between the control planes")
		}
	}
}

func (c *Config) readName(r *reader) field {
	return r.str(&c.Name, clusterNameRE.MatchString, "cannot name a cluster", "use at most 37 of a-z, 0-9 and -, with a letter or digit at both ends")
}

// readOptional reads a boolean that has a default.
func readOptional(r *reader, to **bool) field {
	return func(n *yaml.Node, path string) {
		yes := true
		r.boolean(&yes)(n, path)
		*to = &yes
	}
}

func (c *Config) readHardening(r *reader) field {
	return func(n *yaml.Node, path string) {
		items, fields := map[string]bool{}, map[string]field{}
		for _, name := range kubeadm.ItemNames() {
			fields[name] = func(n *yaml.Node, path string) {
				on := true
				r.boolean(&on)(n, path)
				items[name] = on
			}
		}
		r.mapping(n, path, fields)
		c.Hardening = items
	}
}

// HardeningOff returns the items that are switched off, in the order of their names.
func (c *Config) HardeningOff() (off []string) {
	for _, name := range slices.Sorted(maps.Keys(c.Hardening)) {
		if !c.Hardening[name] {
			off = append(off, name)
		}
	}
	return off
}

func (c *Config) readBackup(r *reader) field {
	return func(n *yaml.Node, path string) {
		r.mapping(n, path, map[string]field{"recipients": func(n *yaml.Node, path string) {
			var list []string
			r.list(&list, func(string) bool { return true }, "")(n, path)
			for i, s := range list {
				if _, err := backup.ParseRecipient(s); err != nil { // it may be a secret key, so it is not quoted
					r.bad(n, fmt.Sprintf("%s[%d]", path, i), err.Error(), "write the public key that age-keygen prints, age1...")
					return
				}
			}
			c.Backup.Recipients = list
		}}, "recipients")
	}
}

func (c *Config) readProvider(r *reader) field {
	return func(n *yaml.Node, path string) {
		fields := map[string]field{}
		for _, p := range providers.All() {
			fields[p.Name] = func(n *yaml.Node, path string) {
				if c.Provider.Name != "" {
					r.bad(n, path, "is a second provider beside "+c.Provider.Name, "remove one of them")
					return
				}
				c.Provider = ProviderConfig{Name: p.Name, Section: r.section(n, path, p.Config)}
			}
		}
		if m := resolve(n); m.Kind == yaml.MappingNode {
			for i := 0; i < len(m.Content); i += 2 {
				if name := m.Content[i].Value; fields[name] == nil {
					fields[name] = func(n *yaml.Node, path string) {
						r.bad(n, path, "is not in this release", "use "+words.Or(providers.Names()))
					}
				}
			}
		}
		before := len(r.errs)
		if r.mapping(n, path, fields) && len(r.errs) == before && c.Provider.Name == "" {
			r.bad(n, path, "names no provider", "write "+words.Or(providers.Names())+": below it")
		}
	}
}

// namedProvider returns the provider that a document names, before its section is read.
func namedProvider(doc *yaml.Node) (providers.Provider, bool) {
	for _, p := range providers.All() {
		if valueOf(find(doc, "provider"), p.Name) != nil {
			return p, true
		}
	}
	return providers.Provider{}, false
}

func (c *Config) readGroups(r *reader) field {
	return func(n *yaml.Node, path string) {
		before := len(r.errs)
		_, ok := r.each(n, path, func(key, value *yaml.Node, path string) {
			if !groupNameRE.MatchString(key.Value) {
				r.bad(key, path, fmt.Sprintf("%q cannot name a group", key.Value), "use a-z, 0-9 and -")
			}
			var g NodeGroup
			var role string
			lowest := 0
			if m := find(resolve(value), "role"); m != nil && m.Value == string(cloud.ControlPlane) {
				lowest = 1
			}
			r.mapping(value, path, map[string]field{
				"role":  r.str(&role, func(s string) bool { return cloud.Role(s).Valid() }, "is no role", "write control-plane or worker"),
				"count": r.integer(&g.Count, lowest, 5000),
			}, "role", "count")
			g.Role = cloud.Role(role)
			c.NodeGroups[key.Value] = g
			c.lines[path] = key.Line
		})
		if !ok || len(r.errs) > before {
			return
		}
		groups := map[cloud.Role]int{}
		for _, g := range c.NodeGroups {
			groups[g.Role]++
		}
		switch {
		case groups[cloud.ControlPlane] == 0:
			r.bad(n, path, "has no group with the role control-plane", "a cluster needs one")
		case groups[cloud.ControlPlane] > 1:
			r.bad(n, path, "has several groups with the role control-plane", "put all control planes into one")
		}
	}
}

func (c *Config) readAttestation(r *reader) field {
	return func(n *yaml.Node, path string) {
		before := len(r.errs)
		ok := r.mapping(n, path, map[string]field{"tpm2": func(n *yaml.Node, path string) {
			t := &TPM2Config{}
			c.Attestation.TPM2 = t
			r.mapping(n, path, map[string]field{
				"measurements": readMeasurements(r, &t.Measurements, c.advice),
				"trustRoots":   readRoots(r, &t.TrustRoots, c.advice),
			}, "measurements", "trustRoots")
		}})
		if ok && len(r.errs) == before && c.Attestation.TPM2 == nil {
			r.bad(n, path, "names no variant", "write tpm2: below it")
		}
	}
}

func (c *Config) readReleases(r *reader) field {
	return func(n *yaml.Node, path string) {
		r.mapping(n, path, map[string]field{
			"feed": func(n *yaml.Node, path string) {
				s, isText := r.text(n, path)
				if !isText {
					return
				}
				if problem, remedy := badFeed(s); problem != "" {
					r.bad(n, path, problem, remedy)
					return
				}
				c.Releases.Feed = s
			},
			"keys": func(n *yaml.Node, path string) {
				s, isText := r.text(n, path)
				if !isText {
					return
				}
				if _, err := release.ParseAnchors(path, []byte(s)); err != nil {
					r.bad(n, path, fmt.Sprintf("cannot be used (%v)", err), "paste the public keys in PEM after a |, and nothing else; `constellation release key new` makes a pair")
					return
				}
				c.Releases.Keys = s
			},
		}, "feed")
	}
}

func (c *Config) readRegistry(r *reader) field {
	return func(n *yaml.Node, path string) {
		x := &RegistryConfig{}
		text := func(to *string, check func(string) (problem, remedy string)) field {
			return func(n *yaml.Node, path string) {
				s, isText := r.text(n, path)
				if !isText {
					return
				}
				if problem, remedy := check(s); problem != "" {
					r.bad(n, path, problem, remedy)
					return
				}
				*to = s
			}
		}
		if r.mapping(n, path, map[string]field{
			"address": text(&x.Address, registry.BadAddress),
			"pullSecret": text(&x.PullSecret, func(s string) (string, string) {
				if s == "" || s != strings.TrimSpace(s) || strings.ContainsFunc(s, unicode.IsControl) || strings.HasPrefix(s, "{") {
					return "is not the path of a file", "write the path of a config.json, as `docker login` writes it"
				}
				return "", ""
			}),
			"caBundle": text(&x.CABundle, func(s string) (string, string) {
				return registry.BadBundle(s), "paste the PEM certificates after a |, and nothing else"
			}),
		}, "address") {
			c.Registry = x
		}
	}
}

func (c *Config) readCharts(r *reader) field {
	return func(n *yaml.Node, path string) {
		n = resolve(n)
		if n.Kind != yaml.SequenceNode {
			r.bad(n, path, "is "+kindOf(n)+", want a list", "begin each chart with a dash: - name: cert-manager")
			return
		}
		seen := map[string]bool{}
		for i, item := range n.Content {
			var x release.Chart
			at := fmt.Sprintf("%s[%d]", path, i)
			before := len(r.errs)
			text := func(to *string) field { return r.str(to, func(string) bool { return true }, "", "") }
			r.mapping(item, at, map[string]field{
				"name": text(&x.Name), "namespace": text(&x.Namespace), "source": text(&x.Source), "version": text(&x.Version),
				"digest": text(&x.Digest), "chart": text(&x.Chart), "crds": text(&x.CRDs), "destructive": text(&x.Destructive),
				"needs":  r.list(&x.Needs, func(string) bool { return true }, ""),
				"values": readValues(r, &x.Values),
			}, "name", "namespace", "source", "version", "digest")
			if len(r.errs) == before {
				for _, p := range x.Check(func(name string) bool { return seen[name] }) {
					where := find(resolve(item), p.Field)
					if where == nil {
						where = item
					}
					r.bad(where, join(at, p.Field), p.Problem, p.Remedy)
				}
			}
			seen[x.Name] = true
			c.lines[at] = item.Line
			c.Charts = append(c.Charts, x)
		}
	}
}

// readValues reads values of a chart, whose keys are texts.
func readValues(r *reader, to *map[string]any) field {
	return func(n *yaml.Node, path string) {
		var v map[string]any
		if resolve(n).Kind != yaml.MappingNode {
			r.bad(n, path, "is "+kindOf(resolve(n))+", want keys and values", "indent the values below it, as in a file for `helm --values`")
			return
		}
		if err := n.Decode(&v); err != nil {
			r.bad(n, path, "cannot be the values of a chart", "keys are words, and none occurs twice")
			return
		}
		if _, err := json.Marshal(v); err != nil { // the cause may quote a value
			r.bad(n, path, "holds a key that is no text", "put keys such as 1 and true in quotes")
			return
		}
		*to = v
	}
}

// badFeed returns the problem of a feed's location; empty if it is valid.
func badFeed(s string) (problem, remedy string) {
	if s == "" || s != strings.TrimSpace(s) || strings.ContainsFunc(s, unicode.IsControl) {
		return fmt.Sprintf("%q is neither a directory nor an address", s), "write the path of a directory, or an https address"
	}
	if s == release.BundleScheme {
		return "names no file", "write bundle:PATH"
	}
	scheme, _, isURL := strings.Cut(s, "://")
	if !isURL {
		return "", ""
	}
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Host == "" || u.RawQuery != "" || u.Fragment != "":
		return "is no address of a feed", "write it as https://host/path"
	case u.User != nil:
		return "holds credentials", "a feed is public: its files are signed"
	case scheme == "https" || scheme == "http" && (u.Hostname() == "localhost" || net.ParseIP(u.Hostname()).IsLoopback()):
		return "", ""
	case scheme == "http":
		return "is not encrypted", "write https://; http is for this computer only"
	}
	return fmt.Sprintf("has the scheme %q", scheme), "write an https address, or the path of a directory"
}

// PCRCluster is the register that marks a machine as a member of a cluster.
const PCRCluster = 15

// readMeasurements reads the registers from their nodes, not through the decoder:
// digits alone are a number to YAML, and 64 of them are a legal value.
func readMeasurements(r *reader, to *attestation.Measurements, advice providers.Advice) field {
	return func(n *yaml.Node, path string) {
		before := len(r.errs)
		m := attestation.Measurements{}
		_, ok := r.each(n, path, func(key, value *yaml.Node, path string) {
			index, err := strconv.ParseUint(key.Value, 10, 32)
			switch {
			case err != nil || index > 23:
				r.bad(key, path, "is no register", "registers (PCRs) are numbered 0 to 23")
				return
			case index == PCRCluster:
				r.bad(key, path, "is the register that carries the cluster ID", "remove it: the program computes its value")
				return
			}
			var expected string
			one := attestation.Measurement{}
			r.mapping(value, path, map[string]field{
				"expected": r.str(&expected, IsDigest, "is not 64 hex digits", "copy the value that belongs to the image"),
				"warnOnly": r.boolean(&one.WarnOnly),
			}, "expected")
			one.Expected, _ = hex.DecodeString(expected) // checked above
			if isPlaceholder(expected) {
				r.bad(value, path, "is a placeholder", advice.Measurements)
			}
			m[uint32(index)] = one
		})
		if !ok || len(r.errs) > before {
			return
		}
		if !m.Enforces() {
			r.bad(n, path, "enforces nothing: any machine would be accepted", "give at least one register without warnOnly")
			return
		}
		*to = m
	}
}

// IsDigest reports whether s is a SHA-256 digest in hex.
func IsDigest(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == 32
}

func readRoots(r *reader, to *string, advice providers.Advice) field {
	return func(n *yaml.Node, path string) {
		s, isText := r.text(n, path)
		if !isText {
			return
		}
		if _, err := attestation.ParseRoots([]byte(s)); err != nil {
			if strings.TrimSpace(s) == "" {
				r.bad(n, path, "is left to be filled in", advice.Roots)
				return
			}
			r.bad(n, path, fmt.Sprintf("cannot be used (%v)", err), "paste the PEM certificates of the cloud that certifies attestation keys, after a |, and nothing else")
			return
		}
		*to = s
	}
}

// find returns the value of a key of a mapping; nil if there is none.
func find(n *yaml.Node, key string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return resolve(n.Content[i+1])
		}
	}
	return nil
}

// GenerateOptions fill a new configuration. Zero fields get the defaults of the
// newest release.
type GenerateOptions struct {
	// Name of the cluster.
	Name       string
	Kubernetes string
	Release    string // of the services
	Image      string
	// ControlPlanes and Workers; negative workers mean none.
	ControlPlanes, Workers int
	// Sandbox is the running sandbox that the configuration is for. It supplies the measurements,
	// the trust roots and fields not set above. Without it these are left for the user to fill
	// in, and validate reports them.
	Sandbox *SandboxInfo
	// Section has values of the provider's section, in the place of examples. A text that is empty removes an example.
	Section section.Values
}

// DefaultKubernetes is the version in a generated configuration that nothing else decides: the
// default of the newest release.
const DefaultKubernetes = "v1.36.4"

// GenerateConfig returns a commented configuration for a provider.
//
// The name [machines.Name], which is that of adopted clusters elsewhere, stands for enrolled machines.
func GenerateConfig(provider string, o GenerateOptions) ([]byte, error) {
	if provider == machines.Name {
		provider = machines.Enrolled
	}
	p, err := providers.Find(provider)
	if err != nil {
		return nil, &plan.Error{Op: "generate configuration", Err: fmt.Errorf("provider %s is not in this release", provider), Exit: plan.ExitUsage, Remedy: "use " + words.Or(providers.Names())}
	}
	d := struct {
		GenerateOptions
		About, Section, Note string // of the provider
		NoImages, Enrolled   bool
		Measurements         map[uint32]string
		TrustRoots           []string
		Version              string
	}{GenerateOptions: o, Version: ConfigVersion, NoImages: p.NoImages, Enrolled: p.Enrolled, Measurements: map[uint32]string{
		4: strings.Repeat("1234", 16), 9: strings.Repeat("1234", 16), 11: strings.Repeat("1234", 16),
	}}
	if p.Roots != nil {
		d.TrustRoots = strings.Split(strings.TrimSpace(string(p.Roots())), "\n")
	}
	if s := o.Sandbox; s != nil {
		d.Measurements = s.Measurements
		d.TrustRoots = strings.Split(strings.TrimSpace(s.TrustRoots), "\n")
		fill(&d.Name, s.clusterName())
		fill(&d.Kubernetes, s.Kubernetes)
		fill(&d.Release, s.Release)
		fill(&d.Image, s.Image)
		if d.ControlPlanes == 0 {
			d.ControlPlanes, d.Workers = s.ControlPlanes, s.Workers
			if s.Workers == 0 {
				d.Workers = -1
			}
		}
	}
	fill(&d.Name, "demo")
	fill(&d.Kubernetes, DefaultKubernetes)
	fill(&d.Release, version.Release)
	fill(&d.Image, d.Release)
	if d.ControlPlanes == 0 {
		d.ControlPlanes = 1
	}
	if d.Workers == 0 {
		d.Workers = 2
	}
	d.Workers = max(d.Workers, 0)

	example := d.Name // before it is shortened
	if len(d.Name) > 37 {
		d.Name = strings.TrimRight(d.Name[:37], "-")
	}
	values := section.Values{}
	switch {
	case o.Sandbox != nil:
		values = o.Sandbox.config()
		if o.Sandbox.Hollow {
			d.Note = hollowNote
		}
	case p.Example != nil:
		values = p.Example(example)
	}
	maps.Copy(values, o.Section)
	d.About = strings.ReplaceAll(p.About, "\n", "\n# ")
	if d.Section, err = sectionText(p.Name, p.Config, values); err != nil {
		return nil, fmt.Errorf("generate configuration: %w", err)
	}

	t, err := template.New(ConfigFile).Option("missingkey=error").Parse(string(assets.DefaultConfig()))
	if err != nil {
		return nil, fmt.Errorf("generate configuration: %w", err)
	}
	var b bytes.Buffer
	if err := t.Execute(&b, d); err != nil {
		return nil, fmt.Errorf("generate configuration: %w", err)
	}
	// What the user named must not become a file that validate refuses. Measurements
	// that are not known yet are the exception: the file says where they come from.
	if _, err := ParseConfig(b.Bytes()); err != nil {
		list, ok := AsConfigErrors(err)
		if !ok {
			return nil, err
		}
		list.Errors = slices.DeleteFunc(list.Errors, func(e FieldError) bool { return o.Sandbox == nil && strings.HasPrefix(e.Field, "attestation.") })
		if len(list.Errors) > 0 {
			return nil, &plan.Error{Op: "generate configuration", Err: list, Exit: plan.ExitUsage, Remedy: "pass other values"}
		}
	}
	return b.Bytes(), nil
}

func fill(s *string, value string) {
	if *s == "" {
		*s = value
	}
}

// MigrateConfig brings an older format to the current one and reports whether it
// had to. Only what changes is touched: comments, order and layout stay. The result
// is a valid configuration, or the error lists what is wrong with it.
func MigrateConfig(b []byte) (out []byte, changed bool, err error) {
	r := &reader{}
	doc := r.document(b)
	if doc == nil {
		return nil, false, r.err(ConfigFile)
	}
	if v := find(doc, "version"); v == nil || v.Value != "v1" {
		if _, err := ParseConfig(b); err != nil {
			return nil, false, err
		}
		return b, false, nil
	}
	if out, err = migrateV1(b, doc); err != nil {
		return nil, false, &plan.Error{Op: "migrate configuration", Err: err, Exit: plan.ExitUsage, Remedy: "write a new one with `constellation config generate`"}
	}
	if _, err := ParseConfig(out); err != nil {
		return nil, false, err
	}
	return out, true, nil
}

// migrateV1 brings the format of release v1.0.0 to v2: groups had an initialCount,
// and a measurement was its value alone.
func migrateV1(b []byte, doc *yaml.Node) ([]byte, error) {
	s := newSource(b)
	if err := s.set(find(doc, "version"), ConfigVersion, nil); err != nil {
		return nil, err
	}
	if groups := find(doc, "nodeGroups"); groups != nil && groups.Kind == yaml.MappingNode {
		for i := 1; i < len(groups.Content); i += 2 {
			g := resolve(groups.Content[i])
			if g.Kind != yaml.MappingNode || find(g, "count") != nil {
				continue
			}
			for k := 0; k+1 < len(g.Content); k += 2 {
				if g.Content[k].Value != "initialCount" {
					continue
				}
				if err := s.set(g.Content[k], "count", nil); err != nil {
					return nil, err
				}
			}
		}
	}
	if m := find(find(find(doc, "attestation"), "tpm2"), "measurements"); m != nil && m.Kind == yaml.MappingNode {
		for i := 1; i < len(m.Content); i += 2 {
			if v := m.Content[i]; v.Kind == yaml.ScalarNode && IsDigest(v.Value) {
				if err := s.replace(v, fmt.Sprintf(`{expected: "%s", warnOnly: false}`, v.Value)); err != nil {
					return nil, err
				}
			}
		}
	}
	return s.result()
}

// defaultPods is the range of pods of a configuration without one.
var defaultPods = netip.MustParsePrefix("10.244.0.0/16")

// PartOfConfig reads the fields name, provider, releases, charts, plans, registry, backup, podCIDR or kubernetesVersion and nothing else: the rest of a configuration may still be unfinished.
func PartOfConfig(w *Workspace, fields ...string) (*Config, error) {
	c := &Config{PodCIDR: defaultPods, lines: map[string]int{}}
	b, err := w.ReadConfig()
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return nil, err
	}
	r := &reader{}
	if doc := r.document(b); doc != nil {
		read := map[string]field{"name": c.readName(r), "releases": c.readReleases(r), "charts": c.readCharts(r), "plans": readOptional(r, &c.Plans), "registry": c.readRegistry(r), "backup": c.readBackup(r), "provider": c.readProvider(r), "podCIDR": r.prefix(&c.PodCIDR, 8, 22), "kubernetesVersion": r.version(&c.Kubernetes, "v1.35.4")}
		for _, name := range fields {
			if n := find(doc, name); n != nil {
				read[name](n, name)
			}
		}
	}
	return c, r.err(ConfigFile)
}
