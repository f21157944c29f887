package preflight

import (
	"crypto/x509"
	"slices"
	"testing"
	"time"
)

// Behind a load balancer all API servers have one address, so their certificates are named by node.
func TestCertificatesOfServersAreNamedByNode(t *testing.T) {
	t.Parallel()
	w := clean()
	w.addServerNode("control-plane-1", "v1.36.4", "3.6.8-0")
	ca := certificate(10*365*day, 9*365*day)
	of := func(left time.Duration, names ...string) *x509.Certificate {
		c := certificate(365*day, left)
		c.DNSNames = names
		return c
	}
	w.servers = []apiServer{
		{address: "10.0.0.1:6443", ca: ca, cert: of(3*day, "kubernetes", "control-plane-1")},
		{address: "10.0.0.1:6443", ca: ca, cert: of(2*day, "control-plane-0", "kubernetes")},
		{address: "10.0.0.1:6443", ca: ca, cert: of(1*day, "kubernetes")},
	}
	var got []string
	for _, c := range w.adoptionFacts().Certificates {
		got = append(got, c.Of)
	}
	if want := []string{"API server 10.0.0.1:6443", "API server of control-plane-0", "API server of control-plane-1", "CA of the cluster"}; !slices.Equal(got, want) {
		t.Errorf("certificates of %q, want %q", got, want)
	}
}
