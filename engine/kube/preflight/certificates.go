package preflight

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"sigs.k8s.io/yaml"

	"constellation/engine/plan"
)

const (
	certificateGuide = "https://kubernetes.io/docs/tasks/administer-cluster/kubeadm/kubeadm-certs/"
	signingGuide     = "https://kubernetes.io/docs/reference/access-authn-authz/certificate-signing-requests/"
)

var certificateChecks = []checkItem{
	{
		id: "api-certificates", title: "the certificates of the API servers are valid for long enough", area: "certificates", ref: certificateGuide,
		needs: []source{sourceServers}, run: serverCertificates,
	},
	{
		id: "kubelet-certificates", title: "the certificates of the kubelets are valid for long enough", area: "certificates", ref: certificateGuide,
		needs: []source{sourceNodes, sourcePods, sourceConfigs}, run: kubeletCertificates,
	},
	{
		id: "signing-requests", title: "no certificate signing request is pending", area: "certificates", ref: signingGuide,
		needs: []source{sourceSignings}, run: signingRequests,
	},
}

const (
	expiryWarn, expiryBlock = 30 * 24 * time.Hour, 7 * 24 * time.Hour
	// signingPatience is how long a request may be pending: controllers approve within seconds.
	signingPatience = 10 * time.Minute
)

// expiry rates the remaining lifetime of a certificate. A certificate issued for less than
// the usual months is renewed automatically, so only a short rest is reported.
func expiry(c *x509.Certificate, now time.Time) (s plan.Severity, left time.Duration) {
	left = c.NotAfter.Sub(now)
	life := c.NotAfter.Sub(c.NotBefore)
	switch {
	case left < min(expiryBlock, life/10):
		return plan.Block, left
	case left < min(expiryWarn, life/3):
		return plan.Warn, left
	}
	return plan.Info, left
}

// renewedExpiry is expiry for certificates that are renewed at the latest when a tenth of
// their life is left.
func renewedExpiry(c *x509.Certificate, now time.Time) (s plan.Severity, left time.Duration) {
	left = c.NotAfter.Sub(now)
	life := c.NotAfter.Sub(c.NotBefore)
	switch {
	case left < min(expiryBlock, life/20):
		return plan.Block, left
	case left < life/10:
		return plan.Warn, left
	}
	return plan.Info, left
}

// remaining is "expires in 12 days", "expired 3 hours ago".
func remaining(left time.Duration) string {
	verb, ago := "expires in ", ""
	if left < 0 {
		verb, ago, left = "expired ", " ago", -left
	}
	switch {
	case left >= 48*time.Hour:
		return verb + count(int(left/(24*time.Hour)), "day") + ago
	case left >= 2*time.Hour:
		return verb + count(int(left/time.Hour), "hour") + ago
	}
	return verb + count(int(left/time.Minute), "minute") + ago
}

func serverCertificates(w *world, _ *probe) (out []plan.Finding) {
	told := map[string]bool{} // behind one CA all have the same
	add := func(what, address string, c *x509.Certificate, remedy, command string) {
		if c == nil || told[string(c.Signature)] {
			return
		}
		told[string(c.Signature)] = true
		if s, left := expiry(c, w.now); s != plan.Info {
			out = append(out, plan.Finding{
				Severity: s, Title: fmt.Sprintf("the certificate of %s %s", what, remaining(left)),
				Detail: fmt.Sprintf("served at %s: subject %s, not after %s", printable(address), printable(c.Subject.String()), stamp(c.NotAfter)),
				Remedy: remedy, Command: command,
			})
		}
	}
	const renew = "renew it on every control plane; a successful `kubeadm upgrade` also renews it"
	for i := range w.servers {
		s := &w.servers[i]
		add("API server "+printable(s.address), s.address, s.cert, renew, "kubeadm certs renew all")
		add("the cluster's CA", s.address, s.ca, "create a new CA by hand and rejoin every node; kubeadm does not renew it", "")
	}
	for _, s := range w.silent {
		add("API server "+printable(s.address), s.address, s.expired, renew, "kubeadm certs renew all")
	}
	return out
}

const (
	// kubeletsAtOnce is the number of concurrent handshakes with kubelets.
	kubeletsAtOnce = 32
	// kubeletSample is the number of kubelets tried before a route counts as unusable.
	kubeletSample = 3
	// kubeletsLimit bounds the total time for all kubelets.
	kubeletsLimit = 20 * time.Second
)

