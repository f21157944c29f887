package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"constellation/engine/plan"
)

// survives reboots a worker, the only control plane, and all machines at once, and then cuts
// the power of all. Each time the cluster recovers by itself: its nodes are Ready, every
// container has restarted, the service responds to every machine, and status has no findings.
func (c *cloud) survives(kind machineKind, all []string) {
	t := c.t
	t.Helper()
	for _, tt := range []struct {
		verb     string
		machines []string // none: all
	}{
		{"reboot", []string{"worker-0"}},
		{"reboot", []string{"control-plane-0"}},
		{"reboot", nil},
		{"power-cut", nil},
	} {
		args, touched := append([]string{"sandbox", "machine", tt.verb}, tt.machines...), tt.machines
		if touched == nil {
			args, touched = append(args, "--all"), all
		}
		begun := time.Now()
		c.run(2*time.Minute, args...).want(plan.ExitDone)
		if kind == realMachines { // most pods of simulated machines run no process that could restart
			c.wantRestarted(begun, touched)
			c.wantNodes(all...)
			c.wantAnswer(all...)
		} else {
			c.wantReady(begun, all)
		}
		var status struct{ Nodes []struct{ Name string } }
		out := c.run(time.Minute, "status", "-o", "json").want(plan.ExitDone).stdout
		if err := json.Unmarshal([]byte(out), &status); err != nil || len(status.Nodes) != len(all) {
			t.Errorf("after %v status reports %s, %v", args, out, err)
		}
		t.Logf("%s: recovered after %s", strings.Join(args[1:], " "), time.Since(begun).Round(100*time.Millisecond))
	}
}

// wantReady waits until all machines are Ready nodes with a heartbeat after a given time.
func (c *cloud) wantReady(since time.Time, all []string) {
	c.t.Helper()
	c.eventually(3*time.Minute, "all nodes are Ready again", func(out string) bool {
		var ready []string
		for line := range strings.Lines(out) {
			f := strings.Fields(line)
			if len(f) == 3 && f[1] == "True" {
				if said, err := time.Parse(time.RFC3339, f[2]); err == nil && !said.Before(since.Truncate(time.Second)) {
					ready = append(ready, f[0])
				}
			}
		}
		return !slices.ContainsFunc(all, func(name string) bool { return !slices.Contains(ready, name) })
	}, "get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status} {.status.conditions[?(@.type=="Ready")].lastHeartbeatTime}{"\n"}{end}`)
}

// wantRestarted waits until every pod on the machines is Ready with containers that started
// after a given time. The API server returns the old state until the kubelets report.
func (c *cloud) wantRestarted(since time.Time, machines []string) {
	c.t.Helper()
	var open []string
	for deadline := time.Now().Add(3 * time.Minute); time.Now().Before(deadline); time.Sleep(500 * time.Millisecond) {
		var err error
		if open, err = c.notRestarted(since.Truncate(time.Second), machines); err == nil && len(open) == 0 {
			return
		} else if err != nil {
			open = []string{err.Error()}
		}
	}
	c.t.Fatalf("not recovered after three minutes:\n%s", strings.Join(open, "\n"))
}

func (c *cloud) notRestarted(since time.Time, machines []string) (open []string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, filepath.Join(c.bin, "kubectl"), "--kubeconfig", filepath.Join(c.dir, "constellation-admin.conf"),
		"--request-timeout=5s", "get", "pods", "-A", "-o", "json").Output()
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	var pods struct {
		Items []struct {
			Metadata struct{ Namespace, Name string }
			Spec     struct{ NodeName string }
			Status   struct {
				Phase             string
				ContainerStatuses []struct {
					Ready bool
					State struct{ Running struct{ StartedAt time.Time } }
				}
			}
		}
	}
	if err := json.Unmarshal(out, &pods); err != nil {
		return nil, err
	}
	if len(pods.Items) == 0 {
		return nil, fmt.Errorf("no pods found")
	}
	for _, p := range pods.Items {
		if p.Status.Phase == "Succeeded" || !slices.Contains(machines, p.Spec.NodeName) {
			continue
		}
		ok := len(p.Status.ContainerStatuses) > 0
		for _, s := range p.Status.ContainerStatuses {
			ok = ok && s.Ready && !s.State.Running.StartedAt.Before(since)
		}
		if !ok {
			open = append(open, fmt.Sprintf("%s/%s on %s: %+v", p.Metadata.Namespace, p.Metadata.Name, p.Spec.NodeName, p.Status))
		}
	}
	return open, nil
}
