package kube

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/streaming/pkg/httpstream"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/internal/podforward"
)

// Port, service account and headers of the operator's snapshot service. Package operator has
// the same values, and a test there takes a snapshot with this client.
const (
	operatorName     = "constellation-operator" // its label
	snapshotPort     = "snapshots"              // the name of its container's port
	snapshotPath     = "/v1/etcd-snapshot"
	etcdStatePath    = "/v1/etcd-state"
	snapshotAccount  = "etcd-snapshot"
	snapshotAudience = "constellation-etcd-snapshot"
	snapshotReader   = "pods/portforward and serviceaccounts/token in " + Namespace
	operatorAccount  = "constellation-operator" // of its Deployment's pods, whose name is the same
)

const (
	// snapshotPrepare bounds what comes before a snapshot's first byte, for all tries.
	snapshotPrepare = time.Minute
	// snapshotDial bounds one port-forward until it stands.
	snapshotDial = 20 * time.Second
	// snapshotStill is how long a snapshot may stand still. The agent ends its own side
	// after a minute and says why; this is for connections on which nothing arrives.
	snapshotStill = 90 * time.Second
	// snapshotBuffer is in bytes.
	snapshotBuffer = 64 << 10
)

// errSnapshotBusy means that the operator takes a snapshot for somebody else.
var errSnapshotBusy = errors.New("another snapshot is being taken")

// EtcdSnapshot implements [engine.Snapshots]. A snapshot of which no byte was
// written is tried again, at each operator in turn, for a minute at most; one that breaks
// off later is not, since w cannot be rewound.
func (c *Client) EtcdSnapshot(ctx context.Context, w backup.Sink, confirm engine.ConfirmControlPlane) (backup.Snapshot, error) {
	ctx, end := context.WithCancel(ctx)
	defer end()
	prepare, cancel := context.WithTimeout(ctx, snapshotPrepare)
	defer cancel()
	token, err := c.snapshotToken(prepare)
	if err != nil {
		return backup.Snapshot{}, snapshotError(err)
	}
	out := &countingWriter{to: w}
	wait := time.Second
	for {
		pods, err := c.operators(prepare, confirm)
		if err != nil && !errors.Is(err, errUnconfirmed) {
			return backup.Snapshot{}, snapshotError(err)
		}
		var before *witness
		if len(pods) > 0 {
			if before, err = c.witness(prepare, 0, false); err != nil {
				return backup.Snapshot{}, snapshotError(err)
			}
		}
		for i := range pods {
			out.first = func() {
				before.begun(ctx, c)
				before.members = c.askMembers(ctx, before.revision, pods, &pods[i], token)
			}
			var s backup.Snapshot
			s, err = c.snapshotFrom(ctx, &pods[i], token, out)
			if err == nil {
				s.Unchecked = before.unchecked
				err = c.compare(ctx, w, &s, before)
			}
			if err == nil {
				return s, nil
			}
			if ctx.Err() != nil {
				return backup.Snapshot{}, ctx.Err()
			}
			if out.n > 0 || !errors.Is(err, cluster.ErrUnreachable) {
				return backup.Snapshot{}, snapshotError(err)
			}
			c.log.Debug("snapshot of etcd not taken", "pod", pods[i].Name, "err", err)
		}
		t := time.NewTimer(wait)
		select {
		case <-prepare.Done():
			t.Stop()
			if ctx.Err() != nil {
				return backup.Snapshot{}, ctx.Err()
			}
			return backup.Snapshot{}, snapshotError(err)
		case <-t.C:
		}
		wait = min(2*wait, 10*time.Second)
	}
}

