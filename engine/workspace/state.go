package workspace

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"

	"gopkg.in/yaml.v3"

	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/words"
)

// StateVersion is the format of constellation-state.yaml.
const StateVersion = "v1"

// State has the data of the machines and their cluster: constellation-state.yaml. It contains
// the init secret, so its file is 0600 and it is never shown as a whole.
type State struct {
	Version        string         `yaml:"version"`
	Infrastructure Infrastructure `yaml:"infrastructure"`
	ClusterValues  ClusterValues  `yaml:"clusterValues,omitempty"`
}

// Infrastructure is the result of creating machines, before init: the machines and their
// addresses.
type Infrastructure struct {
	// UID names this incarnation of the machines: attestation keys are certified for it.
	UID      string `yaml:"uid"`
	Name     string `yaml:"name"`
	Provider string `yaml:"provider"`
	// ClusterEndpoint is host:port of the API server as this computer reaches it,
	// InitEndpoint that of the bootstrappers.
	ClusterEndpoint string `yaml:"clusterEndpoint"`
	InitEndpoint    string `yaml:"initEndpoint"`
	// InClusterEndpoint is the load balancer's address as machines reach it.
	InClusterEndpoint string `yaml:"inClusterEndpoint"`
	// InitSecret proves that the caller owns the machines.
	InitSecret HexBytes `yaml:"initSecret"`
	// APIServerCertSANs are names and addresses that the API server's certificate
	// must have besides those of the machines.
	APIServerCertSANs []string     `yaml:"apiServerCertSANs,omitempty"`
	NodeCIDR          netip.Prefix `yaml:"ipCidrNode"`
	PodCIDR           netip.Prefix `yaml:"ipCidrPod"`
	// Section is what only the provider understands: how its control API is reached.
	Section section.Values `yaml:"-"`
}

// partial reports whether the machines are being made: no address is known yet.
func (i *Infrastructure) partial() bool {
	return i.ClusterEndpoint == "" && i.InitEndpoint == "" && i.InClusterEndpoint == ""
}

// MarshalYAML returns the fields, and after them the provider's section by its schema.
func (i Infrastructure) MarshalYAML() (any, error) {
	type plain Infrastructure // without this method
	out := &yaml.Node{}
	if err := out.Encode(plain(i)); err != nil {
		return nil, err
	}
	p, ok := providers.Named(i.Provider)
	if !ok {
		return nil, fmt.Errorf("provider %q is not in this release", i.Provider)
	}
	if p.Inventory || p.Enrolled || i.partial() {
		// Not all that init needs is known of machines that exist already.
		var kept []*yaml.Node
		for k := 0; k+1 < len(out.Content); k += 2 {
			if v := out.Content[k+1]; v.Kind != yaml.ScalarNode || v.Value != "" {
				kept = append(kept, out.Content[k], v)
			}
		}
		out.Content = kept
	}
	n, err := sectionNode(p.State, i.Section)
	if err != nil {
		return nil, err
	}
	if len(n.Content) > 0 {
		out.Content = append(out.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: p.Name}, n)
	}
	return out, nil
}

// Simulated reports whether the machines only imitate machines.
func (s *State) Simulated() bool {
	p, ok := providers.Named(s.Infrastructure.Provider)
	return ok && p.Simulated != nil && p.Simulated(s.Infrastructure.Section)
}

// Adopted reports whether the cluster existed before its workspace: `adopt` wrote it.
func (s *State) Adopted() bool {
	p, ok := providers.Named(s.Infrastructure.Provider)
	return ok && p.Inventory
}

// NotAttested reports whether no evidence of hardware vouches for the machines: they were adopted, or one of them was
// enrolled with a key on disk.
func (s *State) NotAttested() bool {
	return s.Adopted() || s.Enrolled() && !s.Infrastructure.Section.Bool(machines.Attested)
}

// Enrolled reports whether the machines are those that `machine add` prepared.
func (s *State) Enrolled() bool {
	p, ok := providers.Named(s.Infrastructure.Provider)
	return ok && p.Enrolled
}

