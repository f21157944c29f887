package workspace

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"

	"constellation/engine/attestation"
	"constellation/engine/attestation/authority"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/section"
	"constellation/engine/plan"
	"constellation/engine/release"
)

// AuthorityKeyFile has the private key of the authority that certifies enrolled machines. It is 0600: who
// holds it can make evidence of any of them.
const AuthorityKeyFile = "constellation-authority-key.pem"

// initPort is the port of bootstrappers.
const initPort = "9000"

// Enrolment is what machines get from a workspace.
type Enrolment struct {
	// Cluster is the name of the cluster, UID identifies its machines.
	Cluster, UID string
	// Endpoint is the host in front of the API servers, and Port its port. Balancer is what listens there; nil: the
	// owner's own.
	Endpoint string
	Port     int
	Balancer *machines.Balancer
	// Authority certifies the machines. Roots is its certificate in PEM, SigningKeys the public key in PEM
	// that signs what machines install.
	Authority          *authority.Authority
	Roots, SigningKeys []byte
	// Machines are those of the configuration.
	Machines []machines.Machine

	secretHash [sha256.Size]byte
}

// MachineFile is a file that an enrolled machine needs before it is a node.
type MachineFile struct {
	Path string // absolute
	Mode fs.FileMode
	Data []byte
}

// Enrolment returns what machines get. The first call makes the state, the authority and the signing key. The
// configuration must have the provider [machines.Enrolled].
func (w *Workspace) Enrolment() (*Enrolment, error) {
	unlock, err := w.lockDir()
	if err != nil {
		return nil, err
	}
	defer unlock()
	return w.enrolment(func(name string, b []byte) error { return w.Write(name, b, 0o600) })
}

// RehearseEnrolment is Enrolment that writes nothing. What the workspace lacks is made for this result alone.
func (w *Workspace) RehearseEnrolment() (*Enrolment, error) {
	return w.enrolment(func(string, []byte) error { return nil })
}

// enrolment returns what machines get, and what it makes to write.
func (w *Workspace) enrolment(write func(name string, b []byte) error) (*Enrolment, error) {
	c, err := w.Config()
	if err != nil {
		return nil, err
	}
	if c.Provider.Name != machines.Enrolled {
		return nil, &plan.Error{
			Op: "enrol machines", Err: fmt.Errorf("%s has the provider %s%s", w.Path(ConfigFile), c.Provider.Name, c.At("provider")), Exit: plan.ExitUsage,
			Remedy: "use another directory with -C, where `constellation config generate machines` writes a configuration",
		}
	}
	s, err := w.State()
	var key []byte
	if errors.Is(err, ErrAbsent) {
		s, key, err = w.beginEnrolment(c, write)
	} else if err == nil {
		key, err = w.read(AuthorityKeyFile)
		if err != nil {
			err = authorityError(w, err)
		}
	}
	if err == nil {
		err = w.Belong(c, s)
	}
	if err != nil {
		return nil, err
	}
	if err := w.keepEndpoint(c, s, write); err != nil {
		return nil, err
	}
	out := &Enrolment{
		Cluster: c.Name, UID: s.Infrastructure.UID, Endpoint: s.Infrastructure.InClusterEndpoint, Port: machines.EndpointPort(c.Provider.Section), Roots: []byte(s.Infrastructure.Section.Text("authority")),
		Machines: machines.List(c.Provider.Section), Balancer: machines.BalancerOf(c.Provider.Section), secretHash: sha256.Sum256(s.Infrastructure.InitSecret),
	}
	if b := out.Balancer; b != nil && b.RouterID == 0 {
		b.RouterID = machines.RouterID(out.UID)
	}
	if out.Authority, err = authority.Parse(out.Roots, key); err != nil {
		return nil, authorityError(w, err)
	}
	signing, err := w.signingKey(func(b []byte) error { return write(SigningKeyFile, b) })
	if err != nil {
		return nil, err
	}
	out.SigningKeys = signing.PEM()
	return out, nil
}

// authorityError is the error about a key of the authority that cannot be used.
func authorityError(w *Workspace, err error) error {
	return &plan.Error{Op: "read " + w.Path(AuthorityKeyFile), Err: WithoutPath(err), Exit: plan.ExitUsage, Remedy: "restore the file from your copy: without it no machine can be enrolled in this cluster"}
}

// writeState is WriteState by write.
func writeState(s *State, write func(name string, b []byte) error) error {
	b, err := s.marshal()
	if err != nil {
		return fmt.Errorf("write %s: %w", StateFile, err)
	}
	return write(StateFile, b)
}