// snapshotError puts why there is no snapshot into the user's words.
func snapshotError(err error) error {
	out := &plan.Error{Op: "take a snapshot of etcd", Err: err}
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, errSnapshotBusy):
		out.Remedy = "try again when it has ended"
	case errors.Is(err, engine.ErrImpostor):
		out.Remedy = "find out who made it (`kubectl get nodes -o wide`, `kubectl -n " + Namespace + " get pods -o wide`, the API server's audit log) before any backup is restored; the rest can be backed up meanwhile: `--etcd=false`"
	case errors.Is(err, cluster.ErrForbidden):
		out.Remedy = "use a kubeconfig that may create " + snapshotReader + ", such as the one that `constellation init` wrote, or make the backup without it: `--etcd=false`"
	case errors.Is(err, cluster.ErrDenied):
		out.Remedy = workspace.KubeconfigFile + " is not of this cluster or not its administrator's: restore the file"
	case errors.Is(err, cluster.ErrAbsent):
		out.Remedy = "`constellation status` shows the state of the operator; to back up without a snapshot: `--etcd=false`"
	case errors.Is(err, errNotWhole):
		out.Remedy = "take it again; if it fails again, look at etcd's disk on the control planes"
	case errors.Is(err, cluster.ErrUnreachable) || errors.Is(err, context.DeadlineExceeded):
		out.Remedy = "run the same command again; `kubectl -n " + Namespace + " logs deployment/" + operatorName + "` has the operator's log"
	}
	return out
}

// errNotWhole means that a snapshot came to its end and is not what it says.
var errNotWhole = errors.New("the snapshot is not whole")

// snapshotToken returns the token that the operator asks for.
func (c *Client) snapshotToken(ctx context.Context) (token string, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	seconds := int64(600) // the least there is; it is looked at when the snapshot begins
	err = retry(ctx, func(ctx context.Context) error {
		r, err := c.core.CoreV1().ServiceAccounts(Namespace).CreateToken(ctx, snapshotAccount, &authenticationv1.TokenRequest{
			Spec: authenticationv1.TokenRequestSpec{Audiences: []string{snapshotAudience}, ExpirationSeconds: &seconds},
		}, metav1.CreateOptions{})
		if err == nil {
			token = r.Status.Token
		}
		return err
	})
	if errors.Is(err, cluster.ErrAbsent) {
		return "", fmt.Errorf("%w: the cluster's operator is not installed, or older than snapshots", cluster.ErrAbsent)
	}
	if err != nil {
		return "", fmt.Errorf("ask for a token of %s: %w", snapshotAccount, err)
	}
	return token, nil
}

// errUnconfirmed means that the cloud did not answer whether a machine is a control plane.
var errUnconfirmed = fmt.Errorf("%w: not confirmed", cluster.ErrUnreachable)

