package machines

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/section"
)

// Enrolled is the name of the provider of machines that `machine add` prepares.
const Enrolled = "enrolled"

// MachineFile is where an enrolled machine has what the metadata server of a cloud would say.
const MachineFile = "/etc/constellation/machine.json"

// IdentityDir is where an enrolled machine has its key and its certificate.
const IdentityDir = "/var/lib/constellation-identity"

// Attested is the column of the list for machines whose key a TPM holds, and the field of the state that says
// that all are such machines.
const Attested = "attested"

// DefaultTPM is the resource manager of the first TPM of a machine with Linux.
const DefaultTPM = "/dev/tpmrm0"

var (
	ekRE  = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	tpmRE = regexp.MustCompile(`^(/dev/tpm(rm)?[0-9]{1,3}|unix:/(run|var/lib)/[A-Za-z0-9._-]*tpm[A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)$`)
)

// ValidTPM reports whether s is the address of a TPM that pods of a control plane can have: a device, or a
// socket in a folder below /run or /var/lib whose name contains tpm. Pods get that folder, and a machine names it.
func ValidTPM(s string) bool { return tpmRE.MatchString(s) }

// Pinned returns m with its key and the TPM that holds it, at the address tpm on the machine, which states it.
func (m Machine) Pinned(key string, attested bool, ek, tpm string) (Machine, error) {
	if !attested {
		ek, tpm = "", ""
	}
	if tpm == DefaultTPM {
		tpm = ""
	}
	if tpm != "" && !ValidTPM(tpm) {
		return m, fmt.Errorf("%q is no address of a TPM that pods can have", tpm)
	}
	m.Key, m.Attested, m.EK, m.TPM = key, attested, ek, tpm
	return m, nil
}

// TPMs returns where the TPMs are with which the control planes of a section prove what they are: the folders of their
// sockets, sorted, and whether one of them is a device.
func TPMs(v section.Values) (sockets []string, device bool) {
	for _, m := range List(v) {
		if !m.Attested || m.Group != cloud.ControlPlane {
			continue
		}
		if socket, ok := strings.CutPrefix(m.TPM, "unix:"); ok {
			sockets = append(sockets, path.Dir(socket))
		} else {
			device = true
		}
	}
	slices.Sort(sockets)
	return slices.Compact(sockets), device
}

var hostRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)

// ValidHost reports whether s is a DNS name or an IP address, without a port.
func ValidHost(s string) bool {
	_, err := netip.ParseAddr(s)
	return err == nil || hostRE.MatchString(s)
}

// EnrolledConfig returns the schema of the section of enrolled machines in the configuration.
func EnrolledConfig() section.Schema {
	return section.Schema{
		{
			Name: "endpoint", Required: true, Valid: ValidHost, Problem: "is no host", Remedy: "write the DNS name or the address, without a port, of the load balancer in front of the control planes; with one control plane that is its own address",
			Ask: "endpoint", Hint: "10.0.0.11 or api.example.com", Help: "host of the load balancer of the control planes; with one control plane its own address",
		},
		{Name: Name, Kind: section.Table, Columns: section.Schema{
			{Name: "name", Required: true, Unique: true, Valid: nameRE.MatchString, Problem: "cannot name a node", Remedy: "use at most 253 of a-z, 0-9, - and ."},
			{Name: "address", Required: true, Unique: true, Valid: func(s string) bool { _, err := netip.ParseAddr(s); return err == nil }, Problem: "is no IP address", Remedy: "write the address at which the other machines reach it, without a port"},
			{Name: "group", Required: true, Valid: func(s string) bool { return cloud.Role(s).Valid() }, Problem: "is no group", Remedy: "write control-plane or worker"},
			{Name: "spare", Kind: section.Bool},
			{Name: Attested, Kind: section.Bool},
			{Name: "ek", Unique: true, Valid: ekRE.MatchString, Problem: "is no hash of an endorsement key", Remedy: "take the row out and run `constellation machine add`, which writes it"},
			{Name: "key", Unique: true, Valid: ekRE.MatchString, Problem: "is no hash of a key", Remedy: "take it out of the row and run `constellation machine add`, which writes it"},
			{Name: "vendor"},
			{Name: "tpm", Valid: ValidTPM, Problem: "is no TPM", Remedy: "write /dev/tpmrm0, or unix: and a socket in a folder of /run or /var/lib whose name contains tpm"},
			{Name: "labels", Valid: func(s string) bool { _, err := ParseLabels(s); return err == nil }, Problem: "are no labels of a Node", Remedy: "write key=value, several separated by commas; keys of kubernetes.io and edgeless.systems are not allowed"},
			{Name: "taints", Valid: func(s string) bool { _, err := ParseTaints(s); return err == nil }, Problem: "are no taints of a Node", Remedy: "write key=value:Effect, several separated by commas, with the effect NoSchedule, PreferNoSchedule or NoExecute; keys of kubernetes.io and edgeless.systems are not allowed"},
		}},
		balancerField(),
		{Name: "controlPlanes", Kind: section.Int, Lowest: 1, Highest: 9},
		{Name: "workers", Kind: section.Int, Lowest: 1, Highest: 5000},
		{Name: "replaceAfter", Valid: func(s string) bool {
			d, err := time.ParseDuration(s)
			return err == nil && d >= time.Minute && d <= 24*time.Hour
		}, Problem: "is no time after which a spare takes the place of a machine", Remedy: "write a time such as 5m, of at least 1m and at most 24h"},
		packagesField(),
		componentsField(),
	}
}

