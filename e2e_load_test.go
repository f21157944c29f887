package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	instance "constellation/engine/cloud"
	"constellation/engine/sandbox/recorder"
)

// askEvery is the pause of one client between a response and its next request.
const askEvery = 200 * time.Millisecond

// workload is a service that can survive a rollout: its pods have readiness probes and a
// preStop delay, and a PodDisruptionBudget allows one disruption at a time.
var workload = `apiVersion: apps/v1
kind: Deployment
metadata: {name: hello}
spec:
  replicas: 4
  selector: {matchLabels: {app: hello}}
  template:
    metadata: {labels: {app: hello}}
    spec:
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {app: hello}}}
      containers:
      - name: hello
        image: ` + agnhost + `
        command: [/agnhost, netexec, --http-port=8080, --delay-shutdown=15]
        readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: hello}
spec:
  type: NodePort
  selector: {app: hello}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: hello}
spec:
  minAvailable: 3
  selector: {matchLabels: {app: hello}}
`

// load is a set of clients of a service: for each machine one inside, which uses the cluster
// address, and one outside, which uses the machine's node port as a load balancer does. Each
// request opens a new connection.
type load struct {
	stop context.CancelFunc
	all  sync.WaitGroup

	mu    sync.Mutex
	asked []request
}

// request is a request to the service and its result.
type request struct {
	machine      string
	outside      bool
	begun, ended time.Time
	err          error
}

func (r request) String() string {
	where := "inside of "
	if r.outside {
		where = "outside, at "
	}
	return fmt.Sprintf("%s from %s%s: %v after %s", r.begun.UTC().Format("15:04:05.000"), where, r.machine, r.err, r.ended.Sub(r.begun).Round(time.Millisecond))
}

// startLoad deploys the workload and starts the clients. It waits until each of them had an answer: kube-proxies learn of the
// pods a moment after they are ready. Clients of machines that come later count from their first request.
func (c *cloud) startLoad() *load {
	t := c.t
	t.Helper()
	c.apply("users", workload)
	c.kubectl("rollout", "status", "deployment/hello", "--timeout=110s")
	vip := c.kubectl("get", "service", "hello", "-o", "jsonpath={.spec.clusterIP}")
	port := c.kubectl("get", "service", "hello", "-o", "jsonpath={.spec.ports[0].nodePort}")
	machines, host := c.reach(slog.New(slog.NewTextHandler(t.Output(), nil)))
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{stop: cancel}
	t.Cleanup(func() { l.end() })
	inside := func(i instance.Instance) func(context.Context) (net.Conn, error) {
		return func(ctx context.Context) (net.Conn, error) { return host.DialFrom(ctx, i.Name, "tcp", vip+":80") }
	}
	outside := func(i instance.Instance) func(context.Context) (net.Conn, error) {
		return func(ctx context.Context) (net.Conn, error) {
			return host.Dial(ctx, "tcp", net.JoinHostPort(i.IP.String(), port))
		}
	}
	list, err := machines.Instances(ctx)
	if err != nil {
		t.Fatal(err)
	}
	limit := time.Now().Add(110 * time.Second)
	for _, i := range list {
		for _, dial := range []func(context.Context) (net.Conn, error){inside(i), outside(i)} {
			for i.State == instance.Ready {
				err := answered(ctx, dial)
				if err == nil {
					break
				}
				if time.Now().After(limit) {
					t.Fatalf("the workload does not answer a client at %s: %v", i.Name, err)
				}
				pause(ctx, askEvery)
			}
		}
	}
	l.all.Go(func() {
		users := map[string]bool{}
		for ; ctx.Err() == nil; pause(ctx, askEvery) {
			list, err := machines.Instances(ctx)
			if err != nil {
				continue
			}
			for _, i := range list {
				if i.State != instance.Ready || users[i.Name] {
					continue
				}
				users[i.Name] = true
				l.all.Go(func() { l.ask(ctx, i.Name, false, inside(i)) })
				l.all.Go(func() { l.ask(ctx, i.Name, true, outside(i)) })
			}
		}
	})
	return l
}

// ask runs one client.
func (l *load) ask(ctx context.Context, machine string, outside bool, dial func(context.Context) (net.Conn, error)) {
	for ; ctx.Err() == nil; pause(ctx, askEvery) {
		r := request{machine: machine, outside: outside, begun: time.Now()}
		r.err = answered(ctx, dial)
		r.ended = time.Now()
		if ctx.Err() == nil {
			l.mu.Lock()
			l.asked = append(l.asked, r)
			l.mu.Unlock()
		}
	}
}

