package kube

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	helmkube "helm.sh/helm/v3/pkg/kube"
	"helm.sh/helm/v3/pkg/release"
	"helm.sh/helm/v3/pkg/storage/driver"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"

	"constellation/engine/cluster"
)

const (
	// digestAnnotation of a chart is the digest of all its files: a chart of the same version
	// with other content counts as another.
	digestAnnotation = "constellation.edgeless.systems/digest"
	// maxRevisions is the number of revisions kept per chart.
	maxRevisions = 10
	// readyPoll is how often the objects of a chart are polled. Each poll is a request per
	// object; our charts have about ten objects.
	readyPoll = 300 * time.Millisecond
	// bringLimit bounds the requests of one revision.
	bringLimit = 30 * time.Second
	// hookLimit bounds the hooks of other vendors' charts.
	hookLimit = 4 * time.Minute
	// undoLimit bounds the rollback of a failed chart.
	undoLimit = 2 * time.Minute
)

// getter hands our clients to Helm.
type getter struct{ c *Client }

func (g getter) ToRESTConfig() (*rest.Config, error) { return rest.CopyConfig(g.c.config), nil }

func (g getter) ToDiscoveryClient() (discovery.CachedDiscoveryInterface, error) {
	return g.c.discovery, nil
}

func (g getter) ToRESTMapper() (meta.RESTMapper, error) {
	return restmapper.NewDeferredDiscoveryRESTMapper(g.c.discovery), nil
}

func (g getter) ToRawKubeConfigLoader() clientcmd.ClientConfig { return g.c.kubeconfig }

// helm returns Helm's configuration for one namespace.
func (c *Client) helm(namespace string) (*action.Configuration, error) {
	cfg := &action.Configuration{}
	log := func(format string, args ...any) {
		c.log.Debug("helm logged", "line", fmt.Sprintf(format, args...))
	}
	if err := cfg.Init(getter{c}, namespace, "secret", log); err != nil {
		return nil, fmt.Errorf("set up Helm: %w", err)
	}
	if k, ok := cfg.KubeClient.(*helmkube.Client); ok {
		k.Namespace = namespace // namespace of objects that name none; the default is the kubeconfig's
	}
	cfg.Releases.MaxHistory = maxRevisions
	return cfg, nil
}

// load converts our chart to Helm's type.
func load(c cluster.Chart) (*chart.Chart, error) {
	files := make([]*loader.BufferedFile, len(c.Files))
	h := sha256.New()
	for i, f := range c.Files {
		files[i] = &loader.BufferedFile{Name: f.Name, Data: f.Data}
		fmt.Fprintf(h, "%d %s %d\n", len(f.Name), f.Name, len(f.Data))
		h.Write(f.Data)
	}
	ch, err := loader.LoadFiles(files)
	if err != nil {
		return nil, fmt.Errorf("load chart %s: %w", c.Name, err)
	}
	if ch.Metadata.Name != cmp.Or(c.OwnName, c.Name) || ch.Metadata.Version != c.Version {
		return nil, fmt.Errorf("load chart %s: content is %s %s, want version %s", c.Name, ch.Metadata.Name, ch.Metadata.Version, c.Version)
	}
	if ch.Metadata.Annotations == nil {
		ch.Metadata.Annotations = map[string]string{}
	}
	ch.Metadata.Annotations[digestAnnotation] = "sha256:" + hex.EncodeToString(h.Sum(nil))
	return ch, nil
}

// isJust reports whether a revision was made from exactly this chart and these values.
func isJust(r *release.Release, ch *chart.Chart, values map[string]any) bool {
	return r.Chart != nil && r.Chart.Metadata != nil &&
		r.Chart.Metadata.Version == ch.Metadata.Version &&
		r.Chart.Metadata.Annotations[digestAnnotation] == ch.Metadata.Annotations[digestAnnotation] &&
		reflect.DeepEqual(asStored(values), asStored(r.Config))
}

// asStored converts values to the types that they have after storage.
func asStored(values map[string]any) map[string]any {
	out := map[string]any{}
	b, err := json.Marshal(values)
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil { // YAML and JSON input differ in their number types
		return values
	}
	return out
}

// last returns the newest revision of a chart; nil if there is none.
func last(cfg *action.Configuration, name string) (*release.Release, error) {
	r, err := cfg.Releases.Last(name)
	if errors.Is(err, driver.ErrReleaseNotFound) {
		return nil, nil
	}
	return r, err
}