// beginEnrolment makes the authority and the state, and returns the state and the authority's key. The state is written
// last: it has the certificate.
func (w *Workspace) beginEnrolment(c *Config, write func(name string, b []byte) error) (s *State, key []byte, err error) {
	if err := w.checkLeftovers("cluster " + c.Name); err != nil {
		return nil, nil, err
	}
	certificate, key, err := authority.Create(c.Name + " machines")
	if err != nil {
		return nil, nil, fmt.Errorf("make the authority of machines: %w", err)
	}
	random := make([]byte, 16+32)
	if _, err := rand.Read(random); err != nil {
		return nil, nil, fmt.Errorf("make the init secret: %w", err)
	}
	s = &State{Version: StateVersion, Infrastructure: Infrastructure{
		UID: hex.EncodeToString(random[:16]), Name: c.Name, Provider: machines.Enrolled, InitSecret: random[16:],
		Section: section.Values{"uid": hex.EncodeToString(random[:16]), "authority": string(certificate)},
	}}
	s.Infrastructure.setEndpoint(c.Provider.Section)
	if err := write(AuthorityKeyFile, key); err != nil {
		return nil, nil, err
	}
	return s, key, writeState(s, write)
}

// setEndpoint sets host and port in front of the API servers from the section of a configuration.
func (i *Infrastructure) setEndpoint(v section.Values) {
	host := v.Text("endpoint")
	i.ClusterEndpoint, i.InClusterEndpoint, i.APIServerCertSANs = net.JoinHostPort(host, strconv.Itoa(machines.EndpointPort(v))), host, []string{host}
	if b := machines.BalancerOf(v); b != nil && b.Address.String() != host {
		i.APIServerCertSANs = append(i.APIServerCertSANs, b.Address.String())
	}
}

// keepEndpoint takes an endpoint that was corrected before init into the state. Later its host and port are in
// certificates and in the configuration of all nodes.
func (w *Workspace) keepEndpoint(c *Config, s *State, write func(name string, b []byte) error) error {
	is := Infrastructure{}
	is.setEndpoint(c.Provider.Section)
	was := &s.Infrastructure
	same := was.InClusterEndpoint == is.InClusterEndpoint && !slices.ContainsFunc(is.APIServerCertSANs, func(s string) bool { return !slices.Contains(was.APIServerCertSANs, s) })
	// This computer may reach the API servers at another address than machines do.
	if same && (was.ClusterEndpoint == is.ClusterEndpoint || hostOf(was.ClusterEndpoint) != was.InClusterEndpoint) {
		return nil
	}
	if len(s.ClusterValues.ClusterID) == 0 {
		was.setEndpoint(c.Provider.Section)
		return writeState(s, write)
	}
	if machines.BalancerOf(c.Provider.Section) == nil && was.ClusterEndpoint == net.JoinHostPort(was.InClusterEndpoint, strconv.Itoa(machines.APIPort)) {
		return nil // the owner's endpoint
	}
	return &plan.Error{
		Op: "enrol machines", Err: fmt.Errorf("%s has the endpoint %s, and the cluster was made with %s", w.Path(ConfigFile), is.ClusterEndpoint, was.ClusterEndpoint), Exit: plan.ExitUsage,
		Remedy: "restore endpoint and balancer in the configuration: certificates and nodes have the endpoint of init",
	}
}

// ID returns the provider ID of a machine.
func (e *Enrolment) ID(m machines.Machine) string { return machines.ProviderID(e.UID, m.Name) }

// Identity is the content of the certificate of a machine.
func (e *Enrolment) Identity(m machines.Machine) (attestation.Identity, error) {
	ip, err := netip.ParseAddr(m.Address)
	if err != nil {
		return attestation.Identity{}, fmt.Errorf("read the address of %s: %w", m.Name, err)
	}
	return attestation.Identity{Name: m.Name, ProviderID: e.ID(m), UID: e.UID, Group: machines.GroupID(e.UID, m.Group), Role: m.Group, IP: ip}, nil
}

// Inventory returns the list of machines as the cluster has it.
func (e *Enrolment) Inventory() machines.Inventory { return inventoryOf(e.UID, e.Endpoint, e.Machines) }

func inventoryOf(uid, endpoint string, list []machines.Machine) machines.Inventory {
	i := machines.Inventory{Schema: "1", Cluster: uid, Endpoint: endpoint}
	for _, m := range list {
		m.ProviderID = machines.ProviderID(uid, m.Name)
		i.Machines = append(i.Machines, m.Entry())
	}
	return i
}

