package operator

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"constellation/assets/render"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/providers"
	"constellation/engine/kubeadm"
	"constellation/engine/sandbox/controlplane"
	"constellation/operator/api/v1alpha1"
)

var clientUse = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}

// nodeSubject is the subject that a node's kubelet requests for its client certificate.
func nodeSubject(name string) *x509.CertificateRequest {
	return &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}}
}

// TestClientRequestsAreJudged changes one property at a time: of the request of a joining machine,
// or of the data in the cluster and the cloud.
func TestClientRequestsAreJudged(t *testing.T) {
	const id = "sandbox://t/w"
	type subject struct {
		csr     *certificatesv1.CertificateSigningRequest
		req     *x509.CertificateRequest
		node    *corev1.Node          // nil: there is none
		joining *v1alpha1.JoiningNode // nil: there is none
		sky     *sky
	}
	is := func(s *subject, change func(*cloud.Instance)) {
		i := s.sky.instances[id]
		change(&i)
		s.sky.instances[id] = i
	}
	const confirmed = "the bootstrap token was issued to machine sandbox://t/w"
	for _, tt := range []struct {
		name   string
		change func(*subject)
		want   verdict
		why    string
	}{
		{name: "its own name", change: func(*subject) {}, want: approved, why: confirmed},
		{name: "a token of the join service of an older release", change: func(s *subject) {
			s.csr.Spec.Groups = []string{bootstrapGroup, "system:bootstrappers:kubeadm:default-node-token"}
		}, want: approved, why: confirmed},
		{name: "a repeated join, whose Node is not Ready", change: func(s *subject) {
			s.joining, s.node = nil, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w"}, Spec: corev1.NodeSpec{ProviderID: id}}
		}, want: approved, why: confirmed},

		{name: "a control plane's name", change: func(s *subject) { s.req = nodeSubject("control-plane-0") }, want: denied, why: `the bootstrap token was issued to another machine than "control-plane-0"`},
		{name: "an administrator's group", change: func(s *subject) { s.req.Subject.Organization = []string{"system:masters"} }, want: denied, why: `its subject is "CN=system:node:w,O=system:masters", want that of a node`},
		{name: "an additional group", change: func(s *subject) { s.req.Subject.Organization = []string{"system:nodes", "system:masters"} }, want: denied, why: `its subject is "CN=system:node:w,O=system:nodes+O=system:masters", want that of a node`},
		{name: "a user that is not a node", change: func(s *subject) { s.req.Subject.CommonName = "kubernetes-admin" }, want: denied, why: `its subject is "CN=kubernetes-admin,O=system:nodes", want that of a node`},
		{name: "a server's usage", change: func(s *subject) {
			s.csr.Spec.Usages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
		}, want: denied, why: `its usages are ["digital signature" "server auth"], not those of a client's certificate`},
		{name: "a name of a server", change: func(s *subject) { s.req.DNSNames = []string{"kubernetes"} }, want: denied, why: "it requests more than a subject"},
		{name: "a machine with another name in the cloud", change: func(s *subject) { is(s, func(i *cloud.Instance) { i.Name = "v" }) }, want: denied, why: "machine sandbox://t/w is called v, so it is not w"},
		{name: "no request", change: func(s *subject) { s.csr.Spec.Request = []byte("x") }, want: denied, why: "it is not one CERTIFICATE REQUEST in PEM"},

		{name: "a node that renews its own certificate", change: func(s *subject) { s.csr.Spec.Username, s.csr.Spec.Groups = "system:node:w", []string{"system:nodes"} }, want: foreign, why: "the requester did not use a bootstrap token"},
		{name: "a user with the name of a token", change: func(s *subject) { s.csr.Spec.Groups = []string{"system:authenticated"} }, want: foreign, why: "the requester did not use a bootstrap token"},
		{name: "a token that a person created", change: func(s *subject) {
			s.csr.Spec.Username, s.csr.Spec.Groups = "system:bootstrap:abcdef", []string{bootstrapGroup, "system:bootstrappers:kubeadm:default-node-token"}
		}, want: foreign, why: "the bootstrap token was not issued by the join service"},

		{name: "a Node that is Ready", change: func(s *subject) {
			s.node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}}
		}, want: undecided, why: "Node w is Ready already, so its machine has joined"},
		{name: "no JoiningNode yet", change: func(s *subject) { s.joining = nil }, want: undecided, why: "there is no JoiningNode w with a providerID"},
		{name: "a machine that the cloud does not find", change: func(s *subject) { delete(s.sky.instances, id) }, want: undecided, why: "the cloud does not find machine sandbox://t/w"},
		{name: "a machine that is being deleted", change: func(s *subject) { is(s, func(i *cloud.Instance) { i.State = cloud.Terminating }) }, want: undecided, why: "machine sandbox://t/w is being deleted"},
		{name: "a cloud that does not answer", change: func(s *subject) { s.sky.err = cloud.ErrUnavailable }, want: undecided, why: "the cloud returns no data about machine sandbox://t/w: cloud unavailable"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &subject{
				csr: &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{
					SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName, Username: kubeadm.TokenUser + kubeadm.TokenID("w"),
					Groups: []string{bootstrapGroup, kubeadm.JoinGroup, "system:authenticated"}, Usages: slices.Clone(clientUse),
				}},
				req: nodeSubject("w"), joining: joiningNode("w", refA, time.Minute),
				sky: &sky{instances: map[string]cloud.Instance{id: {Name: "w", ProviderID: id, IP: netip.MustParseAddr("10.42.0.20"), State: cloud.Ready}}},
			}
			tt.change(s)
			if s.csr.Spec.Request == nil {
				s.csr.Spec.Request = requestPEM(t, s.req, ecKey(t))
			}
			scheme := runtime.NewScheme()
			if err := clientgoscheme.AddToScheme(scheme); err != nil {
				t.Fatal(err)
			}
			if err := v1alpha1.AddToScheme(scheme); err != nil {
				t.Fatal(err)
			}
			b := fake.NewClientBuilder().WithScheme(scheme)
			if s.node != nil {
				b = b.WithObjects(s.node)
			}
			if s.joining != nil {
				b = b.WithObjects(s.joining)
			}
			r := &servingRequests{client: b.Build(), cloud: s.sky}
			got, why, _ := r.judgeClient(t.Context(), s.csr)
			if got != tt.want || why != tt.why {
				t.Errorf("%s: %s\nwant %s: %s", verdictNames[got], why, verdictNames[tt.want], tt.why)
			}
		})
	}
}

