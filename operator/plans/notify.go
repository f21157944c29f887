package plans

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/operator/api/upgradev1"
)

const (
	notifyTimeout = 10 * time.Second
	notifyTries   = 3
	notifyPause   = 5 * time.Second
)

// notification is the body of a webhook request. Its field names are stable: docs/plans.md.
type notification struct {
	Plan      string           `json:"plan"`
	Namespace string           `json:"namespace"`
	Reason    string           `json:"reason"`
	Message   string           `json:"message"`
	Node      string           `json:"node,omitempty"`
	Version   string           `json:"version"`
	Counts    upgradev1.Counts `json:"counts"`
	Time      string           `json:"time"`
}

// notify calls the Plan's webhook in the background: when upgrades start after a time without any,
// when a node fails, and when the Plan is complete. first is true if no upgrade was under way.
func (k *controller) notify(ctx context.Context, p *upgradev1.Plan, d decision, first bool) {
	to := rollout(p).Notify
	if to == nil {
		return
	}
	for _, e := range d.events {
		if e.reason != reasonJobFailed && e.reason != reasonComplete && (e.reason != reasonSyncJob || !first) {
			continue
		}
		n := notification{
			Plan: p.Name, Namespace: p.Namespace, Reason: e.reason, Message: e.note, Node: e.node, Version: d.status.LatestVersion,
			Counts: d.status.Constellation.Counts, Time: k.now().UTC().Format(time.RFC3339),
		}
		k.tasks.Go(func() {
			var err error
			for try := range notifyTries {
				if try > 0 {
					select {
					case <-ctx.Done():
						return
					case <-time.After(notifyPause):
					}
				}
				if err = k.post(ctx, *to, n); err == nil {
					return
				}
			}
			k.Log.Warn("webhook not called", "plan", p.Name, "reason", n.Reason, "err", err)
		})
	}
}

// post sends a notification once. Its errors do not contain the URL, which may be a secret.
func (k *controller) post(ctx context.Context, to upgradev1.Notify, n notification) error {
	ctx, cancel := context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	url := to.URL
	if to.SecretName != "" {
		var s corev1.Secret
		if err := k.live.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: to.SecretName}, &s); err != nil {
			return fmt.Errorf("read the webhook's URL: %w", err)
		}
		url = strings.TrimSpace(string(s.Data["url"]))
	}
	body, err := json.Marshal(n)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return errors.New("the webhook's URL cannot be used")
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return errors.New("the webhook cannot be reached")
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, channelBody)
	if resp.StatusCode >= 300 {
		return fmt.Errorf("the webhook answered %s", resp.Status)
	}
	return nil
}
