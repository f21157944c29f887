package support

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/words"
)

// The namespaces that a bundle is about.
const (
	ours   = "constellation-system"
	system = "kube-system"
)

// List is a kind of objects that a bundle has.
type List struct {
	// Group is the API group, Version its version, Resource the plural name.
	Group, Version, Resource string
	// Namespaces are those that are read; empty for objects of the whole cluster.
	Namespaces []string
}

var both = []string{ours, system}

// Lists are all kinds of objects that a bundle has.
var Lists = []List{
	{Version: "v1", Resource: "nodes"},
	{Group: "update.edgeless.systems", Version: "v1alpha1", Resource: "nodeversions"},
	{Group: "update.edgeless.systems", Version: "v1alpha1", Resource: "scalinggroups"},
	{Group: "update.edgeless.systems", Version: "v1alpha1", Resource: "pendingnodes"},
	{Group: "update.edgeless.systems", Version: "v1alpha1", Resource: "joiningnodes"},
	{Group: "update.edgeless.systems", Version: "v1alpha1", Resource: "autoscalingstrategies"},
	{Group: "upgrade.cattle.io", Version: "v1", Resource: "plans", Namespaces: []string{""}},
	{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"},
	{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "validatingwebhookconfigurations"},
	{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "mutatingwebhookconfigurations"},
	{Group: "certificates.k8s.io", Version: "v1", Resource: "certificatesigningrequests"},
	{Group: "coordination.k8s.io", Version: "v1", Resource: "leases", Namespaces: []string{ours, system, "kube-node-lease"}},
	{Group: "apps", Version: "v1", Resource: "deployments", Namespaces: both},
	{Group: "apps", Version: "v1", Resource: "daemonsets", Namespaces: both},
	{Group: "apps", Version: "v1", Resource: "replicasets", Namespaces: both},
	{Group: "batch", Version: "v1", Resource: "jobs", Namespaces: both},
	{Group: "policy", Version: "v1", Resource: "poddisruptionbudgets", Namespaces: both},
	{Version: "v1", Resource: "services", Namespaces: both},
	{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices", Namespaces: both},
	{Version: "v1", Resource: "configmaps", Namespaces: both},
	{Version: "v1", Resource: "events", Namespaces: []string{ours, system, "default"}},
	{Version: "v1", Resource: "pods", Namespaces: both},
}

// URLs are the paths of an API server that are read beside objects.
var URLs = []string{"/version", "/readyz", "/livez", "/apis", "/metrics"}

// path returns the path of a list.
func (l List) path(namespace string) string {
	p := "/api/" + l.Version
	if l.Group != "" {
		p = "/apis/" + l.Group + "/" + l.Version
	}
	if namespace != "" {
		p += "/namespaces/" + namespace
	}
	return p + "/" + l.Resource
}

// Limits of requests.
const (
	pageSize  = 200
	maxBody   = 64 << 20 // bytes of one page
	maxSilent = 3        // requests in a row without an answer, after which no more are sent
)

// errSilent means that the API server stopped answering during the collection.
var errSilent = errors.New("the API server stopped answering")

// get sends a request. An answer other than 200 is an error, with the text of its body.
func (c *collector) get(ctx context.Context, path string, query url.Values) (io.ReadCloser, error) {
	status, body, err := c.ask(ctx, path, query)
	if err != nil {
		return nil, err
	}
	if status == http.StatusOK {
		return body, nil
	}
	defer body.Close()
	b, _ := io.ReadAll(io.LimitReader(body, 4096)) // a part of the text is enough
	return nil, &refusal{status, messageOf(b)}
}

// ask sends a request, unless the API server stopped answering.
func (c *collector) ask(ctx context.Context, path string, query url.Values) (int, io.ReadCloser, error) {
	if c.silent >= maxSilent {
		return 0, nil, errSilent
	}
	status, body, err := c.api.Get(ctx, path, query)
	switch {
	case err == nil:
		c.silent = 0
	case errors.Is(err, cluster.ErrUnreachable):
		c.silent++
	}
	return status, body, err
}

// RightMissing begins the reason of what could not be collected for lack of a right.
const RightMissing = "a right is missing: "

// refusal is an answer other than 200.
type refusal struct {
	status  int
	message string
}

// Error implements error.
func (r *refusal) Error() string {
	switch {
	case r.status == http.StatusForbidden:
		return RightMissing + r.message
	case r.message == "":
		return fmt.Sprintf("the API server answered %d %s", r.status, http.StatusText(r.status))
	}
	return r.message
}

// messageOf returns the message of a Status, or the text itself.
func messageOf(b []byte) string {
	var s struct {
		Kind    string `json:"kind"`
		Message string `json:"message"`
	}
	if json.Unmarshal(b, &s) == nil && s.Kind == "Status" {
		return s.Message
	}
	return strings.TrimSpace(string(b))
}

// cluster adds objects, metrics and logs of the cluster.
func (c *collector) cluster(ctx context.Context) {
	c.progress("cluster")
	body, err := c.get(ctx, "/version", nil)
	if err != nil {
		c.missing("cluster", "GET /version", err.Error(), "start the cluster or correct the kubeconfig, then run the command again")
		return
	}
	b, err := readAll(body)
	var v struct {
		GitVersion string `json:"gitVersion"`
	}
	if err != nil || json.Unmarshal(b, &v) != nil || v.GitVersion == "" {
		c.missing("cluster", "GET /version", "the answer is not that of a Kubernetes API server", "name another context or kubeconfig")
		return
	}
	c.index.Reachable, c.index.Kubernetes = true, v.GitVersion
	c.add("cluster/version.json", "GET /version", b, "", nil)
	for _, path := range []string{"readyz", "livez"} {
		c.health(ctx, path)
	}
	if body, err := c.get(ctx, "/apis", nil); err != nil {
		c.missing("cluster/apis.json", "GET /apis", err.Error(), "")
	} else if b, err := readAll(body); err == nil {
		c.add("cluster/apis.json", "GET /apis", b, "", nil)
	}
	var pods []pod
	var absent []string
	for _, l := range Lists {
		for _, ns := range namespaces(l) {
			if ctx.Err() != nil {
				return
			}
			if c.list(ctx, l, ns, &pods) {
				continue
			}
			absent = append(absent, l.Resource)
			break
		}
	}
	if len(absent) > 0 {
		c.missing(words.And(absent), "", "the cluster does not have these kinds", "")
	}
	c.failedRequests(ctx)
	c.metrics(ctx, pods)
	c.logs(ctx, pods)
}

func namespaces(l List) []string {
	if len(l.Namespaces) == 0 {
		return []string{""}
	}
	return l.Namespaces
}

// readAll reads an answer and closes it.
func readAll(body io.ReadCloser) ([]byte, error) {
	defer body.Close()
	return io.ReadAll(io.LimitReader(body, maxBody))
}

// health adds an answer about the health of the API server. If a check fails, the answer is an error with the list of checks.
func (c *collector) health(ctx context.Context, path string) {
	source := "GET /" + path + "?verbose"
	status, body, err := c.ask(ctx, "/"+path, url.Values{"verbose": {""}})
	var b []byte
	if err == nil {
		b, err = readAll(body)
	}
	if err == nil && (status == http.StatusForbidden || status == http.StatusUnauthorized) {
		err = &refusal{status, messageOf(b)}
	}
	if err != nil {
		c.missing("cluster/"+path+".txt", source, err.Error(), "")
		return
	}
	c.add("cluster/"+path+".txt", fmt.Sprintf("%s, which answered %d", source, status), b, "", nil)
}

// pod is a pod with logs to read.
type pod struct {
	namespace, name, node, service string
	containers                     []container
	metrics                        int32 // the port of its metrics; 0: none
}

type container struct {
	name     string
	previous bool // it was restarted
	waiting  bool // it has not started yet
}

// list adds the objects of a list. It returns false if the cluster does not have the kind.
func (c *collector) list(ctx context.Context, l List, namespace string, pods *[]pod) bool {
	path := "cluster/" + l.Resource + ".json"
	if namespace != "" {
		path = "cluster/" + namespace + "/" + l.Resource + ".json"
	}
	source := "GET " + l.path(namespace)
	c.progress(strings.TrimSuffix(strings.TrimPrefix(path, "cluster/"), ".json"))
	var out bytes.Buffer
	out.WriteString("{\"apiVersion\":\"v1\",\"kind\":\"List\",\"items\":[")
	left := map[string]int{}
	kept, skipped, all := 0, 0, 0
	next := ""
	for {
		q := url.Values{"limit": {fmt.Sprint(pageSize)}}
		if next != "" {
			q.Set("continue", next)
		}
		body, err := c.get(ctx, l.path(namespace), q)
		if err == nil {
			next, err = items(io.LimitReader(body, maxBody), func(o map[string]any) error {
				all++
				if l.Resource == "pods" {
					*pods = append(*pods, podOf(o))
				}
				if !c.wants(l, o) {
					return nil
				}
				c.cleanObject(l, o, left)
				c.cleanStrings(o, left)
				b, err := json.Marshal(o)
				if err != nil {
					return err
				}
				if int64(out.Len()+len(b)+8) > c.MaxFile {
					skipped++
					return nil
				}
				if kept++; kept > 1 {
					out.WriteByte(',')
				}
				out.WriteByte('\n')
				out.Write(b)
				return nil
			})
			body.Close()
		}
		var no *refusal
		if errors.As(err, &no) && no.status == http.StatusNotFound && all == 0 {
			return false
		}
		if err != nil {
			c.missing(path, source, err.Error(), "")
			if kept == 0 {
				return true
			}
			break
		}
		if next == "" {
			break
		}
	}
	out.WriteString("\n]}\n")
	cut := ""
	if skipped > 0 {
		cut = fmt.Sprintf("%d of %d objects are left out", skipped, kept+skipped)
	}
	c.add(path, source, out.Bytes(), cut, left)
	return true
}

// items calls f with each object of a list, and returns the token of the next page.
func items(r io.Reader, f func(map[string]any) error) (next string, err error) {
	d := json.NewDecoder(r)
	d.UseNumber()
	if _, err := d.Token(); err != nil {
		return "", fmt.Errorf("decode list: %w", err)
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return "", fmt.Errorf("decode list: %w", err)
		}
		switch key {
		case "metadata":
			var m struct {
				Continue string `json:"continue"`
			}
			if err := d.Decode(&m); err != nil {
				return "", fmt.Errorf("decode list: %w", err)
			}
			next = m.Continue
		case "items":
			t, err := d.Token()
			if err != nil {
				return "", fmt.Errorf("decode list: %w", err)
			}
			if t == nil { // null
				continue
			}
			for d.More() {
				var o map[string]any
				if err := d.Decode(&o); err != nil {
					return "", fmt.Errorf("decode list: %w", err)
				}
				if err := f(o); err != nil {
					return "", err
				}
			}
			if _, err := d.Token(); err != nil {
				return "", fmt.Errorf("decode list: %w", err)
			}
		default:
			var skip json.RawMessage
			if err := d.Decode(&skip); err != nil {
				return "", fmt.Errorf("decode list: %w", err)
			}
		}
	}
	return next, nil
}

// wants reports whether an object is selected by --node and --since.
func (c *collector) wants(l List, o map[string]any) bool {
	switch l.Resource {
	case "nodes":
		return len(c.Nodes) == 0 || slices.Contains(c.Nodes, text(o, "metadata", "name"))
	case "events":
		if text(o, "metadata", "namespace") == "default" && text(o, "involvedObject", "kind") != "Node" && !strings.HasPrefix(text(o, "involvedObject", "apiVersion"), "update.edgeless.systems/") {
			return false // of somebody's workloads
		}
		if c.Since.IsZero() {
			return true
		}
		for _, field := range [][]string{{"series", "lastObservedTime"}, {"lastTimestamp"}, {"eventTime"}, {"metadata", "creationTimestamp"}} {
			if at, err := time.Parse(time.RFC3339, text(o, field...)); err == nil {
				return !at.Before(c.Since)
			}
		}
	}
	return true
}

// field returns a value of an object; nil if it is absent.
func field(v any, path ...string) any {
	for _, p := range path {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[p]
	}
	return v
}

// text returns a string of an object; empty if it is absent.
func text(v any, path ...string) string {
	s, _ := field(v, path...).(string)
	return s
}

// podOf returns what logs of a pod there are.
func podOf(o map[string]any) pod {
	p := pod{namespace: text(o, "metadata", "namespace"), name: text(o, "metadata", "name"), node: text(o, "spec", "nodeName"), service: text(o, "metadata", "labels", "app.kubernetes.io/name")}
	for _, of := range []string{"initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"} {
		list, _ := field(o, "status", of).([]any)
		for _, s := range list {
			p.containers = append(p.containers, container{
				name: text(s, "name"), previous: field(s, "lastState", "terminated") != nil,
				waiting: field(s, "state", "waiting") != nil && field(s, "lastState", "terminated") == nil,
			})
		}
	}
	list, _ := field(o, "spec", "containers").([]any)
	for _, x := range list {
		ports, _ := field(x, "ports").([]any)
		for _, port := range ports {
			if n, ok := field(port, "containerPort").(json.Number); ok && text(port, "name") == "metrics" {
				if i, err := n.Int64(); err == nil && i > 0 && i < 1<<16 {
					p.metrics = int32(i)
				}
			}
		}
	}
	return p
}

// failures are the metrics of an API server that count requests that failed.
var failures = []string{"apiserver_request_total{", "apiserver_request_terminations_total{", "apiserver_request_aborts_total{", "etcd_request_errors_total{", "apiserver_admission_webhook_rejection_count{", "apiserver_admission_webhook_fail_open_count{", "apiserver_flowcontrol_rejected_requests_total{", "apiserver_envelope_encryption_"}

// failedRequests adds the counters of requests that failed, of the API server that answered.
func (c *collector) failedRequests(ctx context.Context) {
	const path, source = "cluster/failed-requests.txt", "GET /metrics, counters of failures alone"
	c.progress("failed requests")
	body, err := c.get(ctx, "/metrics", nil)
	if err != nil {
		c.missing(path, source, err.Error(), "")
		return
	}
	defer body.Close()
	t := tail{limit: int(c.MaxFile)}
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		l := lines.Text()
		if !slices.ContainsFunc(failures, func(f string) bool { return strings.HasPrefix(l, f) }) || strings.HasSuffix(l, " 0") || strings.Contains(l, "_bucket{") {
			continue
		}
		if strings.HasPrefix(l, failures[0]) && !strings.Contains(l, `code="4`) && !strings.Contains(l, `code="5`) {
			continue
		}
		fmt.Fprintln(&t, l)
	}
	if err := lines.Err(); err != nil {
		c.missing(path, source, err.Error(), "")
	}
	b, cut := t.lines()
	c.add(path, source, b, cut, nil)
}

