package plan

import (
	"maps"
	"sync"
)

// Reporter is how a step tells what happens. Its methods may be called concurrently.
type Reporter struct {
	Sink
	step string

	mu  sync.Mutex
	end string
}

// Sink is what a [Reporter] reports to: the run that executes the step. Its methods may be
// called concurrently.
type Sink interface {
	// Send numbers an event, records it and emits it.
	Send(e Event)
	// SendPlan emits the plan as it is now.
	SendPlan() error
	// Hide keeps secrets out of all later events, in the forms they could take.
	Hide(secrets ...[]byte)
	// SetNodes records how many nodes are Ready, for the result.
	SetNodes(n int)
	// Forecast has complete called with every later event of the run, so that it can add when
	// the rollout will be over.
	Forecast(complete func(e *Event))
}

// NewReporter returns a reporter for the step of an ID; empty for what belongs to no step.
func NewReporter(to Sink, step string) *Reporter { return &Reporter{Sink: to, step: step} }

// Conclude says what the step has done, in place of its title. It is told when the step is
// done.
func (r *Reporter) Conclude(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.end = text
}

// Concluded returns what Conclude was last called with.
func (r *Reporter) Concluded() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.end
}

// Send sends an event of the step.
func (r *Reporter) Send(e Event) {
	e.Step = r.step
	r.Sink.Send(e)
}

// Progress tells how far the step is, in the unit that text names; total is zero if
// it is not known.
func (r *Reporter) Progress(current, total int64, text string) {
	r.Send(Event{Kind: KindProgress, Current: current, Total: total, Text: text})
}

// Counts tells how many things are in which state.
func (r *Reporter) Counts(current, total int64, counts map[string]int64) {
	r.Send(Event{Kind: KindProgress, Current: current, Total: total, Counts: maps.Clone(counts)})
}

// Log passes on one line of another program.
func (r *Reporter) Log(source, node, level, line string) {
	r.Send(Event{Kind: KindLog, Source: source, Node: node, Level: level, Text: line})
}

// Wait tells why nothing happens; an empty text ends the wait. The same text again is
// not repeated.
func (r *Reporter) Wait(object, node, text string) {
	r.Send(Event{Kind: KindWait, Object: object, Node: node, Text: text})
}

// Part tells how far a named part of the step is: state is a state of a step, current
// and total are in the unit that text names, zero if they are not known.
func (r *Reporter) Part(name, state, text string, current, total int64) {
	r.Send(Event{Kind: KindProgress, Object: name, State: state, Text: text, Current: current, Total: total})
}

// Check passes on a finding.
func (r *Reporter) Check(e Event) { r.Send(e) }
