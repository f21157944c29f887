package conformance

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"constellation/engine/plan"
)

// step is a step of the suite.
type step struct {
	id, title string
	charges   bool // machines cost from its beginning
	deletes   bool // it runs at the end, whatever happened before
	run       func(ctx context.Context, x *suite, st *Step) (verdict, why string, err error)
}

// steps are the suite, in order.
func steps() []step {
	return []step{
		{id: "plan", title: "Plan the infrastructure", run: unlessEmulated(plain("infra", "plan"))},
		{id: "create", title: "Make network, load balancer and machines", charges: true, run: unlessEmulated(plain("infra", "create", "--non-interactive", "--yes"))},
		{id: "measure", title: "Read the measurements of the first machine", run: unlessEmulated(orNothing("the configuration has them already", "config", "measure", "--write"))},
		{id: "init", title: "Make a cluster of the machines", run: orNothing("the cluster exists already", "init", "--non-interactive", "--yes")},
		{id: "before", title: "Describe the cluster", run: describe(func(r *Report, v *Versions) { r.Before = v })},
		{id: "verify", title: "Verify the evidence of the control planes", run: plain("verify")},
		{id: "check", title: "Check the upgrade, and write its target to the configuration", run: orNothing("there is no newer version", "upgrade", "check", "--write-config")},
		{id: "upgrade", title: "Upgrade, with a new machine for each node", run: orNothing("there is no newer version", "upgrade", "apply", "--non-interactive", "--yes")},
		{id: "after", title: "Describe the upgraded cluster", run: describe(func(r *Report, v *Versions) { r.After = v })},
		{id: "verify-upgraded", title: "Verify the evidence of the new control planes", run: plain("verify")},
		{id: "replace", title: "Revoke a worker, and replace it", run: replace},
		{id: "health", title: "Check that all nodes are ready", run: healthy},
		{id: "terminate", title: "Delete everything, and prove that nothing is left", deletes: true, run: terminate},
	}
}

// plain executes a verb that must succeed.
func plain(args ...string) func(context.Context, *suite, *Step) (string, string, error) {
	return func(ctx context.Context, x *suite, st *Step) (string, string, error) {
		exit, out, err := x.verb(ctx, st, args...)
		return judge(exit, out, err)
	}
}

// orNothing executes a verb that may have nothing to do.
func orNothing(why string, args ...string) func(context.Context, *suite, *Step) (string, string, error) {
	return func(ctx context.Context, x *suite, st *Step) (string, string, error) {
		exit, out, err := x.verb(ctx, st, args...)
		if err == nil && exit == plan.ExitNothing {
			if st.Attempts > 1 { // the interrupted attempt has done it
				return Passed, "", nil
			}
			return Skipped, why, nil
		}
		return judge(exit, out, err)
	}
}

// unlessEmulated skips a step for machines that an emulator has made.
func unlessEmulated(run func(context.Context, *suite, *Step) (string, string, error)) func(context.Context, *suite, *Step) (string, string, error) {
	return func(ctx context.Context, x *suite, st *Step) (string, string, error) {
		if x.Emulated {
			return Skipped, "the emulator has made the machines", nil
		}
		return run(ctx, x, st)
	}
}

// judge returns the verdict of a verb.
func judge(exit int, out []byte, err error) (string, string, error) {
	if err != nil || exit == plan.ExitDone {
		return Passed, "", err
	}
	return Failed, fmt.Sprintf("exit code %d: %s", exit, reason(out)), nil
}

// reason returns the line of an output that names the cause: the last error, or else the last line.
func reason(out []byte) string {
	text := ""
	for line := range bytes.Lines(out) {
		s := strings.TrimSpace(string(line))
		if s != "" && !strings.HasPrefix(text, "error") || strings.HasPrefix(s, "error") {
			text = s
		}
	}
	return cmp.Or(text, "no output")
}

// state is what the suite reads of `status`.
type state struct {
	Nodes []struct {
		Name         string `json:"name"`
		Role         string `json:"role"`
		State        string `json:"state"`
		Kubernetes   string `json:"kubernetes"`
		Image        string `json:"image"`
		ImageVersion string `json:"imageVersion"`
	} `json:"nodes"`
}

// status returns the nodes of the cluster.
func (x *suite) status(ctx context.Context, st *Step) (s state, err error) {
	var out bytes.Buffer
	exit, err := x.Run(ctx, &out, "status", "-o", "json")
	st.Command, st.Exit = "constellation status -o json", exit
	if err == nil && exit != plan.ExitDone {
		err = fmt.Errorf("exit code %d: %s", exit, reason(out.Bytes()))
	}
	if err == nil {
		err = json.Unmarshal(out.Bytes(), &s)
	}
	if err != nil {
		return s, fmt.Errorf("read the state of the cluster: %w", err)
	}
	return s, nil
}