// kubeletCertificates opens a TLS connection to every kubelet: directly or, if it is
// unreachable, through the API server and a pod on the node's host network.
func kubeletCertificates(w *world, p *probe) []plan.Finding {
	ctx, cancel := context.WithTimeout(p.ctx, kubeletsLimit)
	defer cancel()
	if len(w.nodes) == 0 {
		return nil
	}
	if w.request.Quiet {
		return []plan.Finding{{
			Severity: plan.NotChecked, Title: fmt.Sprintf("not checked how long the certificate of the kubelet of %s is valid", count(len(w.nodes), "node")), Detail: silentKubelets,
			Remedy: "allow such requests with --dry-run-requests",
		}}
	}
	helpers := w.hostPods()
	ways := []func(context.Context, *corev1.Node) (*x509.Certificate, error){
		func(ctx context.Context, n *corev1.Node) (*x509.Certificate, error) {
			a := kubeletAddress(n)
			if a == "" {
				return nil, errors.New("it has no address")
			}
			conn, err := (&net.Dialer{Timeout: dialLimit}).DialContext(ctx, "tcp", a)
			if err != nil {
				return nil, err
			}
			return peerCertificate(ctx, conn)
		},
		func(ctx context.Context, n *corev1.Node) (*x509.Certificate, error) {
			helper := helpers[n.Name]
			if helper == nil {
				return nil, errors.New("it runs no pod on the host network")
			}
			return forwarded(ctx, p, helper, kubeletPort(n))
		},
	}
	var found []*x509.Certificate
	var failed []error
	for _, way := range ways {
		// If three kubelets are unreachable, all are. Thousands of timeouts add nothing.
		found, failed = askKubelets(ctx, p, w.nodes[:min(len(w.nodes), kubeletSample)], way)
		if slices.ContainsFunc(found, func(c *x509.Certificate) bool { return c != nil }) {
			found, failed = askKubelets(ctx, p, w.nodes, way)
			break
		}
	}
	return tellKubelets(w, found, failed)
}

// tellKubelets returns findings on the certificates of the first len(found) nodes.
func tellKubelets(w *world, found []*x509.Certificate, failed []error) (out []plan.Finding) {
	type group struct {
		names, objects []string
		soonest        time.Duration
	}
	by := map[plan.Severity]*group{}
	judge := expiry
	remedy := "enable rotation of the kubelets' certificates (serverTLSBootstrap and an approver), or replace the nodes"
	var configured kubeletConfiguration
	if yaml.Unmarshal([]byte(w.configs[kubeletConfig]["kubelet"]), &configured) == nil && configured.ServerTLSBootstrap {
		judge = renewedExpiry
		remedy = "find out why the kubelet has not renewed it: check the approver of kubernetes.io/kubelet-serving requests (`kubectl get csr`, and the approver's log), or replace the nodes"
	}
	silent, why := len(w.nodes)-len(found), ""
	for i, c := range found {
		if c == nil {
			silent++
			if why == "" {
				why = fmt.Sprintf("%s: %s", printable(w.nodes[i].Name), serverProblem(failed[i]))
			}
			continue
		}
		s, left := judge(c, w.now)
		if s == plan.Info {
			continue
		}
		g := by[s]
		if g == nil {
			g = &group{soonest: left}
			by[s] = g
		}
		g.soonest = min(g.soonest, left)
		g.names = append(g.names, w.nodes[i].Name)
		g.objects = append(g.objects, object("node", "", w.nodes[i].Name))
	}
	for _, s := range []plan.Severity{plan.Block, plan.Warn} {
		if g := by[s]; g != nil {
			out = append(out, plan.Finding{
				Severity: s, Title: fmt.Sprintf("the certificate of the kubelet of %s %s", count(len(g.names), "node"), remaining(g.soonest)),
				Detail: "the first to expire; nodes: " + enumerate(g.names, 20), Objects: first(g.objects),
				Remedy: remedy,
			})
		}
	}
	if silent > 0 {
		out = append(out, plan.Finding{
			Severity: plan.NotChecked, Title: fmt.Sprintf("not checked how long the certificate of the kubelet of %s is valid", count(silent, "node")),
			Detail: "unreachable by its address and through the API server: " + why, Remedy: "run the check from a network that reaches the nodes, or as a user who may create pods/portforward",
		})
	}
	return out
}

// askKubelets reads the certificates of the nodes' kubelets through one route, concurrently.
func askKubelets(ctx context.Context, p *probe, nodes []corev1.Node, way func(context.Context, *corev1.Node) (*x509.Certificate, error)) ([]*x509.Certificate, []error) {
	found, failed := make([]*x509.Certificate, len(nodes)), make([]error, len(nodes))
	var asking sync.WaitGroup
	var mu sync.Mutex // of done
	done := int64(0)
	free := make(chan struct{}, kubeletsAtOnce)
	for i := range nodes {
		free <- struct{}{}
		asking.Go(func() {
			defer func() { <-free }()
			ctx, cancel := context.WithTimeout(ctx, serverLimit)
			defer cancel()
			if found[i], failed[i] = way(ctx, &nodes[i]); failed[i] == nil && !isOf(found[i], &nodes[i]) {
				found[i], failed[i] = nil, fmt.Errorf("another host answers: %s", printable(found[i].Subject.String()))
			}
			mu.Lock()
			defer mu.Unlock()
			done++
			if len(nodes) > kubeletSample {
				p.progress(done, int64(len(nodes)))
			}
		})
	}
	asking.Wait()
	return found, failed
}

