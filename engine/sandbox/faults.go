package sandbox

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine"
	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sandbox/machine/disk"
)

var machineNameRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// Faults are the faults that a cloud injects on request. The zero value
// injects none. They are immutable once parsed.
type Faults struct {
	spec []string

	// By machine, or by share of all machines.
	bootDelay map[string]time.Duration
	neverBoot map[string]bool
	neverJoin map[string]bool
	kill      map[string]string // machine → point

	throttle      float64 // share of control calls answered 429
	fail          float64 // share of control calls answered 500
	latency       time.Duration
	metadataFail  float64 // share of metadata calls answered 500
	partialList   float64 // share of lists that silently lack an element
	toldPartial   float64 // share of lists that lack elements and are marked as partial
	lostDelete    float64 // share of deletes accepted and forgotten
	createTimeout float64 // share of creates that take effect without an answer
	describeLag   time.Duration
	quota         int             // machines; 0: no limit
	truncate      map[string]bool // by component
	corrupt       map[string]bool
	cut           map[string]bool
	registryEmpty bool
	consoleCut    bool

	// Of running machines, by name.
	frozen, isolated, diskFull, diskReadOnly, tpmHangs, tpmGone map[string]bool
	lost                                                        map[string][]string // machine → peers that it cannot reach
	powerCut                                                    map[string]string   // machine → point
	// By machine, or by share of all machines.
	slowDisk               map[string]time.Duration
	lostWrites, tornWrites map[string]bool
}

// theCloud stands for the cloud in place of a machine's name. It is the cloud's own address,
// which also routes to the pods of other machines.
const theCloud = "cloud"

// machineFaults returns the faults of one running machine.
func (f *Faults) machineFaults(s *state, name string) machine.Faults {
	a := machine.Faults{
		Frozen: f.frozen[name], Isolated: f.isolated[name], DiskFull: f.diskFull[name], DiskReadOnly: f.diskReadOnly[name],
		SlowDisk: happens(f.slowDisk, "slow-disk", name), LostWrites: happens(f.lostWrites, "lost-writes", name), TornWrites: happens(f.tornWrites, "torn-writes", name),
		TPMHangs: f.tpmHangs[name], TPMGone: f.tpmGone[name],
	}
	for _, to := range f.lost[name] {
		if to == theCloud {
			a.Lost = append(a.Lost, machine.Peer{IP: s.gateway()})
		} else if i := s.instance(to); i != nil {
			a.Lost = append(a.Lost, machine.Peer{IP: i.ip(), PodCIDR: i.podCIDR()})
		}
	}
	return a
}

// ofReal are the faults that require machines with their own network and disks. ofRunning are
// those that require running processes.
var (
	ofReal    = []string{"isolated", "cut", "cut-to", "disk-full", "disk-read-only", "slow-disk", "lost-writes", "torn-writes", "registry-empty"}
	ofRunning = []string{"frozen", "tpm-hangs", "tpm-gone", "console-cut", "power-cut", "kill", "component-truncate", "component-corrupt", "component-cut"}
)

// Simulated returns an error that names the faults which simulated machines do not support.
func (f *Faults) Simulated() error { return f.only("real machines", ofReal) }

// Hollow returns an error that names the faults which machines without processes do not support.
func (f *Faults) Hollow() error {
	return f.only("machines in which something runs", slices.Concat(ofReal, ofRunning))
}

// Real returns an error that names the faults which this computer cannot inject into real machines.
func (f *Faults) Real() error {
	if len(f.slowDisk)+len(f.lostWrites)+len(f.tornWrites) == 0 {
		return nil
	}
	if err := disk.Supported(); err != nil {
		return fmt.Errorf("%w: %w", ErrConflict, err)
	}
	return nil
}

