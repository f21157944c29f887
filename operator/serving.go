package operator

import (
	"context"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"constellation/engine/cloud"
	"constellation/internal/kubeletcsr"
)

const (
	// approvers is how many requests to one signer are judged at a time, and so how many
	// requests about them the cloud gets at a time. Each is of another user.
	approvers = 4
	// judgeTimeout bounds one judgment. If the cloud does not answer in time, the request is judged again.
	judgeTimeout = 10 * time.Second
)

// servingRequests answers certificate requests of kubelets. judgeClient handles the requests of
// joining machines. A renewal of a serving certificate is approved if it is for the same node, with
// the name and the address of its machine in the cloud. (The first serving certificate comes with
// the ticket; see package joinservice.) Addresses in the Node do not count, because the kubelet
// writes them.
//
// A request that a kubelet must not make is denied with the reason. A request that cannot be judged
// yet waits. Requests that are not a kubelet's are left to people.
type servingRequests struct {
	client   client.Client
	cloud    cloudAPI // queried for each request, because addresses are reused
	events   events.EventRecorder
	counters *counters
	log      *slog.Logger
	now      func() time.Time
}

// setup adds one controller for each signer, so that requests of one kind never wait for
// those of the other.
func (r *servingRequests) setup(mgr manager.Manager) error {
	for signer, kind := range certificateKinds {
		err := builder.TypedControllerManagedBy[certificateRequest](mgr).Named(kind.controller).
			Watches(&certificatesv1.CertificateSigningRequest{}, handler.TypedEnqueueRequestsFromMapFunc(openRequests(signer))).
			WithOptions(controller.TypedOptions[certificateRequest]{MaxConcurrentReconciles: approvers, NewQueue: newFairQueue}).
			Complete(&kindOfRequests{r, kind, newUserLimits(kind.burst, kind.refill, r.now)})
		if err != nil {
			return fmt.Errorf("add controller of CertificateSigningRequest for %s: %w", signer, err)
		}
	}
	return nil
}

// verdict is the result of a judgment.
type verdict int

const (
	approved  verdict = iota
	denied            // it may never be approved
	undecided         // it cannot be judged yet
	foreign           // it is not a kubelet's
)

// verdictNames are the results of the metric.
var verdictNames = [...]string{approved: "approved", denied: "denied", undecided: "waiting", foreign: "left"}

// kindOfRequests answers the requests to one signer.
type kindOfRequests struct {
	*servingRequests

	kind   *certificateKind
	limits *userLimits
}