// answered sends a request and returns nil if a pod of the workload responded.
func answered(ctx context.Context, dial func(context.Context) (net.Conn, error)) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if _, err := io.WriteString(conn, "GET /hostname HTTP/1.1\r\nHost: hello\r\nConnection: close\r\n\r\n"); err != nil {
		return err
	}
	rsp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err
	}
	defer rsp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(rsp.Body, 1<<10))
	switch {
	case err != nil:
		return err
	case rsp.StatusCode != http.StatusOK || !strings.HasPrefix(string(body), "hello-"):
		return fmt.Errorf("%s: %q", rsp.Status, body)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// end stops the clients and returns all requests.
func (l *load) end() []request {
	l.stop()
	l.all.Wait()
	return l.asked
}

// judge returns the number of successful requests, and the failed requests that were
// avoidable. A machine counts from its first success as a Ready node. Failures of outside
// clients do not count after the operator has cordoned the machine, because a load balancer
// removes such a machine. Failures of inside clients do not count once the machine is being
// deleted.
func judge(asked []request, journal []recorder.Entry) (kept int, lost []request) {
	ready, cordoned, leaves := map[string]time.Time{}, map[string]time.Time{}, map[string]time.Time{}
	first := func(m map[string]time.Time, name string, at time.Time) {
		if _, ok := m[name]; !ok && name != "" {
			m[name] = at
		}
	}
	for _, e := range journal {
		switch f := e.Fact.(type) {
		case *recorder.Node:
			if f.Ready {
				first(ready, f.Name, e.Time)
			}
			if f.CordonedByUs || f.Gone {
				first(cordoned, f.Name, e.Time)
			}
			if f.Gone {
				first(leaves, f.Name, e.Time)
			}
		case *recorder.Pending:
			if f.Goal == "Leave" {
				first(leaves, f.Machine[strings.LastIndexByte(f.Machine, '/')+1:], e.Time)
			}
		}
	}
	type user struct {
		machine string
		outside bool
	}
	serves := map[user]bool{}
	for _, r := range asked {
		u := user{r.machine, r.outside}
		since, is := ready[r.machine]
		if r.err == nil {
			kept++
			serves[u] = serves[u] || is && r.ended.After(since)
			continue
		}
		until, ends := leaves[r.machine]
		late := r.ended
		if r.outside {
			until, ends = cordoned[r.machine]
			late = r.begun
		}
		if serves[u] && (!ends || late.Before(until)) {
			lost = append(lost, r)
		}
	}
	return kept, lost
}

// Avoidable request failures are distinguished from unavoidable ones.
func TestJudgeCountsAvoidableFailures(t *testing.T) {
	begin := time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC)
	at := func(s int) time.Time { return begin.Add(time.Duration(s) * time.Second) }
	journal := []recorder.Entry{
		{Time: at(0), Fact: &recorder.Node{Name: "old", Ready: true}},
		{Time: at(10), Fact: &recorder.Node{Name: "new", Ready: true}},
		{Time: at(20), Fact: &recorder.Node{Name: "old", Ready: true, CordonedByUs: true}},
		{Time: at(30), Fact: &recorder.Pending{Name: "replace-0", Goal: "Leave", Machine: "sandbox://demo/old"}},
		{Time: at(40), Fact: &recorder.Node{Name: "old", Gone: true}},
	}
	answer := func(machine string, outside bool, from int) request {
		return request{machine: machine, outside: outside, begun: at(from), ended: at(from + 1)}
	}
	failure := func(machine string, outside bool, from int) request {
		r := answer(machine, outside, from)
		r.err = io.ErrUnexpectedEOF
		return r
	}
	for _, tt := range []struct {
		name  string
		asked []request
		lost  int
	}{
		{name: "all requests succeed", asked: []request{answer("old", false, 1), answer("old", true, 1)}, lost: 0},
		{name: "a request to a machine that has served fails", asked: []request{answer("old", false, 1), failure("old", false, 5)}, lost: 1},
		{name: "a request to a machine that has not served yet fails", asked: []request{failure("new", false, 5), failure("new", true, 12)}, lost: 0},
		{name: "a request to a machine that answered before it was a node fails", asked: []request{answer("new", true, 3), failure("new", true, 5)}, lost: 0},
		{name: "a request fails after the cordon of its machine", asked: []request{answer("old", true, 1), failure("old", true, 21)}, lost: 0},
		{name: "an inside request fails during the drain of its machine", asked: []request{answer("old", false, 1), failure("old", false, 21)}, lost: 1},
		{name: "an inside request fails during the deletion of its machine", asked: []request{answer("old", false, 1), failure("old", false, 29), failure("old", false, 35)}, lost: 0},
		{name: "a request that was sent before the cordon fails after it", asked: []request{answer("old", true, 1), failure("old", true, 19)}, lost: 1},
	} {
		if kept, lost := judge(tt.asked, journal); len(lost) != tt.lost || kept+len(lost) > len(tt.asked) {
			t.Errorf("%s: lost %v, want %d", tt.name, lost, tt.lost)
		}
	}
}
