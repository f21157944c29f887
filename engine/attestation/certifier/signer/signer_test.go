package signer

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/attestation/certifier"
	"constellation/engine/attestation/keyprocess"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/attest/attesttest/lab"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/internal/mutation"
	"constellation/internal/syncbuffer"
	"constellation/internal/testneeds"
)

// callerEnv has a copy of the test binary call the certifier at a socket, as another user.
const callerEnv = "CONSTELLATION_TEST_CERTIFIER"

func TestMain(m *testing.M) {
	if socket := os.Getenv(callerEnv); socket != "" {
		_, _, err := certifier.Client{Socket: socket}.Authorities(context.Background())
		fmt.Println(err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

var clusterID = bytes.Repeat([]byte{7}, 32)

// site is an emulated project, whose owner has a secret.
type site struct {
	t                      *testing.T
	p                      *lab.Project
	workers, controlPlanes string
	owner                  *Owner
	log                    syncbuffer.Buffer
	dir                    string
	all                    []*plane
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{t: t, p: lab.NewProject(t), owner: ownerOf(t, 1), dir: t.TempDir()}
	s.workers, s.controlPlanes = s.p.Group("workers", cloud.Worker, gcptest.UID), s.p.Group("control-planes", cloud.ControlPlane, gcptest.UID)
	t.Cleanup(s.scan)
	return s
}

func ownerOf(t testing.TB, seed byte) *Owner {
	t.Helper()
	o, err := NewOwner(bytes.Repeat([]byte{seed}, SecretSize))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// plane is a control plane with a certifier.
type plane struct {
	certifier.Client
	vm   *lab.VM
	dir  string
	stop func()
	now  atomic.Int64 // ahead of the clock
}

// start makes a control plane a member and starts a certifier with keys, as Keys.Encode returns them.
func (s *site) start(keys []byte) *plane {
	s.t.Helper()
	p := &plane{vm: s.p.Start(s.controlPlanes, nil), dir: filepath.Join(s.dir, fmt.Sprint(len(s.all)))}
	if err := os.Mkdir(p.dir, 0o700); err != nil {
		s.t.Fatal(err)
	}
	if err := Store(s.t.Context(), p.dir, p.vm.TPM, clusterID, keys); err != nil {
		s.t.Fatal(err)
	}
	p.vm.Join(clusterID)
	s.run(p)
	s.all = append(s.all, p)
	return p
}

// run runs the certifier of a control plane.
func (s *site) run(p *plane) {
	s.t.Helper()
	server, err := Open(s.t.Context(), Config{
		Dir: p.dir, TPM: p.vm.TPM, ClusterID: clusterID, Log: slog.New(slog.NewJSONHandler(&s.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		now: func() time.Time { return time.Now().Add(time.Duration(p.now.Load())) },
	})
	if err != nil {
		s.t.Fatal(err)
	}
	p.Socket = filepath.Join(p.dir, "certifier.sock")
	l, err := keyprocess.Listen(s.t.Context(), p.Socket, slog.New(slog.NewJSONHandler(&s.log, nil)))
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx, l) }()
	p.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			s.t.Errorf("the certifier ended: %v", err)
		}
	})
	s.t.Cleanup(p.stop)
}

// keys returns the keys of the owner's generation.
func (s *site) keys(generation uint32) []byte {
	s.t.Helper()
	k, err := s.owner.Keys(generation)
	if err != nil {
		s.t.Fatal(err)
	}
	b, err := k.Encode()
	if err != nil {
		s.t.Fatal(err)
	}
	return b
}

// scan fails the test if a secret key of the owner's first generations is in a log or a file of a certifier.
func (s *site) scan() {
	canaries := map[string][]byte{}
	for g := uint32(1); g <= 3; g++ {
		k, err := s.owner.Keys(g)
		if err != nil {
			s.t.Fatal(err)
		}
		raw, err := k.key.Bytes()
		if err != nil {
			s.t.Fatal(err)
		}
		name := fmt.Sprintf("the key of generation %d", g)
		canaries[name], canaries[name+" in hex"], canaries[name+" in base64"] = raw, []byte(hex.EncodeToString(raw)), []byte(base64.StdEncoding.EncodeToString(raw))
	}
	canaries["the owner's secret"] = s.owner.secret
	look := func(where string, b []byte) {
		for name, c := range canaries {
			if bytes.Contains(b, c) {
				s.t.Errorf("%s has %s", where, name)
			}
		}
	}
	look("the log", []byte(s.log.String()))
	for _, p := range s.all {
		err := filepath.WalkDir(p.dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			b, err := os.ReadFile(path)
			look(path, b)
			return err
		})
		if err != nil {
			s.t.Error(err)
		}
	}
}