// EnrolledInventory returns the list of machines of a configuration and its state.
func EnrolledInventory(c *Config, s *State) machines.Inventory {
	i := inventoryOf(s.Infrastructure.UID, s.Infrastructure.InClusterEndpoint, machines.List(c.Provider.Section))
	if sizes := machines.Sizes(c.Provider.Section); len(sizes) > 0 {
		i.Sizes = sizes
	}
	i.ReplaceAfter = c.Provider.Section.Text("replaceAfter")
	i.SetPackages(c.Provider.Section)
	return i
}

// Files returns the files of a machine, which need not be in the configuration yet.
func (e *Enrolment) Files(m machines.Machine) ([]MachineFile, error) {
	i := e.Inventory()
	for n := range i.Machines {
		i.Machines[n].Key, i.Machines[n].Labels, i.Machines[n].Taints = "", "", "" // only the cluster needs them
	}
	if !slices.ContainsFunc(i.Machines, func(x machines.Entry) bool { return x.Name == m.Name }) {
		i.Machines = append(i.Machines, machines.Entry{Name: m.Name, Address: m.Address, Group: m.Group, ProviderID: e.ID(m)})
	}
	data, err := json.MarshalIndent(machines.MachineData{Inventory: i, Self: m.Name, InitSecretHash: hex.EncodeToString(e.secretHash[:])}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write the data of %s: %w", m.Name, err)
	}
	env := fmt.Sprintf("CONSTELLATION_PROVIDER=%s\nCONSTELLATION_METADATA=%s\nCONSTELLATION_TPM=enrolled:%s\n", machines.Enrolled, machines.MachineFile, machines.IdentityDir)
	if e.Port != machines.APIPort {
		env += fmt.Sprintf("CONSTELLATION_API_SERVER_PORT=%d\n", e.Port)
	}
	return []MachineFile{
		{machines.MachineFile, 0o600, append(data, '\n')},
		{"/etc/constellation/environment", 0o644, []byte(env)},
		{"/etc/constellation/attestation-roots.pem", 0o644, e.Roots},
		{"/usr/lib/constellation/peers.json", 0o644, []byte("[]\n")},
		{"/" + release.MachineKeys, 0o644, e.SigningKeys},
		// The unit of the kubelet names the folder, and a kubelet does not start without it.
		{"/usr/lib/constellation/kubelet.conf.d/00-enrolled.conf", 0o644, []byte("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n")},
	}, nil
}

// CheckKey returns an error if a machine may not be certified under a name, because another computer was enrolled as it,
// or because this computer was enrolled under another name. key and ek are those of its key and of the TPM that holds
// it, as in [machines.Machine]; without ek, the key is in a file.
func (e *Enrolment) CheckKey(name, key, ek string) error { return checkKey(e.Machines, name, key, ek) }

func checkKey(list []machines.Machine, name, key, ek string) error {
	for _, x := range list {
		why := ""
		switch {
		case x.Name != name && ek != "" && x.EK == ek:
			why = "its TPM is that of " + x.Name
		case x.Name != name && key != "" && x.Key == key:
			why = "its key is that of " + x.Name + ": the identity was copied"
		case x.Name != name || ek != "" && x.EK == ek: // a TPM may have got another key
			continue
		case ek == "" && x.EK != "":
			why = fmt.Sprintf("it was enrolled with a key in its TPM (%s), and the key is in a file now", x.EK)
		case x.EK != "":
			why = fmt.Sprintf("its TPM has the endorsement key %s, and the machine of this name had %s: it is another computer, or its TPM was replaced", ek, x.EK)
		case x.Key == "" || x.Key == key: // no computer is pinned to the name yet, or this one
			continue
		default:
			why = fmt.Sprintf("it has the key %s, and the machine of this name had %s: it is another computer, or its disk was replaced", key, x.Key)
		}
		return &plan.Error{Op: "enrol machine " + name, Err: errors.New(why), Exit: plan.ExitUsage, Remedy: "if that is intended, remove the old machine first: `constellation machine remove " + x.Name + " --ssh USER@HOST`, or with --gone if it is lost"}
	}
	return nil
}