// Unmanaged reports whether the cluster was adopted, and has no operator of ours.
func (s *State) Unmanaged() bool { return s.Adopted() && !s.Infrastructure.Section.Bool(managedField) }

// managedField is the field of the provider's section that says that the operator runs in an adopted cluster.
const managedField = "operator"

// Catalogue returns the catalogue of OS images of the state's cloud. list reads its entries; it is
// called only for an image whose reference does not contain its version.
func (s *State) Catalogue(list func() ([]cloud.Image, error)) *cloud.Catalogue {
	p, err := providers.Known(s.Infrastructure.Provider)
	if err != nil {
		return cloud.NewCatalogue(nil, func() ([]cloud.Image, error) { return nil, err })
	}
	return cloud.NewCatalogue(p.ImageVersion, list)
}

// Advice returns the sentences about the cloud of the state.
func (s *State) Advice() providers.Advice {
	return providers.AdviceFor(s.Infrastructure.Provider, s.Infrastructure.Section)
}

// ClusterValues is what init adds.
type ClusterValues struct {
	// ClusterID is derived from the master secret and MeasurementSalt.
	ClusterID       HexBytes `yaml:"clusterID,omitempty"`
	MeasurementSalt HexBytes `yaml:"measurementSalt,omitempty"`
	// InitNode is the provider ID of the machine that was asked to be the first node.
	// No other one is asked: a request that is half-way on one machine must not start
	// a second cluster on another.
	InitNode string `yaml:"initNode,omitempty"`
	// Certifier says that init gave the cluster keys of a certifier.
	Certifier bool `yaml:"certifier,omitempty"`
	// EncryptsSecrets says that init gave the cluster keys that encrypt Secrets in etcd, and that its first node uses them.
	EncryptsSecrets bool `yaml:"encryptsSecrets,omitempty"`
	// EncryptionPending says that an upgrade gives control planes these keys, and that not all Secrets are encrypted yet.
	EncryptionPending bool `yaml:"encryptionPending,omitempty"`
}

// KeyService reports whether control planes of the cluster have, or get, keys that encrypt Secrets.
func (v *ClusterValues) KeyService() bool { return v.EncryptsSecrets || v.EncryptionPending }

// HexBytes is binary data that YAML holds as hex digits.
type HexBytes []byte

// MarshalYAML returns the hex digits.
func (b HexBytes) MarshalYAML() (any, error) { return hex.EncodeToString(b), nil }

// String hides the value: some of them are secrets.
func (b HexBytes) String() string { return "(hidden)" }

// ParseState reads constellation-state.yaml strictly. The error is a *ConfigErrors
// that lists everything that is wrong; it holds no value of the file that is secret.
func ParseState(b []byte) (*State, error) { return parseState(b, StateFile, false) }