// operators returns the operator's pods that are ready and serve snapshots, the one
// that runs longest first. The error wraps cluster.ErrAbsent if there is none, and
// engine.ErrImpostor if the only ones run where none may.
//
// Labels and names prove nothing: every kubelet may make mirror pods with any. What it
// cannot make is a pod whose controller is our Deployment's ReplicaSet, or one of our
// ServiceAccount.
func (c *Client) operators(ctx context.Context, confirm engine.ConfirmControlPlane) (out []corev1.Pod, err error) {
	limited, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	sets, err := c.operatorSets(limited)
	if err != nil {
		return nil, fmt.Errorf("look for the operator: %w", err)
	}
	var all []corev1.Pod
	err = retry(limited, func(ctx context.Context) error {
		l, err := c.core.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{LabelSelector: podLabel + "=" + operatorName})
		if err == nil {
			all = l.Items
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look for the operator: %w", err)
	}
	why := "the operator has no pod"
	for i := range all {
		p := &all[i]
		if text := foreignPod(p, sets); text != "" {
			c.log.Warn("pod poses as the operator", "pod", p.Name, "node", p.Spec.NodeName, "why", text)
			continue
		}
		switch {
		case p.DeletionTimestamp != nil || p.Spec.NodeName == "":
		case snapshotPortOf(p) == 0:
			why = "the operator's version serves no snapshots"
		case p.Status.Phase != corev1.PodRunning || !podReady(p):
			why = "the operator's pod on " + p.Spec.NodeName + " is not ready"
		default:
			out = append(out, *p)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: %s", cluster.ErrAbsent, why)
	}
	slices.SortFunc(out, func(a, b corev1.Pod) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	var refused error
	out = slices.DeleteFunc(out, func(p corev1.Pod) bool {
		err := c.onControlPlane(ctx, &p, confirm)
		if err != nil {
			c.log.Warn("machine of the operator refused", "pod", p.Name, "node", p.Spec.NodeName, "err", err)
			refused = errors.Join(refused, err)
		}
		return err != nil
	})
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case len(out) > 0:
		return out, nil
	case errors.Is(refused, cluster.ErrUnreachable) && !errors.Is(refused, engine.ErrImpostor):
		return nil, fmt.Errorf("%w: %w", errUnconfirmed, refused)
	}
	return nil, refused
}

// operatorSets returns the UIDs of the ReplicaSets of the operator's Deployment.
func (c *Client) operatorSets(ctx context.Context) (map[types.UID]bool, error) {
	sets := map[types.UID]bool{}
	return sets, retry(ctx, func(ctx context.Context) error {
		d, err := c.core.AppsV1().Deployments(Namespace).Get(ctx, operatorName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil // then it has no pod either
		}
		if err != nil {
			return err
		}
		l, err := c.core.AppsV1().ReplicaSets(Namespace).List(ctx, metav1.ListOptions{LabelSelector: podLabel + "=" + operatorName})
		if err != nil {
			return err
		}
		for i := range l.Items {
			if o := metav1.GetControllerOf(&l.Items[i]); o != nil && o.Kind == "Deployment" && o.UID == d.UID {
				sets[l.Items[i].UID] = true
			}
		}
		return nil
	})
}

// foreignPod says why a pod with the operator's label is not the operator's; empty if it
// is.
func foreignPod(p *corev1.Pod, sets map[types.UID]bool) string {
	o := metav1.GetControllerOf(p)
	switch {
	case p.Annotations[corev1.MirrorPodAnnotationKey] != "":
		return "it is a mirror pod, which the kubelet of its node made"
	case o == nil || o.Kind != "ReplicaSet" || !sets[o.UID]:
		return "no ReplicaSet of Deployment " + operatorName + " controls it"
	case p.Spec.ServiceAccountName != operatorAccount:
		return fmt.Sprintf("its ServiceAccount is %q, not %s", p.Spec.ServiceAccountName, operatorAccount)
	}
	return ""
}

// onControlPlane returns nil if a pod's machine is a control plane as those see it whom the
// machine cannot move: the label, which no kubelet may set, and the cloud. Without a cloud
// it is the list of API servers, which they keep themselves: the address that the API
// server will dial must be in it. A machine that claims the address of a control plane gets
// no connection: the connection goes to the control plane, which has no such pod.
func (c *Client) onControlPlane(ctx context.Context, p *corev1.Pod, confirm engine.ConfirmControlPlane) error {
	var n *corev1.Node
	err := retry(ctx, func(ctx context.Context) (err error) {
		n, err = c.core.CoreV1().Nodes().Get(ctx, p.Spec.NodeName, metav1.GetOptions{})
		return err
	})
	switch {
	case errors.Is(err, cluster.ErrAbsent):
		return fmt.Errorf("%w: the operator's pod %s is on %s, which is no Node", cluster.ErrUnreachable, p.Name, p.Spec.NodeName)
	case err != nil:
		return fmt.Errorf("read Node %s: %w", p.Spec.NodeName, err)
	}
	if _, ok := n.Labels[roleLabel]; !ok {
		return fmt.Errorf("%w: the operator's pod %s is on %s, which is no control plane", engine.ErrImpostor, p.Name, n.Name)
	}
	if confirm != nil {
		return confirm(ctx, n.Name, n.Spec.ProviderID)
	}
	at := ""
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			at = a.Address // the first one is what the API server dials
			break
		}
	}
	var servers []string
	err = retry(ctx, func(ctx context.Context) error {
		l, err := c.core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Get(ctx, "kubernetes", metav1.GetOptions{})
		if err != nil {
			return err
		}
		servers = nil
		for _, e := range l.Endpoints {
			servers = append(servers, e.Addresses...)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the API servers' own list of them: %w", err)
	}
	if at == "" || !slices.Contains(servers, at) {
		return fmt.Errorf("%w: no API server announces itself at %s, the address of Node %s", engine.ErrImpostor, cmp.Or(at, "no address"), n.Name)
	}
	return nil
}

// snapshotPortOf returns where a pod of the operator serves snapshots; zero if it does
// not.
func snapshotPortOf(p *corev1.Pod) int32 {
	for i := range p.Spec.Containers {
		for _, port := range p.Spec.Containers[i].Ports {
			if port.Name == snapshotPort {
				return port.ContainerPort
			}
		}
	}
	return 0
}

// snapshotFrom takes a snapshot through one pod. The error wraps cluster.ErrUnreachable
// if another pod, or the same one later, may do better.
func (c *Client) snapshotFrom(ctx context.Context, p *corev1.Pod, token string, w *countingWriter) (backup.Snapshot, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	still := time.AfterFunc(snapshotStill, func() {
		cancel(fmt.Errorf("%w: nothing arrived for %s", cluster.ErrUnreachable, snapshotStill))
	})
	defer still.Stop()
	s, err := c.streamSnapshot(ctx, p, token, w, func() { still.Reset(snapshotStill) })
	if why := context.Cause(ctx); err != nil && why != nil {
		err = why
	}
	if err != nil {
		return s, fmt.Errorf("through the operator on %s: %w", p.Spec.NodeName, err)
	}
	return s, nil
}

// streamSnapshot does so, and calls alive for all that arrives.
func (c *Client) streamSnapshot(ctx context.Context, p *corev1.Pod, token string, w *countingWriter, alive func()) (backup.Snapshot, error) {
	resp, tunnel, err := c.askOperator(ctx, p, token, snapshotPath)
	if err != nil {
		return backup.Snapshot{}, err
	}
	defer tunnel.Close()
	defer resp.Body.Close()
	started, sum := time.Now(), sha256.New()
	buf := make([]byte, snapshotBuffer)
	for {
		n, err := resp.Body.Read(buf)
		if n > 0 {
			alive()
			sum.Write(buf[:n])
			if _, err := w.Write(buf[:n]); err != nil {
				return backup.Snapshot{}, fmt.Errorf("write the snapshot: %w", err)
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return backup.Snapshot{}, fmt.Errorf("%w: it broke off after %d bytes: %w", cluster.ErrUnreachable, w.n, whyEnded(tunnel, err))
		}
	}
	s, err := trailers(resp.Trailer, w.n, sum.Sum(nil))
	s.Member, s.MemberID = p.Spec.NodeName, resp.Trailer.Get("Snapshot-Etcd-Member")
	if err == nil {
		c.log.Debug("snapshot of etcd taken", "pod", p.Name, "bytes", s.Size, "revision", s.Revision, "took", time.Since(started))
	}
	return s, err
}

// askOperator sends a request to a pod of the operator. The caller ends the tunnel, which
// ctx ends, too.
func (c *Client) askOperator(ctx context.Context, p *corev1.Pod, token, path string) (_ *http.Response, _ *podforward.Conn, err error) {
	tunnel, err := c.tunnel(ctx, p, snapshotPortOf(p))
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			tunnel.Close()
		}
	}()
	context.AfterFunc(ctx, func() { _ = tunnel.Close() }) // which ends a read
	client := &http.Client{
		Transport: &http.Transport{
			DialContext:       func(context.Context, string, string) (net.Conn, error) { return dataOnly{tunnel}, nil },
			DisableKeepAlives: true, DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // the token goes nowhere else
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+operatorName+path, nil)
	if err != nil {
		return nil, nil, err
	}
	r.Header.Set("Authorization", "Bearer "+token)
	resp, err := client.Do(r)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", cluster.ErrUnreachable, whyEnded(tunnel, errors.Unwrap(err)))
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		return nil, nil, refused(resp)
	}
	return resp, tunnel, nil
}

// refused makes an error of an answer that is no snapshot.
func refused(resp *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // what arrived says enough
	text := strings.TrimSpace(string(b))
	if text == "" {
		text = resp.Status
	}
	switch resp.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden:
		return fmt.Errorf("%w: %s", cluster.ErrForbidden, text)
	case http.StatusServiceUnavailable:
		if resp.Header.Get("Retry-After") != "" {
			return fmt.Errorf("%w: %w", cluster.ErrUnreachable, errSnapshotBusy)
		}
	case http.StatusNotFound:
		return fmt.Errorf("%w: the operator's version serves no snapshots", cluster.ErrAbsent)
	}
	return fmt.Errorf("%w: %s", cluster.ErrUnreachable, text)
}

