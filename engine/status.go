package engine

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// Status is a cluster as it is now. It marshals as the document of `status -o json`.
type Status struct {
	Schema  string `json:"schema"`
	Cluster string `json:"cluster"`
	// Server is the address of the API server; empty in a workspace.
	Server string `json:"server,omitempty"`
	// Unmanaged means that the cluster has no NodeVersion: others upgrade it.
	Unmanaged bool `json:"unmanaged,omitempty"`
	// Plans are those of upgrade.cattle.io, Notes what could not be read; only without a workspace.
	Plans []NodePlanStatus `json:"plans,omitempty"`
	Notes []string         `json:"notes,omitempty"`
	// Simulated says that the machines only do as machines would.
	Simulated bool `json:"simulated,omitempty"`
	// NotAttested says that no evidence of hardware vouches for the machines.
	NotAttested bool `json:"notAttested,omitempty"`
	// Provider is the name of the cloud that the machines come from.
	Provider string    `json:"provider"`
	Time     time.Time `json:"time"`
	// Stage is how far the cluster's life has come.
	Stage Stage `json:"stage"`
	// Reachable reports whether the API server answered. If not, Problem has the reason and only
	// the cloud's data is filled in.
	Reachable bool   `json:"reachable"`
	Problem   string `json:"problem,omitempty"`
	Remedy    string `json:"remedy,omitempty"`
	// APIServer is the version that the API server reports.
	APIServer string `json:"apiServer,omitempty"`
	// Target is what NodeVersion asks for; zero fields are not set.
	Target     plan.Target         `json:"target"`
	Conditions []cluster.Condition `json:"conditions,omitempty"`
	Services   []cluster.Service   `json:"services,omitempty"`
	Nodes      []cluster.Node      `json:"nodes"`
	// Machines exist in the cloud and are not nodes yet, or no longer.
	Machines []Machine `json:"machines"`
	// Spares are the spares among enrolled machines, and those that were released from their group.
	Spares []machines.SpareState `json:"spares,omitempty"`
	// Counts are the totals of the above: nodes, ready, current, machines, wanted.
	Counts map[string]int64 `json:"counts"`
	// Backup is the last one; nil if there is none.
	Backup *plan.LastBackup `json:"backup,omitempty"`
	// Health lists the problems; empty if there are none.
	Health []plan.Finding `json:"health"`
}

// Machine is an instance of the cloud that is no node.
type Machine struct {
	Name  string `json:"name"`
	Group string `json:"group"`
	Role  string `json:"role"`
	State string `json:"state"` // one of the Node constants: creating, booting, joining, failed
	Image string `json:"image,omitempty"`
	// ImageVersion is the release of the image; empty if it is unknown.
	ImageVersion string    `json:"imageVersion,omitempty"`
	IP           string    `json:"ip,omitempty"`
	ProviderID   string    `json:"providerID,omitempty"`
	Message      string    `json:"message,omitempty"`
	Created      time.Time `json:"created,omitzero"`
}

// Stage is how far a workspace's cluster has come.
type Stage string

// Stages, in order.
const (
	StageEmpty      Stage = "empty"      // no configuration
	StageConfigured Stage = "configured" // a configuration, no machines
	StageReady      Stage = "ready"      // machines, no cluster: init can start
	StagePartial    Stage = "partial"    // init began and did not end
	StageCluster    Stage = "cluster"
)

// Home is what a workspace holds and what makes sense to do next.
type Home struct {
	Dir   string `json:"dir"`
	Stage Stage  `json:"stage"`
	// Cluster is its name; empty before there is a configuration.
	Cluster string `json:"cluster,omitempty"`
	// Simulated says that the machines only do as machines would.
	Simulated bool `json:"simulated,omitempty"`
	// NotAttested says that no evidence of hardware vouches for the machines.
	NotAttested bool `json:"notAttested,omitempty"`
	// Adopted says that `adopt` wrote the workspace: kubeadm made and upgrades the cluster.
	Adopted bool `json:"adopted,omitempty"`
	// Config and State are nil if the file is absent or cannot be read; Problems says why.
	Config   *workspace.Config `json:"config,omitempty"`
	State    *workspace.State  `json:"-"`
	Problems []plan.Finding    `json:"problems,omitempty"`
	// Next are the commands that make sense, the best one first.
	Next []Suggestion `json:"next"`
	// Runs are the past runs, the newest first.
	Runs []plan.RunSummary `json:"runs,omitempty"`
	// Backup is the last one of the cluster; nil if there is none, or no cluster.
	Backup *plan.LastBackup `json:"backup,omitempty"`
}