// judge is a validator of the machine v that trusts the certifier of p, or none.
func (s *site) judge(v *lab.VM, p *plane, o attestation.Options) attestation.Validator {
	s.t.Helper()
	if p != nil {
		var err error
		if o.Certifiers, _, err = p.Authorities(s.t.Context()); err != nil {
			s.t.Fatal(err)
		}
	}
	return v.Method().Validator(s.p.Roots(), lab.Measurements(), o)
}

var nonce = bytes.Repeat([]byte{42}, attestation.MaxUserData)

// machine is a machine with its issuer, which has the certificate.
type machine struct {
	*lab.VM
	issuer *attestation.VendorIssuer
}

func (s *site) machine(group string) machine {
	s.t.Helper()
	v := s.p.Start(group, nil)
	return machine{v, v.Issuer().(*attestation.VendorIssuer)}
}

func (m machine) evidence(t *testing.T) []byte {
	t.Helper()
	doc, err := m.issuer.Issue(t.Context(), nonce)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

// certify has the certifier of p certify m, as a join service does. Unless edit is nil, it changes what the certificate states.
func (s *site) certify(p *plane, m machine, edit func(*attestation.Identity)) ([]byte, error) {
	s.t.Helper()
	st, err := s.judge(p.vm, nil, attestation.Options{UID: gcptest.UID}).Validate(s.t.Context(), m.evidence(s.t), nonce)
	if err != nil {
		return nil, err
	}
	if edit != nil {
		edit(&st.Identity)
	}
	return s.exchange(p, m, st)
}

func (s *site) exchange(p *plane, m machine, st attestation.Statement) ([]byte, error) {
	s.t.Helper()
	request, err := m.issuer.RequestCertificate(s.t.Context())
	if err != nil {
		return nil, err
	}
	c, err := p.Begin(s.t.Context(), request)
	if err != nil {
		return nil, err
	}
	answer, err := m.issuer.AnswerChallenge(s.t.Context(), c.Challenge)
	if err != nil {
		return nil, err
	}
	return c.Finish(s.t.Context(), answer, st)
}

// certified is certify, and m uses the certificate from then on.
func (s *site) certified(p *plane, m machine, edit func(*attestation.Identity)) []byte {
	s.t.Helper()
	der, err := s.certify(p, m, edit)
	if err == nil {
		err = m.issuer.UseCertificate(der)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return der
}

// withoutAPI takes the right to ask the vendor's API until the returned function is called.
func (s *site) withoutAPI() (again func()) {
	s.p.Revoke("compute.instances.get")
	return func() { s.p.Grant("compute.instances.get") }
}

// TestCertificateTakesThePlaceOfTheAPI goes from a vendor's evidence and the API's answer to our certificate, and judges evidence
// with it while the API refuses to answer.
func TestCertificateTakesThePlaceOfTheAPI(t *testing.T) {
	s := newSite(t)
	p := s.start(s.keys(1))
	m := s.machine(s.workers)
	before := m.evidence(t)
	s.certified(p, m, nil)
	again := s.withoutAPI()
	defer again()
	doc := m.evidence(t)
	st, err := s.judge(p.vm, p, attestation.Options{UID: gcptest.UID, Role: cloud.Worker}).Validate(t.Context(), doc, nonce)
	if err != nil || st.Identity != m.Identity() || !st.Certified || st.Key == "" || !st.Attested {
		t.Fatalf("got %+v, %v; want %+v", st, err, m.Identity())
	}
	if !strings.Contains(s.log.String(), `"msg":"attestation key certified"`) || !strings.Contains(s.log.String(), m.Certified.Name) || !strings.Contains(s.log.String(), st.Key) {
		t.Errorf("the signature is not in the log:\n%s", &s.log)
	}
	if _, err := s.judge(p.vm, p, attestation.Options{}).Validate(t.Context(), before, nonce); !errors.Is(err, cloud.ErrDenied) {
		t.Errorf("without a certificate: %v, want the API's refusal", err)
	}
	if _, err := s.judge(p.vm, nil, attestation.Options{}).Validate(t.Context(), doc, nonce); !errors.Is(err, cloud.ErrDenied) {
		t.Errorf("a verifier that trusts no certifier: %v, want the API's refusal", err)
	}
	if _, err := s.exchange(p, m, st); err == nil || !strings.Contains(err.Error(), "did not confirm") {
		t.Errorf("a certificate was renewed without the API: %v", err)
	}
	for _, tt := range []struct {
		name string
		o    attestation.Options
		data []byte
		doc  []byte
		is   error
		text string
	}{
		{name: "another connection", data: nonce[1:], is: attestation.ErrQuote},
		{name: "another role is wanted", o: attestation.Options{Role: cloud.ControlPlane}, is: attestation.ErrIdentity, text: "is a worker"},
		{name: "another cluster is wanted", o: attestation.Options{UID: "another-cluster"}, is: attestation.ErrIdentity},
		{name: "after the certificate's end", o: attestation.Options{Now: func() time.Time { return time.Now().Add(certifier.Life + time.Minute) }}, is: cloud.ErrDenied, text: "certificate has expired"},
		{name: "a used machine is wanted", o: attestation.Options{PCR15: attestation.PCR15ClusterID(clusterID)}, is: attestation.ErrMember},
	} {
		t.Run(tt.name, func(t *testing.T) {
			data := tt.data
			if data == nil {
				data = nonce
			}
			if _, err := s.judge(p.vm, p, tt.o).Validate(t.Context(), doc, data); !errors.Is(err, tt.is) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v; want %v with %q", err, tt.is, tt.text)
			}
		})
	}
}

// TestMutatedCertificates judges documents with a changed certificate, and changed documents with one. While the API does not answer,
// none may be accepted.
func TestMutatedCertificates(t *testing.T) {
	s := newSite(t)
	p := s.start(s.keys(1))
	m := s.machine(s.workers)
	s.certified(p, m, nil)
	doc := m.evidence(t)
	parts, err := attestationtest.ParseVendorDocument(doc)
	if err != nil {
		t.Fatal(err)
	}
	defer s.withoutAPI()()
	judge := s.judge(p.vm, p, attestation.Options{})
	if _, err := judge.Validate(t.Context(), doc, nonce); err != nil {
		t.Fatal(err)
	}
	right := parts.OfCertifier
	mutations := 300
	if !testing.Short() {
		mutations = 4000
	}
	mutations = testneeds.Number(t, "CONSTELLATION_EVIDENCE_MUTATIONS", mutations)
	refused := map[string]int{}
	for seed := range mutations {
		r := mathrand.New(mathrand.NewPCG(uint64(seed), 24))
		parts.OfCertifier = mutation.Bytes(r, right)
		inner, err := parts.Document()
		if err != nil {
			t.Fatal(err)
		}
		for where, b := range map[string][]byte{"the certificate": inner, "the document": mutation.Bytes(r, doc)} {
			if st, err := judge.Validate(t.Context(), b, nonce); err == nil {
				t.Errorf("seed %d: a change of %s was accepted: %+v", seed, where, st)
			} else {
				refused[where]++
			}
		}
	}
	t.Logf("%d mutations of each, refused: %v", mutations, refused)
}

// TestCertifierCannotMakeMachines has certificates of the certifier's real key that state what the vendor did not certify. A thief of
// the key, or a join service that was deceived, makes these.
func TestCertifierCannotMakeMachines(t *testing.T) {
	s := newSite(t)
	p := s.start(s.keys(1))
	stranger := s.start(func() []byte { // of another cluster
		k, err := ownerOf(t, 2).Keys(1)
		if err != nil {
			t.Fatal(err)
		}
		b, err := k.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}())
	for _, tt := range []struct {
		name string
		by   *plane
		edit func(*attestation.Identity)
		text string
	}{
		{name: "another provider ID", edit: func(id *attestation.Identity) {
			id.ProviderID = strings.Replace(id.ProviderID, "demo-project", "another-project", 1)
		}, text: "the provider ID of"},
		{name: "another UID", edit: func(id *attestation.Identity) { id.UID = "another-cluster" }, text: "the UID of the cluster of"},
		{name: "a reused name", edit: func(id *attestation.Identity) { id.Incarnation += "0" }, text: "the number of"},
		{name: "another name", edit: func(id *attestation.Identity) { id.Name = "another" }, text: "the name of"},
		{name: "another cluster's certifier", by: stranger, text: "signed by unknown authority"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m, by := s.machine(s.workers), p
			if tt.by != nil {
				by = tt.by
			}
			s.certified(by, m, tt.edit)
			doc := m.evidence(t)
			// The API knows the machine, so its word counts.
			if st, err := s.judge(p.vm, p, attestation.Options{}).Validate(t.Context(), doc, nonce); err != nil || st.Certified || st.Identity != m.Identity() {
				t.Errorf("with the API: %+v, %v", st, err)
			}
			defer s.withoutAPI()()
			if _, err := s.judge(p.vm, p, attestation.Options{}).Validate(t.Context(), doc, nonce); !errors.Is(err, cloud.ErrDenied) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("without the API: %v; want %q", err, tt.text)
			}
		})
	}
	t.Run("the certificate of another machine", func(t *testing.T) {
		victim, thief := s.machine(s.controlPlanes), s.machine(s.workers)
		der := s.certified(p, victim, nil)
		if err := thief.issuer.UseCertificate(der); err != nil {
			t.Fatal(err)
		}
		parts, err := attestationtest.ParseVendorDocument(thief.evidence(t))
		if err != nil || parts.OfCertifier != nil {
			t.Fatalf("the issuer uses the certificate of another key: %v", err)
		}
		parts.OfCertifier = der
		doc, err := parts.Document()
		if err != nil {
			t.Fatal(err)
		}
		for _, trust := range []*plane{p, nil} {
			if _, err := s.judge(p.vm, trust, attestation.Options{}).Validate(t.Context(), doc, nonce); !errors.Is(err, attestation.ErrDocument) {
				t.Errorf("got %v", err)
			}
		}
	})
	t.Run("a machine of another project", func(t *testing.T) {
		m := s.machine(s.workers)
		s.certified(p, m, nil)
		view := s.p.ViewOf(lab.Rewrite(s.p.MetadataOf(p.vm.Certified.Name), gcptest.Project, "another-project"))
		roots, _, err := p.Authorities(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		v := s.p.MethodOf(view).Validator(s.p.Roots(), lab.Measurements(), attestation.Options{Certifiers: roots})
		if _, err := v.Validate(t.Context(), m.evidence(t), nonce); !errors.Is(err, attestation.ErrIdentity) || !strings.Contains(err.Error(), "project") {
			t.Errorf("got %v", err)
		}
	})
}

