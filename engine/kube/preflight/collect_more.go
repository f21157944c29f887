package preflight

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"constellation/internal/delay"
)

// Names of ConfigMaps of kube-system that kubeadm keeps.
const (
	kubeadmConfig = "kubeadm-config"
	kubeletConfig = "kubelet-config"
	proxyConfig   = "kube-proxy"
)

// configs reads kubeadm's ConfigMaps. One that does not exist stays nil.
func (r *reader) configs(ctx context.Context) error {
	r.w.configs = map[string]map[string]string{}
	for _, name := range []string{kubeadmConfig, kubeletConfig, proxyConfig} {
		m, err := r.core.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return err
		default:
			r.w.configs[name] = m.Data
		}
	}
	return nil
}

const (
	// leaderWait bounds the wait for a leader. The API server of the only control plane is down for a minute or two in an
	// upgrade. Its controller manager and scheduler exit, are started again with a back-off of up to 40 s, and take over
	// the lease 15 s later.
	leaderWait = time.Minute
	leaderPoll = time.Second
	// lostLately is how old a lease may be for which a wait is worthwhile.
	lostLately = 5 * time.Minute
)

// leaders reads the leader election leases of kube-system. It waits for a leader that was lost a moment ago: otherwise
// the upgrade after that of an only control plane would be blocked, by something that ends without anybody's help.
func (r *reader) leaders(ctx context.Context) error {
	for began := time.Now(); ; {
		leaders := map[string]coordinationv1.LeaseSpec{}
		err := pages(ctx, r.core.CoordinationV1().Leases(metav1.NamespaceSystem).List, func(l *coordinationv1.LeaseList) {
			for i := range l.Items {
				leaders[l.Items[i].Name] = l.Items[i].Spec
			}
		})
		r.w.leaders = leaders
		now := time.Now()
		returns := func(name string) bool {
			l, ok := leaders[name]
			return ok && l.RenewTime != nil && lostLeader(&l, now) && now.Sub(l.RenewTime.Time) < lostLately
		}
		if err != nil || now.Sub(began) >= leaderWait || !slices.ContainsFunc(electedComponents, returns) || !delay.For(ctx, leaderPoll) {
			return err
		}
	}
}

// signings reads the pending certificate signing requests.
func (r *reader) signings(ctx context.Context) error {
	return pages(ctx, r.core.CertificatesV1().CertificateSigningRequests().List, func(l *certificatesv1.CertificateSigningRequestList) {
		for _, o := range l.Items {
			if len(o.Status.Conditions) == 0 {
				slim(&o.ObjectMeta)
				o.Spec.Request = nil
				r.w.signings = append(r.w.signings, o)
			}
		}
	})
}

// helmRelease is the slim copy of a Helm release.
type helmRelease struct {
	namespace, name string
	chart, version  string
	kubeVersion     string // the constraint; empty if it has none
	appVersion      string // of what the chart installs; empty if it names none
}

const (
	// helmPageSize is small because each secret can be a megabyte.
	helmPageSize = 20
	// maxChart bounds the decompressed size of a release.
	maxChart = 64 << 20
)

// charts reads the deployed charts. Helm stores a release compressed in a secret.
func (r *reader) charts(ctx context.Context) error {
	o := metav1.ListOptions{Limit: helmPageSize, LabelSelector: "owner=helm,status=deployed", FieldSelector: "type=helm.sh/release.v1"}
	for {
		l, err := r.core.CoreV1().Secrets(metav1.NamespaceAll).List(ctx, o)
		if err != nil {
			return err
		}
		for i := range l.Items {
			s := &l.Items[i]
			r.w.addRelease(s)
		}
		if o.Continue = l.Continue; o.Continue == "" {
			break
		}
	}
	slices.Sort(r.w.unreadableCharts)
	slices.SortFunc(r.w.charts, func(a, b helmRelease) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	})
	return nil
}

// addRelease adds the release of one of Helm's records. Of its content it keeps the metadata of the
// chart alone.
func (w *world) addRelease(s *corev1.Secret) {
	h, err := readChart(s.Data["release"])
	h.namespace, h.name = s.Namespace, cmp.Or(s.Labels["name"], s.Name)
	if err != nil {
		w.unreadableCharts = append(w.unreadableCharts, h.namespace+"/"+h.name)
		return
	}
	w.charts = append(w.charts, h)
}

