package sandbox

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine/cloud"
)

var machineNameRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// Faults are the misfortunes that a cloud injects on request. The zero value
// injects none. They are immutable once parsed.
type Faults struct {
	spec []string

	// By machine, or by the share of all machines that it happens to.
	bootDelay map[string]time.Duration
	neverBoot map[string]bool
	neverJoin map[string]bool
	kill      map[string]string // machine → point

	throttle      float64 // share of control calls answered 429
	fail          float64 // share of control calls answered 500
	latency       time.Duration
	metadataFail  float64 // share of metadata calls answered 500
	partialList   float64 // share of lists that lack an element and do not say so
	toldPartial   float64 // share of lists that lack elements and say so
	lostDelete    float64 // share of deletes accepted and forgotten
	createTimeout float64 // share of creates that are done and not answered
	describeLag   time.Duration
	quota         int             // machines; 0: no limit
	truncate      map[string]bool // by component
	corrupt       map[string]bool
	cut           map[string]bool
	registryEmpty bool
}

// BootDelay returns how much longer than usual the machine takes to boot.
func (f *Faults) BootDelay(machine string) time.Duration {
	return happens(f.bootDelay, "boot-delay", machine)
}

// NeverBoots reports whether the machine never becomes ready.
func (f *Faults) NeverBoots(machine string) bool { return happens(f.neverBoot, "never-boot", machine) }

// NeverJoins reports whether the machine, however well it boots, does not join its
// cluster for as long as the fault is active.
func (f *Faults) NeverJoins(machine string) bool { return happens(f.neverJoin, "never-join", machine) }

// happens finds what happens to a machine, by its name or as one of a share, to which
// a machine belongs for good.
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

// partial leaves one element out of a list, now and then, as clouds do while a
// change travels; keep is never left out.
func (f *Faults) partial(l []cloud.Instance, keep string) []cloud.Instance {
	if len(l) == 0 || !strikes(f.partialList) {
		return l
	}
	if i := rand.IntN(len(l)); l[i].Name != keep {
		return slices.Delete(slices.Clone(l), i, i+1)
	}
	return l
}

// Points of a machine's life at which the fault "kill" can strike, once.
const (
	pointMetadata  = "metadata"  // the machine asks who it is
	pointComponent = "component" // it downloads its first component
	pointImage     = "image"     // it pulls its first image
)

var killPoints = []string{pointMetadata, pointComponent, pointImage}

// faultKinds is the list that users are shown, and the parser's table.
var faultKinds = []struct {
	name, form string
	parse      func(f *Faults, value string) error
}{
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
	{"registry-empty", "registry-empty", func(f *Faults, v string) error {
		if v != "" {
			return errors.New("takes no value")
		}
		f.registryEmpty = true
		return nil
	}},
}

// FaultNames returns the beginnings of all faults, as users write them: "quota=".
func FaultNames() []string {
	names := make([]string, len(faultKinds))
	for i, k := range faultKinds {
		names[i] = k.name
		if strings.Contains(k.form, "=") {
			names[i] += "="
		}
	}
	return names
}

// ParseFaults reads faults as users write them: a word, "=" and what it is about. The error names every fault that
// is wrong and lists those that exist; probabilities ("SHARE") lie in (0, 1].
// A share of machines is always the same machines.
func ParseFaults(spec []string) (*Faults, error) {
	f := &Faults{spec: slices.Clone(spec)}
	var errs []error
	for _, s := range spec {
		name, value, _ := strings.Cut(s, "=")
		i := slices.IndexFunc(faultKinds, func(k struct {
			name, form string
			parse      func(*Faults, string) error
		},
		) bool {
			return k.name == name
		})
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

// someMachines accepts the name of a machine, or a share of all.
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

// strikes throws the dice for a fault of probability p.
func strikes(p float64) bool { return p > 0 && rand.Float64() < p }

// machineRE matches the names that machines get, now or later.
var machineRE = regexp.MustCompile(`^(control-plane|worker)-(0|[1-9][0-9]*)$`)

// unknownNames reports the faults of machines and components that there will never be,
// with the names that there are. A fault may well name a machine that is made later.
func (f *Faults) unknownNames(machines []string) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(f.bootDelay)) {
		errs = append(errs, noMachine("boot-delay", name))
	}
	for _, name := range slices.Sorted(maps.Keys(f.neverBoot)) {
		errs = append(errs, noMachine("never-boot", name))
	}
	for _, name := range slices.Sorted(maps.Keys(f.neverJoin)) {
		errs = append(errs, noMachine("never-join", name))
	}
	for _, name := range slices.Sorted(maps.Keys(f.kill)) {
		errs = append(errs, noMachine("kill", name))
	}
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