// Reconcile implements reconcile.TypedReconciler.
func (r *kindOfRequests) Reconcile(ctx context.Context, req certificateRequest) (ctrl.Result, error) {
	kind := r.kind
	var csr certificatesv1.CertificateSigningRequest
	if err := r.client.Get(ctx, client.ObjectKey{Name: req.name}, &csr); err != nil {
		if apierrors.IsNotFound(err) {
			r.limits.forget(req)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !open(&csr) || csr.Spec.Username != req.user {
		r.limits.forget(req)
		return ctrl.Result{}, nil
	}
	pause, first := r.limits.begin(req)
	if pause > 0 {
		if first {
			r.log.Warn("certificate requests delayed", "request", csr.Name, "by", csr.Spec.Username, "reason", "this user makes more requests than are judged at once", "pause", pause)
		}
		return ctrl.Result{RequeueAfter: pause}, nil
	}
	defer r.limits.end(req)
	judge := r.judge
	if kind == certificateKinds[certificatesv1.KubeAPIServerClientKubeletSignerName] {
		judge = r.judgeClient
	}
	// A cloud that hangs must not block a worker that other requests need.
	limited, cancel := context.WithTimeout(ctx, judgeTimeout)
	v, why, node := judge(limited, &csr)
	cancel()
	if ctx.Err() != nil {
		return ctrl.Result{}, ctx.Err()
	}
	if v == approved || v == denied {
		err := r.answer(ctx, &csr, v, why)
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return ctrl.Result{}, nil // its new state arrives as an event
		}
		if err != nil {
			return ctrl.Result{}, err
		}
	}
	kind.counter(r.counters).WithLabelValues(verdictNames[v]).Inc()
	log := r.log.With("request", csr.Name, "by", csr.Spec.Username, "reason", why)
	switch v {
	case approved, foreign:
		log.Info(string(kind.messages[v]))
	case denied:
		log.Warn(string(kind.messages[v]))
		r.tell(&csr, node, kind.event+"CertificateDenied", "Deny", why)
	case undecided:
		log.Warn(string(kind.messages[v]))
		r.tell(&csr, node, kind.event+"CertificateWaits", "Approve", why)
		// The interval grows, until Kubernetes deletes the request after a day.
		return ctrl.Result{RequeueAfter: min(max(r.now().Sub(csr.CreationTimestamp.Time)/2, kind.pause), maxServingPause)}, nil
	}
	return ctrl.Result{}, nil
}

// certificateKind is how requests of one signer are logged, counted and repeated.
type certificateKind struct {
	event    string // prefix of the reason of events
	messages [len(verdictNames)]logMessage
	counter  func(*counters) *prometheus.CounterVec
	pause    time.Duration // minimum before a request is judged again

	controller string // its name
	// burst is how many judgments each user has at once, and refill the time until there is
	// another one. An honest kubelet needs one, or a few while its request cannot be judged.
	burst  int
	refill time.Duration
}

// certificateKinds are the signers whose requests are judged.
var certificateKinds = map[string]*certificateKind{
	certificatesv1.KubeletServingSignerName: {
		"Serving",
		[...]logMessage{approved: "serving certificate approved", denied: "serving certificate denied", undecided: "serving certificate pending", foreign: "serving certificate ignored"},
		func(c *counters) *prometheus.CounterVec { return c.serving }, minServingPause,
		"servingrequest", 8, 10 * time.Second,
	},
	certificatesv1.KubeAPIServerClientKubeletSignerName: {
		"Client",
		[...]logMessage{approved: "client certificate approved", denied: "client certificate denied", undecided: "client certificate pending", foreign: "client certificate ignored"},
		func(c *counters) *prometheus.CounterVec { return c.client }, minClientPause,
		"clientrequest", 16, time.Second,
	},
}

// A request that cannot be judged is judged again after half of its age, within these bounds. A
// kubelet waits for 15 minutes, and then makes another request.
const minServingPause, maxServingPause = 2 * time.Second, 5 * time.Minute

// A joining machine waits for its first certificate. Most often only the record of the join service
// is missing, which reaches the cache shortly afterwards.
const minClientPause = 100 * time.Millisecond

// tell writes an event about the Node, or about the request if there is none. Many of the
// same kind become one with a count.
func (r *servingRequests) tell(csr *certificatesv1.CertificateSigningRequest, node *corev1.Node, reason, action, note string) {
	var about runtime.Object = csr
	if node != nil {
		about = node
	}
	r.events.Eventf(about, nil, corev1.EventTypeWarning, reason, action, "%s", note)
}

// answer writes the verdict to the request, if it is unchanged since the judgment.
func (r *servingRequests) answer(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, v verdict, why string) error {
	c := certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "MachineConfirmed", Message: why, LastUpdateTime: metav1.NewTime(r.now()),
	}
	if v == denied {
		c.Type, c.Reason = certificatesv1.CertificateDenied, "NotThisMachine"
	}
	changed := csr.DeepCopy()
	changed.Status.Conditions = append(changed.Status.Conditions, c)
	if err := r.client.SubResource("approval").Update(ctx, changed); err != nil {
		return fmt.Errorf("answer request %s for a kubelet's certificate: %w", csr.Name, err)
	}
	return nil
}

// judge returns the verdict on a request for a kubelet's serving certificate, the reason, and the
// requesting Node if it exists.
func (r *servingRequests) judge(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) (verdict, string, *corev1.Node) {
	// The API server sets both fields when it authenticates the caller.
	name, ok := strings.CutPrefix(csr.Spec.Username, kubeletcsr.UserPrefix)
	if !ok || name == "" || !slices.Contains(csr.Spec.Groups, kubeletcsr.Group) {
		return foreign, "no kubelet has asked for it", nil
	}
	asked, err := parseServing(csr.Spec.Request, csr.Spec.Usages, csr.Spec.Username)
	if err != nil {
		return denied, err.Error(), r.node(ctx, name)
	}
	var node corev1.Node
	if err := r.client.Get(ctx, client.ObjectKey{Name: name}, &node); err != nil {
		if !apierrors.IsNotFound(err) {
			return undecided, fmt.Sprintf("Node %s cannot be read: %v", name, err), nil
		}
		return undecided, fmt.Sprintf("there is no Node %s", name), nil
	}
	id := keyOf(&node)
	if id == "" {
		return undecided, fmt.Sprintf("Node %s has no providerID, so its machine cannot be found", name), &node
	}
	instance, err := r.cloud.Instance(ctx, id)
	switch {
	case errors.Is(err, cloud.ErrNotFound):
		return undecided, fmt.Sprintf("the cloud does not know machine %s", id), &node
	case err != nil:
		return undecided, fmt.Sprintf("the cloud does not say what machine %s is: %v", id, err), &node
	case instance.State == cloud.Terminating || instance.State == cloud.Terminated:
		return undecided, fmt.Sprintf("machine %s is being deleted", id), &node
	case !cloud.SameMachine(instance.Key(), id) || instance.Name != name:
		// A kubelet names its machine when it registers.
		return denied, fmt.Sprintf("machine %s is called %s, so it is not Node %s", id, instance.Name, name), &node
	case !instance.IP.IsValid():
		return undecided, fmt.Sprintf("the cloud does not say which address machine %s has", id), &node
	}
	if err := asked.within(instance); err != nil {
		return denied, err.Error(), &node
	}
	return approved, fmt.Sprintf("names and addresses are those of machine %s", id), &node
}

