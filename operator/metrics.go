package operator

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"constellation/operator/api/v1alpha1"
)

// gauges are the figures of the NodeVersion for whoever watches the operator.
type gauges struct {
	nodes *prometheus.GaugeVec
	ready prometheus.Gauge
}

// newGauges registers the gauges with controller-runtime's registry, or finds them there.
func newGauges() (*gauges, error) {
	nodes, err := register(prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "constellation_nodes", Help: "Nodes of the cluster by class; every node is in exactly one, pending machines are not nodes.",
	}, []string{"class"}))
	if err != nil {
		return nil, err
	}
	ready, err := register(prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "constellation_target_reached", Help: "1 if every node is at the target of the NodeVersion, else 0.",
	}))
	if err != nil {
		return nil, err
	}
	return &gauges{nodes: nodes, ready: ready}, nil
}

func register[C prometheus.Collector](c C) (C, error) {
	err := metrics.Registry.Register(c)
	var known prometheus.AlreadyRegisteredError
	if errors.As(err, &known) {
		if same, ok := known.ExistingCollector.(C); ok {
			return same, nil
		}
	}
	return c, err
}

func (g *gauges) set(s v1alpha1.NodeVersionStatus) {
	for class, n := range map[string]int32{
		"up_to_date": s.Nodes.UpToDate, "outdated": s.Nodes.Outdated, "donor": s.Nodes.Donors, "heir": s.Nodes.Heirs, "mint": s.Nodes.Mints,
		"awaiting_annotation": s.Nodes.AwaitingAnnotation, "obsolete": s.Nodes.Obsolete, "invalid": s.Nodes.Invalid, "pending": s.Nodes.Pending,
	} {
		g.nodes.WithLabelValues(class).Set(float64(n))
	}
	g.ready.Set(0)
	if readyCondition(s).Reason == reasonUpToDate {
		g.ready.Set(1)
	}
}
