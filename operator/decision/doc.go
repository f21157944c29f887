// Package decision decides what the operator does next to bring a cluster's nodes to their
// target. [Decide] takes the target and what was observed, the [World], and returns actions
// and a status. Every safety condition of a rollout is here and nowhere else.
//
// A World is a plain value. It may be stale or incomplete: what is missing from it is
// unknown, never gone. Every [Action] is safe on its own, in any order, and when it is
// repeated or late; [ActionKind] states the condition of each. Conditions on which safety or
// progress depends have names (rules.go). A test can switch one off. TestExplore visits all
// states of small worlds, and TestMutants shows that it finds an error without each condition.
// TestSimulate runs random rollouts with faults.
//
// The package imports no Kubernetes client and no clock: the time is World.Now. Package
// operator observes and carries out the actions.
package decision
