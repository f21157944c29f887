package engine

import "time"

// SetLimits shortens what init waits for.
func (e *Engine) SetLimits(contact, silence, api, ack, chart, still time.Duration) {
	e.limits = limits{contact: contact, silence: silence, api: api, ack: ack, chart: chart, still: still, glance: time.Second, poll: 20 * time.Millisecond, services: 300 * time.Millisecond}
}

// Names of files that only tests look into.
const (
	PendingFile = pendingFile
	EventsFile  = eventsFile
	PlanFile    = planFile
)

// PlanFor returns a plan of steps for tests of Run.
func PlanFor(e *Engine, steps ...Step) *Plan {
	return &Plan{ID: newRunID(VerbInit, e.now()), Verb: VerbInit, Cluster: "demo", Steps: steps, Created: e.now()}
}

// ParseLine is what takes lines of the join service apart.
var ParseLine = parseLine
