package plans

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
)

// Settings are the common settings of all Plans and Jobs. They are named as in
// system-upgrade-controller, see [SettingsFrom].
type Settings struct {
	// ActiveDeadlineSeconds limits Jobs whose Plan sets no deadline, ActiveDeadlineSecondsMax all Jobs.
	// Zero: no limit.
	ActiveDeadlineSeconds, ActiveDeadlineSecondsMax int64
	// BackoffLimit is the number of pods of a Job that may fail.
	BackoffLimit int32
	// KubectlImage and KubectlImageWindows cordon and drain. The latter may be empty; then
	// Plans with either cannot be carried out on nodes with Windows.
	KubectlImage, KubectlImageWindows string
	// Privileged applies to upgrade containers without their own security context.
	Privileged bool
	// ImagePullPolicy of all containers.
	ImagePullPolicy corev1.PullPolicy
	// TTLSecondsAfterFinish is how long finished Jobs are kept.
	TTLSecondsAfterFinish int32
	// PodReplacementPolicy of Jobs.
	PodReplacementPolicy batchv1.PodReplacementPolicy
	// PollingInterval is the interval between two polls of a channel.
	PollingInterval time.Duration
}

// leastPolling is the minimum interval between two polls of a channel.
const leastPolling = time.Minute

// DefaultSettings returns the settings for an empty environment.
func DefaultSettings() Settings {
	return Settings{
		ActiveDeadlineSeconds: 600, BackoffLimit: 2, KubectlImage: "rancher/kubectl:v1.30.3", Privileged: true, ImagePullPolicy: corev1.PullIfNotPresent,
		TTLSecondsAfterFinish: 900, PodReplacementPolicy: batchv1.TerminatingOrFailed, PollingInterval: 15 * time.Minute,
	}
}

// SettingsFrom reads the settings from an environment. Missing and invalid values get their default.
// The error lists the invalid ones; the settings are valid even then.
func SettingsFrom(lookup func(string) (string, bool)) (Settings, error) {
	s := DefaultSettings()
	var errs []error
	read := func(name string, parse func(string) error) {
		if v, ok := lookup(name); ok && v != "" {
			if err := parse(v); err != nil {
				errs = append(errs, fmt.Errorf("read %s: %w", name, err))
			}
		}
	}
	number := func(bits int, set func(int64)) func(string) error {
		return func(v string) error {
			n, err := strconv.ParseInt(v, 10, bits)
			if err == nil {
				set(n)
			}
			return err
		}
	}
	oneOf := func(set func(string), known ...string) func(string) error {
		return func(v string) error {
			for _, k := range known {
				if v == k {
					set(v)
					return nil
				}
			}
			return fmt.Errorf("%q is not one of %q", v, known)
		}
	}
	read("SYSTEM_UPGRADE_JOB_ACTIVE_DEADLINE_SECONDS", number(64, func(n int64) { s.ActiveDeadlineSeconds = n }))
	read("SYSTEM_UPGRADE_JOB_ACTIVE_DEADLINE_SECONDS_MAX", number(64, func(n int64) { s.ActiveDeadlineSecondsMax = n }))
	read("SYSTEM_UPGRADE_JOB_BACKOFF_LIMIT", number(32, func(n int64) { s.BackoffLimit = int32(n) }))
	read("SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE", func(v string) error { s.KubectlImage = v; return nil })
	read("SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE_WINDOWS", func(v string) error { s.KubectlImageWindows = v; return nil })
	read("SYSTEM_UPGRADE_JOB_PRIVILEGED", func(v string) (err error) {
		b, err := strconv.ParseBool(v)
		if err == nil {
			s.Privileged = b
		}
		return err
	})
	read("SYSTEM_UPGRADE_JOB_IMAGE_PULL_POLICY", oneOf(func(v string) { s.ImagePullPolicy = corev1.PullPolicy(v) },
		string(corev1.PullAlways), string(corev1.PullIfNotPresent), string(corev1.PullNever)))
	read("SYSTEM_UPGRADE_JOB_TTL_SECONDS_AFTER_FINISH", number(32, func(n int64) { s.TTLSecondsAfterFinish = int32(n) }))
	read("SYSTEM_UPGRADE_JOB_POD_REPLACEMENT_POLICY", oneOf(func(v string) { s.PodReplacementPolicy = batchv1.PodReplacementPolicy(v) },
		string(batchv1.TerminatingOrFailed), string(batchv1.Failed)))
	read("SYSTEM_UPGRADE_PLAN_POLLING_INTERVAL", func(v string) error {
		d, err := time.ParseDuration(v)
		switch {
		case err != nil:
			return err
		case d <= leastPolling:
			return fmt.Errorf("%s is not more than %s", d, leastPolling)
		}
		s.PollingInterval = d
		return nil
	})
	return s, errors.Join(errs...)
}
