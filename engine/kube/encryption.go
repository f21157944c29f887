package kube

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"constellation/engine/cluster"
	"constellation/engine/kms"
)

const (
	generationManager = "constellation-kms"

	// secretsPage is the number of Secrets that are listed at once, secretsAtOnce that of concurrent writes.
	secretsPage   = 500
	secretsAtOnce = 32
	// maxRefused bounds the Secrets whose refusals an error names.
	maxRefused = 5
)

// Secrets are listed and written without their content.
var secrets = corev1.SchemeGroupVersion.WithResource("secrets")

// SecretsReadable implements [engine.SecretReader].
func (c *Client) SecretsReadable(ctx context.Context) error {
	accept := "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	if _, err := c.getAlone(ctx, "/api/v1/secrets", url.Values{"limit": {"1"}}, accept); err != nil {
		return fmt.Errorf("read Secrets: %w", err)
	}
	return nil
}

// getAlone makes one request on a connection of its own, which a load balancer may lead to another API server than the last one.
func (c *Client) getAlone(ctx context.Context, path string, query url.Values, accept string) ([]byte, error) {
	config := rest.CopyConfig(c.config)
	config.NextProtos = []string{"http/1.1"}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("make HTTP client: %w", err)
	}
	defer utilnet.CloseIdleConnectionsFor(client.Transport)
	u, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("make HTTP client: %w", err)
	}
	w := &wire{client, strings.TrimSuffix(u.String(), "/")}
	limited, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	b, err := w.do(limited, http.MethodGet, path, query, accept, nil)
	return b, classify(err)
}

// KeyRotation implements [engine.Encryptor].
func (c *Client) KeyRotation(ctx context.Context) (kms.Rotation, error) {
	var out kms.Rotation
	err := retry(ctx, func(ctx context.Context) error {
		m, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, joinConfigName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		out, err = kms.RotationOf(m.Data, m.Annotations)
		return err
	})
	if err != nil {
		return kms.Rotation{}, fmt.Errorf("read ConfigMap %s: %w", joinConfigName, err)
	}
	return out, nil
}