// AddMachine adds a machine to the list in the configuration, and notes the address of the first control plane
// in the state, and whether all machines are attested. Comments and layout stay. A machine that is there with the same
// values is no error, and one that has a TPM by now, or another key in its TPM, gets it. It also gets labels and taints that
// its row lacks.
func (w *Workspace) AddMachine(m machines.Machine) error {
	m.ProviderID = ""
	return w.editMachines(func(list []machines.Machine) ([]machines.Machine, error) {
		if err := checkKey(list, m.Name, m.Key, m.EK); err != nil {
			return nil, err
		}
		for i, x := range list {
			if m.Vendor == "" && m.EK == x.EK {
				m.Vendor = x.Vendor // the TPM was verified by an earlier enrolment
			}
			switch {
			case x == m:
				return list, nil
			case plain(x) == plain(m):
				is, err := WithSettings(x, m)
				if err != nil {
					return nil, err
				}
				list = slices.Clone(list)
				list[i] = is
				return list, nil
			case x.Name == m.Name || x.Address == m.Address:
				return nil, &plan.Error{
					Op: "add machine " + m.Name, Err: fmt.Errorf("the configuration has %s with address %s and group %s", x.Name, x.Address, x.Group), Exit: plan.ExitUsage,
					Remedy: "choose another --name, or remove that machine first: `constellation machine remove " + x.Name + " --ssh USER@HOST`",
				}
			}
		}
		return append(slices.Clone(list), m), nil
	})
}

// WithSettings returns m, which is added again, with the labels and taints of its row unless it has some. The error says
// that the row has others.
func WithSettings(row, m machines.Machine) (machines.Machine, error) {
	m.Labels, m.Taints = cmp.Or(m.Labels, row.Labels), cmp.Or(m.Taints, row.Taints)
	if row.Labels != "" && row.Labels != m.Labels || row.Taints != "" && row.Taints != m.Taints {
		return m, &plan.Error{
			Op: "add machine " + m.Name, Err: fmt.Errorf("its row in the configuration has the labels %q and the taints %q", row.Labels, row.Taints), Exit: plan.ExitUsage,
			Remedy: "change them in " + ConfigFile + ", and run the same command without --label and --taint",
		}
	}
	return m, nil
}

// plain returns m without its key and settings.
func plain(m machines.Machine) machines.Machine {
	m.Attested, m.EK, m.Vendor, m.TPM, m.Key, m.Labels, m.Taints = false, "", "", "", "", "", ""
	return m
}

// RemoveMachine removes a machine from the list in the configuration. One that is not there is no error.
func (w *Workspace) RemoveMachine(name string) error {
	return w.editMachines(func(list []machines.Machine) ([]machines.Machine, error) {
		return slices.DeleteFunc(slices.Clone(list), func(m machines.Machine) bool { return m.Name == name }), nil
	})
}

// editMachines replaces the list of machines in the configuration by what change makes of it.
func (w *Workspace) editMachines(change func([]machines.Machine) ([]machines.Machine, error)) error {
	unlock, err := w.lockDir()
	if err != nil {
		return err
	}
	defer unlock()
	b, err := w.ReadConfig()
	if err != nil {
		return err
	}
	c, err := ParseConfig(b)
	if err != nil {
		return &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "correct the file; `constellation config validate` checks it again"}
	}
	before := machines.List(c.Provider.Section)
	after, err := change(before)
	if err != nil {
		return err
	}
	if !slices.Equal(before, after) {
		out, err := editMachines(b, before, after)
		if err != nil {
			return err
		}
		if err := w.UpdateConfig(b, out); err != nil {
			return err
		}
	}
	s, err := w.State()
	if err != nil {
		return err
	}
	first := ""
	if n := slices.IndexFunc(after, func(m machines.Machine) bool { return m.Group == cloud.ControlPlane && !m.Spare }); n >= 0 {
		first = net.JoinHostPort(after[n].Address, initPort)
	}
	if len(s.ClusterValues.ClusterID) > 0 { // init has begun on a machine already
		first = s.Infrastructure.InitEndpoint
	}
	attested := len(after) > 0 && !slices.ContainsFunc(after, func(m machines.Machine) bool { return !m.Attested })
	if s.Infrastructure.InitEndpoint == first && s.Infrastructure.Section.Bool(machines.Attested) == attested {
		return nil
	}
	s.Infrastructure.InitEndpoint, s.Infrastructure.Section[machines.Attested] = first, attested
	return w.WriteState(s)
}

