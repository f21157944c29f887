package gcptest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine/cloud/cloudtest/wire"
)

// faults are the faults of a cloud that last.
type faults struct {
	stockout, lost bool
	quota          int
	revoked        map[string]bool
	throttled      float64 // shares of calls
	failing        float64
	latency        time.Duration
}

// faultForm is a fault as users write it.
type faultForm struct {
	form  string
	does  string // a clause
	parse func(f *faults, value string) error
}

func (f faultForm) name() string {
	name, _, _ := strings.Cut(f.form, "=")
	return name
}

// faultForms are all faults. They last, but name-reuse and preempt happen once.
var faultForms = []faultForm{
	{"stockout", "no zone has machines left", func(f *faults, _ string) error { f.stockout = true; return nil }},
	{"quota=MACHINES", "the project may have this many machines", func(f *faults, value string) (err error) {
		if f.quota, err = strconv.Atoi(value); err == nil && f.quota < 1 {
			err = errors.New("want 1 or more")
		}
		return err
	}},
	{"role-revoked=PERMISSION", "no account has the permission, such as `compute.instances.list`", func(f *faults, value string) error {
		if value == "" {
			return errors.New("name a permission")
		}
		f.revoked[value] = true
		return nil
	}},
	{"operation-lost", "operations that start meanwhile never end, and have no effect", func(f *faults, _ string) error { f.lost = true; return nil }},
	{"name-reuse=MACHINE", "the machine is gone at once, and its group makes another one of its name", func(_ *faults, value string) error {
		if value == "" {
			return errors.New("name a machine")
		}
		return nil
	}},
	{"preempt=MACHINE", "the metadata server announces the preemption; the machine is gone 30 s later, and its group makes another one of its name", func(_ *faults, value string) error {
		if value == "" {
			return errors.New("name a machine")
		}
		return nil
	}},
	{"maintenance=MACHINE:EVENT", "the metadata server announces maintenance of the machine's host; EVENT is " + Terminate + " or " + Migrate, func(_ *faults, value string) error {
		if name, event, _ := strings.Cut(value, ":"); name == "" || !slices.Contains([]string{Terminate, Migrate}, event) {
			return fmt.Errorf("name a machine, and %s or %s", Terminate, Migrate)
		}
		return nil
	}},
	{"api-429=SHARE", "this share of API calls is refused by a rate limit", func(f *faults, value string) (err error) { f.throttled, err = share(value); return err }},
	{"api-500=SHARE", "this share of API calls fails with 500", func(f *faults, value string) (err error) { f.failing, err = share(value); return err }},
	{"api-latency=DURATION", "each API call takes this much longer", func(f *faults, value string) (err error) {
		if f.latency, err = time.ParseDuration(value); err == nil && f.latency <= 0 {
			err = errors.New("the duration must be positive")
		}
		return err
	}},
}

func share(s string) (float64, error) {
	p, err := strconv.ParseFloat(s, 64)
	if err == nil && !(p > 0 && p <= 1) {
		err = fmt.Errorf("%q is not above 0 and at most 1", s)
	}
	return p, err
}

// HasFault reports whether the cloud has a fault of this name, with or without a value.
func HasFault(spec string) bool {
	name, _, _ := strings.Cut(spec, "=")
	return slices.ContainsFunc(faultForms, func(f faultForm) bool { return f.name() == name })
}

// FaultForms returns the faults of the cloud as users write them.
func FaultForms() (forms []string) {
	for _, f := range faultForms {
		forms = append(forms, f.form)
	}
	return forms
}

// FaultEffects returns what each fault of FaultForms does, as clauses.
func FaultEffects() (effects []string) {
	for _, f := range faultForms {
		effects = append(effects, f.does)
	}
	return effects
}

// CheckFaults returns an error that names each fault that is not valid.
func CheckFaults(spec []string) error {
	_, err := parseFaults(spec)
	return err
}

func parseFaults(spec []string) (faults, error) {
	next := faults{revoked: map[string]bool{}}
	var errs []error
	for _, s := range spec {
		name, value, _ := strings.Cut(s, "=")
		n := slices.IndexFunc(faultForms, func(f faultForm) bool { return f.name() == name })
		if n < 0 {
			errs = append(errs, fmt.Errorf("fault %q is unknown", s))
		} else if err := faultForms[n].parse(&next, value); err != nil {
			errs = append(errs, fmt.Errorf("fault %q, want %s: %w", s, faultForms[n].form, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return faults{}, fmt.Errorf("%w; the faults are %s", err, strings.Join(FaultForms(), ", "))
	}
	return next, nil
}

// restoreFaults has the faults of an earlier process again. Those that happen once do not happen again.
func (c *Cloud) restoreFaults(spec []string) error {
	next, err := parseFaults(spec)
	if err != nil {
		return err
	}
	c.spec, c.faults = slices.Clone(spec), next
	for _, s := range spec {
		if value, is := strings.CutPrefix(s, "maintenance="); is {
			machine, event, _ := strings.Cut(value, ":")
			_ = c.Maintain(machine, event) // the machine may be gone
		}
	}
	return nil
}

// SetFaults replaces the faults of the cloud, see FaultEffects. An error names each fault that is not valid, and leaves the faults as
// they are. name-reuse and preempt happen when the fault is new: a machine that was preempted is gone after PreemptedAfter, when the
// fault has ended, too.
func (c *Cloud) SetFaults(spec []string) error {
	next, err := parseFaults(spec)
	if err != nil {
		return err
	}
	c.mu.Lock()
	before := c.spec
	c.spec, c.faults = slices.Clone(spec), next
	c.mu.Unlock()
	var errs []error
	for _, s := range spec {
		if slices.Contains(before, s) {
			continue
		}
		var err error
		switch name, value, _ := strings.Cut(s, "="); name {
		case "name-reuse":
			c.Kill(value)
		case "preempt":
			err = c.Preempt(value)
		case "maintenance":
			machine, event, _ := strings.Cut(value, ":")
			err = c.Maintain(machine, event)
		}
		errs = append(errs, err)
	}
	for _, s := range before {
		if value, is := strings.CutPrefix(s, "maintenance="); is && !slices.Contains(spec, s) {
			machine, _, _ := strings.Cut(value, ":")
			_ = c.Maintain(machine, NoMaintenance) // the machine may be gone
		}
	}
	return errors.Join(errs...)
}

// Faults returns the argument of the last SetFaults.
func (c *Cloud) Faults() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.spec)
}

// disturb returns the answer to a call that fails by a fault; nil: none.
func (c *Cloud) disturb() *wire.Reply {
	c.mu.Lock()
	f := c.faults
	c.mu.Unlock()
	time.Sleep(f.latency)
	var r wire.Reply
	switch p := rand.Float64(); { //nolint:gosec // no secret
	case p < f.throttled:
		r = refusal(http.StatusForbidden, "rateLimitExceeded", "Rate Limit Exceeded")
	case p < f.throttled+f.failing:
		r = refusal(http.StatusInternalServerError, "backendError", "Internal error. Please try again or contact Google Support.")
	default:
		return nil
	}
	return &r
}