// metrics adds the metrics of the operator.
func (c *collector) metrics(ctx context.Context, pods []pod) {
	found := false
	for _, p := range pods {
		if p.namespace != ours || p.service != "constellation-operator" || p.metrics == 0 || ctx.Err() != nil || c.silent >= maxSilent {
			continue
		}
		found = true
		c.progress("metrics of " + p.name)
		path, source := "metrics/"+p.name+".txt", fmt.Sprintf("port-forward to port %d of pod %s/%s", p.metrics, p.namespace, p.name)
		body, err := c.api.Metrics(ctx, p.namespace, p.name, p.metrics)
		if err != nil {
			c.missing(path, source, err.Error(), "")
			continue
		}
		t := tail{limit: int(c.MaxFile)}
		_, err = io.Copy(&t, body)
		body.Close()
		if err != nil {
			c.missing(path, source, err.Error(), "")
			continue
		}
		b, cut := t.lines()
		c.add(path, source, b, cut, nil)
	}
	if !found && ctx.Err() == nil {
		c.missing("metrics of the operator", "", "no pod of the operator was listed", "")
	}
}

// logs adds logs of pods, those of our own namespace first.
func (c *collector) logs(ctx context.Context, pods []pod) {
	slices.SortStableFunc(pods, func(a, b pod) int {
		return strings.Compare(rank(a)+a.name, rank(b)+b.name)
	})
	left := 0
	for _, p := range pods {
		if len(c.Nodes) > 0 && !slices.Contains(c.Nodes, p.node) {
			left++
			continue
		}
		for _, x := range p.containers {
			if x.waiting {
				c.missing("logs/"+p.namespace+"/"+p.name+"/"+x.name+".log", "", "the container has not started", "")
				continue
			}
			c.log(ctx, p, x.name, false)
			if x.previous {
				c.log(ctx, p, x.name, true)
			}
			if ctx.Err() != nil {
				return
			}
		}
	}
	if left > 0 {
		c.missing("logs of "+words.Count(left, "pod"), "", "the pods are on other nodes than those of --node", "")
	}
	for _, n := range c.Nodes {
		if !slices.ContainsFunc(pods, func(p pod) bool { return p.node == n }) {
			c.missing("logs of node "+n, "", "no pod of our namespaces is on a node of this name", "list the nodes with `kubectl get nodes`")
		}
	}
}

func rank(p pod) string {
	if p.namespace == ours {
		return "0"
	}
	return "1"
}

// log adds the log of a container.
func (c *collector) log(ctx context.Context, p pod, name string, previous bool) {
	path := "logs/" + p.namespace + "/" + p.name + "/" + name + ".log"
	request := "/api/v1/namespaces/" + p.namespace + "/pods/" + p.name + "/log"
	q := url.Values{"container": {name}, "timestamps": {"true"}}
	if previous {
		path = strings.TrimSuffix(path, ".log") + ".previous.log"
		q.Set("previous", "true")
	}
	if !c.Since.IsZero() {
		q.Set("sinceTime", c.Since.UTC().Format(time.RFC3339))
	}
	source := "GET " + request + "?" + q.Encode()
	c.progress("log of " + p.name)
	body, err := c.get(ctx, request, q)
	if err != nil {
		c.missing(path, source, err.Error(), "")
		return
	}
	t := tail{limit: int(c.MaxFile)}
	_, err = io.Copy(&t, body)
	body.Close()
	if err != nil {
		c.missing("the end of "+path, source, err.Error(), "")
	}
	b, cut := t.lines()
	c.add(path, source, b, cut, nil)
}