// Sizes returns the sizes of groups that a section sets.
func Sizes(v section.Values) map[cloud.Role]int {
	out := map[cloud.Role]int{}
	for field, r := range map[string]cloud.Role{"controlPlanes": cloud.ControlPlane, "workers": cloud.Worker} {
		if n := v.Int(field); n > 0 {
			out[r] = n
		}
	}
	return out
}

// EnrolledState returns the schema of their section in the state.
func EnrolledState() section.Schema {
	return section.Schema{
		{Name: "uid", Required: true},
		// The certificate in PEM of the authority that certifies the keys of machines.
		{Name: "authority", Required: true},
		// Whether TPMs hold the keys of all machines.
		{Name: Attested, Kind: section.Bool},
	}
}

// MachineData is the content of [MachineFile] in JSON: the inventory, and which of its machines this is.
type MachineData struct {
	Inventory
	// Self is the name of this machine.
	Self string `json:"self"`
	// InitSecretHash is the SHA-256 of the init secret in hex.
	InitSecretHash string `json:"initSecretHash"`
}

// Metadata is what an enrolled machine, or a pod of a control plane, knows about its cluster: the content of
// a file, which is read again for each call. It is safe for concurrent use.
type Metadata struct{ path string }

// NewMetadata returns the metadata in the file at path: MachineData on machines, an [Inventory] in pods.
func NewMetadata(path string) Metadata { return Metadata{path} }

func (m Metadata) read(ctx context.Context) (d MachineData, err error) {
	if err := ctx.Err(); err != nil {
		return d, err
	}
	b, err := os.ReadFile(m.path)
	if err != nil {
		return d, fmt.Errorf("read the data of this machine: %w: %w", cloud.ErrUnavailable, err)
	}
	i, err := ParseInventory(b)
	if err == nil {
		err = json.Unmarshal(b, &d)
	}
	if err != nil {
		return d, fmt.Errorf("read %s: %w: %w", m.path, cloud.ErrUnavailable, err)
	}
	d.Inventory = i
	return d, nil
}

// Self returns the machine that asks. An [Inventory] does not say which that is.
func (m Metadata) Self(ctx context.Context) (cloud.Instance, error) {
	d, err := m.read(ctx)
	if err != nil {
		return cloud.Instance{}, err
	}
	for k := range d.Machines {
		if e := &d.Machines[k]; e.Name == d.Self {
			return d.instance(e), nil
		}
	}
	return cloud.Instance{}, fmt.Errorf("read %s: %w: it does not say which machine this is", m.path, cloud.ErrNotFound)
}

// Peers returns the machines of the file. On a machine they are those that were enrolled before it.
func (m Metadata) Peers(ctx context.Context) ([]cloud.Instance, error) {
	d, err := m.read(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]cloud.Instance, len(d.Machines))
	for k := range d.Machines {
		out[k] = d.instance(&d.Machines[k])
	}
	return out, nil
}

// LoadBalancer returns the host in front of the API servers.
func (m Metadata) LoadBalancer(ctx context.Context) (string, error) {
	d, err := m.read(ctx)
	if err == nil && d.Endpoint == "" {
		err = errors.New("read " + m.path + ": it has no endpoint")
	}
	return d.Endpoint, err
}

// InitSecretHash returns the SHA-256 of the init secret.
func (m Metadata) InitSecretHash(ctx context.Context) ([]byte, error) {
	d, err := m.read(ctx)
	if err != nil {
		return nil, err
	}
	b, err := hex.DecodeString(d.InitSecretHash)
	if err != nil || len(b) != 32 {
		return nil, errors.New("read " + m.path + ": the hash of the init secret is not 32 bytes in hex")
	}
	return b, nil
}