// editMachines returns the configuration b with another list of enrolled machines: rows are removed, and added at the
// end. The result is read again and compared.
func editMachines(b []byte, before, after []machines.Machine) ([]byte, error) {
	tied := func() error {
		var lines []string
		for _, m := range after {
			lines = append(lines, "- "+rowText(m))
		}
		return &plan.Error{
			Op: "edit " + ConfigFile, Err: errTied, Exit: plan.ExitUsage,
			Remedy: "write the list provider." + machines.Enrolled + "." + machines.Name + " by hand: " + strings.Join(lines, " "),
		}
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil || len(doc.Content) == 0 {
		return nil, tied()
	}
	own := find(find(doc.Content[0], "provider"), machines.Enrolled)
	if own == nil || own.Kind != yaml.MappingNode || own.Style&yaml.FlowStyle != 0 || len(own.Content) == 0 {
		return nil, tied()
	}
	s := newSource(b)
	if err := s.setMachines(own, before, after); err != nil {
		return nil, tied()
	}
	out, err := s.result()
	if err != nil {
		return nil, tied()
	}
	was, err := ParseConfig(b)
	if err != nil {
		return nil, tied()
	}
	is, err := ParseConfig(out)
	if err != nil || !slices.Equal(machines.List(is.Provider.Section), after) {
		return nil, tied()
	}
	// All else is as it was.
	for _, c := range []*Config{was, is} {
		delete(c.Provider.Section, machines.Name)
		c.NodeGroups = nil
	}
	x, errX := json.Marshal(was)
	y, errY := json.Marshal(is)
	if errX != nil || errY != nil || !bytes.Equal(x, y) {
		return nil, tied()
	}
	return out, nil
}

// setMachines adds the edits of the list in the section own.
func (s *source) setMachines(own *yaml.Node, before, after []machines.Machine) error {
	rows := func(indent string) (added []string) {
		for _, m := range after {
			if !slices.ContainsFunc(before, func(x machines.Machine) bool { return plain(x) == plain(m) }) {
				added = append(added, indent+"- "+rowText(m))
			}
		}
		return added
	}
	key, list := (*yaml.Node)(nil), (*yaml.Node)(nil)
	for i := 0; i+1 < len(own.Content); i += 2 {
		if own.Content[i].Value == machines.Name {
			key, list = own.Content[i], own.Content[i+1]
		}
	}
	if list == nil {
		at, err := s.end(own.Content[1])
		if err != nil {
			return err
		}
		indent := strings.Repeat(" ", own.Content[0].Column-1)
		s.addLines(at, append([]string{indent + machines.Name + ":"}, rows(indent)...)...)
		return nil
	}
	if list.Kind != yaml.SequenceNode || list.Style&yaml.FlowStyle != 0 || len(list.Content) != len(before) {
		return errTied
	}
	last, indent := 0, ""
	for i, item := range list.Content {
		from, err := s.offset(item)
		if err != nil {
			return err
		}
		end, err := s.end(item)
		if err != nil {
			return err
		}
		last = end
		lead, _, ok := bytes.Cut(s.b[s.startOfLine(from):from], []byte("-"))
		if !ok {
			return errTied
		}
		indent = string(lead)
		if n := slices.IndexFunc(after, func(m machines.Machine) bool { return plain(m) == plain(before[i]) }); n >= 0 {
			for _, p := range columnsOf(after[n]) {
				if err := s.pin(resolve(item), p[0], p[1]); err != nil {
					return err
				}
			}
		} else {
			s.edits = append(s.edits, replacement{s.startOfLine(from), s.afterLine(end), ""})
		}
	}
	if len(after) == 0 { // a list without rows is no list
		at, err := s.offset(key)
		if err != nil {
			return err
		}
		s.edits = append(s.edits, replacement{s.startOfLine(at), s.afterLine(at), ""})
	}
	if added := rows(indent); len(added) > 0 {
		s.addLines(last, added...)
	}
	return nil
}

// pin sets a column of a row.
func (s *source) pin(row *yaml.Node, column, value string) error {
	n := find(row, column)
	switch {
	case n == nil:
		return s.addKey(row, "group", column, value)
	case n.Value == strings.Trim(value, `"`):
		return nil
	}
	return s.replace(n, value)
}

// rowText is a machine as a row of the list.
func rowText(m machines.Machine) string {
	text := fmt.Sprintf("{name: %s, address: %q, group: %s", m.Name, m.Address, m.Group)
	for _, p := range columnsOf(m) {
		text += ", " + p[0] + ": " + p[1]
	}
	return text + "}"
}

// columnsOf returns the columns of a row that not every machine has, with their values.
func columnsOf(m machines.Machine) (columns [][2]string) {
	if m.Spare {
		columns = append(columns, [2]string{"spare", "true"})
	}
	if m.Attested {
		columns = append(columns, [2]string{machines.Attested, "true"})
	}
	for _, c := range [][2]string{{"ek", m.EK}, {"vendor", m.Vendor}, {"key", m.Key}, {"tpm", m.TPM}, {"labels", m.Labels}, {"taints", m.Taints}} {
		if c[1] != "" {
			columns = append(columns, [2]string{c[0], strconv.Quote(c[1])})
		}
	}
	return columns
}