// Suggestion is a command that makes sense now.
type Suggestion struct {
	Title   string `json:"title"`   // "Create the cluster"
	Command string `json:"command"` // "constellation init"
	Why     string `json:"why,omitempty"`
}

// lookLimit bounds how long Status asks the API server, and how long the cloud.
const lookLimit = 8 * time.Second

// Status describes the present state of the cluster. If the API server does not answer, the
// description has the cloud's data. The error is about the workspace.
func (e *Engine) Status(ctx context.Context) (Status, error) {
	c, s, err := e.load()
	if errors.Is(err, workspace.ErrAdopted) {
		return e.statusAdopted(ctx, c)
	}
	if err != nil {
		return Status{}, err
	}
	st := Status{
		Schema: plan.Schema, Cluster: c.Name, Simulated: s.Simulated(), NotAttested: s.NotAttested(), Provider: c.Provider.Name, Time: e.now().UTC(), Stage: StageReady,
		Nodes: []cluster.Node{}, Machines: []Machine{}, Health: []plan.Finding{}, Counts: map[string]int64{},
	}
	switch {
	case e.ws.Has(workspace.KubeconfigFile):
		st.Stage = StageCluster
	case len(s.ClusterValues.ClusterID) > 0:
		st.Stage = StagePartial
	}

	var list []cluster.CloudMachine
	var cloudErr error
	var p Cloud
	var inside inside
	var wg sync.WaitGroup
	wg.Go(func() {
		limited, cancel := context.WithTimeout(ctx, lookLimit)
		defer cancel()
		if p, cloudErr = e.provider(limited, c, s); cloudErr == nil {
			list, cloudErr = p.Machines(limited)
		}
	})
	if st.Stage == StageCluster {
		wg.Go(func() {
			limited, cancel := context.WithTimeout(ctx, lookLimit)
			defer cancel()
			inside.look(limited, e)
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return Status{}, err
	}

	st.Reachable = st.Stage == StageCluster && inside.err == nil
	if inside.err != nil {
		st.Problem, st.Remedy = inside.err.Error(), "check whether the control plane is up; the machines of the cloud are listed below"
		if errors.Is(inside.err, cluster.ErrDenied) {
			st.Remedy = workspace.KubeconfigFile + " is not of this cluster or not its administrator's"
		}
		if inside.unread != nil {
			st.Remedy = inside.unread.Remedy
		}
	}
	if st.Reachable && inside.clusterID != "" && inside.clusterID != hex.EncodeToString(s.ClusterValues.ClusterID) {
		return Status{}, e.ws.ForeignKubeconfig()
	}
	st.APIServer, st.Services, st.Conditions = inside.version, inside.services, inside.target.Conditions
	st.Target = plan.Target{Image: inside.target.ImageVersion, Kubernetes: inside.target.Kubernetes}
	if st.Reachable {
		st.Target.Release = releaseOf(inside.services)
	}
	catalogue := s.Catalogue(func() ([]cloud.Image, error) {
		if cloudErr != nil {
			return nil, cloudErr
		}
		limited, cancel := context.WithTimeout(ctx, lookLimit)
		defer cancel()
		return p.Images(limited)
	})
	if s.Enrolled() {
		list = withoutSpares(list, inside.nodes, c.Counts())
	}
	st.merge(list, inside, catalogue)
	st.judge(c, cloudErr, inside)
	st.spares(c, s, inside)
	st.registers(c, s, inside)
	switch {
	case st.Reachable && inside.unenrolled != nil:
		st.Health = append(st.Health, check.AgentsUnchecked(inside.unenrolled))
	case st.Reachable && cloudErr == nil:
		if left := check.Unverified(st.Nodes, list, inside.enrolled, catalogue); len(left) > 0 {
			st.Health = append(st.Health, check.AgentsFinding(left, catalogue, check.ReplaceOnce(left)))
		}
	}
	if st.Stage == StageCluster {
		var err error
		st.Backup, err = e.lastBackup(s)
		if f := e.backupFinding(st.Backup, err); f.Severity != plan.Info {
			st.Health = append(st.Health, f)
		}
	}
	return st, nil
}

// registers adds the enrolled machines whose firmware or boot loader changed.
func (st *Status) registers(c *workspace.Config, s *workspace.State, in inside) {
	if !s.Enrolled() || !st.Reachable {
		return
	}
	const remove = "`kubectl -n constellation-system patch configmap " + machines.RegistersConfigMap + ` --type merge -p '{"data":{"NAME":null}}'` + "`"
	changed, err := machines.ChangedRegisters(workspace.EnrolledInventory(c, s), in.records.Registers)
	switch {
	case err != nil:
		st.Health = append(st.Health, plan.Finding{ID: "registers", Severity: plan.Warn, Title: "the registers of TPMs cannot be read", Detail: err.Error(), Remedy: "remove its record with " + remove, Source: "health"})
	case len(changed) > 0:
		st.Health = append(st.Health, plan.Finding{
			ID: "registers", Severity: plan.Warn, Title: "the TPMs of " + words.Count(len(changed), "machine") + " measured another boot than before", Detail: strings.Join(changed, "; "),
			Remedy: "if you updated firmware or boot loader then, end this finding with " + remove + "; else take the machine out of the cluster with `constellation machine revoke NAME`", Source: "health",
		})
	}
}

// spares adds the spares of enrolled machines, and groups that lack one.
func (st *Status) spares(c *workspace.Config, s *workspace.State, in inside) {
	if !s.Enrolled() || !st.Reachable {
		return
	}
	list := workspace.EnrolledInventory(c, s)
	spares, short, err := machines.Report(list, in.records.Assignments, in.records.Seen, st.Time)
	if err != nil {
		st.Health = append(st.Health, plan.Finding{ID: "spares", Severity: plan.Warn, Title: "the assignments of spares cannot be read", Detail: err.Error(), Remedy: "restore the ConfigMap from a backup", Source: "health"})
		return
	}
	st.Spares = spares
	for _, group := range slices.Sorted(maps.Keys(short)) {
		st.Health = append(st.Health, plan.Finding{
			ID: "spares", Severity: plan.Warn, Title: "group " + group + " waits for a spare", Detail: short[group],
			Remedy: "run `constellation machine list`, which shows why spares are not usable, or add one with `constellation machine add --spare`", Source: "health",
		})
	}
}

// inside is the data from the API server.
type inside struct {
	version   string
	clusterID string
	target    cluster.NodeTarget
	nodes     []*cluster.Node
	expected  []cluster.ExpectedNode
	services  []cluster.Service
	records   machines.Records
	err       error
	unread    *plan.Error // err, if it is about the kubeconfig
	// enrolled are the components of nodes that are upgraded in place, by name; nil if unknown.
	enrolled   map[string]cluster.Components
	unenrolled error // why they are unknown
}

func (i *inside) look(ctx context.Context, e *Engine) {
	b, err := e.ws.Kubeconfig()
	if err != nil {
		i.err = err
		return
	}
	k, err := e.connect(ctx, b)
	if err != nil {
		i.unread = e.ws.BadKubeconfig(err)
		i.err = i.unread
		return
	}
	if i.version, i.err = k.Version(ctx); i.err != nil {
		return
	}
	// What init has not made yet is absent; that is no error here.
	var errs [6]error
	var wg sync.WaitGroup
	wg.Go(func() {
		var j cluster.JoinConfig
		j, errs[0] = k.JoinConfig(ctx)
		i.clusterID = j.ClusterID
	})
	wg.Go(func() { i.target, errs[1] = k.NodeTarget(ctx) })
	wg.Go(func() { i.nodes, errs[2] = k.Nodes(ctx) })
	wg.Go(func() { i.expected, errs[3] = k.Expected(ctx) })
	wg.Go(func() { i.services, errs[4] = k.Services(ctx) })
	if e, ok := k.(Enroller); ok {
		wg.Go(func() { i.records, errs[5] = e.MachineRecords(ctx) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil && !errors.Is(err, cluster.ErrAbsent) {
			i.err = err
			return
		}
	}
	nodes := make([]cluster.Node, len(i.nodes))
	for at, n := range i.nodes {
		nodes[at] = *n
	}
	// The rest of the status stands without it: a Node of an older program can claim any name.
	if i.enrolled, err = check.EnrolledBy(ctx, k, nodes); err != nil {
		i.enrolled, i.unenrolled = nil, err
	}
}

// releaseOf returns the version of the services that come with a release; empty if
// they differ, as during an upgrade.
func releaseOf(services []cluster.Service) string {
	found := ""
	for _, s := range services {
		if s.Kind != cluster.ServiceOfRelease {
			continue
		}
		if found != "" && s.Version != found {
			return ""
		}
		found = s.Version
	}
	return found
}

// merge fills nodes and machines.
func (st *Status) merge(machines []cluster.CloudMachine, in inside, catalogue *cloud.Catalogue) {
	versionOf := func(image string) string {
		switch image {
		case "":
			return ""
		case in.target.Image:
			return in.target.ImageVersion
		}
		v, err := catalogue.Version(image)
		if err != nil {
			return "" // the reference is shown
		}
		return v.String()
	}
	isNode := map[string]bool{}
	for _, shared := range in.nodes {
		n := *shared
		isNode[n.Name] = true
		n.Current = in.target.Components != "" && (in.target.Image == "" || n.Image == in.target.Image || n.InPlace) && n.Components == in.target.Components
		n.ImageVersion = versionOf(n.Image)
		st.Nodes = append(st.Nodes, n)
	}
	joining := map[string]bool{}
	for _, x := range in.expected {
		joining[x.Name] = true
	}
	for _, m := range machines {
		if isNode[m.Name] {
			continue
		}
		state := m.Stage
		switch {
		case state == "" && joining[m.Name]:
			state = plan.NodeJoining
		case state == "":
			state = plan.NodeBooting
			if !st.Reachable && st.Stage == StageCluster {
				state = plan.StateUnknown // it may well be a node
			}
		}
		st.Machines = append(st.Machines, Machine{
			Name: m.Name, Group: m.GroupName, Role: string(m.Role), State: state, Image: m.Image, ImageVersion: versionOf(m.Image),
			IP: m.IP.String(), ProviderID: m.ProviderID, Message: m.Message, Created: m.Created,
		})
	}
	slices.SortFunc(st.Machines, func(a, b Machine) int { return strings.Compare(a.Name, b.Name) })
}

// judge counts, and lists the problems.
func (st *Status) judge(c *workspace.Config, cloudErr error, in inside) {
	bad := func(id string, s plan.Severity, title, detail, remedy string) {
		st.Health = append(st.Health, plan.Finding{ID: id, Severity: s, Title: title, Detail: detail, Remedy: remedy, Source: "health"})
	}
	count := st.Counts
	for _, k := range []string{"nodes", "ready", "current", "machines", "wanted"} {
		count[k] = 0
	}
	for _, g := range c.NodeGroups {
		count["wanted"] += int64(g.Count)
	}
	var notReady, old []string
	for _, n := range st.Nodes {
		count["nodes"]++
		if n.State == plan.NodeReady {
			count["ready"]++
		} else {
			notReady = append(notReady, named(n.Name, n.Message))
		}
		if n.Current {
			count["current"]++
		} else {
			old = append(old, n.Name)
		}
	}
	count["machines"] = int64(len(st.Machines))

	switch {
	case in.unread != nil:
		bad(workspace.KubeconfigFile, plan.Block, workspace.KubeconfigFile+" leads to no cluster", st.Problem, st.Remedy)
	case st.Problem != "":
		bad("api-server", plan.Block, "the API server does not answer", st.Problem, st.Remedy)
	}
	if cloudErr != nil {
		e := check.CloudError("ask the cloud", c.Advice(), cloudErr)
		bad("cloud", plan.Block, "the cloud does not answer", e.Error(), plan.Remedy(e))
	}
	if st.Stage == StagePartial {
		bad("init", plan.Warn, "init of the cluster is not complete", "", "run `constellation init` to continue")
	}
	if len(notReady) > 0 {
		bad("nodes-ready", plan.Warn, fmt.Sprintf("%d of %d nodes are not ready", len(notReady), count["nodes"]), some(notReady), "")
	}
	if st.Reachable && in.target.Components != "" && len(old) > 0 {
		bad("nodes-current", plan.Warn, fmt.Sprintf("%d of %d nodes are not at the target", len(old), count["nodes"]), some(old), "")
	}
	var failed, waiting []string
	for _, m := range st.Machines {
		if m.State == plan.NodeFailed {
			failed = append(failed, named(m.Name, m.Message))
		} else {
			waiting = append(waiting, m.Name)
		}
	}
	if len(failed) > 0 {
		bad("machines-failed", plan.Block, words.Count(len(failed), "machine")+" failed", some(failed), c.Advice().Failed)
	}
	if st.Reachable && len(waiting) > 0 {
		bad("machines-joining", plan.Warn, fmt.Sprintf("%s not yet in the cluster", words.Count(len(waiting), "machine")), some(waiting), "")
	}
	for _, s := range st.Services {
		if s.Ready < s.Wanted {
			bad("service-"+s.Name, plan.Warn, fmt.Sprintf("%s is not ready: %d of %d pods", s.Name, s.Ready, s.Wanted), s.Message, "")
		}
	}
	for _, x := range st.Conditions {
		if x.Type == "Stalled" && x.Status == "True" {
			bad("operator", plan.Block, "the operator is blocked", x.Message, "")
		}
	}
}

func named(name, message string) string {
	if message == "" {
		return name
	}
	return name + ": " + message
}

// some returns the first few of a list.
func some(list []string) string {
	if n := len(list); n > 5 {
		return strings.Join(list[:5], ", ") + fmt.Sprintf(" and %d more", n-5)
	}
	return strings.Join(list, ", ")
}