// ChartCurrent implements [engine.Cluster].
func (c *Client) ChartCurrent(ctx context.Context, want cluster.Chart) (bool, error) {
	ch, err := load(want)
	if err != nil {
		return false, err
	}
	cfg, err := c.helm(want.Namespace)
	if err != nil {
		return false, err
	}
	kinds, err := kindsIn(want, ch)
	if err != nil {
		return false, err
	}
	if outdated, err := c.OutdatedKinds(ctx, kinds); err != nil || len(outdated) > 0 {
		return false, err
	}
	var current bool
	err = retry(ctx, func(ctx context.Context) error {
		current = false
		r, err := last(cfg, want.Name)
		if err != nil || r == nil || r.Info.Status != release.StatusDeployed || !isJust(r, ch, want.Values) {
			return err
		}
		state, err := c.readiness(ctx, cfg, r)
		current = err == nil && state.complete()
		return err
	})
	if err != nil {
		return false, fmt.Errorf("read chart %s: %w", want.Name, err)
	}
	return current, nil
}

// ApplyChart implements [engine.Cluster].
//
// Helm's own waiting reports no progress and polls every two seconds. So Helm only stores and
// applies, and the wait and the rollback are ours.
func (c *Client) ApplyChart(ctx context.Context, want cluster.Chart, report func(text string, ready, wanted int64)) error {
	ch, err := load(want)
	if err != nil {
		return err
	}
	cfg, err := c.helm(want.Namespace)
	if err != nil {
		return err
	}
	kinds, err := kindsIn(want, ch)
	if err != nil {
		return err
	}
	if err := c.ApplyKinds(ctx, kinds, func(name string) { report("kind "+name, 0, 0) }); err != nil {
		return fmt.Errorf("apply chart %s: %w", want.Name, err)
	}
	limit := bringLimit
	if want.Foreign {
		limit += hookLimit
	}
	var before *release.Release // the revision deployed before; nil if none
	var now *release.Release
	err = retry(ctx, func(context.Context) (err error) {
		// These few requests belong together, so cancellation takes effect after them.
		whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
		defer cancel()
		before, now, err = c.bring(whole, cfg, ch, want)
		return err
	})
	if err != nil {
		err = fmt.Errorf("apply chart %s: %w", want.Name, err)
		if now == nil || errors.Is(err, context.Canceled) { // Helm recorded no revision that needs a rollback
			return err
		}
		return c.takeBack(ctx, cfg, want, before, err)
	}
	if err := c.waitChart(ctx, cfg, now, report); err != nil {
		if errors.Is(err, context.Canceled) {
			return err
		}
		return c.takeBack(ctx, cfg, want, before, fmt.Errorf("wait for chart %s: %w", want.Name, err))
	}
	return nil
}

// bring makes chart and values the newest revision if they are not yet, after cleaning up
// behind a console that was killed. It returns the previously deployed revision and the new
// one, which is not nil once Helm has recorded it.
func (c *Client) bring(ctx context.Context, cfg *action.Configuration, ch *chart.Chart, want cluster.Chart) (before, now *release.Release, err error) {
	if want.Namespace == Namespace {
		if err := c.ownNamespace(ctx); err != nil {
			return nil, nil, err
		}
	}
	r, err := last(cfg, want.Name)
	if err != nil {
		return nil, nil, err
	}
	// No process waits for a pending revision, since all work on this chart requires the lock of
	// the workspace. Its record is dropped; the next revision adopts its objects, since they
	// carry the chart's name.
	for r != nil && r.Info.Status.IsPending() {
		c.log.Warn("pending chart revision dropped, objects adopted", "chart", want.Name, "revision", r.Version, "status", r.Info.Status)
		if _, err := cfg.Releases.Delete(r.Name, r.Version); err != nil {
			return nil, nil, err
		}
		if r, err = last(cfg, want.Name); err != nil {
			return nil, nil, err
		}
	}
	if r != nil {
		if before, err = deployed(cfg, want.Name); err != nil {
			return nil, nil, err
		}
	}
	timeout := requestLimit
	if want.Foreign {
		timeout = hookLimit
	}
	switch {
	case before != nil && r.Version == before.Version && isJust(r, ch, want.Values):
		return before, r, nil // applied before, possibly not ready yet
	case before != nil:
		if want.Recreate {
			manifest, err := c.render(ctx, want)
			if err == nil {
				err = c.clear(ctx, want.Namespace, before.Manifest, manifest)
			}
			if err != nil {
				return before, nil, err
			}
		}
		u := action.NewUpgrade(cfg)
		u.Namespace, u.MaxHistory, u.SkipCRDs, u.ResetValues, u.DisableOpenAPIValidation = want.Namespace, maxRevisions, true, true, true
		u.TakeOwnership = !want.Foreign
		u.Timeout = timeout
		now, err = u.RunWithContext(ctx, want.Name, ch, want.Values)
		return before, now, err
	case r != nil:
		// It failed before anything was deployed: start over.
		if err := purge(cfg, want.Name); err != nil {
			return nil, nil, err
		}
	}
	i := action.NewInstall(cfg)
	i.ReleaseName, i.Namespace, i.CreateNamespace, i.SkipCRDs, i.DisableOpenAPIValidation = want.Name, want.Namespace, true, true, true
	// Objects of our charts may exist already, such as the namespace of Plans.
	i.TakeOwnership = !want.Foreign
	i.Timeout = timeout
	now, err = i.RunWithContext(ctx, ch, want.Values)
	return nil, now, err
}

