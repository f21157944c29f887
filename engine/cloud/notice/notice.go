// Package notice has what a cloud announces to a machine about its end: that it is preempted, or that its host is maintained.
//
// The agent of the machine reads announcements from the machine's metadata server, by a source of package
// [constellation/engine/cloud/providers/notices]. It writes them as the condition [Condition] of the machine's Node, with the
// identity of the kubelet. The operator reads the condition, and drains the node.
package notice

import (
	"context"
	"time"
)

// Condition is the type of the condition of a Node. It is True while the cloud announces something. Its reason is a [Reason].
const Condition = "CloudDisruption"

// Reason is what the cloud announces.
type Reason string

// Reasons. The zero value means that the cloud announces nothing.
const (
	// Preempted means that the cloud ends the machine for good.
	Preempted Reason = "Preempted"
	// HostTerminates means that the cloud stops the machine, because its host is maintained.
	HostTerminates Reason = "HostTerminates"
	// HostMigrates means that the cloud moves the machine to another host. It pauses for less than a second, and keeps running.
	HostMigrates Reason = "HostMigrates"
	// Ended is the reason of a condition that is False.
	Ended Reason = "Ended"
)

// Stops reports whether the machine stops.
func (r Reason) Stops() bool { return r == Preempted || r == HostTerminates }

// Notice is an announcement. The zero value means that there is none.
type Notice struct {
	Reason Reason
	// Within is the documented time from the announcement until it happens.
	Within time.Duration
}

// Text returns the announcement as a sentence for users.
func (n Notice) Text() string {
	switch n.Reason {
	case Preempted:
		return "the cloud preempts this machine and stops it within " + n.Within.String()
	case HostTerminates:
		return "the cloud stops this machine in about " + n.Within.String() + " for maintenance of its host"
	case HostMigrates:
		return "the cloud moves this machine to another host in about " + n.Within.String() + "; it keeps running"
	}
	return "the cloud announces nothing about this machine"
}

// Source calls told with what the cloud announces now, and after each change, from one goroutine, until ctx ends. Errors are
// retried; the first one in a row is reported to failed.
type Source func(ctx context.Context, told func(Notice), failed func(error))
