package kube

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	adoption "constellation/engine/adopt"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/distribution"
	"constellation/engine/kube/preflight"
	"constellation/engine/plan"
)

// surveyed is a Foreign that keeps the facts of its preflight.
type surveyed struct {
	*Foreign
	facts adoption.Facts
}

// Preflight implements [check.Foreign].
func (s *surveyed) Preflight(ctx context.Context, hops []check.PreflightRequest, emit func(plan.Event)) ([][]plan.Finding, error) {
	found, facts, err := preflight.Survey(ctx, s.config, hops, emit)
	if err != nil {
		return nil, fmt.Errorf("run preflight checks: %w", classify(err))
	}
	s.facts = facts
	if n, ok := preflight.NotAllowed(s.requests.Denied()); ok {
		found[0] = append(found[0], n)
	}
	return found, nil
}

// Examine reports what adopting a cluster would do. It sends the requests of a check.
func (Clusters) Examine(ctx context.Context, s cluster.Selected, r adoption.Request, emit func(plan.Event)) (adoption.Report, error) {
	f, err := openSelected(s, s.RequestTimeout)
	if err != nil {
		return adoption.Report{}, err
	}
	r.Context, r.Server = s.Context, s.Server
	if r.Kubernetes, err = f.Version(ctx); err != nil {
		return adoption.Report{}, check.ForeignDown(s, err)
	}
	facts := f.Facts(ctx)
	facts.GitVersion = r.Kubernetes
	r.Distribution = distribution.Recognise(facts)
	if n := r.Distribution.Name; n != distribution.Kubeadm && n != distribution.Unknown {
		return noted(adoption.Examine(adoption.Facts{}, r, time.Now()), s), nil
	}
	x := &surveyed{Foreign: f}
	// A hop to the running version: what stands against the next minor does not concern an adoption.
	k, err := check.ForeignCluster(ctx, x, s, check.ForeignRequest{Kubernetes: r.Kubernetes}, time.Now(), emit)
	if err != nil {
		return adoption.Report{}, err
	}
	r.Distribution, r.Found = k.Distribution, k.Findings()
	x.facts.Certificates = append(x.facts.Certificates, ownCertificates(s.Kubeconfig)...)
	return noted(adoption.Examine(x.facts, r, time.Now()), s), nil
}

func noted(r adoption.Report, s cluster.Selected) adoption.Report {
	if s.Note != "" {
		r.Notes = append(r.Notes, s.Note)
	}
	return r
}

// ownCertificates returns the client certificate of a kubeconfig, if it has one.
func ownCertificates(kubeconfig []byte) (out []adoption.Certificate) {
	c, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil
	}
	for _, user := range c.AuthInfos {
		block, _ := pem.Decode(user.ClientCertificateData)
		if block == nil {
			continue
		}
		if x, err := x509.ParseCertificate(block.Bytes); err == nil {
			out = append(out, adoption.Certificate{Of: "client certificate of your kubeconfig", NotBefore: x.NotBefore.UTC(), NotAfter: x.NotAfter.UTC()})
		}
	}
	return out
}

// Kubeconfig returns a kubeconfig with the selected context alone, which any program can use.
func (Clusters) Kubeconfig(a cluster.Access) ([]byte, error) {
	s, err := Select(a, "")
	return s.Kubeconfig, err
}
