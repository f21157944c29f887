// Package infra answers: which objects does a cluster need of its cloud, and which of them are there?
//
// A vendor implements [Cloud]: a list of objects in the order in which they are made, such as a network, a load
// balancer and groups of machines. The package makes steps of a plan of it. Each step observes whether its object
// exists. So an interrupted run continues with the same command, and a second run changes nothing.
//
// What belongs to a cluster bears its UID, in a label or in the description. Only that is deleted. An object that the
// user named in the configuration is used as it is, and stays.
//
// The package sends nothing itself, and knows no vendor.
package infra

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/section"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/words"
)

// Ports of the load balancer in front of the control planes.
const (
	APIPort  = 6443  // of API servers
	InitPort = 9000  // of bootstrappers, for init
	JoinPort = 30090 // of join services
)

// State is how an object is.
type State string

// States of objects.
const (
	Absent  State = "absent"  // it is made
	Exists  State = "exists"  // nothing is to be done
	Differs State = "differs" // it bears the UID, and is not as it would be made; it stays as it is
	Taken   State = "taken"   // an object without the UID has its name
	Own     State = "own"     // the configuration names it: it is used, and never deleted
	Wrong   State = "wrong"   // the configuration names it, and it is missing or cannot be used
	Unknown State = "unknown" // it could not be read
)

// Object is an object of the cloud.
type Object struct {
	// ID is stable for a cluster, in kebab case: firewall-internal.
	ID string `json:"id"`
	// Kind is what the vendor calls such objects: "firewall rule".
	Kind string `json:"kind"`
	Name string `json:"name"`
	// Place is its region or zone; empty: it is in no particular one.
	Place string `json:"place,omitempty"`
	// Purpose states what it is for, in the present tense: "lets machines of the cluster reach each other".
	Purpose string `json:"purpose,omitempty"`
	// Details are its properties, line by line.
	Details []string `json:"details,omitempty"`
	State   State    `json:"state"`
	// Differences are the fields that differ from the object that create makes, or that are wrong.
	Differences []string `json:"differences,omitempty"`
	// Link is the page of the object in the console of the vendor; empty: it does not exist, or has no page of its own.
	Link string `json:"link,omitempty"`
}

// String is "firewall rule demo in europe-west3".
func (o Object) String() string {
	if o.Place == "" {
		return o.Kind + " " + o.Name
	}
	return o.Kind + " " + o.Name + " in " + o.Place
}

// There reports whether nothing has to be made.
func (o Object) There() bool { return o.State == Exists || o.State == Differs || o.State == Own }

// Group is a group of equal machines that the configuration wants.
type Group struct {
	Name  string
	Role  cloud.Role
	Count int
}

// Request describes the infrastructure of a cluster.
type Request struct {
	Cluster string
	// UID marks all objects; empty: it is not chosen yet, so none exists.
	UID string
	// InitSecretHash is the SHA-256 of the init secret; nil without a UID.
	InitSecretHash []byte
	// Config is the provider's section of the configuration, Known that of the state file or the intent; nil
	// before there is one.
	Config, Known section.Values
	Groups        []Group // sorted by name
	Image         version.Version
	PodCIDR       netip.Prefix
	ServiceCIDR   netip.Prefix
	// UserData and BootScript prepare machines with a stock image: for cloud-init, and for images that run a script at
	// each boot instead. Both are empty for other images. They contain no secret, because pods can read them.
	UserData, BootScript string
}

// Stock is what new machines need whose image is one of a distribution and knows nothing of clusters.
type Stock struct {
	// Programs is the URL of the folder with the programs of the release.
	Programs string
	// Proxy is the HTTP proxy of the machines; empty: none. Direct are destinations that need none.
	Proxy  string
	Direct []string
	// Files are what machines of this cloud need beside those of every node.
	Files []StockFile
	// Reread are units of the image, as patterns, that read their files again.
	Reread []string
}

// StockFile is a file that everybody on a machine may read.
type StockFile struct{ Path, Text string }