// parseState reads a state. A partial one has no addresses.
func parseState(b []byte, name string, partial bool) (*State, error) {
	r := &reader{}
	s := &State{}
	if doc := r.document(b); doc != nil {
		s.read(r, doc, partial)
	}
	if err := r.err(name); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *State) read(r *reader, doc *yaml.Node, partial bool) {
	i := &s.Infrastructure
	filled := func(v string) bool { return strings.TrimSpace(v) != "" && len(v) <= 256 }
	r.mapping(doc, "", map[string]field{
		"version": r.str(&s.Version, func(v string) bool { return v == StateVersion }, "is not a format that this program reads", "use the program that wrote the file"),
		"infrastructure": func(n *yaml.Node, path string) {
			var named string // the provider of the section
			provider := find(resolve(n), "provider")
			fields := map[string]field{
				"uid":               r.str(&i.UID, filled, "is empty or too long", ""),
				"name":              r.str(&i.Name, clusterNameRE.MatchString, "cannot name a cluster", ""),
				"provider":          r.str(&i.Provider, func(v string) bool { _, ok := providers.Named(v); return ok }, "is no provider of this release", "this release has "+words.And(providers.Names())),
				"clusterEndpoint":   r.str(&i.ClusterEndpoint, isHostPort, "is not host:port", ""),
				"initEndpoint":      r.str(&i.InitEndpoint, isHostPort, "is not host:port", ""),
				"inClusterEndpoint": r.str(&i.InClusterEndpoint, filled, "is empty or too long", ""),
				"initSecret":        r.secret(&i.InitSecret, 16, 64),
				"apiServerCertSANs": r.list(&i.APIServerCertSANs, filled, "is empty or too long"),
				"ipCidrNode":        r.prefix(&i.NodeCIDR, 8, 29),
				"ipCidrPod":         r.prefix(&i.PodCIDR, 8, 22),
			}
			required := []string{"uid", "name", "provider", "clusterEndpoint", "initEndpoint", "inClusterEndpoint", "initSecret", "ipCidrNode", "ipCidrPod"}
			if provider != nil {
				switch p, ok := providers.Named(provider.Value); {
				case ok && p.Inventory:
					required = []string{"uid", "name", "provider", "clusterEndpoint"}
				case ok && p.Enrolled:
					required = []string{"uid", "name", "provider", "clusterEndpoint", "inClusterEndpoint", "initSecret"}
				case partial:
					required = []string{"uid", "name", "provider", "initSecret"}
				}
			}
			for _, p := range providers.All() {
				fields[p.Name] = func(n *yaml.Node, path string) {
					values := r.section(n, path, p.State)
					if i.Section != nil {
						r.bad(n, path, "is the section of a second provider", "remove one of them")
					}
					i.Section = values
					named = p.Name
				}
				if provider != nil && provider.Value == p.Name && p.State.Required() {
					required = append(required, p.Name)
				}
			}
			before := len(r.errs)
			r.mapping(n, path, fields, required...)
			if named != "" && named != i.Provider && len(r.errs) == before {
				r.bad(n, join(path, named), "is the section of another provider than "+i.Provider, "restore the file from a backup")
			}
		},
		"clusterValues": func(n *yaml.Node, path string) {
			v := &s.ClusterValues
			r.mapping(n, path, map[string]field{
				"clusterID":         r.secret(&v.ClusterID, 32, 32),
				"measurementSalt":   r.secret(&v.MeasurementSalt, 32, 32),
				"initNode":          r.str(&v.InitNode, filled, "is empty or too long", ""),
				"certifier":         r.boolean(&v.Certifier),
				"encryptsSecrets":   r.boolean(&v.EncryptsSecrets),
				"encryptionPending": r.boolean(&v.EncryptionPending),
			})
		},
	}, "version", "infrastructure")
	if v := s.ClusterValues; len(v.ClusterID) > 0 && len(v.MeasurementSalt) == 0 {
		r.bad(nil, "clusterValues.measurementSalt", "is missing", "restore the file from a backup: the cluster ID cannot be checked without it")
	}
}

// secret reads hex digits without ever repeating them in an error.
func (r *reader) secret(to *HexBytes, shortest, longest int) field {
	return func(n *yaml.Node, path string) {
		n = resolve(n)
		b, err := hex.DecodeString(n.Value)
		if n.Kind != yaml.ScalarNode || err != nil || len(b) < shortest || len(b) > longest {
			r.bad(n, path, "is not hex digits of the right length", "restore the file from a backup")
			return
		}
		*to = b
	}
}

// marshal returns the file's text.
func (s *State) marshal() ([]byte, error) {
	var b bytes.Buffer
	if s.Adopted() {
		b.WriteString("# Which cluster this workspace is of. Written by `constellation adopt`; do not edit.\n")
	} else {
		b.WriteString("# State of the machines and their cluster. It contains a secret: do not share it.\n# Written by constellation; do not edit.\n")
	}
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(s); err != nil {
		return nil, err
	}
	return b.Bytes(), e.Close()
}
