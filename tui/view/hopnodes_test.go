package view

import (
	"strings"
	"testing"

	"constellation/engine/check"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/tui/term"
)

// The path names nodes that keep their machines, and fits a terminal of 80 columns.
func TestHopNamesNodesInPlace(t *testing.T) {
	t.Parallel()
	const all, some = compat.AllNodes, compat.SomeNodes
	for _, tt := range []struct {
		want                          string
		controlPlanes, workers        bool // that the hop concerns
		keptControlPlanes, keptWorker compat.Share
		image, etcd                   bool // the hop changes that, and not Kubernetes
	}{
		{want: "replaces every node", controlPlanes: true, workers: true},
		{want: "replaces the control planes, workers stay", controlPlanes: true},
		{want: "replaces the workers", workers: true},
		{want: "replaces no node"},
		{want: "upgrades every node in place", controlPlanes: true, workers: true, keptControlPlanes: all, keptWorker: all},
		{want: "control planes in place, workers stay", controlPlanes: true, keptControlPlanes: all},
		{want: "upgrades the workers in place", workers: true, keptWorker: all},
		{want: "replaces control planes, workers in place", controlPlanes: true, workers: true, keptWorker: all},
		{want: "replaces workers, control planes in place", controlPlanes: true, workers: true, keptControlPlanes: all},
		{want: "replaces some nodes, others in place", controlPlanes: true, workers: true, keptWorker: some},
		{want: "replaces no node", controlPlanes: true, workers: true, keptControlPlanes: all, keptWorker: all, image: true},
		{want: "control planes in place, workers stay", controlPlanes: true, workers: true, keptControlPlanes: all, keptWorker: all, etcd: true},
	} {
		h := compat.Hop{
			Number: 1, ReplaceControlPlanes: tt.controlPlanes, ReplaceWorkers: tt.workers, ControlPlanesInPlace: tt.keptControlPlanes, WorkersInPlace: tt.keptWorker,
			From: plan.Target{Kubernetes: "v1.36.4"}, To: plan.Target{Kubernetes: "v1.37.2"}, Get: "x",
		}
		if tt.image || tt.etcd {
			h.To.Kubernetes = h.From.Kubernetes
		}
		if tt.etcd {
			h.To.Etcd = "3.6.11-0"
		}
		rows := HopRows(Page{Theme: term.NewTheme(term.Display{})}, 80, &check.Check{Path: []compat.Hop{h}}, 1)
		if !strings.HasSuffix(rows[0], " "+tt.want) {
			t.Errorf("%+v: %q, want %q at its end", tt, rows[0], tt.want)
		}
	}
}