// Outcome is what the state file needs of a complete infrastructure.
type Outcome struct {
	// Host is the address of the load balancer.
	Host     string
	NodeCIDR netip.Prefix
	// Section is the provider's section of the state file.
	Section section.Values
}

// Cloud is the infrastructure of one cluster at a vendor. Its errors wrap those of package cloud. Reads are repeated
// by the implementation while the cloud throttles or does not answer, and report that to wait.
type Cloud interface {
	// Look returns all objects in the order in which they are made, and findings about all that create needs
	// beside them. It only reads. A missing right is a finding that names it.
	Look(ctx context.Context) ([]Object, []plan.Finding, error)
	// Observe returns one of these objects as it is now.
	Observe(ctx context.Context, id string) (Object, error)
	// Make makes an object and returns when it exists. To make it twice is no error.
	Make(ctx context.Context, id string, wait func(text string)) error
	// Running returns how many machines run, how many there should be, and why some do not; empty: not known.
	Running(ctx context.Context) (running, want int, why string, err error)
	// Outcome fails unless all objects exist.
	Outcome(ctx context.Context) (Outcome, error)
	// Remains returns all that bears the UID, in the order in which it is deleted. It only reads.
	Remains(ctx context.Context) ([]Object, error)
	// Settle waits until no earlier request of a creation is unfinished.
	Settle(ctx context.Context, wait func(text string)) error
	// Delete deletes an object of Remains and returns when it is gone. An object that is gone is no error.
	Delete(ctx context.Context, o Object, wait func(text string)) error
}

// Role is a set of rights, with the files and commands that grant them.
type Role struct {
	// Name selects it.
	Name string `json:"name"`
	// For states whose rights these are.
	For    string  `json:"for"`
	Rights []Right `json:"rights"`
	// Text is the role in the format that the vendor's tool reads, with the commands as comments.
	Text string `json:"-"`
}

// Right is a permission, and the methods that need it.
type Right struct {
	Permission string   `json:"permission"`
	Methods    []string `json:"methods"`
}

// Vendor is how a cloud makes infrastructures.
type Vendor struct {
	// Open returns the infrastructure of a cluster. It sends nothing yet.
	Open func(ctx context.Context, r Request) (Cloud, error)
	// Roles are the least roles for a section of the configuration.
	Roles func(config section.Values) []Role
	// Stock describes the machines of a configuration whose image is a stock image. It reports false for other images.
	// Nil: there are none.
	Stock func(config section.Values, image version.Version) (Stock, bool)
	// Note is a sentence that people must read before they create something; empty: none.
	Note string
}

// IDs of findings and steps.
const (
	FindingTaken   = "infra-name-taken"
	FindingDiffers = "infra-differs"
	FindingRight   = "infra-right"
	FindingOwn     = "infra-own"

	StepMachines = "machines"
	StepProve    = "prove"
)

// Findings returns what the states of objects mean for create.
func Findings(objects []Object) (out []plan.Finding) {
	for _, o := range objects {
		switch o.State {
		case Taken:
			out = append(out, plan.Finding{
				ID: FindingTaken, Severity: plan.Block, Title: "the name of " + o.String() + " is taken", Detail: "an object without the UID of this cluster has it",
				Remedy: "delete or rename it, if it is yours; this program never touches it", Source: "infrastructure",
			})
		case Differs:
			out = append(out, plan.Finding{
				ID: FindingDiffers, Severity: plan.Warn, Title: o.String() + " is not as create makes it", Detail: strings.Join(o.Differences, "\n"),
				Remedy: "leave it if you changed it on purpose; otherwise change it back, or delete it and run `constellation infra create`", Source: "infrastructure",
			})
		}
	}
	return out
}

