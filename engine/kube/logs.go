package kube

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cluster"
)

// podLabel is the label with a pod's service.
const podLabel = "app.kubernetes.io/name"

// maxLine bounds one line of a log in bytes; longer lines are cut.
const maxLine = 64 << 10

// Follow implements [engine.Cluster].
func (c *Client) Follow(ctx context.Context, service string, since time.Time, line func(cluster.LogLine)) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var mu sync.Mutex // serializes calls of line
	followed := map[string]bool{}
	for ctx.Err() == nil {
		err := c.eachPod(ctx, service, func(p *corev1.Pod) {
			for _, s := range p.Status.ContainerStatuses {
				// The key is the container's ID: after a restart it has another.
				if s.State.Running == nil || followed[s.ContainerID] {
					continue
				}
				followed[s.ContainerID] = true
				wg.Go(func() {
					c.followContainer(ctx, p.Name, p.Spec.NodeName, s.Name, since, func(l cluster.LogLine) {
						mu.Lock()
						defer mu.Unlock()
						line(l)
					})
				})
			}
		})
		if errors.Is(err, cluster.ErrDenied) {
			return fmt.Errorf("follow %s: %w", service, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(500 * time.Millisecond): // the watch was lost
		}
	}
	return ctx.Err()
}

// eachPod calls f for the present pods of a service and after each change, until the watch
// ends.
func (c *Client) eachPod(ctx context.Context, service string, f func(*corev1.Pod)) error {
	o := metav1.ListOptions{LabelSelector: podLabel + "=" + service}
	l, err := c.core.CoreV1().Pods(Namespace).List(ctx, o)
	if err != nil {
		return classify(err)
	}
	for i := range l.Items {
		f(&l.Items[i])
	}
	o.ResourceVersion = l.ResourceVersion
	w, err := c.core.CoreV1().Pods(Namespace).Watch(ctx, o)
	if err != nil {
		return classify(err)
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		if p, ok := e.Object.(*corev1.Pod); ok {
			f(p)
		}
	}
	return cluster.ErrUnreachable
}

// followContainer passes on the lines of a container until it terminates. A lost connection is
// resumed where it ended.
func (c *Client) followContainer(ctx context.Context, pod, node, container string, since time.Time, line func(cluster.LogLine)) {
	for ctx.Err() == nil {
		// The API takes whole seconds; duplicate lines are skipped below.
		from := metav1.NewTime(since.Truncate(time.Second))
		stream, err := c.core.CoreV1().Pods(Namespace).GetLogs(pod, &corev1.PodLogOptions{Container: container, Follow: true, Timestamps: true, SinceTime: &from}).Stream(ctx)
		if err == nil {
			r := bufio.NewReaderSize(stream, maxLine)
			for {
				var b []byte
				var cut bool
				if b, cut, err = r.ReadLine(); err != nil {
					break
				}
				text := string(b)
				for cut && err == nil {
					_, cut, err = r.ReadLine()
				}
				stamp, rest, _ := strings.Cut(text, " ")
				t, perr := time.Parse(time.RFC3339Nano, stamp)
				if perr != nil || !t.After(since) {
					continue
				}
				since = t
				line(cluster.LogLine{Time: t, Pod: pod, Node: node, Text: rest})
			}
			stream.Close()
		}
		// A restarted kubelet does not list its pods at first, so only the API server decides that a
		// pod is gone.
		p, perr := c.core.CoreV1().Pods(Namespace).Get(ctx, pod, metav1.GetOptions{})
		if perr == nil && !running(p, container) || errors.Is(classify(perr), cluster.ErrAbsent) {
			return // its successor is another container
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

func running(p *corev1.Pod, container string) bool {
	for _, s := range p.Status.ContainerStatuses {
		if s.Name == container {
			return s.State.Running != nil
		}
	}
	return false
}