// TestCertifierRefuses has requests that get no certificate.
func TestCertifierRefuses(t *testing.T) {
	s := newSite(t)
	p := s.start(s.keys(1))
	m, other := s.machine(s.workers), s.machine(s.workers)
	st, err := s.judge(p.vm, nil, attestation.Options{}).Validate(t.Context(), m.evidence(t), nonce)
	if err != nil {
		t.Fatal(err)
	}
	begin := func(m machine) *certifier.Certification {
		t.Helper()
		request, err := m.issuer.RequestCertificate(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		c, err := p.Begin(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	refused := func(t *testing.T, err error, text string) {
		t.Helper()
		if e := (*keyprocess.RefusedError)(nil); !errors.As(err, &e) || !strings.Contains(err.Error(), text) || !strings.Contains(s.log.String(), "certification refused") {
			t.Errorf("got %v, want %q", err, text)
		}
	}
	answer := func(m machine, c *certifier.Certification) []byte {
		t.Helper()
		a, err := m.issuer.AnswerChallenge(t.Context(), c.Challenge)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	t.Run("the TPM of another machine", func(t *testing.T) {
		if _, err := other.issuer.AnswerChallenge(t.Context(), begin(m).Challenge); err == nil {
			t.Error("it answered")
		}
	})
	t.Run("the request of another machine", func(t *testing.T) {
		c := begin(other)
		_, err := c.Finish(t.Context(), answer(other, c), st)
		refused(t, err, "the request is for the key")
	})
	t.Run("the answer to another challenge", func(t *testing.T) {
		_, err := begin(m).Finish(t.Context(), answer(m, begin(m)), st)
		refused(t, err, "to another challenge")
	})
	t.Run("a second answer", func(t *testing.T) {
		c := begin(m)
		a := answer(m, c)
		if _, err := c.Finish(t.Context(), a, st); err != nil {
			t.Fatal(err)
		}
		_, err := c.Finish(t.Context(), a, st)
		refused(t, err, "was answered")
	})
	t.Run("a late answer", func(t *testing.T) {
		c := begin(m)
		a := answer(m, c)
		p.now.Store(int64(challengeLife + time.Second))
		_, err := c.Finish(t.Context(), a, st)
		p.now.Store(0)
		refused(t, err, "is too old")
		c = begin(m)
		a = answer(m, c)
		p.stop()
		s.run(p) // a restart forgets challenges
		_, err = c.Finish(t.Context(), a, st)
		refused(t, err, "is not known")
	})
	t.Run("a key in a file", func(t *testing.T) {
		request, _, err := attestation.RequestIdentity(t.Context(), t.TempDir(), attestation.NoTPM)
		if err != nil {
			t.Fatal(err)
		}
		c, err := p.Begin(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.Finish(t.Context(), []byte(`{"version":1}`), st)
		refused(t, err, "the request is for the key")
	})
	t.Run("a machine without an incarnation", func(t *testing.T) {
		c, nameless := begin(m), st
		nameless.Identity.Incarnation = ""
		_, err := c.Finish(t.Context(), answer(m, c), nameless)
		refused(t, err, "incarnation")
	})
	t.Run("no request", func(t *testing.T) {
		if _, err := p.Begin(t.Context(), []byte("{}")); err == nil {
			t.Error("it was accepted")
		}
	})
	t.Run("more challenges than are remembered", func(t *testing.T) {
		c := begin(m)
		a := answer(m, c)
		server := &Server{c: Config{now: time.Now}, pending: map[string]pending{}}
		for n := range maxChallenges + 5 {
			id := fmt.Sprint(n)
			server.remember(id, pending{until: time.Now().Add(time.Hour)})
		}
		if len(server.pending) != maxChallenges || len(server.order) != maxChallenges {
			t.Errorf("%d and %d are remembered", len(server.pending), len(server.order))
		}
		if _, err := server.take("4"); err == nil {
			t.Error("the oldest one is remembered")
		}
		if _, err := server.take("5"); err != nil {
			t.Error(err)
		}
		if _, err := c.Finish(t.Context(), a, st); err != nil {
			t.Error(err)
		}
	})
}

// TestKeysOutliveAllControlPlanes replaces all control planes, one after the other. It then loses all of them.
func TestKeysOutliveAllControlPlanes(t *testing.T) {
	s := newSite(t)
	p := s.start(s.keys(1))
	m := s.machine(s.workers)
	s.certified(p, m, nil)
	accepted := func(p *plane) {
		t.Helper()
		defer s.withoutAPI()()
		if st, err := s.judge(p.vm, p, attestation.Options{}).Validate(t.Context(), m.evidence(t), nonce); err != nil || !st.Certified {
			t.Fatalf("a certificate of an earlier control plane: %v", err)
		}
	}
	for range 3 {
		worker := s.machine(s.workers).Identity()
		if _, err := p.HandOver(t.Context(), worker); err == nil || !strings.Contains(err.Error(), "only control planes") {
			t.Fatalf("a worker got the keys: %v", err)
		}
		next := s.p.Start(s.controlPlanes, nil)
		keys, err := p.HandOver(t.Context(), next.Identity())
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(s.log.String(), `"msg":"certifier keys handed over"`) || !strings.Contains(s.log.String(), next.Certified.Name) {
			t.Error("the hand-over is not in the log")
		}
		old := p
		p = s.start(keys)
		old.stop()
		accepted(p)
		s.certified(p, s.machine(s.workers), nil)
	}
	p.stop()
	// The owner makes a cluster again, with the secret.
	p = s.start(s.keys(1))
	accepted(p)
	another, err := ownerOf(t, 9).Keys(1)
	if err != nil {
		t.Fatal(err)
	}
	own, err := s.owner.Keys(1)
	if err != nil {
		t.Fatal(err)
	}
	if another.key.Equal(own.key) {
		t.Error("two secrets have one key")
	}
}

// TestRestartAndReboot opens a certifier again, and on machines that must not read its keys.
func TestRestartAndReboot(t *testing.T) {
	s := newSite(t)
	p := s.start(s.keys(1))
	m := s.machine(s.workers)
	s.certified(p, m, nil)
	p.stop()
	s.run(p)
	if st, err := s.judge(p.vm, p, attestation.Options{}).Validate(t.Context(), m.evidence(t), nonce); err != nil || !st.Certified {
		t.Errorf("after a restart: %v", err)
	}
	p.stop()
	c := Config{Dir: p.dir, TPM: p.vm.TPM, ClusterID: clusterID}
	t.Run("the disk in another machine", func(t *testing.T) {
		thief := s.p.Start(s.controlPlanes, nil)
		thief.Join(clusterID)
		stolen := c
		stolen.TPM = thief.TPM
		if _, err := Open(t.Context(), stolen); !errors.Is(err, attestation.ErrSealed) || !strings.Contains(err.Error(), "replace it") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no keys", func(t *testing.T) {
		empty := c
		empty.Dir = t.TempDir()
		if _, err := Open(t.Context(), empty); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("another boot loader", func(t *testing.T) {
		p.vm.Measure(4, "another boot loader")
		if _, err := Open(t.Context(), c); !errors.Is(err, attestation.ErrSealed) || !strings.Contains(err.Error(), "PCR 4") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("malformed keys", func(t *testing.T) {
		good := s.keys(1)
		for n, b := range [][]byte{nil, []byte("{}"), good[:len(good)-2], bytes.Replace(good, []byte(`"version":1`), []byte(`"version":2`), 1), bytes.Replace(good, []byte(`"generation":1`), []byte(`"generation":0`), 1), append(bytes.Clone(good), '{')} {
			if err := Store(t.Context(), t.TempDir(), p.vm.TPM, clusterID, b); err == nil {
				t.Errorf("%d was stored", n)
			}
		}
	})
}

// TestRotation has two control planes that get the next keys at different times.
func TestRotation(t *testing.T) {
	s := newSite(t)
	first, second := s.start(s.keys(1)), s.start(s.keys(1))
	before, after := s.machine(s.workers), s.machine(s.workers)
	s.certified(first, before, nil)
	rotation, err := s.owner.Rotation(1, false)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // a repeated one changes nothing
		if g, err := first.Rotate(t.Context(), rotation); err != nil || g != 2 {
			t.Fatalf("generation %d, %v", g, err)
		}
	}
	if n := strings.Count(s.log.String(), `"msg":"certifier keys rotated"`); n != 1 {
		t.Errorf("%d rotations are in the log", n)
	}
	s.certified(first, after, nil)
	certified := func(p *plane, m machine, o attestation.Options, want bool) {
		t.Helper()
		st, err := s.judge(p.vm, p, o).Validate(t.Context(), m.evidence(t), nonce)
		if err != nil || st.Certified != want {
			t.Errorf("certified %t, %v; want %t", st.Certified, err, want)
		}
	}
	certified(first, before, attestation.Options{}, true)
	certified(first, after, attestation.Options{}, true)
	certified(second, before, attestation.Options{}, true)
	certified(second, after, attestation.Options{}, false) // until it has the rotation, the API decides
	if _, err := second.Rotate(t.Context(), rotation); err != nil {
		t.Fatal(err)
	}
	certified(second, after, attestation.Options{}, true)
	t.Run("a restart and a new control plane have both", func(t *testing.T) {
		first.stop()
		s.run(first)
		certified(first, before, attestation.Options{}, true)
		certified(first, after, attestation.Options{}, true)
		keys, err := first.HandOver(t.Context(), second.vm.Identity())
		if err != nil {
			t.Fatal(err)
		}
		third := s.start(keys)
		certified(third, before, attestation.Options{}, true)
		certified(third, after, attestation.Options{}, true)
	})
	t.Run("the former authority ends", func(t *testing.T) {
		second.now.Store(int64(formerLife + time.Hour))
		certified(second, before, attestation.Options{}, false)
		certified(second, after, attestation.Options{}, true)
		second.now.Store(0)
	})
	t.Run("a cluster that lost all control planes", func(t *testing.T) {
		restored := s.start(s.keys(2))
		certified(restored, after, attestation.Options{}, true)
	})
	third, err := s.owner.Rotation(2, false)
	if err != nil {
		t.Fatal(err)
	}
	fourth, err := s.owner.Rotation(3, false)
	if err != nil {
		t.Fatal(err)
	}
	forged, err := ownerOf(t, 9).Rotation(2, false)
	if err != nil {
		t.Fatal(err)
	}
	var mixed, good envelope
	if err := errors.Join(json.Unmarshal(forged, &mixed), json.Unmarshal(third, &good)); err != nil {
		t.Fatal(err)
	}
	mixed.Signature = good.Signature
	spliced, err := json.Marshal(mixed)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		b    []byte
		text string
	}{
		{name: "of another owner", b: forged, text: "the owner did not sign it"},
		{name: "with the signature of another one", b: spliced, text: "the owner did not sign it"},
		{name: "of an earlier generation", b: rotation, text: ""},
		{name: "that skips a generation", b: fourth, text: "leads to generation 4"},
		{name: "that is cut off", b: third[:len(third)-1], text: "malformed"},
		{name: "without anything", text: "malformed"},
	} {
		t.Run("a rotation "+tt.name, func(t *testing.T) {
			g, err := second.Rotate(t.Context(), tt.b)
			if tt.text == "" && (err != nil || g != 2) || tt.text != "" && (err == nil || !strings.Contains(err.Error(), tt.text)) {
				t.Errorf("generation %d, %v; want %q", g, err, tt.text)
			}
		})
	}
	if bytes.Contains(rotation, s.keys(2)) {
		t.Error("the rotation has the keys in clear")
	}
	if g, revokes, err := s.owner.Rotated(rotation); err != nil || g != 2 || revokes {
		t.Errorf("the owner reads generation %d, %v", g, err)
	}
	for name, b := range map[string][]byte{"of another owner": forged, "malformed": []byte("{}")} {
		if g, _, err := s.owner.Rotated(b); err == nil || g != 0 {
			t.Errorf("a rotation %s: generation %d, %v", name, g, err)
		}
	}
	var relabelled envelope
	if err := json.Unmarshal(third, &relabelled); err != nil {
		t.Fatal(err)
	}
	relabelled.Revoke = true
	b, err := json.Marshal(relabelled)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.Rotate(t.Context(), b); err == nil {
		t.Error("somebody else made a rotation revoke certificates")
	}
	if g, err := second.Rotate(t.Context(), third); err != nil || g != 3 {
		t.Errorf("the next rotation: generation %d, %v", g, err)
	}
	certified(second, before, attestation.Options{}, true)
	revoking, err := s.owner.Rotation(3, true)
	if err != nil {
		t.Fatal(err)
	}
	if g, revokes, err := s.owner.Rotated(revoking); err != nil || g != 4 || !revokes {
		t.Errorf("the owner reads generation %d, %t, %v", g, revokes, err)
	}
	if g, err := second.Rotate(t.Context(), revoking); err != nil || g != 4 {
		t.Errorf("a rotation after a theft: generation %d, %v", g, err)
	}
	certified(second, before, attestation.Options{}, false)
	certified(second, after, attestation.Options{}, false)
}

// envelope is a rotation where a variable has that name.
type envelope = rotation

// TestSocket has callers that the certifier does not serve.
func TestSocket(t *testing.T) {
	s := newSite(t)
	p := s.start(s.keys(1))
	if i, err := os.Stat(p.Socket); err != nil || i.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", i.Mode(), err)
	}
	t.Run("another user", func(t *testing.T) {
		testneeds.Root(t, "to call as another user")
		// The guard alone, as if the socket were in reach of others.
		for dir := p.dir; strings.HasPrefix(dir, os.TempDir()+"/"); dir = filepath.Dir(dir) {
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(p.Socket, 0o666); err != nil {
			t.Fatal(err)
		}
		self := filepath.Join(p.dir, "caller")
		b, err := os.ReadFile("/proc/self/exe")
		if err == nil {
			err = os.WriteFile(self, b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), self)
		cmd.Dir, cmd.Env = "/", append(os.Environ(), callerEnv+"="+p.Socket)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "ask the certifier") {
			t.Errorf("it was served: %v\n%s", err, out)
		}
		if err := os.Remove(self); err != nil {
			t.Error(err)
		}
		eventually(t, "the refusal is logged", func() bool {
			return strings.Contains(s.log.String(), `"msg":"callers of a process with keys refused"`) && strings.Contains(s.log.String(), `"uid":65534`)
		})
	})
	for name, b := range map[string][]byte{
		"nothing": nil, "no JSON": []byte("hello"), "two requests": []byte(`{"op":"authorities"}{"op":"authorities"}`), "an unknown field": []byte(`{"op":"authorities","x":1}`),
		"an endless request": bytes.Repeat([]byte(" "), keyprocess.MaxMessage+10),
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("unix", p.Socket)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_, _ = conn.Write(b)
			_ = conn.(*net.UnixConn).CloseWrite()
			if err := keyprocess.Receive(conn, &keyprocess.Message{}); err == nil {
				t.Error("it was answered")
			}
		})
	}
	t.Run("an unknown operation", func(t *testing.T) {
		conn, err := net.Dial("unix", p.Socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		var answer keyprocess.Message
		if err := errors.Join(keyprocess.Send(conn, keyprocess.Message{Op: "sign-anything"}), keyprocess.Receive(conn, &answer)); err != nil || !strings.Contains(answer.Error, "not known") {
			t.Errorf("got %+v, %v", answer, err)
		}
	})
	t.Run("silent callers do not keep it from ending", func(t *testing.T) {
		conn, err := net.Dial("unix", p.Socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		p.stop()
	})
	t.Run("no certifier", func(t *testing.T) {
		if _, _, err := p.Authorities(t.Context()); !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("the socket of a dead process is replaced", func(t *testing.T) {
		s.run(p)
		if _, g, err := p.Authorities(t.Context()); err != nil || g != 1 {
			t.Errorf("generation %d, %v", g, err)
		}
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what + ": not so")
		}
	}
}

// TestSecretsAreHidden prints keys in each way.
func TestSecretsAreHidden(t *testing.T) {
	o := ownerOf(t, 1)
	k, err := o.Keys(1)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := k.key.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for _, v := range []any{k, o} {
		fmt.Fprintf(&out, "%v %+v %#v %s\n", v, v, v, v)
		slog.New(slog.NewTextHandler(&out, nil)).Info("test", "v", v)
		slog.New(slog.NewJSONHandler(&out, nil)).Info("test", "v", v)
	}
	b, err := json.Marshal(k)
	if err != nil {
		t.Fatal(err)
	}
	out.Write(b)
	for _, secret := range []string{string(raw), hex.EncodeToString(raw), base64.StdEncoding.EncodeToString(raw), new(big.Int).SetBytes(raw).String(), strings.Trim(fmt.Sprintf("%d", raw), "[]"), strings.Trim(fmt.Sprintf("%d", o.secret), "[]")} {
		if strings.Contains(out.String(), secret) {
			t.Errorf("it is printed:\n%s", &out)
		}
	}
	if n := strings.Count(out.String(), hidden); n != 13 {
		t.Errorf("%d values are hidden, want 13:\n%s", n, &out)
	}
	if _, err := NewOwner(make([]byte, 31)); err == nil {
		t.Error("a short secret was taken")
	}
	for _, g := range []uint32{0, maxGeneration + 1} {
		if _, err := o.Keys(g); err == nil {
			t.Errorf("generation %d was derived", g)
		}
	}
}

// TestDerivation keeps the derivation as it is: a cluster that lost all control planes needs the same keys years later. The values were
// computed from RFC 5869 and the parameters of P-256 with other means.
func TestDerivation(t *testing.T) {
	o := ownerOf(t, 1)
	keys := map[string]*ecdsa.PrivateKey{"owner": o.key}
	for g := uint32(1); g <= 2; g++ {
		k, err := o.Keys(g)
		if err != nil {
			t.Fatal(err)
		}
		keys[fmt.Sprint("generation ", g)] = k.key
	}
	for name, want := range map[string]string{
		"owner":        "9e3b808aab487af72fd98bcf6725fad0a76681eb60803fd6c185ed327887baca39557c9d4a42c0b3c622cfea7bbca86142600da1332fdfe785d2a66ff4665ae4",
		"generation 1": "52dd42a0a3615fc80ba31d4766b054aa724e7929ca6036e2185a9ec62d2c54adc2bfb12e4dbac25afeeaacd3f23e6792210f3df186548f240a97bd4071966886",
		"generation 2": "cd24536b8fe13dd19648780a841c9836d51275d79a754876dad77904de44903685fb4c03f9c314c2c116b97c402bd6d48641d6fd68a084cdb835f663452819eb",
	} {
		point, err := keys[name].PublicKey.Bytes() // 4, x, y
		if err != nil {
			t.Fatal(err)
		}
		if got := hex.EncodeToString(point[1:]); got != want {
			t.Errorf("the key of %s is %s, want %s", name, got, want)
		}
	}
}