// trailers reads what a snapshot says of itself at its end, which it must be.
func trailers(h http.Header, size int64, sum []byte) (backup.Snapshot, error) {
	s := backup.Snapshot{SHA256: h.Get("Snapshot-Sha256"), Version: h.Get("Snapshot-Etcd-Version"), ClusterID: h.Get("Snapshot-Etcd-Cluster")}
	var err, err2 error
	s.Size, err = strconv.ParseInt(h.Get("Snapshot-Size"), 10, 64)
	s.Revision, err2 = strconv.ParseInt(h.Get("Snapshot-Revision"), 10, 64)
	switch {
	case s.SHA256 == "":
		return s, fmt.Errorf("%w: its end is missing, %d bytes came", errNotWhole, size)
	case err != nil || err2 != nil:
		return s, fmt.Errorf("%w: its end is not readable", errNotWhole)
	case s.Size != size:
		return s, fmt.Errorf("%w: %d bytes came, and it has %d", errNotWhole, size, s.Size)
	case s.SHA256 != hex.EncodeToString(sum):
		return s, fmt.Errorf("%w: its SHA-256 is another one", errNotWhole)
	}
	return s, nil
}

// countingWriter counts what it writes, in bytes, and calls first before the first one.
type countingWriter struct {
	to    io.Writer
	n     int64
	first func()
}