// describe records what the nodes run.
func describe(keep func(*Report, *Versions)) func(context.Context, *suite, *Step) (string, string, error) {
	return func(ctx context.Context, x *suite, st *Step) (string, string, error) {
		s, err := x.status(ctx, st)
		if err != nil {
			return "", "", err
		}
		v := &Versions{Nodes: len(s.Nodes)}
		for _, n := range s.Nodes {
			v.Kubernetes = append(v.Kubernetes, n.Kubernetes)
			v.Images = append(v.Images, cmp.Or(n.ImageVersion, x.hide(n.Image)))
		}
		slices.Sort(v.Kubernetes)
		slices.Sort(v.Images)
		v.Kubernetes, v.Images = slices.Compact(v.Kubernetes), slices.Compact(v.Images)
		keep(x.report, v)
		return Passed, fmt.Sprintf("%d nodes with Kubernetes %s", v.Nodes, strings.Join(v.Kubernetes, ", ")), nil
	}
}

// replace revokes the first worker, or the one that an interrupted attempt chose. Its group makes another one.
func replace(ctx context.Context, x *suite, st *Step) (string, string, error) {
	if st.On == "" {
		before, err := x.status(ctx, st)
		if err != nil {
			return "", "", err
		}
		for _, n := range before.Nodes {
			if n.Role == "worker" && st.On == "" {
				st.On = n.Name
			}
		}
		if st.On == "" {
			return Skipped, "there is no worker", nil
		}
		if err := x.save(); err != nil {
			return "", "", err
		}
	}
	worker := st.On
	run := orNothing("", "machine", "revoke", worker, "--replace", "--reason", "conformance", "--non-interactive", "--yes")
	if verdict, why, err := run(ctx, x, st); err != nil || verdict != Passed {
		return verdict, why, err
	}
	command := st.Command
	after, err := x.status(ctx, st)
	st.Command = command
	if err != nil {
		return "", "", err
	}
	for _, n := range after.Nodes {
		if n.Name == worker {
			return Failed, "the revoked worker is still a node", nil
		}
	}
	if len(after.Nodes) != x.Machines {
		return Failed, fmt.Sprintf("there are %d nodes, want %d", len(after.Nodes), x.Machines), nil
	}
	return Passed, "", nil
}

// healthy checks that the cluster has as many nodes as the configuration, and that all are ready.
func healthy(ctx context.Context, x *suite, st *Step) (string, string, error) {
	s, err := x.status(ctx, st)
	if err != nil {
		return "", "", err
	}
	ready := 0
	for _, n := range s.Nodes {
		if n.State == plan.NodeReady {
			ready++
		}
	}
	if ready != x.Machines || len(s.Nodes) != x.Machines {
		return Failed, fmt.Sprintf("%d of %d nodes are ready, want %d", ready, len(s.Nodes), x.Machines), nil
	}
	return Passed, fmt.Sprintf("%d nodes are ready", ready), nil
}

// terminate deletes everything. `infra terminate` lists what is left afterwards, and fails unless that is nothing.
func terminate(ctx context.Context, x *suite, st *Step) (string, string, error) {
	args := []string{"infra", "terminate", "--confirm", x.Cluster, "--non-interactive", "-o", "json"}
	if x.Emulated {
		args = []string{"sandbox", "down"}
	}
	exit, out, err := x.verb(ctx, st, args...)
	switch verdict, why, err := judge(exit, out, err); {
	case err == nil && exit == plan.ExitNothing && !x.Emulated: // it never was made, or an interrupted attempt has ended
		return Passed, "there is nothing to delete", nil
	case err != nil || verdict != Passed:
		return verdict, why, err
	}
	if x.Emulated {
		return Passed, "the sandbox is gone with all of its machines", nil
	}
	proof := ""
	for line := range bytes.Lines(out) {
		var e plan.Event
		if json.Unmarshal(line, &e) == nil && e.Kind == plan.KindResult {
			proof = e.Text
		}
	}
	return Passed, proof, nil
}

// calls returns the number of calls of the API of an emulator so far; nil: not known.
func (x *suite) calls(ctx context.Context) *int {
	if !x.Emulated {
		return nil
	}
	var (
		out bytes.Buffer
		s   struct {
			Calls map[string]int `json:"calls"`
		}
		n int
	)
	if exit, err := x.Run(ctx, &out, "sandbox", "status", "-o", "json"); err != nil || exit != plan.ExitDone || json.Unmarshal(out.Bytes(), &s) != nil {
		return nil
	}
	for _, calls := range s.Calls {
		n += calls
	}
	return &n
}
