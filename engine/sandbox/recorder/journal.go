package recorder

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"
)

// Entry is one observation. Entries are in order of time.
type Entry struct {
	Time time.Time
	Fact Fact // nil only in an entry of a newer recorder
}

// Fact is what an entry reports: a Mark, a Note, or a pointer to one of the types below.
type Fact interface{ setIn(*line) }

// As returns f if it is an F, else nil.
func As[F Fact](f Fact) F {
	x, _ := f.(F)
	return x
}

// line is an entry in a file.
type line struct {
	Time time.Time `json:"time"`

	Mark     Mark      `json:"mark,omitempty"`
	Note     Note      `json:"note,omitempty"`
	Stream   *Stream   `json:"stream,omitempty"`
	Node     *Node     `json:"node,omitempty"`
	Pending  *Pending  `json:"pending,omitempty"`
	Joining  *Joining  `json:"joining,omitempty"`
	Target   *Target   `json:"target,omitempty"`
	Strategy *Strategy `json:"strategy,omitempty"`
	Scaler   *Scaler   `json:"scaler,omitempty"`
	Lease    *Lease    `json:"lease,omitempty"`
	Server   *Server   `json:"server,omitempty"`
	Machines *Machines `json:"machines,omitempty"`
	Members  *Members  `json:"members,omitempty"`
	Probe    *Probe    `json:"probe,omitempty"`
	Budget   *Budget   `json:"budget,omitempty"`
	Run      *Run      `json:"run,omitempty"`
	Outage   *Outage   `json:"outage,omitempty"`
	Secret   *Secret   `json:"secret,omitempty"`
}

func (f Mark) setIn(l *line)      { l.Mark = f }
func (f Note) setIn(l *line)      { l.Note = f }
func (f *Stream) setIn(l *line)   { l.Stream = f }
func (f *Node) setIn(l *line)     { l.Node = f }
func (f *Pending) setIn(l *line)  { l.Pending = f }
func (f *Joining) setIn(l *line)  { l.Joining = f }
func (f *Target) setIn(l *line)   { l.Target = f }
func (f *Strategy) setIn(l *line) { l.Strategy = f }
func (f *Scaler) setIn(l *line)   { l.Scaler = f }
func (f *Lease) setIn(l *line)    { l.Lease = f }
func (f *Server) setIn(l *line)   { l.Server = f }
func (f *Machines) setIn(l *line) { l.Machines = f }
func (f *Members) setIn(l *line)  { l.Members = f }
func (f *Probe) setIn(l *line)    { l.Probe = f }
func (f *Budget) setIn(l *line)   { l.Budget = f }
func (f *Run) setIn(l *line)      { l.Run = f }
func (f *Outage) setIn(l *line)   { l.Outage = f }
func (f *Secret) setIn(l *line)   { l.Secret = f }

// MarshalJSON implements json.Marshaler.
func (e Entry) MarshalJSON() ([]byte, error) {
	l := line{Time: e.Time}
	if e.Fact != nil {
		e.Fact.setIn(&l)
	}
	return json.Marshal(l)
}

// UnmarshalJSON implements json.Unmarshaler.
func (e *Entry) UnmarshalJSON(b []byte) error {
	var l line
	if err := json.Unmarshal(b, &l); err != nil {
		return err
	}
	*e = Entry{Time: l.Time}
	switch {
	case l.Mark != "":
		e.Fact = l.Mark
	case l.Note != "":
		e.Fact = l.Note
	case l.Stream != nil:
		e.Fact = l.Stream
	case l.Node != nil:
		e.Fact = l.Node
	case l.Pending != nil:
		e.Fact = l.Pending
	case l.Joining != nil:
		e.Fact = l.Joining
	case l.Target != nil:
		e.Fact = l.Target
	case l.Strategy != nil:
		e.Fact = l.Strategy
	case l.Scaler != nil:
		e.Fact = l.Scaler
	case l.Lease != nil:
		e.Fact = l.Lease
	case l.Server != nil:
		e.Fact = l.Server
	case l.Machines != nil:
		e.Fact = l.Machines
	case l.Members != nil:
		e.Fact = l.Members
	case l.Probe != nil:
		e.Fact = l.Probe
	case l.Budget != nil:
		e.Fact = l.Budget
	case l.Run != nil:
		e.Fact = l.Run
	case l.Outage != nil:
		e.Fact = l.Outage
	case l.Secret != nil:
		e.Fact = l.Secret
	}
	return nil
}

// Note is an action of the caller, for users.
type Note string

// Mark divides a journal.
type Mark string

// A rollout must preserve the state at Begin. The state at End is
// its result.
const (
	Begin Mark = "begin"
	End   Mark = "end"
)

