package evidence

import (
	"bytes"
	"context"
	"fmt"
	mathrand "math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"constellation/internal/mutation"
	"constellation/internal/testneeds"
)

// mutations is how many mutated documents TestMutatedEvidence judges; with -short a
// tenth. Package atls judges 20,000 mutated certificates. `make soak` judges 100,000 of each.
const mutations = 80_000

// TestMutatedEvidence changes genuine evidence at random, as bytes, inside of its
// fields, and by mixing that of several machines. A validator must refuse each change
// or state exactly what it states of one of the originals.
func TestMutatedEvidence(t *testing.T) {
	ca := newCA(t, "cloud")
	v := NewTPMValidator(ca.Roots(), images(), Options{})
	honest, rsa, other := newForger(t, ca), newForger(t, ca), newForger(t, ca)
	rsa.useRSA(t, 2048, algRSAPSS)
	ext, err := worker(1).marshal()
	if err != nil {
		t.Fatal(err)
	}
	other.template.ExtraExtensions[0].Value = ext
	var originals []mutable
	for _, f := range []*forger{honest, rsa, other} {
		raw := f.document(t)
		d, err := parseDocument(raw)
		if err != nil {
			t.Fatal(err)
		}
		st, err := v.Validate(t.Context(), raw, nonce)
		if err != nil {
			t.Fatal(err)
		}
		originals = append(originals, mutable{raw, d, st})
	}
	total := mutations
	if testing.Short() {
		total /= 10
	}
	total = testneeds.Number(t, "CONSTELLATION_EVIDENCE_MUTATIONS", total)
	var refused, accepted, next atomic.Int64
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for seed := next.Add(1); seed <= int64(total) && !t.Failed(); seed = next.Add(1) {
				r := mathrand.New(mathrand.NewPCG(uint64(seed), 18))
				b := mutate(r, originals)
				st, err := judged(v, b)
				if err != nil {
					refused.Add(1)
					continue
				}
				accepted.Add(1)
				if !slices.ContainsFunc(originals, func(m mutable) bool { return reflect.DeepEqual(m.states, st) }) {
					t.Errorf("seed %d: accepted as %+v: %x", seed, st, b)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("quote of a TPM: %d mutations, %d refused, %d that state what the original does", total, refused.Load(), accepted.Load())
	if refused.Load() < int64(total)*9/10 {
		t.Errorf("only %d of %d changes were refused", refused.Load(), total)
	}
}

// mutable is genuine evidence.
type mutable struct {
	raw    []byte
	doc    document
	states Statement
}

// judged turns a panic of the validator into a statement that nobody made.
func judged(v *TPMValidator, b []byte) (st Statement, err error) {
	defer func() {
		if p := recover(); p != nil {
			st, err = Statement{Warnings: []string{fmt.Sprint("panic: ", p)}}, nil
		}
	}()
	return v.Validate(context.Background(), b, nonce)
}

// mutate returns evidence that differs from all of originals.
func mutate(r *mathrand.Rand, originals []mutable) []byte {
	for {
		m := originals[r.IntN(len(originals))]
		var out []byte
		switch r.IntN(8) {
		case 0: // the bytes as they are sent
			out = mutation.Bytes(r, m.raw)
		case 1: // one field of another machine's
			out = m.with(r, originals[r.IntN(len(originals))].doc, nil)
		case 2, 3, 4, 5: // one field scrambled
			out = m.with(r, document{}, r)
		case 6: // one register
			d := m.doc
			d.pcrs = slices.Clone(d.pcrs)
			i := r.IntN(len(d.pcrs))
			d.pcrs[i].value = mutation.Bytes(r, d.pcrs[i].value)
			out, _ = d.marshal()
		case 7: // one register more, less, or under another number
			d := m.doc
			d.pcrs = slices.Clone(d.pcrs)
			i := r.IntN(len(d.pcrs))
			switch r.IntN(3) {
			case 0:
				d.pcrs = slices.Delete(d.pcrs, i, i+1)
			case 1:
				d.pcrs = slices.Insert(d.pcrs, i, register{uint32(r.IntN(lastPCR + 1)), d.pcrs[r.IntN(len(d.pcrs))].value})
			default:
				d.pcrs[i].index = uint32(r.IntN(lastPCR + 1))
			}
			out, _ = d.marshal()
		}
		if out != nil && !slices.ContainsFunc(originals, func(m mutable) bool { return bytes.Equal(m.raw, out) }) {
			return out
		}
	}
}

// with returns m with one field of other, or scrambled by r if scrambled is not nil.
func (m mutable) with(r *mathrand.Rand, other document, scrambled *mathrand.Rand) []byte {
	d := m.doc
	fields, theirs := []*[]byte{&d.certificate, &d.public, &d.quote, &d.signature, &d.log}, [][]byte{other.certificate, other.public, other.quote, other.signature, other.log}
	i := r.IntN(len(fields))
	if *fields[i] = theirs[i]; scrambled != nil {
		*fields[i] = mutation.Bytes(scrambled, [][]byte{m.doc.certificate, m.doc.public, m.doc.quote, m.doc.signature, m.doc.log}[i])
	}
	out, err := d.marshal()
	if err != nil {
		return nil
	}
	return out
}
