package joinservice

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/attestation"
	"constellation/engine/cloud/machines"
)

// registers records what the TPMs of enrolled machines measured when they booted, and logs changes. Members ask the join
// service all the time, so that it learns of a boot within a minute. A change is reported and not refused: the owner of an
// enrolled machine updates its firmware.
type registers struct {
	kube *kube

	mu   sync.Mutex
	told map[string]machines.Registers // last records, by machine
}

// note records the registers of a machine's statement, which came from the address peer, if they are new.
func (r *registers) note(ctx context.Context, log *slog.Logger, d *directory, st attestation.Statement, peer netip.Addr) {
	values := machines.BootRegisters(st.PCRs)
	if !st.Attested || values == nil {
		return
	}
	name := st.Identity.Name
	r.mu.Lock()
	last := r.told[name]
	r.mu.Unlock()
	if last.Key == st.Key && slices.Equal(last.Values, values) {
		return
	}
	// A certificate of an earlier enrolment, and a copied key, must not look like a boot of this machine.
	if _, err := d.check(ctx, st, directoryAge); err != nil || d.from(peer, st.Identity) != nil {
		return
	}
	next, written, err := r.record(ctx, name, last, st.Key, values)
	if err != nil {
		log.Warn("registers not recorded", "err", err)
		return
	}
	if written && len(next.Changed) > 0 {
		log.Warn("registers changed", "registers", next.String())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told[name] = next
}

// record writes the registers of a machine unless they are recorded, also by another join service. last is the record that
// this process wrote or read before, which counts if it was removed from the cluster.
func (r *registers) record(ctx context.Context, name string, last machines.Registers, key string, values []string) (next machines.Registers, written bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, ticketTimeout)
	defer cancel()
	maps := r.kube.core.ConfigMaps(r.kube.ns)
	cm, err := maps.Get(ctx, machines.RegistersConfigMap, metav1.GetOptions{})
	if apierrors.IsNotFound(err) { // a cluster whose list was published by an older console
		return last.Next(key, values, time.Now()), false, nil
	}
	if err != nil {
		return next, false, fmt.Errorf("read ConfigMap %s: %w", machines.RegistersConfigMap, err)
	}
	var recorded machines.Registers // a damaged record is replaced
	if text := cm.Data[name]; text != "" && json.Unmarshal([]byte(text), &recorded) == nil {
		last = recorded
	}
	next = last.Next(key, values, time.Now())
	if next.Key == recorded.Key && next.Time.Equal(recorded.Time) && slices.Equal(next.Values, recorded.Values) {
		return next, false, nil
	}
	text, err := json.Marshal(next)
	if err != nil {
		return next, false, fmt.Errorf("write registers: %w", err)
	}
	patch, err := json.Marshal(map[string]any{"data": map[string]string{name: string(text)}})
	if err != nil {
		return next, false, fmt.Errorf("write registers: %w", err)
	}
	if _, err := maps.Patch(ctx, machines.RegistersConfigMap, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		return next, false, fmt.Errorf("write ConfigMap %s: %w", machines.RegistersConfigMap, err)
	}
	return next, true, nil
}