type (
	// Stream reports that a watch was interrupted or resumed. In between, its data are
	// stale.
	Stream struct {
		Kind string `json:"kind"`
		Cut  bool   `json:"cut,omitempty"`
	}

	// Node is a Node of Kubernetes after a change.
	Node struct {
		Name         string   `json:"name"`
		UID          string   `json:"uid,omitempty"`
		Gone         bool     `json:"gone,omitempty"`
		Ready        bool     `json:"ready,omitempty"`
		ControlPlane bool     `json:"controlPlane,omitempty"`
		ProviderID   string   `json:"providerID,omitempty"`
		Kubelet      string   `json:"kubelet,omitempty"`
		Image        string   `json:"image,omitempty"`
		Components   string   `json:"components,omitempty"`
		Group        string   `json:"group,omitempty"`
		Donor        string   `json:"donor,omitempty"`
		Heir         string   `json:"heir,omitempty"`
		Cordoned     bool     `json:"cordoned,omitempty"`
		CordonedByUs bool     `json:"cordonedByUs,omitempty"`
		Postponed    bool     `json:"postponed,omitempty"`
		Obsolete     bool     `json:"obsolete,omitempty"`
		InPlace      bool     `json:"inPlace,omitempty"` // it is upgraded in place
		Taints       []string `json:"taints,omitempty"`  // keys
	}

	// Pending is a PendingNode after a change.
	Pending struct {
		Name    string `json:"name"`
		Gone    bool   `json:"gone,omitempty"`
		Goal    string `json:"goal,omitempty"`
		Token   string `json:"token,omitempty"`
		Donor   string `json:"donor,omitempty"`
		Machine string `json:"machine,omitempty"` // ID
		Node    string `json:"node,omitempty"`
		Group   string `json:"group,omitempty"`
		Phase   string `json:"phase,omitempty"` // of its own agent's run
	}

	// Joining is a JoiningNode after a change.
	Joining struct {
		Name string `json:"name"`
		Gone bool   `json:"gone,omitempty"`
	}

	// Target is the NodeVersion after a change.
	Target struct {
		Image        string `json:"image"`
		Components   string `json:"components"`
		Kubernetes   string `json:"kubernetes"`
		ControlPlane string `json:"controlPlane,omitempty"` // version for joining control planes
		Worker       string `json:"worker,omitempty"`
		Phase        string `json:"phase,omitempty"` // of the agent's run
		Line         string `json:"line,omitempty"`
		Node         string `json:"node,omitempty"` // the agent's
		Waiting      string `json:"waiting,omitempty"`
		Ready        bool   `json:"ready,omitempty"` // for the generation of the spec
		Reason       string `json:"reason,omitempty"`
		KeepWorkers  bool   `json:"keepWorkers,omitempty"`
	}

	// Strategy is the AutoscalingStrategy after a change.
	Strategy struct {
		Enabled bool `json:"enabled,omitempty"`
		Paused  bool `json:"paused,omitempty"` // by us
	}

	// Scaler is the autoscaler's Deployment after a change.
	Scaler struct {
		Gone     bool  `json:"gone,omitempty"`
		Replicas int32 `json:"replicas,omitempty"` // desired
		Pods     int32 `json:"pods,omitempty"`     // running
	}

	// Lease is that of the operator's leader after its holder changed.
	Lease struct {
		Holder string `json:"holder,omitempty"` // name of the Node; empty: none
	}

	// Server is the pod of a control plane's API server after a change.
	Server struct {
		Node    string `json:"node"`
		Gone    bool   `json:"gone,omitempty"`
		Version string `json:"version,omitempty"`
	}

	// Machines are all that the cloud has.
	Machines struct {
		List []Machine `json:"list"`
	}

	// Machine is one of the cloud's.
	Machine struct {
		ID           string `json:"id"`
		Incarnation  string `json:"incarnation,omitempty"` // empty in clouds that do not reuse IDs
		Name         string `json:"name"`
		Group        string `json:"group"`
		ControlPlane bool   `json:"controlPlane,omitempty"`
		State        string `json:"state"`
		Token        string `json:"token,omitempty"`
		Image        string `json:"image,omitempty"`
	}

	// Members are the members of etcd.
	Members struct {
		List []Member `json:"list"`
	}

	// Member is a member of etcd. It has no name before its start.
	Member struct {
		Name    string `json:"name,omitempty"`
		Learner bool   `json:"learner,omitempty"`
	}

	// Probe is a request, to a service from a machine, or to the API server from outside.
	Probe struct {
		From   string `json:"from,omitempty"` // name of the machine; empty: to the API server
		Err    string `json:"err,omitempty"`  // empty: answered
		TookMS int64  `json:"tookMS,omitempty"`
	}

	// Budget is a PodDisruptionBudget of a workload after a change of its pods.
	Budget struct {
		Name    string `json:"name"`
		Gone    bool   `json:"gone,omitempty"`
		Healthy int32  `json:"healthy"`
		Wanted  int32  `json:"wanted"`
	}

	// Run is the latest run in the journal of a node's agent, and what an upgrade in place left on
	// the disk.
	Run struct {
		Node string `json:"node"`
		// Stage is that of a run without a success; empty otherwise, or if there was none.
		Stage string   `json:"stage,omitempty"`
		Left  []string `json:"left,omitempty"` // paths
		Err   string   `json:"err,omitempty"`  // why the disk could not be read
	}

	// Outage is a power cut of all machines, when they are back or the wait for them has ended.
	Outage struct {
		Machines []string `json:"machines"`       // that lost their power
		Away     []string `json:"away,omitempty"` // those that exist and are not Ready again
		TookMS   int64    `json:"tookMS"`
	}

	// Secret is a Secret of the caller, as all control planes return and store it.
	Secret struct {
		Name string     `json:"name"`
		On   []SecretOn `json:"on"`
	}

	// SecretOn is a Secret on a control plane.
	SecretOn struct {
		Node string `json:"node"`
		// Sum is the SHA-256 of the content that its API server returned.
		Sum string `json:"sum,omitempty"`
		// Stored is how its etcd stores it: the prefix of the encryption, or "not encrypted".
		Stored string `json:"stored,omitempty"`
		Err    string `json:"err,omitempty"` // why it could not be read
	}
)

// Read reads a journal that a [Recorder] wrote.
func Read(file string) ([]Entry, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read journal: %w", err)
	}
	defer f.Close()
	var out []Entry
	d := json.NewDecoder(bufio.NewReader(f))
	for {
		var e Entry
		if err := d.Decode(&e); err == io.EOF {
			return out, nil
		} else if err != nil {
			return nil, fmt.Errorf("read journal: entry %d: %w", len(out)+1, err)
		}
		out = append(out, e)
	}
}
