package kube

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"

	"constellation/engine/cluster"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
)

const (
	migrationManager = "constellation-kms-mode"
	annotationDone   = "constellation.edgeless.systems/kms-done"

	// Secrets with this label show that an API server encrypts. They are empty, and are deleted at once.
	probeLabel = "constellation.edgeless.systems/encryption-probe"
	probeName  = "constellation-encryption-probe-"
)

// Migration implements [engine.Migrator].
func (c *Client) Migration(ctx context.Context) (cluster.Migration, error) {
	var out cluster.Migration
	err := retry(ctx, func(ctx context.Context) error {
		m, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, joinConfigName, metav1.GetOptions{})
		if err == nil {
			out = cluster.Migration{Fingerprint: m.Data[kms.FingerprintKey], Encrypts: m.Data[kms.ModeKey] == string(kubeadm.Encrypt), Done: m.Annotations[annotationDone]}
		}
		return err
	})
	if err != nil {
		return cluster.Migration{}, fmt.Errorf("read ConfigMap %s: %w", joinConfigName, err)
	}
	return out, nil
}

// PublishMigration implements [engine.Migrator]. It has a field manager of its own, so that PublishJoinConfig keeps the keys.
func (c *Client) PublishMigration(ctx context.Context, m cluster.Migration) error {
	mode := kubeadm.Decrypt
	if m.Encrypts {
		mode = kubeadm.Encrypt
	}
	a := applycorev1.ConfigMap(joinConfigName, systemNamespace).WithData(map[string]string{kms.FingerprintKey: m.Fingerprint, kms.ModeKey: string(mode)})
	if m.Done != "" {
		a.WithAnnotations(map[string]string{annotationDone: m.Done})
	}
	err := retry(ctx, func(ctx context.Context) error {
		_, err := c.core.CoreV1().ConfigMaps(systemNamespace).Apply(ctx, a, metav1.ApplyOptions{FieldManager: migrationManager, Force: true})
		return err
	})
	if err != nil {
		return fmt.Errorf("apply ConfigMap %s: %w", joinConfigName, err)
	}
	return nil
}

// CanEncrypt implements [engine.Migrator].
func (c *Client) CanEncrypt(ctx context.Context) (bool, error) {
	servers, err := c.eachAPIServer(ctx, func(ctx context.Context, node string) (string, error) {
		p, err := c.apiServerPod(ctx, node)
		if err != nil {
			return "", err
		}
		for _, x := range p.Spec.Containers {
			for _, arg := range slices.Concat(x.Command, x.Args) {
				if strings.HasPrefix(arg, "--encryption-provider-config=") {
					return "yes", nil
				}
			}
		}
		return "", nil
	})
	for _, s := range servers {
		if s.Err != nil && err == nil {
			err = s.Err
		}
	}
	return err == nil && len(servers) > 0 && !slices.ContainsFunc(servers, func(s cluster.APIServerKey) bool { return s.Key == "" }), err
}

// EncryptingAPIServers implements [engine.Migrator]. Metrics alone show only what an API server did, so each one gets an empty Secret to
// store.
func (c *Client) EncryptingAPIServers(ctx context.Context) ([]cluster.APIServerKey, error) {
	out, err := c.eachAPIServer(ctx, c.probeEncryption)
	// Left by an answer that was lost.
	old := c.core.CoreV1().Secrets(systemNamespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: probeLabel})
	if old != nil && err == nil && ctx.Err() == nil {
		err = fmt.Errorf("delete Secrets %s: %w", probeName, classify(old))
	}
	return out, err
}

// probeEncryption returns the hashed ID of the key with which the API server of a control plane encrypts a Secret.
func (c *Client) probeEncryption(ctx context.Context, node string) (string, error) {
	p, err := c.apiServerPod(ctx, node)
	if err != nil {
		return "", err
	}
	before, err := c.metricsOf(ctx, p)
	if err != nil {
		return "", fmt.Errorf("read metrics of the API server: %w", err)
	}
	key := EncryptionKey(before)
	if key == "" {
		return "", fmt.Errorf("%w: it uses no key service yet", cluster.ErrNotEncrypting)
	}
	probe := corev1.Secret{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"}, ObjectMeta: metav1.ObjectMeta{GenerateName: probeName, Labels: map[string]string{probeLabel: "true"}}}
	body, err := json.Marshal(probe)
	if err != nil {
		return "", err
	}
	w, err := c.serverOf(p)
	if err != nil {
		return "", err
	}
	path := "/api/v1/namespaces/" + systemNamespace + "/secrets"
	made, err := w.do(ctx, http.MethodPost, path, nil, "application/json", body)
	if err == nil {
		if err = json.Unmarshal(made, &probe); err == nil {
			_, err = w.do(ctx, http.MethodDelete, path+"/"+probe.Name, nil, "application/json", nil)
		}
	}
	if err != nil && !apierrors.IsNotFound(err) { // another call deletes it, too
		return "", fmt.Errorf("write a Secret through the API server: %w", classify(err))
	}
	after, err := c.metricsOf(ctx, p)
	if err != nil {
		return "", fmt.Errorf("read metrics of the API server: %w", err)
	}
	if encrypted(after, key) <= encrypted(before, key) {
		return "", cluster.ErrNotEncrypting
	}
	return key, nil
}

// encryptedMetric counts objects that were encrypted, or decrypted, with a key.
const encryptedMetric = "apiserver_envelope_encryption_key_id_hash_total{"

// encrypted returns how many objects an API server has encrypted with a key, in the metrics of the API server.
func encrypted(metrics []byte, key string) (n float64) {
	lines := bufio.NewScanner(bytes.NewReader(metrics))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if !strings.HasPrefix(line, encryptedMetric) || !strings.Contains(line, `key_id_hash="`+key+`"`) || !strings.Contains(line, `transformation_type="to_storage"`) {
			continue
		}
		_, value, _ := strings.Cut(line, "} ")
		if v, err := strconv.ParseFloat(strings.TrimSpace(value), 64); err == nil {
			n += v
		}
	}
	return n
}