func (f *Faults) only(who string, kinds []string) error {
	var wrong []string
	for _, s := range f.spec {
		if kind, _, _ := strings.Cut(s, "="); slices.Contains(kinds, kind) {
			wrong = append(wrong, s)
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%w: only %s can have %s", ErrConflict, who, strings.Join(wrong, ", "))
	}
	return nil
}

// twoEnds parses A:B. A is a machine, B is another machine or the cloud.
func twoEnds(v string) (from, to string, err error) {
	from, to, ok := strings.Cut(v, ":")
	switch {
	case !ok || from == to:
		err = fmt.Errorf("%q does not name two ends", v)
	case to != theCloud:
		err = someName(to)
	}
	return from, to, errors.Join(someName(from), err)
}

// lose drops all packets in one direction.
func (f *Faults) lose(from, to string) {
	if f.lost == nil {
		f.lost = map[string][]string{}
	}
	f.lost[from] = append(f.lost[from], to)
}

// Spec returns the faults in the format of users.
func (f *Faults) Spec() []string { return slices.Clone(f.spec) }

// BootDelay returns the additional boot time of the machine.
func (f *Faults) BootDelay(machine string) time.Duration {
	return happens(f.bootDelay, "boot-delay", machine)
}

// NeverBoots reports whether the machine never becomes ready.
func (f *Faults) NeverBoots(machine string) bool { return happens(f.neverBoot, "never-boot", machine) }

// NeverJoins reports whether the machine does not join its cluster while the fault is active,
// even if it boots.
func (f *Faults) NeverJoins(machine string) bool { return happens(f.neverJoin, "never-join", machine) }

// happens returns the fault of a machine, by its name or by a share. The machines of a share
// never change.
func happens[T any](m map[string]T, kind, machine string) T {
	if v, ok := m[machine]; ok {
		return v
	}
	for key, v := range m {
		if p, err := share(key); err == nil {
			sum := sha256.Sum256([]byte(kind + "/" + machine))
			if float64(uint(sum[0])<<16|uint(sum[1])<<8|uint(sum[2]))/(1<<24) < p {
				return v
			}
		}
	}
	var none T
	return none
}

// partial leaves one element out of a list, with some probability, like a cloud with
// eventually consistent lists. keep is never left out.
func (f *Faults) partial(l []cloud.Instance, keep string) []cloud.Instance {
	if len(l) == 0 || !strikes(f.partialList) {
		return l
	}
	if i := rand.IntN(len(l)); l[i].Name != keep {
		return slices.Delete(slices.Clone(l), i, i+1)
	}
	return l
}

// Points in a machine's life at which the fault "kill" is injected, once.
const (
	pointMetadata  = "metadata"  // the machine reads its metadata
	pointComponent = "component" // it downloads its first component
	pointImage     = "image"     // it pulls its first image
)

var killPoints = []string{pointMetadata, pointComponent, pointImage}

// Points in a machine's life that are detected by a newly written file. The file exists from
// that point on.
var filePoints = map[string]string{
	"download-kubeadm":           "/usr/local/bin/.kubeadm.*.partial",                                  // a machine downloads kubeadm
	"download-kubelet":           "/usr/local/bin/.kubelet.*.partial",                                  // likewise the kubelet
	"run-kubeadm":                "/var/lib/constellation/agent/renewed/var/lib/kubelet/config.yaml",   // the agent has copied what kubeadm will write
	"certificates":               "/etc/kubernetes/pki/ca.key",                                         // init or join has the keys of the cluster
	"manifests":                  "/etc/kubernetes/manifests/etcd.yaml",                                // a control plane's pods are about to start
	"etcd":                       "/var/lib/etcd/member/snap/db",                                       // its etcd has started
	"kubelet":                    "/etc/kubernetes/kubelet.conf",                                       // the kubelet has its kubeconfig
	"upgrade-begun":              "/etc/kubernetes/tmp/kubeadm-upgraded-manifests*/etcd.yaml",          // kubeadm has written the new manifests
	"upgrade-etcd":               "/etc/kubernetes/tmp/kubeadm-backup-manifests-*/etcd.yaml",           // etcd's manifest is being replaced
	"upgrade-api-server":         "/etc/kubernetes/tmp/kubeadm-backup-manifests-*/kube-apiserver.yaml", // likewise
	"upgrade-controller-manager": "/etc/kubernetes/tmp/kubeadm-backup-manifests-*/kube-controller-manager.yaml",
	"upgrade-scheduler":          "/etc/kubernetes/tmp/kubeadm-backup-manifests-*/kube-scheduler.yaml",
}

// cutPoints returns all points at which the power can be cut.
func cutPoints() []string {
	return append(slices.Clone(killPoints), slices.Sorted(maps.Keys(filePoints))...)
}

// faultKind is a kind of fault in the format of users, with its parser.
type faultKind struct {
	name, form string
	parse      func(f *Faults, value string) error
}

// ofMachine is a kind of fault that is on or off for a machine.
func ofMachine(name string, has func(f *Faults) *map[string]bool) faultKind {
	return faultKind{name, name + "=MACHINE", func(f *Faults, v string) error { return put(has(f), v, true, someName(v)) }}
}

// faultKinds is the list shown to users, and the parser's table.
var faultKinds = []faultKind{
	{"boot-delay", "boot-delay=MACHINE|SHARE:DURATION", func(f *Faults, v string) error {
		which, d, _ := strings.Cut(v, ":")
		delay, err := positive(d)
		return put(&f.bootDelay, which, delay, errors.Join(someMachines(which), err))
	}},
	{"never-boot", "never-boot=MACHINE|SHARE", func(f *Faults, v string) error { return put(&f.neverBoot, v, true, someMachines(v)) }},
	{"never-join", "never-join=MACHINE|SHARE", func(f *Faults, v string) error { return put(&f.neverJoin, v, true, someMachines(v)) }},
	{"kill", "kill=MACHINE:POINT (" + strings.Join(killPoints, ", ") + ")", func(f *Faults, v string) error {
		name, point, err := nameAnd(v, func(s string) (string, error) {
			if !slices.Contains(killPoints, s) {
				return "", fmt.Errorf("no point %q", s)
			}
			return s, nil
		})
		return put(&f.kill, name, point, err)
	}},
	{"api-429", "api-429=SHARE", func(f *Faults, v string) (err error) { f.throttle, err = share(v); return err }},
	{"api-500", "api-500=SHARE", func(f *Faults, v string) (err error) { f.fail, err = share(v); return err }},
	{"api-latency", "api-latency=DURATION", func(f *Faults, v string) (err error) { f.latency, err = positive(v); return err }},
	{"describe-lag", "describe-lag=DURATION", func(f *Faults, v string) (err error) { f.describeLag, err = positive(v); return err }},
	{"create-timeout", "create-timeout=SHARE", func(f *Faults, v string) (err error) { f.createTimeout, err = share(v); return err }},
	{"quota", "quota=MACHINES", func(f *Faults, v string) (err error) {
		if f.quota, err = strconv.Atoi(v); err != nil || f.quota < 1 {
			return fmt.Errorf("%q is not a number of at least 1", v)
		}
		return nil
	}},
	{"metadata-500", "metadata-500=SHARE", func(f *Faults, v string) (err error) { f.metadataFail, err = share(v); return err }},
	{"partial-list", "partial-list=SHARE", func(f *Faults, v string) (err error) { f.partialList, err = share(v); return err }},
	{"partial-list-told", "partial-list-told=SHARE", func(f *Faults, v string) (err error) { f.toldPartial, err = share(v); return err }},
	{"lost-delete", "lost-delete=SHARE", func(f *Faults, v string) (err error) { f.lostDelete, err = share(v); return err }},
	{"component-truncate", "component-truncate=COMPONENT", func(f *Faults, v string) error { return put(&f.truncate, v, true, someName(v)) }},
	{"component-corrupt", "component-corrupt=COMPONENT", func(f *Faults, v string) error { return put(&f.corrupt, v, true, someName(v)) }},
	{"component-cut", "component-cut=COMPONENT", func(f *Faults, v string) error { return put(&f.cut, v, true, someName(v)) }},
	ofMachine("frozen", func(f *Faults) *map[string]bool { return &f.frozen }),
	ofMachine("isolated", func(f *Faults) *map[string]bool { return &f.isolated }),
	{"cut", "cut=MACHINE:MACHINE|" + theCloud, func(f *Faults, v string) error {
		a, b, err := twoEnds(v)
		if err == nil {
			f.lose(a, b)
			if b != theCloud { // the cloud sends only responses, which never arrive if requests are lost
				f.lose(b, a)
			}
		}
		return err
	}},
	{"cut-to", "cut-to=MACHINE:MACHINE|" + theCloud, func(f *Faults, v string) error {
		a, b, err := twoEnds(v)
		if err == nil {
			f.lose(a, b)
		}
		return err
	}},
	{"console-cut", "console-cut", func(f *Faults, v string) error {
		if v != "" {
			return errors.New("takes no value")
		}
		f.consoleCut = true
		return nil
	}},
	ofMachine("disk-full", func(f *Faults) *map[string]bool { return &f.diskFull }),
	ofMachine("disk-read-only", func(f *Faults) *map[string]bool { return &f.diskReadOnly }),
	{"slow-disk", "slow-disk=MACHINE|SHARE:DURATION", func(f *Faults, v string) error {
		which, d, _ := strings.Cut(v, ":")
		longer, err := positive(d)
		return put(&f.slowDisk, which, longer, errors.Join(someMachines(which), err))
	}},
	{"lost-writes", "lost-writes=MACHINE|SHARE", func(f *Faults, v string) error { return put(&f.lostWrites, v, true, someMachines(v)) }},
	{"torn-writes", "torn-writes=MACHINE|SHARE", func(f *Faults, v string) error { return put(&f.tornWrites, v, true, someMachines(v)) }},
	ofMachine("tpm-hangs", func(f *Faults) *map[string]bool { return &f.tpmHangs }),
	ofMachine("tpm-gone", func(f *Faults) *map[string]bool { return &f.tpmGone }),
	{"power-cut", "power-cut=MACHINE:POINT (" + strings.Join(cutPoints(), ", ") + ")", func(f *Faults, v string) error {
		name, point, err := nameAnd(v, func(s string) (string, error) {
			if !slices.Contains(cutPoints(), s) {
				return "", fmt.Errorf("no point %q", s)
			}
			return s, nil
		})
		return put(&f.powerCut, name, point, err)
	}},
	{"registry-empty", "registry-empty", func(f *Faults, v string) error {
		if v != "" {
			return errors.New("takes no value")
		}
		f.registryEmpty = true
		return nil
	}},
}

// FaultNames returns the prefixes of all faults, those of emulated clouds, too, in the format of users: "quota=".
func FaultNames() (names []string) {
	add := func(name, form string) {
		if strings.Contains(form, "=") {
			name += "="
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, k := range faultKinds {
		add(k.name, k.form)
	}
	for _, cloud := range slices.Sorted(maps.Keys(emulatedFaults)) {
		for _, k := range emulatedFaults[cloud].kinds {
			add(k.Name, k.Form)
		}
	}
	return names
}

// faultDoes describes the effect of each kind, as a clause.
var faultDoes = map[string]string{
	"boot-delay":         "the first boot of the machine takes this much longer",
	"never-boot":         "the machine is created and never boots",
	"never-join":         "the machine receives no metadata, so it cannot join; it joins after the fault ends",
	"kill":               "the machine loses power once, when it reaches the point, and stays off",
	"power-cut":          "the machine loses power once, when it reaches the point, and boots again; download-kubeadm and download-kubelet are points of a join or an upgrade, run-kubeadm of an upgrade, and the others after image of a control plane or of its kubeadm upgrade",
	"frozen":             "all processes of the machine stop; its connections stay open",
	"isolated":           "the machine loses all network connectivity",
	"cut":                "packets between the two machines are dropped in both directions, including those of their pods; with cloud, packets from the machine to the cloud, to the load balancer and to pods on other machines are dropped",
	"cut-to":             "packets from the first machine to the second (or to the cloud) are dropped; the other direction works",
	"console-cut":        "connections from this computer to the cluster and to the init endpoint stall until the fault ends",
	"disk-full":          "`/usr/local/bin`, `/etc/kubernetes` and `/var/lib/constellation` are full; open files are not affected",
	"disk-read-only":     "the directories of disk-full are read-only",
	"slow-disk":          "each fsync of etcd's data takes this much longer",
	"lost-writes":        "a power cut loses all data that etcd wrote without fsync",
	"torn-writes":        "a power cut loses a random half of the pages that etcd wrote without fsync",
	"tpm-hangs":          "the machine's TPM does not respond until the fault ends",
	"tpm-gone":           "the machine has no TPM until it boots again after the fault",
	"api-429":            "this share of cloud API calls fails with 429",
	"api-500":            "this share of cloud API calls fails with 500",
	"api-latency":        "each cloud API call takes this much longer",
	"describe-lag":       "the cloud API returns stale data about machines, up to this old",
	"create-timeout":     "this share of create calls makes the machine, but times out",
	"quota":              "machine creation fails above this number",
	"metadata-500":       "this share of the machines' metadata requests fails with 500",
	"partial-list":       "this share of machine lists silently lacks one machine",
	"partial-list-told":  "this share of machine lists lacks machines and is marked as partial",
	"lost-delete":        "this share of delete calls succeeds without deleting the machine",
	"component-truncate": "downloads of the component end after half of it, without an error",
	"component-corrupt":  "downloads of the component have one changed byte",
	"component-cut":      "downloads of the component break after a quarter of it",
	"registry-empty":     "the image registry has no images",
}

// FaultKinds lists the faults that a sandbox of an emulated cloud can have; empty: of the sandbox's own cloud.
func (s *Sandboxes) FaultKinds(cloud string) []engine.FaultKind {
	vendor, emulated := emulatedFaults[cloud]
	out := slices.Clone(vendor.kinds)
	for _, k := range faultKinds {
		if !emulated || !slices.Contains(ofOwnCloud, k.name) {
			out = append(out, engine.FaultKind{Name: k.name, Form: k.form, Does: faultDoes[k.name]})
		}
	}
	return out
}

// checkFaults returns the faults of machines in spec, and an error if a fault is not valid, or names a machine that never exists.
func checkFaults(cloud string, spec, machines []string) (*Faults, error) {
	ofCloud, ofMachines, err := divideFaults(cloud, spec)
	if err != nil {
		return nil, err
	}
	f, err := ParseFaults(ofMachines)
	if err != nil {
		return nil, err
	}
	return f, errors.Join(f.unknownNames(machines), emulatedFaults[cloud].machinesOf(ofCloud, machines))
}

// SetFaults replaces the faults of a running sandbox.
func (s *Sandboxes) SetFaults(ctx context.Context, name string, faults []string) error {
	client, name, err := s.reach(name, "set the faults")
	if err != nil {
		return err
	}
	op := "set the faults of sandbox " + name
	info, err := client.Sandbox(ctx)
	if err != nil {
		return &plan.Error{Op: op, Err: err, Remedy: "start its cloud with `constellation sandbox up`"}
	}
	var machines []string
	for _, m := range info.Machines {
		machines = append(machines, m.Name)
	}
	if _, err := checkFaults(cloudOf(info), faults, machines); err != nil {
		return usage(op, "`constellation sandbox fault list` shows how they are written", "%w", err)
	}
	if err := inTime(op, faults, info); err != nil {
		return err
	}
	if err := client.SetFaults(ctx, faults); err != nil {
		return &plan.Error{Op: op, Err: err, Remedy: "leave out what these machines cannot have; `constellation sandbox fault list` says which faults there are"}
	}
	return nil
}

// cloudOf is the cloud that a sandbox emulates; empty: none.
func cloudOf(info sandboxapi.Info) string {
	if info.Emulator == nil {
		return ""
	}
	return info.Emulator.Cloud
}

// ParseFaults parses faults in the format of users: a name, "=" and a value. The error names every
// invalid fault and lists the existing ones. Probabilities ("SHARE") are in (0, 1].
// A share of machines always selects the same machines.
func ParseFaults(spec []string) (*Faults, error) {
	f := &Faults{spec: slices.Clone(spec)}
	var errs []error
	for _, s := range spec {
		name, value, _ := strings.Cut(s, "=")
		i := slices.IndexFunc(faultKinds, func(k faultKind) bool { return k.name == name })
		if i < 0 {
			errs = append(errs, fmt.Errorf("fault %q is unknown", s))
			continue
		}
		if err := faultKinds[i].parse(f, value); err != nil {
			errs = append(errs, fmt.Errorf("fault %q, want %s: %w", s, faultKinds[i].form, err))
		}
	}
	if len(errs) > 0 {
		return nil, fmt.Errorf("%w; the faults are %s", errors.Join(errs...), strings.Join(faultForms(), ", "))
	}
	return f, nil
}

func faultForms() []string {
	forms := make([]string, len(faultKinds))
	for i, k := range faultKinds {
		forms[i] = k.form
	}
	return forms
}

func someName(s string) error {
	if !machineNameRE.MatchString(s) {
		return fmt.Errorf("%q is not a name", s)
	}
	return nil
}

// someMachines accepts the name of a machine, or a share of all machines.
func someMachines(s string) error {
	if _, err := share(s); err == nil {
		return nil
	}
	return someName(s)
}

func positive(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err == nil && d <= 0 {
		err = errors.New("the duration must be positive")
	}
	return d, err
}

func nameAnd[T any](s string, parse func(string) (T, error)) (string, T, error) {
	name, rest, _ := strings.Cut(s, ":")
	v, err := parse(rest)
	if nameErr := someName(name); nameErr != nil {
		err = nameErr
	}
	return name, v, err
}

func put[T any](m *map[string]T, key string, value T, err error) error {
	if err != nil {
		return err
	}
	if *m == nil {
		*m = map[string]T{}
	}
	(*m)[key] = value
	return nil
}

func share(s string) (float64, error) {
	p, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return 0, fmt.Errorf("%q is not a number", s)
	}
	if !(p > 0 && p <= 1) {
		return 0, fmt.Errorf("%q is not above 0 and at most 1", s)
	}
	return p, nil
}

// strikes decides at random whether a fault of probability p is injected.
func strikes(p float64) bool { return p > 0 && rand.Float64() < p }

// machineRE matches the names of existing and future machines.
var machineRE = regexp.MustCompile(`^(control-plane|worker)-(0|[1-9][0-9]*)$`)

// unknownNames rejects faults of machines and components that can never exist, and lists
// the existing names. A fault may name a machine that is created later.
func (f *Faults) unknownNames(machines []string) error {
	var errs []error
	of := func(kind string, names iter.Seq[string]) {
		for _, name := range slices.Sorted(names) {
			errs = append(errs, noMachine(kind, name))
		}
	}
	of("boot-delay", maps.Keys(f.bootDelay))
	of("never-boot", maps.Keys(f.neverBoot))
	of("never-join", maps.Keys(f.neverJoin))
	of("kill", maps.Keys(f.kill))
	of("power-cut", maps.Keys(f.powerCut))
	of("slow-disk", maps.Keys(f.slowDisk))
	for _, name := range slices.Sorted(maps.Keys(f.lost)) {
		errs = append(errs, noMachine("cut", name))
		for _, to := range f.lost[name] {
			if to != theCloud {
				errs = append(errs, noMachine("cut", to))
			}
		}
	}
	of("frozen", maps.Keys(f.frozen))
	of("isolated", maps.Keys(f.isolated))
	of("disk-full", maps.Keys(f.diskFull))
	of("disk-read-only", maps.Keys(f.diskReadOnly))
	of("lost-writes", maps.Keys(f.lostWrites))
	of("torn-writes", maps.Keys(f.tornWrites))
	of("tpm-hangs", maps.Keys(f.tpmHangs))
	of("tpm-gone", maps.Keys(f.tpmGone))
	errs = slices.CompactFunc(slices.DeleteFunc(errs, func(err error) bool { return err == nil }), func(a, b error) bool { return a.Error() == b.Error() })
	if err := errors.Join(errs...); err != nil {
		errs = []error{fmt.Errorf("%w; the machines are %s, and later ones are numbered on", err, strings.Join(machines, ", "))}
	}
	var wrong []error
	for _, k := range []struct {
		kind  string
		names map[string]bool
	}{{"component-truncate", f.truncate}, {"component-corrupt", f.corrupt}, {"component-cut", f.cut}} {
		for _, name := range slices.Sorted(maps.Keys(k.names)) {
			if !slices.Contains(mirrored, name) {
				wrong = append(wrong, fmt.Errorf("fault %s=%s: there is no such component", k.kind, name))
			}
		}
	}
	if err := errors.Join(wrong...); err != nil {
		errs = append(errs, fmt.Errorf("%w; the components are %s", err, strings.Join(mirrored, ", ")))
	}
	return errors.Join(errs...)
}

func noMachine(kind, name string) error {
	if _, err := share(name); err == nil || machineRE.MatchString(name) {
		return nil
	}
	return fmt.Errorf("fault %s=%s: there is no such machine", kind, name)
}