// Create returns the steps that make what is absent. The last of them waits for the machines.
func Create(c Cloud, objects []Object) (steps []plan.Step) {
	for _, o := range objects {
		if o.State == Own {
			continue
		}
		steps = append(steps, plan.Step{
			ID: o.ID, Title: "Create " + o.Kind + " " + o.Name, Effect: o.Purpose, Details: o.Details, Finished: o.There(),
			Done: func(ctx context.Context) (bool, error) {
				now, err := c.Observe(ctx, o.ID)
				if err == nil && now.State == Taken {
					err = &plan.Error{Err: errors.New("the name of " + now.String() + " is taken by an object without the UID of this cluster"), Remedy: "delete or rename it, if it is yours", Exit: plan.ExitBlocked}
				}
				return err == nil && now.There(), err
			},
			Run: func(ctx context.Context, r *plan.Reporter) error { return c.Make(ctx, o.ID, waiter(r)) },
		})
	}
	running := func(ctx context.Context) (bool, error) {
		n, want, _, err := c.Running(ctx)
		return n >= want, err
	}
	return append(steps, plan.Step{
		ID: StepMachines, Title: "Wait for the machines", Effect: "all machines of the groups run", Done: running,
		Run: func(ctx context.Context, r *plan.Reporter) error {
			for {
				n, want, why, err := c.Running(ctx)
				if err != nil {
					return err
				}
				r.Progress(int64(n), int64(want), "machines")
				if n >= want {
					r.Conclude(words.Count(n, "machine") + " " + words.Verb(n, "run"))
					return nil
				}
				if why == "" {
					why = fmt.Sprintf("%d of %s %s", n, words.Count(want, "machine"), words.Verb(n, "run"))
				}
				waiter(r)(why)
				if err := Pause(ctx, poll); err != nil {
					return err
				}
			}
		},
	})
}

// hasty is the key of Hasty.
type hasty struct{}

// Hasty returns a context for a plan: a person waits for it, so its requests are repeated for a short time only.
func Hasty(ctx context.Context) context.Context { return context.WithValue(ctx, hasty{}, true) }

// Patience is how long a request is repeated while a cloud does not answer.
func Patience(ctx context.Context) time.Duration {
	if ctx.Value(hasty{}) != nil {
		return time.Minute
	}
	return 10 * time.Minute
}

// poll is the time between two observations of machines.
const poll = 3 * time.Second

// Pause waits for a time, unless ctx ends before.
func Pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// waiter reports why a step makes no progress.
func waiter(r *plan.Reporter) func(string) {
	return func(text string) { r.Wait("cloud", "", text) }
}

// Left returns all that bears the UID, after earlier requests of a creation have ended. It only reads.
func Left(ctx context.Context, c Cloud) ([]Object, error) {
	if err := c.Settle(ctx, func(string) {}); err != nil {
		return nil, err
	}
	return c.Remains(ctx)
}

// Terminate returns the steps that delete the objects of Left, and prove that nothing is left.
func Terminate(c Cloud, uid string, objects []Object) (steps []plan.Step) {
	for _, o := range objects {
		steps = append(steps, plan.Step{
			ID: "delete-" + o.ID, Title: "Delete " + o.Kind + " " + o.Name, Effect: o.Purpose,
			Run: func(ctx context.Context, r *plan.Reporter) error { return c.Delete(ctx, o, waiter(r)) },
		})
	}
	return append(steps, plan.Step{
		ID: StepProve, Title: "Prove that nothing is left", Effect: "no object bears the UID " + uid,
		Run: func(ctx context.Context, r *plan.Reporter) error {
			for n := range 5 {
				left, err := Left(ctx, c)
				if err != nil {
					return err
				}
				if len(left) == 0 {
					r.Conclude("nothing bears the UID " + uid)
					return nil
				}
				if n == 4 {
					return &plan.Error{Op: "delete what bears the UID " + uid, Err: fmt.Errorf("%s left: %s", words.Count(len(left), "object")+" "+words.Verb(len(left), "is"), list(left)), Remedy: "run the same command again; if other programs make such objects, end them first"}
				}
				for _, o := range left { // an operator or an autoscaler made them meanwhile
					r.Log("infrastructure", "", "info", "found "+o.String())
					if err := c.Delete(ctx, o, waiter(r)); err != nil {
						return err
					}
				}
			}
			return nil
		},
	})
}

func list(objects []Object) string {
	var names []string
	for _, o := range objects {
		names = append(names, o.String())
	}
	slices.Sort(names)
	return words.And(names)
}