// readChart decodes a release in Helm's format: base64 of JSON, optionally gzipped. It returns the
// metadata of the chart.
func readChart(data []byte) (helmRelease, error) {
	packed, err := base64.StdEncoding.DecodeString(string(data))
	if err != nil {
		return helmRelease{}, fmt.Errorf("read release: %w", err)
	}
	var in io.Reader = bytes.NewReader(packed)
	if bytes.HasPrefix(packed, []byte{0x1f, 0x8b}) {
		if in, err = gzip.NewReader(in); err != nil {
			return helmRelease{}, fmt.Errorf("read release: %w", err)
		}
	}
	var release struct {
		Chart struct {
			Metadata struct {
				Name        string `json:"name"`
				Version     string `json:"version"`
				KubeVersion string `json:"kubeVersion"`
				AppVersion  string `json:"appVersion"`
			} `json:"metadata"`
		} `json:"chart"`
	}
	in = io.LimitReader(in, maxChart)
	if err := json.NewDecoder(in).Decode(&release); err != nil {
		return helmRelease{}, fmt.Errorf("read release: %w", err)
	}
	// Read to the end, as Helm does: gzip's checksum is there.
	if _, err := io.Copy(io.Discard, in); err != nil {
		return helmRelease{}, fmt.Errorf("read release: %w", err)
	}
	m := release.Chart.Metadata
	return helmRelease{chart: m.Name, version: m.Version, kubeVersion: m.KubeVersion, appVersion: m.AppVersion}, nil
}

// writer is a client that last wrote an object through a removed API version.
type writer struct {
	manager, operation string
	at                 time.Time // zero if it is not known
	object             string    // the object that was written last
	objects            int       // number of objects it wrote
}

// writers reads the managers of objects of APIs that the hop removes. It lists metadata only,
// and through a remaining version: a request through a removed one would be counted as use. Only
// an API that is deleted in all versions is read through itself.
func (r *reader) writers(ctx context.Context) error {
	r.w.writers = map[schema.GroupVersionResource][]writer{}
	byResource := map[schema.GroupResource][]removedAPI{}
	for _, a := range removedAPIs(r.w.request.From, minorAfter(r.w.request.To)) {
		if a.deleted {
			if err := r.writersOfDeleted(ctx, a); err != nil {
				return err
			}
			continue
		}
		byResource[a.resource.GroupResource()] = append(byResource[a.resource.GroupResource()], a)
	}
	for _, gone := range byResource {
		seen := map[schema.GroupVersionResource]map[string]*writer{}
		for _, a := range gone {
			seen[a.resource] = map[string]*writer{}
		}
		for _, through := range survivors(gone, minorAfter(r.w.request.To)) {
			err := pages(ctx, r.meta.Resource(through).List, func(l *metav1.PartialObjectMetadataList) {
				for i := range l.Items {
					for _, a := range gone {
						note(seen[a.resource], &l.Items[i], a.resource.GroupVersion().String())
					}
				}
			})
			if apierrors.IsNotFound(err) {
				continue // not served here; another may be
			}
			if err != nil {
				return err
			}
			break
		}
		for resource, by := range seen {
			r.addWriters(resource, by)
		}
	}
	return nil
}

func (r *reader) addWriters(resource schema.GroupVersionResource, by map[string]*writer) {
	for _, w := range by {
		r.w.writers[resource] = append(r.w.writers[resource], *w)
	}
	slices.SortFunc(r.w.writers[resource], func(a, b writer) int {
		return cmp.Or(b.at.Compare(a.at), cmp.Compare(a.manager, b.manager))
	})
}

// writersOfDeleted reads the managers of all objects of a deleted API.
func (r *reader) writersOfDeleted(ctx context.Context, a removedAPI) error {
	by := map[string]*writer{}
	err := pages(ctx, r.meta.Resource(a.resource).List, func(l *metav1.PartialObjectMetadataList) {
		for i := range l.Items {
			o := &l.Items[i]
			manager := ""
			if n := len(o.ManagedFields); n > 0 {
				manager = o.ManagedFields[n-1].Manager
			}
			w := by[manager]
			if w == nil {
				w = &writer{manager: manager, object: object("", o.Namespace, o.Name), at: o.CreationTimestamp.Time}
				by[manager] = w
			}
			w.objects++
		}
	})
	if apierrors.IsNotFound(err) {
		return nil // not served
	}
	r.addWriters(a.resource, by)
	return err
}

// note records the managers that wrote o through apiVersion.
func note(by map[string]*writer, o *metav1.PartialObjectMetadata, apiVersion string) {
	wrote := func(manager, operation string, at time.Time) {
		w := by[manager]
		if w == nil {
			w = &writer{manager: manager}
			by[manager] = w
		}
		w.objects++
		if w.object == "" || at.After(w.at) {
			w.at, w.operation, w.object = at, operation, object("", o.Namespace, o.Name)
		}
	}
	noted := false
	for i := range o.ManagedFields {
		f := &o.ManagedFields[i]
		if f.APIVersion != apiVersion || f.Subresource != "" {
			continue
		}
		at := o.CreationTimestamp.Time
		if f.Time != nil {
			at = f.Time.Time
		}
		wrote(f.Manager, string(f.Operation), at)
		noted = true
	}
	if noted {
		return
	}
	var applied metav1.TypeMeta
	if json.Unmarshal([]byte(o.Annotations[corev1.LastAppliedConfigAnnotation]), &applied) == nil && applied.APIVersion == apiVersion {
		wrote("kubectl apply", "Apply", time.Time{})
	}
}