func (c *countingWriter) Write(p []byte) (int, error) {
	if c.n == 0 && c.first != nil {
		c.first()
	}
	n, err := c.to.Write(p)
	c.n += int64(n)
	return n, err
}

// tunnel connects to a port of a pod through the API server. No port is opened on this
// computer, which others here could use.
func (c *Client) tunnel(ctx context.Context, p *corev1.Pod, port int32) (*podforward.Conn, error) {
	dialer, err := c.forwarder(p)
	if err != nil {
		return nil, fmt.Errorf("forward a port: %w", err)
	}
	limited, cancel := context.WithTimeout(ctx, snapshotDial)
	defer cancel()
	t, err := podforward.Dial(limited, dialer, port, operatorName, operatorName)
	switch {
	case err == nil:
		return t, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case limited.Err() != nil:
		return nil, fmt.Errorf("%w: no port-forward within %s", cluster.ErrUnreachable, snapshotDial)
	}
	return nil, c.forwardError(ctx, p, err)
}

// forwarder returns what connects to a pod: through a websocket, as kubectl does, or
// with SPDY where an old API server or a proxy takes none.
func (c *Client) forwarder(p *corev1.Pod) (httpstream.Dialer, error) {
	old, u, err := podforward.SPDY(c.core, c.config, p)
	if err != nil {
		return nil, err
	}
	socket, err := portforward.NewSPDYOverWebsocketDialerForStreaming(u, rest.CopyConfig(c.config))
	if err != nil {
		return nil, err
	}
	// Whatever the reason: a websocket needs the right to get besides that to create.
	return portforward.NewFallbackDialerForStreaming(socket, old, func(error) bool { return true }), nil
}

// forwardError says why a port-forward does not stand. What the dialers say has no
// type, so the API server is asked whether the user may.
func (c *Client) forwardError(ctx context.Context, p *corev1.Pod, err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err // which request it was, we say
	}
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	may, rerr := c.core.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
			Namespace: p.Namespace, Name: p.Name, Verb: "create", Resource: "pods", Subresource: "portforward",
		}},
	}, metav1.CreateOptions{})
	if rerr == nil && !may.Status.Allowed {
		return fmt.Errorf("%w: the kubeconfig's user may not create pods/portforward in %s", cluster.ErrForbidden, p.Namespace)
	}
	return fmt.Errorf("%w: forward a port: %w", cluster.ErrUnreachable, err)
}

// dataOnly is a tunnel whose Close ends the data, so that the node can still report why it ended.
type dataOnly struct{ *podforward.Conn }

// Close implements net.Conn.
func (d dataOnly) Close() error { return d.CloseData() }

// whyEnded returns the error that the node reports for the end of a tunnel, otherwise err.
func whyEnded(t *podforward.Conn, err error) error {
	if text := t.Refusal(time.Second); text != "" {
		return errors.New(text)
	}
	return err
}
