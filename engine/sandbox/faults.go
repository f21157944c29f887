package sandbox

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

var machineNameRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// faults are the misfortunes that a cloud injects on request. The zero value
// injects none. It is immutable once parsed.
type faults struct {
	spec []string

	bootDelay map[string]time.Duration // by machine
	neverBoot map[string]bool
	kill      map[string]string // machine → point

	throttle      float64 // share of control calls answered 429
	fail          float64 // share of control calls answered 500
	latency       time.Duration
	metadataFail  float64         // share of metadata calls answered 500
	partialList   float64         // share of lists that lack an element
	lostDelete    float64         // share of deletes accepted and forgotten
	truncate      map[string]bool // by component
	corrupt       map[string]bool
	cut           map[string]bool
	registryEmpty bool
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
	parse      func(f *faults, value string) error
}{
	{"boot-delay", "boot-delay=MACHINE:DURATION", func(f *faults, v string) error {
		name, d, err := nameAnd(v, time.ParseDuration)
		if err == nil && d <= 0 {
			err = errors.New("the duration must be positive")
		}
		return put(&f.bootDelay, name, d, err)
	}},
	{"never-boot", "never-boot=MACHINE", func(f *faults, v string) error { return put(&f.neverBoot, v, true, someName(v)) }},
	{"kill", "kill=MACHINE:POINT (" + strings.Join(killPoints, ", ") + ")", func(f *faults, v string) error {
		name, point, err := nameAnd(v, func(s string) (string, error) {
			if !slices.Contains(killPoints, s) {
				return "", fmt.Errorf("no point %q", s)
			}
			return s, nil
		})
		return put(&f.kill, name, point, err)
	}},
	{"api-429", "api-429=SHARE", func(f *faults, v string) (err error) { f.throttle, err = share(v); return err }},
	{"api-500", "api-500=SHARE", func(f *faults, v string) (err error) { f.fail, err = share(v); return err }},
	{"api-latency", "api-latency=DURATION", func(f *faults, v string) (err error) {
		f.latency, err = time.ParseDuration(v)
		if err == nil && f.latency <= 0 {
			err = errors.New("the duration must be positive")
		}
		return err
	}},
	{"metadata-500", "metadata-500=SHARE", func(f *faults, v string) (err error) { f.metadataFail, err = share(v); return err }},
	{"partial-list", "partial-list=SHARE", func(f *faults, v string) (err error) { f.partialList, err = share(v); return err }},
	{"lost-delete", "lost-delete=SHARE", func(f *faults, v string) (err error) { f.lostDelete, err = share(v); return err }},
	{"component-truncate", "component-truncate=COMPONENT", func(f *faults, v string) error { return put(&f.truncate, v, true, someName(v)) }},
	{"component-corrupt", "component-corrupt=COMPONENT", func(f *faults, v string) error { return put(&f.corrupt, v, true, someName(v)) }},
	{"component-cut", "component-cut=COMPONENT", func(f *faults, v string) error { return put(&f.cut, v, true, someName(v)) }},
	{"registry-empty", "registry-empty", func(f *faults, v string) error {
		if v != "" {
			return errors.New("takes no value")
		}
		f.registryEmpty = true
		return nil
	}},
}

// parseFaults reads faults as users write them. The error names every fault that
// is wrong and lists those that exist; probabilities ("SHARE") lie in (0, 1].
func parseFaults(spec []string) (*faults, error) {
	f := &faults{spec: slices.Clone(spec)}
	var errs []error
	for _, s := range spec {
		name, value, _ := strings.Cut(s, "=")
		i := slices.IndexFunc(faultKinds, func(k struct {
			name, form string
			parse      func(*faults, string) error
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
func (f *faults) unknownNames(machines []string) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(f.bootDelay)) {
		errs = append(errs, noMachine("boot-delay", name))
	}
	for _, name := range slices.Sorted(maps.Keys(f.neverBoot)) {
		errs = append(errs, noMachine("never-boot", name))
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
	if machineRE.MatchString(name) {
		return nil
	}
	return fmt.Errorf("fault %s=%s: there is no such machine", kind, name)
}