// TestBootstrapTokenOfAWorkerGetsNoOtherIdentity runs the real controller manager, with the binding by which
// kubeadm has every client certificate approved, and asks as a worker's bootstrap token for the
// worker's own identity and for a control plane's.
func TestBootstrapTokenOfAWorkerGetsNoOtherIdentity(t *testing.T) {
	c := newClusterWith(t, controlplane.Options{Controllers: true})
	services, err := render.Chart("constellation-services", "v1.1.0", namespace, providers.LocalValues(), map[string]any{"release": "v1.1.0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cp.Apply(t.Context(), services); err != nil {
		t.Fatal(err)
	}
	// As kubeadm makes it at init and at each upgrade.
	binding := func() *rbacv1.ClusterRoleBinding {
		return &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: autoApproval},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:certificates.k8s.io:certificatesigningrequests:nodeclient"},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:bootstrappers:kubeadm:default-node-token"}},
		}
	}
	kubeadms := []string{"system:bootstrappers", "system:bootstrappers:kubeadm:default-node-token", "system:authenticated"}
	c.create(binding())
	c.create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "kubeadm:kubelet-bootstrap"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:node-bootstrapper"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:bootstrappers:kubeadm:default-node-token"}},
	})
	c.node("control-plane-0", true)
	for _, name := range []string{"control-plane-0", "w"} {
		c.cloud.set(func(s *sky) {
			s.instances["sandbox://t/"+name] = cloud.Instance{Name: name, ProviderID: "sandbox://t/" + name, Group: workerGroup, Image: image2, State: cloud.Ready, IP: netip.MustParseAddr("10.42.0.20")}
		})
	}
	ask := func(t *testing.T, groups []string, request, node string) string {
		t.Helper()
		cfg := c.cp.Config()
		cfg.Impersonate = rest.ImpersonationConfig{UserName: kubeadm.TokenUser + kubeadm.TokenID("w"), Groups: groups}
		csr := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: request}, Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName, Usages: clientUse, Request: requestPEM(t, nodeSubject(node), ecKey(t)),
		}}
		if _, err := kubernetes.NewForConfigOrDie(cfg).CertificatesV1().CertificateSigningRequests().Create(t.Context(), csr, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		return request
	}
	answered := func(request, want string) {
		t.Helper()
		c.eventually("request "+request+" is answered: "+want, func() (string, bool) {
			var csr certificatesv1.CertificateSigningRequest
			c.get(request, &csr)
			var is []string
			for _, k := range csr.Status.Conditions {
				is = append(is, string(k.Type)+" "+k.Reason)
			}
			return fmt.Sprint(is), strings.Join(is, " ") == want && (len(csr.Status.Certificate) > 0 == strings.HasPrefix(want, "Approved"))
		})
	}
	// Without the policy, the operator and the token group, the attack succeeds.
	answered(ask(t, kubeadms, "before", "control-plane-0"), "Approved AutoApproved")

	policies, err := render.Chart("constellation-policies", "v1.1.0", namespace, nil, map[string]any{"release": "v1.1.0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cp.Apply(t.Context(), policies); err != nil {
		t.Fatal(err)
	}
	c.enforced()
	bound := c.cp.Config()
	bound.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + namespace + ":constellation-operator",
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
		Extra:    map[string][]string{"authentication.kubernetes.io/pod-name": {"constellation-operator-0"}},
	}
	bound.Wrap(c.denied.wrap)
	c.startWith(bound)
	c.eventually("kubeadm's binding is deleted", func() (string, bool) {
		return "still there", !c.get(autoApproval, &rbacv1.ClusterRoleBinding{})
	})
	c.create(joiningNode("w", refA, time.Minute))
	ours := []string{"system:bootstrappers", kubeadm.JoinGroup, "system:authenticated"}
	answered(ask(t, ours, "other", "control-plane-0"), "Denied NotThisMachine")
	answered(ask(t, ours, "own", "w"), "Approved MachineConfirmed")

	// A kubelet renews its own, which the controller manager approves as before, and no other's.
	c.create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "kubeadm:node-autoapprove-certificate-rotation"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:nodes"}},
	})
	renews := func(node string) error {
		cfg := c.cp.Config()
		cfg.Impersonate = rest.ImpersonationConfig{UserName: "system:node:w", Groups: []string{"system:nodes", "system:authenticated"}}
		csr := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "renewal-of-" + node}, Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName, Usages: clientUse, Request: requestPEM(t, nodeSubject(node), ecKey(t)),
		}}
		_, err := kubernetes.NewForConfigOrDie(cfg).CertificatesV1().CertificateSigningRequests().Create(t.Context(), csr, metav1.CreateOptions{})
		return err
	}
	if err := renews("w"); err != nil {
		t.Fatal(err)
	}
	answered("renewal-of-w", "Approved AutoApproved")
	if err := renews("control-plane-0"); err == nil {
		t.Error("a kubelet may request another node's certificate")
	}
	revoked := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "constellation-revoked-nodes", Namespace: namespace}, Data: map[string]string{"w": "{}"}}
	c.create(revoked)
	c.eventually("a revoked node may renew a certificate", func() (string, bool) {
		_ = c.admin.Delete(t.Context(), &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "renewal-of-w"}}) // of the attempt before
		err := renews("w")
		return fmt.Sprint(err), err != nil && strings.Contains(err.Error(), "this node was revoked")
	})
	if err := c.admin.Delete(t.Context(), revoked); err != nil {
		t.Fatal(err)
	}

	// A machine that was released from its group writes nothing until it is assigned again.
	spares := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: machines.SparesConfigMap, Namespace: namespace}, Data: map[string]string{"w": assignment(t, machines.Released), "control-plane-0": assignment(t, machines.Released)}}
	c.create(spares)
	again := func(what, want string) {
		t.Helper()
		c.eventually(what, func() (string, bool) {
			_ = c.admin.Delete(t.Context(), &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "renewal-of-w"}}) // of the attempt before
			err := renews("w")
			return fmt.Sprint(err), err == nil && want == "" || err != nil && want != "" && strings.Contains(err.Error(), want)
		})
	}
	again("a released machine may renew a certificate", "this machine was released from its group")
	spares.Data["w"] = assignment(t, machines.Assigned)
	if err := c.admin.Update(t.Context(), spares); err != nil {
		t.Fatal(err)
	}
	again("a machine that is assigned again may not renew a certificate", "")

	// An upgrade of a control plane by an older agent creates the binding again. Until the operator
	// removes it, the policy prevents approvals by the controller manager.
	c.create(binding())
	left := ask(t, kubeadms, "left", "control-plane-0")
	own := ask(t, kubeadms, "own-again", "w") // of a join service of an older release
	answered(own, "Approved MachineConfirmed")
	c.eventually("kubeadm's binding is deleted again", func() (string, bool) {
		return "still there", !c.get(autoApproval, &rbacv1.ClusterRoleBinding{})
	})
	var csr certificatesv1.CertificateSigningRequest
	if c.get(left, &csr); len(csr.Status.Conditions) > 0 {
		t.Errorf("request %s has conditions %v, want none", left, csr.Status.Conditions)
	}
}

// assignment is the record of a machine, as the operator writes it.
func assignment(t *testing.T, state string) string {
	t.Helper()
	b, err := json.Marshal(machines.Assignment{State: state, Incarnation: 1})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// enforced returns when the API server enforces the policies, all of which it reads at once.
func (c *cluster) enforced() {
	c.t.Helper()
	cfg := c.cp.Config()
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "system:node:w", Groups: []string{"system:nodes", "system:authenticated"}}
	kubelet, err := client.New(cfg, client.Options{Scheme: c.admin.Scheme()})
	if err != nil {
		c.t.Fatal(err)
	}
	probe := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w", Annotations: map[string]string{v1alpha1.AnnotationObsolete: "true"}}}
	c.eventually("the policies are enforced", func() (string, bool) {
		err := kubelet.Create(c.t.Context(), probe.DeepCopy(), client.DryRunAll)
		return fmt.Sprint(err), err != nil && strings.Contains(err.Error(), "constellation-nodes-kubelets")
	})
}
