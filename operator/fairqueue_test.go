package operator

import (
	"context"
	"crypto"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/engine/kubeadm"
	"constellation/engine/sandbox/controlplane"
	"constellation/internal/kubeletcsr"
)

// slowSky is a cloud with a delay for each answer.
type slowSky struct {
	*sky

	takes time.Duration
}

func (s slowSky) Instance(ctx context.Context, id string) (cloud.Instance, error) {
	select {
	case <-ctx.Done():
		return cloud.Instance{}, ctx.Err()
	case <-time.After(s.takes):
	}
	return s.sky.Instance(ctx, id)
}

// TestFloodOfRequestsDelaysNoOtherUser: a captured machine makes 500 requests of each kind while the
// operator runs. It approves the requests of a machine that joins and of an honest node within 2 s.
func TestFloodOfRequestsDelaysNoOtherUser(t *testing.T) {
	const flood, limit, issued = 500, 2 * time.Second, 10 * time.Second
	c := newClusterWith(t, controlplane.Options{Controllers: true})
	for _, b := range []*rbacv1.ClusterRoleBinding{
		{
			ObjectMeta: metav1.ObjectMeta{Name: "kubeadm:node-autoapprove-certificate-rotation"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:nodes"}},
		},
		{
			ObjectMeta: metav1.ObjectMeta{Name: "constellation:join"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:node-bootstrapper"},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: kubeadm.JoinGroup}},
		},
	} {
		c.create(b)
	}
	address := map[string]string{"captured": "10.42.0.20", "honest": "10.42.0.21", "new": "10.42.0.22"}
	for name, ip := range address {
		c.cloud.set(func(s *sky) {
			s.instances["sandbox://t/"+name] = cloud.Instance{Name: name, ProviderID: "sandbox://t/" + name, Group: workerGroup, Image: image2, State: cloud.Ready, IP: netip.MustParseAddr(ip)}
		})
	}
	c.node("captured", false)
	c.node("honest", false)
	node := func(name string) rest.ImpersonationConfig {
		return rest.ImpersonationConfig{UserName: kubeletcsr.UserPrefix + name, Groups: []string{kubeletcsr.Group, "system:authenticated"}}
	}
	token := func(name string) rest.ImpersonationConfig {
		return rest.ImpersonationConfig{UserName: kubeadm.TokenUser + kubeadm.TokenID(name), Groups: []string{bootstrapGroup, kubeadm.JoinGroup, "system:authenticated"}}
	}
	key := ecKey(t)
	request := func(signer, name string, key crypto.Signer) certificatesv1.CertificateSigningRequestSpec {
		if signer == certificatesv1.KubeletServingSignerName {
			return certificatesv1.CertificateSigningRequestSpec{SignerName: signer, Usages: signOnly, Request: requestPEM(t, &x509.CertificateRequest{
				Subject: nodeSubject(name).Subject, DNSNames: []string{name}, IPAddresses: []net.IP{net.ParseIP(address[name])},
			}, key)}
		}
		return certificatesv1.CertificateSigningRequestSpec{SignerName: signer, Usages: clientUse, Request: requestPEM(t, nodeSubject(name), key)}
	}
	as := func(who rest.ImpersonationConfig) kubernetes.Interface {
		cfg := c.cp.Config()
		cfg.Impersonate, cfg.QPS = who, -1
		return kubernetes.NewForConfigOrDie(cfg)
	}
	c.startCloud(c.access(), slowSky{c.cloud, 200 * time.Millisecond})
	// The requests of one machine by the thousand: serving certificates and renewals as a node, and
	// first certificates with a bootstrap token that it has kept.
	var wg sync.WaitGroup
	for what, f := range map[string]struct {
		who    rest.ImpersonationConfig
		signer string
	}{
		"serving": {node("captured"), certificatesv1.KubeletServingSignerName},
		"token":   {token("captured"), certificatesv1.KubeAPIServerClientKubeletSignerName},
		"renewal": {node("captured"), certificatesv1.KubeAPIServerClientKubeletSignerName},
	} {
		api, spec := as(f.who).CertificatesV1().CertificateSigningRequests(), request(f.signer, "captured", key)
		for part := range 4 {
			wg.Go(func() {
				for i := range flood / 4 {
					csr := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d-%d", what, part, i)}, Spec: spec}
					if _, err := api.Create(t.Context(), csr, metav1.CreateOptions{}); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	answered := func() (n int) {
		var all certificatesv1.CertificateSigningRequestList
		if err := c.admin.List(t.Context(), &all); err != nil {
			t.Fatal(err)
		}
		for i := range all.Items {
			if len(all.Items[i].Status.Conditions) > 0 {
				n++
			}
		}
		return n
	}
	c.eventually("the operator answers requests", func() (string, bool) { n := answered(); return fmt.Sprint(n), n > 0 })

	for name, ask := range map[string]struct {
		who    rest.ImpersonationConfig
		signer string
	}{
		"new":    {token("new"), certificatesv1.KubeAPIServerClientKubeletSignerName},
		"honest": {node("honest"), certificatesv1.KubeletServingSignerName},
	} {
		if name == "new" {
			c.create(joiningNode("new", refA, time.Minute))
		}
		start := time.Now()
		csr := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "of-" + name}, Spec: request(ask.signer, name, ecKey(t))}
		if _, err := as(ask.who).CertificatesV1().CertificateSigningRequests().Create(t.Context(), csr, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		for len(csr.Status.Conditions) == 0 {
			if time.Since(start) > limit {
				t.Fatalf("%s: the request was not approved within %s", name, limit)
			}
			if err := c.admin.Get(t.Context(), client.ObjectKeyFromObject(csr), csr); err != nil {
				t.Fatal(err)
			}
		}
		if csr.Status.Conditions[0].Type != certificatesv1.CertificateApproved {
			t.Fatalf("%s: conditions %v", name, csr.Status.Conditions)
		}
		approved := time.Since(start)
		c.eventually(name+" has its certificate", func() (string, bool) {
			c.get(csr.Name, csr)
			return "none", len(csr.Status.Certificate) > 0
		})
		if took := time.Since(start); took > issued {
			t.Errorf("%s: the certificate was issued after %s, want %s", name, took, issued)
		}
		t.Logf("%s: approved after %s, issued after %s; %d of %d requests are answered", name, approved.Round(time.Millisecond), time.Since(start).Round(time.Millisecond), answered(), 3*flood)
	}
	// None is dropped: the requests of the captured machine continue being answered.
	n := answered()
	c.eventually("more requests are judged", func() (string, bool) { return fmt.Sprint(n), answered() > n })
}

func TestUsersAreServedRoundRobin(t *testing.T) {
	q := newFairQueue("", nil)
	defer q.ShutDown()
	for i := range 100 {
		q.Add(certificateRequest{"flood", fmt.Sprint(i)})
	}
	q.Add(certificateRequest{"a", "1"})
	q.Add(certificateRequest{"b", "1"})
	q.Add(certificateRequest{"a", "2"})
	var got []string
	for range 6 {
		r, _ := q.Get()
		got = append(got, r.user+r.name)
		q.Done(r)
	}
	if want := []string{"flood0", "a1", "b1", "flood1", "a2", "flood2"}; !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
	if q.Len() != 97 {
		t.Errorf("%d requests are left, want 97", q.Len())
	}
}

func TestUserHasABucketOfJudgments(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newUserLimits(3, time.Second, time.Now)
		start, reported := time.Now(), 0
		var judged []string
		waiting := []string{"0", "1", "2", "3", "4", "5"}
		for len(waiting) > 0 {
			name := waiting[0]
			waiting = waiting[1:]
			r := certificateRequest{"flood", name}
			pause, report := l.begin(r)
			if report {
				reported++
			}
			if pause > 0 {
				waiting = append(waiting, name)
				time.Sleep(10 * time.Millisecond)
				continue
			}
			judged = append(judged, fmt.Sprintf("%s@%.0fs", name, time.Since(start).Seconds()))
			l.end(r)
		}
		if want := "0@0s 1@0s 2@0s 3@1s 4@2s 5@3s"; strings.Join(judged, " ") != want {
			t.Errorf("judged %v, want %s", judged, want)
		}
		if reported != 1 {
			t.Errorf("the delay was logged %d times in three seconds, want once", reported)
		}
		if pause, _ := l.begin(certificateRequest{"honest", "0"}); pause != 0 {
			t.Errorf("another user waits %s", pause)
		}
		if pause, _ := l.begin(certificateRequest{"honest", "1"}); pause != busyPause {
			t.Errorf("a second request is judged beside the first: pause %s", pause)
		}
		l.end(certificateRequest{"honest", "0"})
		l.forget(certificateRequest{"honest", "1"}) // it was deleted meanwhile
		time.Sleep(time.Hour)
		l.begin(certificateRequest{"other", "0"})
		if len(l.users) != 1 {
			t.Errorf("%d users are remembered after an hour, want 1", len(l.users))
		}
	})
}
