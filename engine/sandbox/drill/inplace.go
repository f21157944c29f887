package drill

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sandbox/recorder"
	standins "constellation/engine/sandbox/simulated"
	"constellation/operator/api/v1alpha1"
)

// keepMachines gives all groups the strategy InPlace, and returns when the operator has labeled all
// nodes accordingly.
func keepMachines(ctx context.Context, access *rest.Config) error {
	scheme := k8sruntime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return err
	}
	api, err := client.New(access, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	return until(ctx, 2*time.Minute, "all groups are upgraded in place", func() bool {
		var groups v1alpha1.ScalingGroupList
		var nodes corev1.NodeList
		if api.List(ctx, &groups) != nil || api.List(ctx, &nodes) != nil {
			return false
		}
		done := len(groups.Items) > 1 // of control planes, and of workers
		for i := range groups.Items {
			if g := &groups.Items[i]; g.Spec.Strategy != v1alpha1.InPlaceStrategy {
				done = api.Patch(ctx, g, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"strategy":"`+string(v1alpha1.InPlaceStrategy)+`"}}`))) == nil && done
			}
		}
		for i := range nodes.Items {
			done = done && nodes.Items[i].Labels[v1alpha1.LabelInPlace] == "true"
		}
		return done
	})
}

// killProgram kills the agent or the relay of a machine, as soon as one runs.
func killProgram(ctx context.Context, host sandbox.Machines, name, program string) error {
	stand, isStandIn := host.(*standins.Host)
	return until(ctx, time.Minute, "the "+program+" of "+name+" runs and could be killed", func() bool {
		switch {
		case isStandIn && program == "agent":
			return stand.KillUnit(ctx, name, program) == nil
		case isStandIn:
			return stand.KillContainer(ctx, name, program) == nil
		}
		// Machines have no pkill. The relay is a process of the operator's program with --role=relay.
		kill := `for p in /proc/[0-9]*; do case "$(readlink $p/exe)" in */agent) kill -9 ${p#/proc/} && exit 0;; esac; done; exit 1`
		if program == "relay" {
			kill = `for p in /proc/[0-9]*; do case "$(readlink $p/exe)" in */operator) grep -q -e --role=relay $p/cmdline && kill -9 ${p#/proc/} && exit 0;; esac; done; exit 1`
		}
		code, err := host.Exec(ctx, name, []string{"bash", "-c", kill}, machine.Stdio{})
		return err == nil && code == 0
	})
}

// Files of an agent, below the root of its machine.
const (
	agentJournal = "var/lib/constellation/agent/upgrade.jsonl"
	agentCopies  = "var/lib/constellation/agent/renewed"
)

// lastRuns reads the journals of the agents of all machines.
func lastRuns(ctx context.Context, box *sandboxapi.Client, host sandbox.Machines) (runs []recorder.Run) {
	all, err := box.Instances(ctx)
	if err != nil {
		return []recorder.Run{{Err: err.Error()}}
	}
	for _, i := range all {
		r := recorder.Run{Node: i.Name}
		var out, other bytes.Buffer
		code, err := host.Exec(ctx, i.Name, []string{"cat", agentJournal}, machine.Stdio{Out: &out, Err: &other})
		switch {
		case err != nil:
			r.Err = err.Error()
		case code != 0:
			r.Err = fmt.Sprintf("cat %s: exit code %d: %s", agentJournal, code, strings.TrimSpace(other.String()))
		default:
			r.Stage = unfinished(out.Bytes())
		}
		switch code, err := host.Exec(ctx, i.Name, []string{"test", "-e", agentCopies}, machine.Stdio{}); {
		case err != nil:
			r.Err = err.Error()
		case code == 0:
			r.Left = []string{agentCopies}
		}
		runs = append(runs, r)
	}
	return runs
}

// unfinished returns the last stage of the run in an agent's journal, or "" if the run ended with a success.
func unfinished(journal []byte) string {
	last, ended := "", false
	for line := range bytes.Lines(journal) {
		var e struct {
			Head json.RawMessage
			Said struct {
				Progress *struct{ Stage string }
				Success  json.RawMessage
			}
		}
		if json.Unmarshal(line, &e) != nil {
			continue // a power cut may leave part of a line
		}
		switch {
		case e.Head != nil:
			last, ended = "", false
		case e.Said.Progress != nil:
			last, ended = e.Said.Progress.Stage, false
		case e.Said.Success != nil:
			ended = true
		}
	}
	if ended {
		return ""
	}
	return cmp.Or(last, "none")
}