// ownNamespace creates the namespace of our services. They use the host network, which a
// cluster with a stricter default pod security level would not admit.
func (c *Client) ownNamespace(ctx context.Context) error {
	n := applycorev1.Namespace(Namespace).WithLabels(map[string]string{"pod-security.kubernetes.io/enforce": "privileged"})
	err := retry(ctx, func(ctx context.Context) error {
		_, err := c.core.CoreV1().Namespaces().Apply(ctx, n, metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
		return err
	})
	if err != nil {
		return fmt.Errorf("create namespace %s: %w", Namespace, err)
	}
	return nil
}

// purge deletes all records of a chart. Its objects stay.
func purge(cfg *action.Configuration, name string) error {
	all, err := cfg.Releases.History(name)
	if err != nil {
		return err
	}
	for _, r := range all {
		if _, err := cfg.Releases.Delete(r.Name, r.Version); err != nil && !errors.Is(err, driver.ErrReleaseNotFound) {
			return err
		}
	}
	return nil
}

// takeBack rolls the cluster back to the previous revision. It returns cause, extended by the
// result of the rollback.
func (c *Client) takeBack(ctx context.Context, cfg *action.Configuration, want cluster.Chart, before *release.Release, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	revision := 0
	if before != nil {
		revision = before.Version
	}
	if err := c.revert(ctx, cfg, want, revision); err != nil {
		return fmt.Errorf("%w; and the rollback failed: %w", cause, err)
	}
	if before == nil {
		return fmt.Errorf("%w; it was removed again", cause)
	}
	return fmt.Errorf("%w; revision %d is back", cause, before.Version)
}

// revert rolls a chart back to a revision unless it is deployed already; with zero it
// uninstalls the chart.
func (c *Client) revert(ctx context.Context, cfg *action.Configuration, ch cluster.Chart, revision int) error {
	return retry(ctx, func(context.Context) error {
		if revision == 0 {
			u := action.NewUninstall(cfg)
			u.IgnoreNotFound, u.Wait, u.Timeout = true, false, undoLimit
			_, err := u.Run(ch.Name)
			return err
		}
		r, err := last(cfg, ch.Name)
		if err != nil {
			return err
		}
		if r != nil && r.Version == revision {
			return nil // it was not changed
		}
		target, err := cfg.Releases.Get(ch.Name, revision)
		if absentRelease(err) {
			return fmt.Errorf("revision %d is no longer stored", revision)
		}
		if err != nil {
			return err
		}
		if r != nil { // objects recreated on the way forward must be recreated on the way back
			if err := c.clear(ctx, ch.Namespace, r.Manifest, target.Manifest); err != nil {
				return err
			}
		}
		b := action.NewRollback(cfg)
		b.Version, b.MaxHistory, b.Timeout = revision, maxRevisions, undoLimit
		if err := b.Run(ch.Name); err != nil {
			return err
		}
		// The description marks the revision as ours, so that it is not taken for a manual change.
		if r, err = last(cfg, ch.Name); err == nil && r != nil {
			r.Info.Description += by
			err = cfg.Releases.Update(r)
		}
		if err != nil {
			c.log.Debug("rollback description not stored", "chart", ch.Name, "err", err)
		}
		return nil
	})
}

// absentRelease reports whether Helm has no such release or revision.
func absentRelease(err error) bool {
	return errors.Is(err, driver.ErrNoDeployedReleases) || errors.Is(err, driver.ErrReleaseNotFound)
}

// ChartRevision implements [engine.Cluster].
func (c *Client) ChartRevision(ctx context.Context, want cluster.Chart) (n int, err error) {
	cfg, err := c.helm(want.Namespace)
	if err != nil {
		return 0, err
	}
	err = retry(ctx, func(context.Context) error {
		r, err := deployed(cfg, want.Name)
		if n = 0; r != nil {
			n = r.Version
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("read chart %s: %w", want.Name, err)
	}
	return n, nil
}

// RevertChart implements [engine.Cluster].
func (c *Client) RevertChart(ctx context.Context, want cluster.Chart, revision int) error {
	cfg, err := c.helm(want.Namespace)
	if err != nil {
		return err
	}
	if err := c.revert(ctx, cfg, want, revision); err != nil {
		return fmt.Errorf("roll back chart %s: %w", want.Name, err)
	}
	return nil
}

// readiness counts the ready objects of a chart.
type readiness struct {
	objects, readyObjects int
	pods, readyPods       int64
	waiting               []string // objects that are not ready
}

func (r readiness) complete() bool { return r.readyObjects == r.objects }

// readiness checks all objects of a revision.
func (c *Client) readiness(ctx context.Context, cfg *action.Configuration, r *release.Release) (readiness, error) {
	var out readiness
	resources, err := cfg.KubeClient.Build(strings.NewReader(r.Manifest), false)
	if err != nil {
		return out, err
	}
	checker := helmkube.NewReadyChecker(c.core, func(string, ...any) {}, helmkube.PausedAsReady(true))
	for _, info := range resources {
		out.objects++
		ready, err := checker.IsReady(ctx, info)
		if err == nil {
			err = info.Get() // the checker works on its own copy
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return out, err
		}
		if err != nil { // it was deleted: not as installed
			ready = false
		} else if typed, err := scheme.Scheme.ConvertToVersion(info.Object, info.Mapping.GroupVersionKind.GroupVersion()); err == nil {
			// Helm counts a Deployment with one replica and maxUnavailable 1 as ready without any ready
			// pod.
			switch w := typed.(type) {
			case *appsv1.Deployment:
				s := ofDeployment(w, "")
				out.pods, out.readyPods = out.pods+int64(s.Wanted), out.readyPods+int64(s.Ready)
				ready = ready && (s.Ready > 0 || s.Wanted == 0)
			case *appsv1.DaemonSet:
				s := ofDaemonSet(w, "")
				out.pods, out.readyPods = out.pods+int64(s.Wanted), out.readyPods+int64(s.Ready)
				ready = ready && (s.Ready > 0 || s.Wanted == 0)
			}
		}
		if ready {
			out.readyObjects++
		} else {
			out.waiting = append(out.waiting, strings.ToLower(info.Mapping.GroupVersionKind.Kind)+" "+info.Name)
		}
	}
	return out, nil
}

// waitChart returns when all objects of a revision are ready.
func (c *Client) waitChart(ctx context.Context, cfg *action.Configuration, r *release.Release, report func(string, int64, int64)) error {
	t := time.NewTicker(readyPoll)
	defer t.Stop()
	var now readiness
	var text, told string
	for {
		err := retry(ctx, func(ctx context.Context) error {
			seen, err := c.readiness(ctx, cfg, r)
			if err == nil {
				now = seen
			}
			return err
		})
		switch {
		case ctx.Err() != nil: // reported below
		case err != nil:
			return err
		case now.complete():
			return nil
		default:
			text = strings.Join(now.waiting, ", ")
			if why := c.problem(ctx, r.Namespace, now.waiting); why != "" {
				text = why
			}
			if line := fmt.Sprint(text, now.readyPods, now.pods); line != told {
				told = line
				report(text, now.readyPods, now.pods)
			}
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return ctx.Err()
			}
			if now.objects == 0 { // never observed
				return err
			}
			return fmt.Errorf("%s: not ready in time, %d of %d pods are ready", text, now.readyPods, now.pods)
		case <-t.C:
		}
	}
}

// problem describes the first failing pod of the objects that are not ready, which are given
// as "daemonset joinservice".
func (c *Client) problem(ctx context.Context, namespace string, waiting []string) string {
	l, err := c.core.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return ""
	}
	for i := range l.Items {
		p := &l.Items[i]
		ours := slices.ContainsFunc(waiting, func(w string) bool {
			_, name, _ := strings.Cut(w, " ")
			return strings.HasPrefix(p.Name, name+"-")
		})
		if ours && p.Status.Phase != corev1.PodSucceeded {
			if why := c.trouble(ctx, p); why != "" {
				return why
			}
		}
	}
	return ""
}

// lastWords returns the last line that a container of p logged before it terminated; empty if
// unknown.
func (c *Client) lastWords(ctx context.Context, p *corev1.Pod) string {
	for _, s := range p.Status.ContainerStatuses {
		if s.State.Terminated == nil && s.LastTerminationState.Terminated == nil {
			continue
		}
		b, err := c.core.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{
			Container: s.Name, Previous: s.State.Terminated == nil, TailLines: new(int64(1)), LimitBytes: new(int64(1024)),
		}).DoRaw(ctx)
		if line := strings.TrimSpace(string(b)); err == nil && line != "" {
			return fmt.Sprintf("last log line: %q", line)
		}
	}
	return ""
}
