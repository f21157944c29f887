package joinservice

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
)

// spares decides whether an enrolled machine belongs to its group, by the assignments of the operator, and records which
// spares ask for a ticket. It reads the assignments for each request: a machine that was just released gets no ticket.
type spares struct {
	kube *kube

	mu   sync.Mutex
	told map[string]machines.Seen // last records, by machine
}

// record returns the assignment of a machine.
func (s *spares) record(ctx context.Context, name string) (a machines.Assignment, recorded bool, err error) {
	cm, err := s.kube.core.ConfigMaps(s.kube.ns).Get(ctx, machines.SparesConfigMap, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return a, false, nil // a cluster whose list was published by an older console
	}
	if err != nil {
		return a, false, fmt.Errorf("read the assignments of spares: %w", err)
	}
	all, err := machines.ParseAssignments(cm.Data)
	if err != nil {
		return a, false, err
	}
	a, recorded = all[name]
	return a, recorded, nil
}

// key returns the cloud.Key of the machine's present assignment. If it has none, the error is errUnassigned, and that the
// machine asked is recorded: it is unused, so it can be assigned.
func (s *spares) key(ctx context.Context, i cloud.Instance) (string, error) {
	a, recorded, err := s.record(ctx, i.Name)
	if err != nil {
		return "", err
	}
	key, ok := machines.KeyOf(i.ProviderID, i.Spare, a, recorded)
	if ok {
		return key, nil
	}
	if err := s.kube.allowed(attestation.Identity{Name: i.Name, ProviderID: i.ProviderID, IP: i.IP, Role: i.Role}); err != nil {
		return "", err // a revoked machine cannot be assigned
	}
	if err := s.seen(ctx, i.Name, a.Incarnation); err != nil {
		return "", err
	}
	return "", errUnassigned
}

// seen records that an unused machine asked for a ticket.
func (s *spares) seen(ctx context.Context, name string, incarnation int) error {
	now := time.Now().UTC().Truncate(time.Second)
	s.mu.Lock()
	last := s.told[name]
	s.mu.Unlock()
	if last.Incarnation == incarnation && now.Sub(last.Time) < machines.SeenEvery {
		return nil
	}
	next := machines.Seen{Incarnation: incarnation, Time: now}
	text, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("record that a spare asked: %w", err)
	}
	patch, err := json.Marshal(map[string]any{"data": map[string]string{name: string(text)}})
	if err != nil {
		return fmt.Errorf("record that a spare asked: %w", err)
	}
	if _, err := s.kube.core.ConfigMaps(s.kube.ns).Patch(ctx, machines.SeenConfigMap, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("record that a spare asked: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.told[name] = next
	return nil
}

// standing is the answer to a machine that is a member already: errReleased, or errUsedMachine.
func (s *spares) standing(ctx context.Context, id attestation.Identity) error {
	ctx, cancel := context.WithTimeout(ctx, ticketTimeout)
	defer cancel()
	a, recorded, err := s.record(ctx, id.Name)
	if err != nil {
		return err
	}
	if recorded && a.State == machines.Released {
		return errReleased
	}
	return errUsedMachine
}
