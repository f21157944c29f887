package plans

import (
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/operator/api/upgradev1"
)

var (
	errUnresolvable = errors.New("cannot resolve plan: missing channel and version")
	errTwoDrains    = errors.New("spec.drain cannot specify both deleteEmptydirData and deleteLocalData")
	errWindow       = errors.New("spec.window is invalid")
	errDelay        = errors.New("spec.postCompleteDelay is negative")
)

// rules are the parsed settings of a valid Plan.
type rules struct {
	selector   labels.Selector
	window     *window
	delay      time.Duration // after completion
	soak       time.Duration
	retryDelay time.Duration
}

const defaultRetryDelay = time.Minute

// validate parses and checks the fields that the API server does not validate.
func validate(p *upgradev1.Plan) (rules, error) {
	r := rules{selector: labels.Nothing(), retryDelay: defaultRetryDelay}
	var err error
	if r.selector, err = metav1.LabelSelectorAsSelector(p.Spec.NodeSelector); err != nil {
		return r, fmt.Errorf("spec.nodeSelector is invalid: %w", err)
	}
	if d := p.Spec.Drain; d != nil {
		if d.DeleteLocalData != nil && d.DeleteEmptydirData != nil {
			return r, errTwoDrains
		}
		if _, err := metav1.LabelSelectorAsSelector(d.PodSelector); err != nil {
			return r, fmt.Errorf("spec.drain.podSelector is invalid: %w", err)
		}
	}
	if p.Spec.Window != nil {
		w, err := parseWindow(*p.Spec.Window)
		if err != nil {
			return r, fmt.Errorf("%w: %w", errWindow, err)
		}
		r.window = &w
	}
	for _, d := range []struct {
		field    string
		from     *upgradev1.Duration
		into     *time.Duration
		negative error
	}{
		{"spec.postCompleteDelay", p.Spec.PostCompleteDelay, &r.delay, errDelay},
		{"spec.constellation.health.soak", soakOf(p), &r.soak, nil},
		{"spec.constellation.retryDelay", rollout(p).RetryDelay, &r.retryDelay, nil},
	} {
		if d.from == nil {
			continue
		}
		v, err := time.ParseDuration(string(*d.from))
		switch {
		case err != nil:
			return r, fmt.Errorf("%s is invalid: %w", d.field, err)
		case v < 0 && d.negative != nil:
			return r, d.negative
		case v < 0:
			return r, fmt.Errorf("%s is negative", d.field)
		}
		*d.into = v
	}
	if h := rollout(p).Health; h != nil {
		if err := validShare("spec.constellation.health.maxUnavailable", h.MaxUnavailable); err != nil {
			return r, err
		}
	}
	return r, validShare("spec.constellation.failureBudget", rollout(p).FailureBudget)
}

func validShare(field string, v *intstr.IntOrString) error {
	if v == nil {
		return nil
	}
	if n, err := intstr.GetScaledValueFromIntOrPercent(v, 100, false); err != nil || n < 0 {
		return fmt.Errorf("%s is neither a number nor a percentage: %s", field, v)
	}
	return nil
}

// share returns v of all, rounded down; a percentage of at least one node yields at least one.
func share(v *intstr.IntOrString, all int) int {
	n, err := intstr.GetScaledValueFromIntOrPercent(v, all, false)
	if err != nil {
		return 0
	}
	if v.Type == intstr.String && v.StrVal != "0%" {
		n = max(n, 1)
	}
	return n
}

// rollout returns the Plan's settings for this controller alone; zero if there are none.
func rollout(p *upgradev1.Plan) upgradev1.Rollout {
	if p.Spec.Constellation == nil {
		return upgradev1.Rollout{}
	}
	return *p.Spec.Constellation
}

func soakOf(p *upgradev1.Plan) *upgradev1.Duration {
	if h := rollout(p).Health; h != nil {
		return h.Soak
	}
	return nil
}