func (r *servingRequests) node(ctx context.Context, name string) *corev1.Node {
	var node corev1.Node
	if err := r.client.Get(ctx, client.ObjectKey{Name: name}, &node); err != nil {
		return nil // it is needed only for an event
	}
	return &node
}

// servingRequest has the requested names and addresses, at least one.
type servingRequest struct {
	names     []string
	addresses []netip.Addr
}

// within returns an error if a requested name or address is not the machine's.
func (s servingRequest) within(i cloud.Instance) error {
	for _, n := range s.names {
		if n != i.Name {
			return fmt.Errorf("it asks for the name %.100q, the cloud calls the machine %s", n, i.Name)
		}
	}
	for _, a := range s.addresses {
		if a != i.IP.Unmap() {
			return fmt.Errorf("it asks for the address %s, the cloud says that the machine has %s", a, i.IP)
		}
	}
	return nil
}

var (
	// A kubelet requests exactly one of these sets; the second is for keys that can only
	// sign. https://kubernetes.io/docs/reference/access-authn-authz/certificate-signing-requests/#kubernetes-signers
	servingUsages = [][]certificatesv1.KeyUsage{
		{certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment, certificatesv1.UsageServerAuth},
		{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
	}
	oidSubjectAltName = asn1.ObjectIdentifier{2, 5, 29, 17}
)

// parseServing reads the request of user for a kubelet's serving certificate: one PEM block, signed
// with its own key, with the subject of a node and names of a server. It refuses a request that it
// cannot parse completely, so that a signer cannot find more in it.
func parseServing(request []byte, usages []certificatesv1.KeyUsage, user string) (servingRequest, error) {
	bad := func(format string, args ...any) (servingRequest, error) {
		return servingRequest{}, fmt.Errorf(format, args...)
	}
	if got, ok := usagesAre(usages, servingUsages); !ok {
		return bad("its usages are %q, not those of a server's certificate", got)
	}
	c, err := parseKubeletRequest(request)
	if err != nil {
		return servingRequest{}, err
	}
	if !kubeletcsr.HasSubject(c, user) {
		return bad("its subject is %.200q, want CN=%s,O=%s", c.Subject.String(), user, kubeletcsr.Group)
	}
	if err := kubeletcsr.CheckServerNames(c); err != nil {
		return servingRequest{}, err
	}
	if len(c.Extensions) != 1 || !c.Extensions[0].Id.Equal(oidSubjectAltName) {
		return bad("it asks for something else than names of a server")
	}
	// Go's parser drops kinds of names that it does not support.
	var all []asn1.RawValue
	if left, err := asn1.Unmarshal(c.Extensions[0].Value, &all); err != nil || len(left) > 0 || len(all) != len(c.DNSNames)+len(c.IPAddresses) || len(all) == 0 {
		return bad("it asks for other names than those of a server")
	}
	s := servingRequest{names: c.DNSNames}
	for _, ip := range c.IPAddresses {
		a, ok := netip.AddrFromSlice(ip)
		if !ok {
			return bad("it asks for an address that is none")
		}
		s.addresses = append(s.addresses, a.Unmap())
	}
	return s, nil
}

// usagesAre reports whether usages are one of some sets, and returns them sorted.
func usagesAre(usages []certificatesv1.KeyUsage, sets [][]certificatesv1.KeyUsage) ([]certificatesv1.KeyUsage, bool) {
	got := slices.Compact(slices.Sorted(slices.Values(usages)))
	return got, slices.ContainsFunc(sets, func(want []certificatesv1.KeyUsage) bool { return slices.Equal(got, want) })
}

// parseKubeletRequest reads one PEM block with a request that its own key has signed.
func parseKubeletRequest(request []byte) (*x509.CertificateRequest, error) {
	block, rest := pem.Decode(request)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || len(block.Headers) > 0 || strings.TrimSpace(string(rest)) != "" {
		return nil, errors.New("it is not one CERTIFICATE REQUEST in PEM")
	}
	return kubeletcsr.Parse(block.Bytes)
}
