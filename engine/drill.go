package engine

import (
	"context"
	"time"
)

// Drills runs upgrades of throwaway clusters while things go wrong.
type Drills interface {
	// Drill runs one and judges it. That an invariant did not hold is no error: it is in
	// the report. An error says that there is nothing to judge. tell, unless nil, gets
	// what happens as it does.
	Drill(ctx context.Context, spec DrillSpec, tell func(text string)) (DrillReport, error)
	// Versions returns spec with the versions that it does not name.
	Versions(spec DrillSpec) (DrillSpec, error)
	// Faults lists what can go wrong in a drill.
	Faults() []DrillFault
}

// DrillSpec configures a drill. Zero fields take their defaults.
type DrillSpec struct {
	// Workspace is the absolute path of a directory without a sandbox. What the drill
	// needs lies below it while it runs.
	Workspace string
	// Machines are real, simulated or hollow; empty and auto mean real for root, and
	// simulated for others.
	Machines string
	// Seed decides which faults there are, at which points, and how long they last.
	Seed uint64
	// ControlPlanes is how many there are, 1, 3 or 5. Zero means one. Hollow machines have
	// control planes that nothing happens to.
	ControlPlanes int
	// InPlace upgrades the nodes of all groups in place, by their agents. Else machines are replaced.
	// Hollow machines have no agents and refuse it.
	InPlace bool
	// Cloud is the provider that is emulated in front of the machines, such as gcp. Empty means the cloud of the sandbox.
	Cloud string
	// Faults are those that the seed may choose from; none means all that these machines
	// can have.
	Faults []string
	// Count is how many faults there are. Zero means four.
	Count int
	// KubernetesFrom is the version before the upgrade. Empty means the default of new sandboxes.
	KubernetesFrom string
	// Kubernetes is the version after the upgrade: of the same minor or the next. Empty means
	// the newest of the next minor, or for the default KubernetesFrom the version that tests upgrade
	// to. If it is KubernetesFrom, machines are only replaced; hollow ones refuse that.
	Kubernetes string
	// Journal is the file that all that was seen is written to. Empty writes none.
	Journal string
}

// DrillFault is something that can go wrong in a drill.
type DrillFault struct {
	Name     string   `json:"name"`
	Does     string   `json:"does"` // a sentence
	Machines []string `json:"machines"`
	Points   []string `json:"points"` // at which it can begin
	// InPlacePoints are those of an upgrade in place.
	InPlacePoints []string `json:"in_place_points,omitempty"`
	// Clouds are the emulated clouds that have it. OwnCloud is whether the cloud of a sandbox has it.
	Clouds   []string `json:"clouds,omitempty"`
	OwnCloud bool     `json:"own_cloud"`
}

// Outcomes of a drill.
const (
	DrillPassed = "passed"
	DrillFailed = "failed" // an invariant did not hold, or the upgrade did not end
	DrillVoid   = "void"   // nothing went wrong, so nothing was tried
)

// DrillReport is what a drill found.
type DrillReport struct {
	Seed     uint64 `json:"seed"`
	Machines string `json:"machines"`
	// ControlPlanes is how many there were of machines in which programs run.
	ControlPlanes int `json:"control_planes,omitempty"`
	// InPlace means that nodes were upgraded in place.
	InPlace bool `json:"in_place,omitempty"`
	// Cloud is the provider that was emulated; empty: none.
	Cloud   string `json:"cloud,omitempty"`
	Cluster string `json:"cluster"` // a description of the upgraded cluster
	// KubernetesFrom and KubernetesTo are the versions before and after the upgrade. Reports of
	// older programs lack them.
	KubernetesFrom string    `json:"kubernetes_from,omitempty"`
	KubernetesTo   string    `json:"kubernetes_to,omitempty"`
	Program        string    `json:"program"` // release of the program that ran it
	Started        time.Time `json:"started"`
	TookMS         int64     `json:"took_ms"`    // of the drill, from its first machine to its last
	RolledMS       int64     `json:"rollout_ms"` // of the upgrade
	Outcome        string    `json:"outcome"`
	// Why says in a sentence why the outcome is not that it passed.
	Why      string           `json:"why,omitempty"`
	Injected []DrillInjection `json:"injected"`
	Rules    []DrillRule      `json:"rules"`
	// Summary has figures of the rollout, in lines.
	Summary []string `json:"summary"`
	// Repeat are the arguments of the program that run the same drill.
	Repeat []string `json:"repeat"`
}

// DrillInjection is a fault of a drill.
type DrillInjection struct {
	Fault string `json:"fault"`
	Point string `json:"point"`
	// Nth says at which of the points of this name.
	Nth int `json:"nth"`
	// On is the machine that it happened to; empty: the cluster or its cloud.
	On string `json:"on,omitempty"`
	// LastsMS is how long it was to last; zero: no longer than it takes.
	LastsMS int64 `json:"lasts_ms"`
	// AtMS and EndMS are since the begin of the upgrade; both are -1 if the point was
	// never reached.
	AtMS  int64 `json:"at_ms"`
	EndMS int64 `json:"end_ms"`
	// Err says why it could not be done or undone.
	Err string `json:"error,omitempty"`
}

// DrillRule is an invariant, and how it fared.
type DrillRule struct {
	Rule string `json:"rule"`
	// NotAsked means that these machines have nothing that could break it.
	NotAsked bool `json:"not_asked,omitempty"`
	// Breaches tell when and how it did not hold. Excused are those that a fault explains:
	// a machine without power is not Ready, whatever anybody decides.
	Breaches []string `json:"breaches,omitempty"`
	Excused  []string `json:"excused,omitempty"`
}