// PublishKeyRotation implements [engine.Encryptor]. It has a field manager of its own, so that PublishJoinConfig keeps the keys.
func (c *Client) PublishKeyRotation(ctx context.Context, old, next kms.Rotation) error {
	err := retry(ctx, func(ctx context.Context) error {
		m, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, joinConfigName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		switch have, err := kms.RotationOf(m.Data, m.Annotations); {
		case err != nil:
			return err
		case have == next:
			return nil // an answer was lost
		case have != old:
			return cluster.ErrConflict
		}
		data, notes := next.Fields()
		a := applycorev1.ConfigMap(joinConfigName, systemNamespace).WithResourceVersion(m.ResourceVersion).WithAnnotations(notes).WithData(data)
		_, err = c.core.CoreV1().ConfigMaps(systemNamespace).Apply(ctx, a, metav1.ApplyOptions{FieldManager: generationManager, Force: true})
		if apierrors.IsConflict(err) {
			err = cluster.ErrConflict
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("apply ConfigMap %s: %w", joinConfigName, err)
	}
	return nil
}

// secureTimeout bounds the request to one API server, with the port-forward to it.
const secureTimeout = 20 * time.Second

// APIServerKeys implements [engine.Encryptor]. It reaches each API server by a port-forward to its pod. A load balancer can lead all
// connections to a few of them, for instance to those with the fewest.
func (c *Client) APIServerKeys(ctx context.Context) ([]cluster.APIServerKey, error) {
	return c.eachAPIServer(ctx, c.apiServerKey)
}

// eachAPIServer reads the key of the API server of each control plane, concurrently.
func (c *Client) eachAPIServer(ctx context.Context, read func(ctx context.Context, node string) (string, error)) ([]cluster.APIServerKey, error) {
	var nodes *corev1.NodeList
	err := retry(ctx, func(ctx context.Context) (err error) {
		nodes, err = c.core.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: roleLabel})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list control planes: %w", err)
	}
	out := make([]cluster.APIServerKey, len(nodes.Items))
	var all sync.WaitGroup
	for i := range nodes.Items {
		all.Go(func() {
			limited, cancel := context.WithTimeout(ctx, secureTimeout)
			defer cancel()
			out[i].Node = nodes.Items[i].Name
			out[i].Key, out[i].Err = read(limited, out[i].Node)
		})
	}
	all.Wait()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	slices.SortFunc(out, func(a, b cluster.APIServerKey) int { return strings.Compare(a.Node, b.Node) })
	return out, nil
}

// apiServerKey returns the hashed ID of the key with which the API server of a control plane encrypts.
func (c *Client) apiServerKey(ctx context.Context, node string) (string, error) {
	p, err := c.apiServerPod(ctx, node)
	if err != nil {
		return "", err
	}
	metrics, err := c.metricsOf(ctx, p)
	if err != nil {
		return "", fmt.Errorf("read metrics of the API server: %w", err)
	}
	key := EncryptionKey(metrics)
	if key == "" {
		return "", errors.New("read metrics of the API server: they have no key of a key service")
	}
	return key, nil
}

func (c *Client) apiServerPod(ctx context.Context, node string) (*corev1.Pod, error) {
	p, err := c.core.CoreV1().Pods(systemNamespace).Get(ctx, "kube-apiserver-"+node, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("find the pod of the API server: %w", classify(err))
	}
	return p, nil
}

// metricsOf reads the metrics of the API server in a pod.
func (c *Client) metricsOf(ctx context.Context, p *corev1.Pod) ([]byte, error) {
	w, err := c.serverOf(p)
	if err != nil {
		return nil, err
	}
	b, err := w.do(ctx, http.MethodGet, "/metrics", nil, "text/plain", nil)
	return b, classify(err)
}

// serverOf returns a client of the API server in a pod.
func (c *Client) serverOf(p *corev1.Pod) (*wire, error) {
	// Not by rest.HTTPClientFor: that would keep a transport for each call.
	secure, err := rest.TLSConfigFor(c.config)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		TLSClientConfig: secure, DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return c.tunnel(ctx, p, securePort(p)) },
	}
	wrapped, err := rest.HTTPWrappersForConfig(c.config, transport)
	if err != nil {
		return nil, err
	}
	u, _, err := rest.DefaultServerUrlFor(c.config)
	if err != nil {
		return nil, err
	}
	// The certificate of each API server has the name of the load balancer.
	return &wire{&http.Client{Transport: wrapped}, strings.TrimSuffix(u.String(), "/")}, nil
}

// securePort is the port of an API server in a pod of kubeadm.
func securePort(p *corev1.Pod) int32 {
	for _, x := range p.Spec.Containers {
		for _, arg := range slices.Concat(x.Command, x.Args) {
			if text, is := strings.CutPrefix(arg, "--secure-port="); is {
				if n, err := strconv.ParseInt(text, 10, 32); err == nil {
					return int32(n)
				}
			}
		}
	}
	return 6443
}

// keyMetric has the time at which a key service returned a key, for each key.
const keyMetric = "apiserver_envelope_encryption_key_id_hash_status_last_timestamp_seconds{"

var keyLabelRE = regexp.MustCompile(`[{,]key_id_hash="([^"]*)"`)

// EncryptionKey returns the hashed ID of the key that the key service of an API server returned last, in the metrics of the API
// server; empty if it uses none. See kms.HashedID.
func EncryptionKey(metrics []byte) (key string) {
	var newest float64
	lines := bufio.NewScanner(bytes.NewReader(metrics))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if !strings.HasPrefix(line, keyMetric) {
			continue
		}
		label := keyLabelRE.FindStringSubmatch(line)
		_, value, _ := strings.Cut(line, "} ")
		at, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err == nil && label != nil && at > newest {
			newest, key = at, label[1]
		}
	}
	return key
}