// isOf reports whether a certificate names the node. A node's address can belong to another
// host where the check runs: private networks overlap, and proxies answer any address.
func isOf(c *x509.Certificate, n *corev1.Node) bool {
	if c.Subject.CommonName == "system:node:"+n.Name || c.VerifyHostname(n.Name) == nil {
		return true
	}
	return slices.ContainsFunc(n.Status.Addresses, func(a corev1.NodeAddress) bool { return a.Address != "" && c.VerifyHostname(a.Address) == nil })
}

func kubeletPort(n *corev1.Node) int32 {
	if port := n.Status.DaemonEndpoints.KubeletEndpoint.Port; port != 0 {
		return port
	}
	return 10250
}

func kubeletAddress(n *corev1.Node) string {
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			return net.JoinHostPort(a.Address, strconv.Itoa(int(kubeletPort(n))))
		}
	}
	return ""
}

// hostPods returns a running pod on the host's network of each node that has one:
// kube-proxy, or a part of the control plane.
func (w *world) hostPods() map[string]*pod {
	out := map[string]*pod{}
	for i := range w.pods {
		p := &w.pods[i]
		if p.namespace == "kube-system" && p.ready && p.terminating.IsZero() && (p.labels["k8s-app"] == "kube-proxy" || p.mirror && p.component != "") {
			out[p.node] = p
		}
	}
	return out
}

// peerCertificate returns the peer's certificate and closes conn. It does not verify the
// chain: only the dates matter, no data is sent, and many kubelets use self-signed
// certificates.
func peerCertificate(ctx context.Context, conn net.Conn) (*x509.Certificate, error) {
	defer conn.Close()
	c := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12})
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return c.ConnectionState().PeerCertificates[0], nil
}

// forwarded opens a TLS connection to a port on the network of pod helper, through the API
// server like `kubectl port-forward`.
func forwarded(ctx context.Context, p *probe, helper *pod, port int32) (*x509.Certificate, error) {
	transport, upgrader, err := spdy.RoundTripperFor(p.config)
	if err != nil {
		return nil, err
	}
	url := p.core.CoreV1().RESTClient().Post().Resource("pods").Namespace(helper.namespace).Name(helper.name).SubResource("portforward").URL()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url.String(), nil)
	if err != nil {
		return nil, err
	}
	conn, _, err := spdy.Negotiate(upgrader, &http.Client{Transport: transport}, req, portforward.PortForwardProtocolV1Name)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })() // the stream's timeout is longer than ours
	headers := http.Header{}
	headers.Set(corev1.PortHeader, strconv.Itoa(int(port)))
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	problems, err := conn.CreateStream(headers)
	if err != nil {
		return nil, err
	}
	if err := problems.Close(); err != nil { // our side: nothing is written there
		return nil, err
	}
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := conn.CreateStream(headers)
	if err != nil {
		return nil, err
	}
	ours, theirs := net.Pipe()
	var copying sync.WaitGroup
	defer copying.Wait()
	defer conn.Close() // ends both copies
	copying.Go(func() {
		_, _ = io.Copy(data, theirs) // the handshake returns the error
	})
	copying.Go(func() {
		_, _ = io.Copy(theirs, data)
		theirs.Close()
	})
	return peerCertificate(ctx, ours)
}

// signingRequests reports certificate signing requests that stay pending.
func signingRequests(w *world, _ *probe) []plan.Finding {
	var names, objects []string
	signers := map[string]bool{}
	for i := range w.signings {
		s := &w.signings[i]
		if w.now.Sub(s.CreationTimestamp.Time) > signingPatience {
			names = append(names, s.Name)
			objects = append(objects, object("CertificateSigningRequest", "", s.Name))
			signers[s.Spec.SignerName] = true
		}
	}
	if len(names) == 0 {
		return nil
	}
	f := plan.Finding{
		Title:  plural(len(names), "1 certificate signing request is pending", "%d certificate signing requests are pending"),
		Detail: enumerate(names, 10), Objects: first(objects),
		Remedy: "approve or deny them; check whether the usual approver still runs",
	}
	if signers[certificatesv1.KubeletServingSignerName] {
		f.Remedy = "start the approver of kubelet serving certificates, or approve them by hand; new nodes of the hop need it too"
	}
	if len(names) == 1 {
		f.Command = command("kubectl certificate approve %s", names[0])
	} else {
		f.Command = "kubectl get csr"
	}
	return []plan.Finding{f}
}