// RewriteSecrets implements [engine.Encryptor]. It patches each Secret with nothing: the API server then writes those that another key
// encrypted, and no others. The content of Secrets stays in the cluster.
func (c *Client) RewriteSecrets(ctx context.Context, progress func(done, total int64)) (int64, error) {
	config := rest.CopyConfig(c.config)
	config.QPS = -1 // secretsAtOnce bounds the load
	client, err := metadata.NewForConfig(config)
	if err != nil {
		return 0, fmt.Errorf("make client of Secrets: %w", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w := &rewriting{progress: progress}
	jobs := make(chan types.NamespacedName)
	var workers sync.WaitGroup
	for range secretsAtOnce {
		workers.Go(func() {
			for j := range jobs {
				err := retry(ctx, func(ctx context.Context) error {
					_, err := client.Resource(secrets).Namespace(j.Namespace).Patch(ctx, j.Name, types.MergePatchType, []byte("{}"), metav1.PatchOptions{FieldManager: generationManager})
					if apierrors.IsConflict(err) { // somebody writes it all the time
						err = fmt.Errorf("%w: %w", cluster.ErrUnreachable, err)
					}
					return err
				})
				if err := w.wrote(j, err); err != nil {
					cancel(err)
				}
			}
		})
	}
	err = eachSecret(ctx, client, w, jobs)
	close(jobs)
	workers.Wait()
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return w.result(err)
}

// eachSecret sends the names of all Secrets to jobs, page by page.
func eachSecret(ctx context.Context, client metadata.Interface, w *rewriting, jobs chan<- types.NamespacedName) error {
	next, listed := "", int64(0)
	for {
		var page *metav1.PartialObjectMetadataList
		err := retry(ctx, func(ctx context.Context) (err error) {
			page, err = client.Resource(secrets).List(ctx, metav1.ListOptions{Limit: secretsPage, Continue: next})
			return err
		})
		if apierrors.IsResourceExpired(err) && next != "" {
			next, listed = "", 0 // those that were written are not written again
			w.restart()
			continue
		}
		if err != nil {
			return fmt.Errorf("list Secrets: %w", err)
		}
		listed += int64(len(page.Items))
		w.expect(listed + rest0(page.RemainingItemCount))
		for _, m := range page.Items {
			select {
			case jobs <- types.NamespacedName{Namespace: m.Namespace, Name: m.Name}:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if next = page.Continue; next == "" {
			return nil
		}
	}
}

func rest0(n *int64) int64 {
	if n == nil {
		return 0
	}
	return *n
}

// rewriting counts Secrets that are written.
type rewriting struct {
	progress func(done, total int64)

	mu          sync.Mutex
	done, total int64
	refused     []string
	refusals    int
	told        time.Time
}

func (w *rewriting) expect(total int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.total = total
}

func (w *rewriting) restart() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done, w.refused, w.refusals = 0, nil, 0
}

// wrote notes the result of a write. It returns an error that ends all of them: one that the other Secrets have, too.
func (w *rewriting) wrote(name types.NamespacedName, err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case err == nil, errors.Is(err, cluster.ErrAbsent): // deleted meanwhile
	case errors.Is(err, context.Canceled), errors.Is(err, cluster.ErrUnreachable), errors.Is(err, cluster.ErrDenied):
		return err
	default:
		if w.refusals++; w.refusals <= maxRefused {
			w.refused = append(w.refused, fmt.Sprintf("%s: %v", name, err))
		}
	}
	w.done++
	if now := time.Now(); now.Sub(w.told) > 200*time.Millisecond || w.done >= w.total {
		w.told = now
		w.progress(w.done, max(w.total, w.done))
	}
	return nil
}

// result returns the number of Secrets, and an error if not all of them were written.
func (w *rewriting) result(err error) (int64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		return w.done, err
	}
	if w.refusals > 0 {
		slices.SortFunc(w.refused, cmp.Compare[string])
		return w.done, fmt.Errorf("write Secrets again: %d were refused: %s", w.refusals, strings.Join(w.refused, "; "))
	}
	return w.done, nil
}
