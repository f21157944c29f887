package view

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/enrol"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
)

// MachineListing is the document of `machine list -o json`.
type MachineListing struct {
	Schema  string    `json:"schema"`
	Time    time.Time `json:"time"`
	CLI     string    `json:"cli"`
	Cluster string    `json:"cluster"`
	// Problem is why it is not known which machines are nodes, Remedy what to do about it.
	Problem string `json:"problem,omitempty"`
	Remedy  string `json:"remedy,omitempty"`
	// Adopted is whether kubeadm made the cluster: its machines were not prepared here, and have no key.
	Adopted  bool            `json:"adopted,omitempty"`
	Machines []ListedMachine `json:"machines"`
	// Initialised is whether the workspace has a cluster.
	Initialised bool `json:"-"`
}

// ListedMachine is one machine of the list. Node is absent if it is none.
type ListedMachine struct {
	Name    string `json:"name"`
	Group   string `json:"group"`
	Address string `json:"address"`
	// Attested is whether a TPM holds the machine's key.
	Attested bool          `json:"attested"`
	Node     *cluster.Node `json:"node,omitempty"`
	// Joins is whether the machine has a ticket to join and is no node yet.
	Joins bool `json:"joins,omitempty"`
	// EK is the hash of the endorsement key of the TPM that holds the machine's key, TPM its address.
	EK  string `json:"ek,omitempty"`
	TPM string `json:"tpm,omitempty"`
	// Vendor is the root of that TPM's certificate; empty: none was verified.
	Vendor string `json:"vendor,omitempty"`
	// Labels and Taints are those that the list gives to the Node.
	Labels string `json:"labels,omitempty"`
	Taints string `json:"taints,omitempty"`
	// Spare is absent of a machine that belongs to its group by its row.
	Spare *engine.Spare `json:"spare,omitempty"`
}

// key is where the key of a machine is.
func (l *MachineListing) key(m *ListedMachine) string {
	switch {
	case l.Adopted:
		return "-"
	case m.Attested:
		return "TPM"
	}
	return "file"
}

// node describes the Node of a machine.
func (l *MachineListing) node(m *ListedMachine) string {
	switch {
	case m.Node != nil:
		text := fmt.Sprintf("%s, %s, since %s", m.Node.State, m.Node.Kubernetes, m.Node.Created.Format(time.DateOnly))
		if m.Spare != nil {
			text += ", a spare of this group"
		}
		return text
	case l.Problem != "":
		return "unknown"
	case !l.Initialised:
		return "waits for init"
	case m.Joins:
		return "joins"
	case m.Spare != nil && m.Spare.State == "assigned":
		return "spare, assigned, and joins"
	case m.Spare != nil && m.Spare.Why != "":
		return "spare, not usable: " + m.Spare.Why
	case m.Spare != nil:
		return "spare, ready to join"
	}
	return "not a node"
}

// MachineTable renders the list.
func MachineTable(pg Page, w int, l *MachineListing) (lines []string) {
	if len(l.Machines) == 0 {
		return []string{"no machine was added"}
	}
	name := 4
	for _, m := range l.Machines {
		name = max(name, term.Width(term.Clean(m.Name)))
	}
	name = min(name, 40)
	lines = append(lines, pg.Row(w).Col(term.Faint, "NAME", name+2).Col(term.Faint, "GROUP", 15).Col(term.Faint, "ADDRESS", 18).Col(term.Faint, "KEY", 6).Add(term.Faint, "NODE").String())
	for i := range l.Machines {
		m := &l.Machines[i]
		lines = append(lines, pg.Row(w).Col(term.Strong, term.Clean(m.Name), name+2).Col(term.Plain, m.Group, 15).Col(term.Plain, term.Clean(m.Address), 18).Col(term.Plain, l.key(m), 6).Add(term.Plain, term.Clean(l.node(m))).String())
	}
	if l.Initialised && l.Problem == "" && !l.Adopted && slices.ContainsFunc(l.Machines, func(m ListedMachine) bool { return m.Node == nil && !m.Joins && m.Spare == nil }) {
		lines = append(lines, "")
		for _, p := range term.Wrap("not a node: `constellation machine logs NAME --ssh USER@HOST` has the reason; a machine whose Node was deleted joins again after `constellation machine add --ssh USER@HOST`", max(20, w)) {
			lines = append(lines, pg.Row(w).Add(term.Faint, p).String())
		}
	}
	if l.Problem != "" {
		lines = append(lines, "", pg.Row(w).Add(term.Plain, term.Clean(l.Problem)).String())
		if l.Remedy != "" {
			lines = append(lines, pg.Row(w).Add(term.Faint, term.Clean(l.Remedy)).String())
		}
	}
	return lines
}

// MachineRows lists machines in h lines, with the cursor on row at.
func MachineRows(pg Page, w, h int, l *MachineListing, at int) []string {
	nodes := 0
	for i := range l.Machines {
		if l.Machines[i].Node != nil {
			nodes++
		}
	}
	remark := fmt.Sprintf("%d of %d are nodes", nodes, len(l.Machines))
	if l.Problem != "" {
		remark = words.Count(len(l.Machines), "machine") + ", nodes unknown"
	}
	names, addresses := 9, 8
	for i := range l.Machines {
		names = max(names, term.Width(term.Clean(l.Machines[i].Name)))
		addresses = max(addresses, term.Width(term.Clean(l.Machines[i].Address)))
	}
	names, addresses = min(names, max(9, w-64))+1, min(addresses, 39)+1
	wide := w >= 64+addresses-8
	head := pg.Row(w).Pad(5).Col(term.Faint, "name", names).Col(term.Faint, "group", 14)
	if wide {
		head.Col(term.Faint, "address", addresses)
	}
	head.Col(term.Faint, "key", 5).Col(term.Faint, "node", 10).Col(term.Faint, "version", 8).Add(term.Faint, "age")
	lines := []string{pg.Rule(w, "Machines", remark), head.String()}
	from, to := Window(len(l.Machines), at, h-len(lines))
	for i := from; i < to; i++ {
		m := &l.Machines[i]
		state := plan.NodeBooting
		if m.Node != nil {
			state = m.Node.State
		}
		sign, st := NodeSign(pg, state)
		name := term.Plain
		if i == at {
			name = term.Strong
		}
		r := pg.Row(w).Add(term.Accent, " "+Marker(pg, i == at)).Add(st, sign).Add(term.Plain, " ").Col(name, term.Clean(m.Name), names).Col(term.Plain, strings.ReplaceAll(m.Group, "-", " "), 14)
		if wide {
			r.Col(term.Plain, term.Clean(m.Address), addresses)
		}
		r.Col(term.Faint, l.key(m), 5)
		if n := m.Node; n != nil {
			r.Col(st, n.State, 10).Col(term.Plain, term.Clean(n.Kubernetes), 8).Add(term.Faint, strings.TrimSuffix(term.Ago(n.Created, pg.Now), " ago"))
		} else {
			r.Add(term.Faint, l.node(m))
		}
		lines = append(lines, r.String())
	}
	return lines
}

// MachineReason is why a machine is no node, or no healthy one; empty if it is one.
func MachineReason(l *MachineListing, m *ListedMachine) string {
	switch n := m.Node; {
	case n != nil && n.Message != "":
		return n.Message
	case n != nil && n.Cordoned:
		return "the Node is cordoned"
	case n != nil:
		return ""
	case l.Problem != "":
		return "unknown whether it is a node: " + l.Problem
	case !l.Initialised:
		return "it waits for init, which makes it a node"
	case m.Joins:
		return "it joins; its log shows how far it is"
	case m.Spare != nil && m.Spare.Why != "":
		return "it is a spare, and cannot be assigned: " + m.Spare.Why
	case m.Spare != nil:
		return "it is a spare: it joins when its group needs it"
	case l.Adopted:
		return "the cluster has no Node of this name: correct the list, or join it with kubeadm"
	}
	return "the cluster has no Node of this name: if it was added after the last init, run init; if its Node was deleted, add it again; its log has the rest"
}

// MachineFacts are the values of a row of the list.
func MachineFacts(pg Page, w int, l *MachineListing, m *ListedMachine, login string) []string {
	lines := []string{pg.Rule(w, "Machine "+term.Clean(m.Name), strings.ReplaceAll(m.Group, "-", " "))}
	row := func(head, text string) {
		lines = append(lines, pg.Row(w).Pad(2).Col(term.Faint, head, 13).Hang(term.Plain, term.Clean(text))...)
	}
	row("address", Dash(m.Address))
	switch {
	case l.Adopted:
		row("key", "none: kubeadm made this cluster, and its machines are not attested")
	case m.Attested:
		row("key", "in the TPM "+m.TPM+", attested at each join; endorsement key "+m.EK)
		row("vendor", cmp.Or(m.Vendor, "not verified: the first enrolment is trusted"))
	default:
		row("key", "in a file: not attested")
	}
	for _, x := range [][2]string{{"labels", m.Labels}, {"taints", m.Taints}} {
		if x[1] != "" {
			row(x[0], strings.ReplaceAll(x[1], ",", ", "))
		}
	}
	node := l.node(m)
	if m.Node != nil && m.Node.Cordoned {
		node += ", cordoned"
	}
	row("node", node)
	if why := MachineReason(l, m); why != "" {
		row("reason", why)
	}
	row("login", cmp.Or(login, "none yet: e"))
	return lines
}

// MachineStep is how far the work on a machine is.
type MachineStep struct {
	Name, Title string
	Done, Total int
	State       string // plan.StateRunning, StateDone or StateFailed; empty: it has not begun
}

// MachineSteps is the live table of machines that are worked on.
func MachineSteps(pg Page, w int, list []MachineStep) (lines []string) {
	names := 0
	for i := range list {
		names = max(names, term.Width(term.Clean(list[i].Name)))
	}
	names = min(names, w/3) + 2
	for i := range list {
		x := &list[i]
		sign, st := pg.Spin(), term.Accent
		switch x.State {
		case "":
			sign, st = pg.Pending, term.Faint
		case plan.StateDone:
			sign, st = pg.OK, term.Good
		case plan.StateFailed:
			sign, st = pg.Fail, term.Bad
		}
		r := pg.Row(w).Add(st, " "+sign+" ").Col(term.Strong, term.Clean(x.Name), names)
		if x.Total > 0 {
			done := min(x.Done+1, x.Total)
			r.Add(term.Accent, pg.Meter(int64(done), int64(x.Total), 10)).Col(term.Faint, fmt.Sprintf(" %d/%d", done, x.Total), 7)
		}
		lines = append(lines, r.Add(term.Plain, term.Clean(x.Title)).String())
	}
	return lines
}

// MachineReport renders the results: one line for each machine, then the findings of each.
func MachineReport(pg Page, w int, report *machinecheck.Report) (lines []string) {
	results := report.Machines
	name := 0
	for _, r := range results {
		name = max(name, term.Width(term.Clean(r.Machine)))
	}
	name = min(name, 40)
	for i := range results {
		r := &results[i]
		severity, verdict := machineVerdict(r, string(report.Role))
		sign, st := SeveritySignOf(pg, severity)
		lines = append(lines, pg.Row(w).Add(st, sign+" ").Col(term.Strong, term.Clean(r.Machine), name+2).Add(term.Plain, verdict).String())
	}
	for i := range results {
		lines = append(lines, "", pg.Rule(w, term.Clean(results[i].Machine), ""))
		lines = append(lines, machineRows(pg, w, &results[i])...)
	}
	return lines
}

// MachineFindings are the facts and findings of one machine.
func MachineFindings(pg Page, w int, r *machinecheck.Result) []string {
	lines := machineRows(pg, w, r)
	if len(r.Findings) == 0 && r.Error == "" {
		lines = append(lines, pg.Row(w).Pad(2).Add(term.Good, pg.OK+" ").Add(term.Plain, "nothing stands in the way").String())
	}
	return lines
}

// machineVerdict is the verdict about a machine in a few words.
func machineVerdict(r *machinecheck.Result, role string) (plan.Severity, string) {
	if r.Error != "" {
		return plan.Block, "could not be checked"
	}
	n := map[plan.Severity]int{}
	for _, f := range r.Findings {
		n[f.Severity]++
	}
	var more []string
	if n[plan.Warn] > 0 {
		more = append(more, words.Count(n[plan.Warn], "warning"))
	}
	if n[plan.NotChecked] > 0 {
		more = append(more, fmt.Sprintf("%d not checked", n[plan.NotChecked]))
	}
	as := strings.ReplaceAll(role, "-", " ")
	severity, verdict := plan.Info, "can become a "+as
	switch {
	case n[plan.Block] > 0:
		severity, verdict = plan.Block, "cannot become a "+as+": "+words.Count(n[plan.Block], "finding")+" in the way"
	case n[plan.Warn] > 0:
		severity = plan.Warn
	case n[plan.NotChecked] > 0:
		severity = plan.NotChecked
	}
	return severity, strings.Join(append([]string{verdict}, more...), ", ")
}

// machineRows are the facts and findings of a machine.
func machineRows(pg Page, w int, r *machinecheck.Result) (lines []string) {
	signed := func(s plan.Severity, text string) {
		sign, st := SeveritySignOf(pg, s)
		lines = append(lines, pg.Row(w).Pad(2).Add(st, sign+" ").Hang(term.Plain, term.Clean(text))...)
	}
	if r.Error != "" {
		signed(plan.Block, r.Error)
		return append(lines, FindingDetail(pg, w, 4, plan.Finding{Remedy: r.Remedy})...)
	}
	f := r.Facts
	about := []string{cmp.Or(f.HostName, "no host name"), cmp.Or(f.OS.Name, "unknown distribution"), f.Arch, "kernel " + f.Kernel, words.Count(f.Cores, "core"), fmt.Sprintf("%.1f GiB", float64(f.Memory)/(1<<20))}
	if f.TPM == "2" {
		about = append(about, "TPM 2.0")
	}
	for _, p := range term.Wrap(term.Clean(strings.Join(about, ", ")), max(20, w-4)) {
		lines = append(lines, pg.Row(w).Pad(2).Add(term.Faint, p).String())
	}
	for i := range r.Findings {
		x := r.Findings[i]
		signed(x.Severity, x.Title+" ["+x.ID+"]")
		lines = append(lines, FindingDetail(pg, w, 4, x)...)
	}
	return lines
}

// AddedMachine is one machine of the document.
type AddedMachine struct {
	Machine string `json:"machine"`
	Name    string `json:"name"`
	Address string `json:"address"`
	Group   string `json:"group"`
	Spare   bool   `json:"spare,omitempty"`
	Labels  string `json:"labels,omitempty"`
	Taints  string `json:"taints,omitempty"`
	// Member is whether it is a node already: only its balancer was compared.
	Member   bool           `json:"member,omitempty"`
	HostKey  string         `json:"hostKey"`
	Findings []plan.Finding `json:"findings,omitempty"`
	enrol.Outcome
	// Attested is whether a TPM holds the machine's key, and EK the hash of the TPM's endorsement key.
	Attested bool          `json:"attested"`
	EK       string        `json:"ek,omitempty"`
	Key      string        `json:"key,omitempty"` // hash of the machine's public key
	Vendor   string        `json:"vendor,omitempty"`
	Error    string        `json:"error,omitempty"`
	Remedy   string        `json:"remedy,omitempty"`
	Took     time.Duration `json:"took,omitempty"` // nanoseconds in JSON
}

// as is what the machine becomes.
func (m *AddedMachine) as() string {
	group := strings.ReplaceAll(m.Group, "-", " ")
	if m.Spare {
		return "spare " + group
	}
	return group
}

// Result takes the changes that were made, or would be made, on the machine.
func (m *AddedMachine) Result(x enrol.Result) {
	m.Outcome, m.Took, m.Attested, m.EK, m.Key, m.Vendor = x.Outcome, x.Took, x.Key.Attested, x.Key.EK, x.Key.Hash, x.Key.Vendor
	if m.Error, m.Remedy = "", ""; x.Err != nil {
		m.Error, m.Remedy = x.Err.Error(), plan.Remedy(x.Err)
	}
}

// MachineChanges lists the changes of each machine: all of them, or those of files by their folders.
func MachineChanges(pg Page, w int, list []AddedMachine, all bool) (lines []string) {
	for _, m := range list {
		as := m.as()
		lines = append(lines, pg.Rule(w, term.Clean(m.Machine), ""), pg.Row(w).Pad(2).Add(term.Strong, term.Clean(fmt.Sprintf("%s, %s at %s", m.Name, as, m.Address))).String())
		for _, x := range [][2]string{{"labels", m.Labels}, {"taints", m.Taints}} {
			if x[1] != "" {
				lines = append(lines, pg.Row(w).Pad(2).Add(term.Faint, x[0]+" "+term.Clean(strings.ReplaceAll(x[1], ",", ", "))).String())
			}
		}
		changes := m.Changes
		if !all {
			changes = changesByFolder(changes)
		}
		if len(changes) == 0 {
			changes = []string{"nothing to change"}
		}
		for _, c := range append(changes, m.Notes...) {
			lines = append(lines, pg.Row(w).Pad(2).Add(term.Plain, "- ").Hang(term.Plain, term.Clean(c))...)
		}
	}
	return append(lines, "")
}

// changesByFolder replaces the changes of files by one line for each verb, with the folders.
func changesByFolder(changes []string) (out []string) {
	count, folders := map[string]int{}, map[string][]string{}
	var verbs []string
	for _, c := range changes {
		verb, file, ok := strings.Cut(c, " ")
		if !ok || !strings.HasPrefix(file, "/") {
			out = append(out, c)
			continue
		}
		if count[verb]++; count[verb] == 1 {
			verbs = append(verbs, verb)
			out = append(out, verb)
		}
		if dir := path.Dir(file); !slices.Contains(folders[verb], dir) {
			folders[verb] = append(folders[verb], dir)
		}
	}
	for _, v := range verbs {
		out[slices.Index(out, v)] = fmt.Sprintf("%s %s in %s", v, words.Count(count[v], "file"), words.And(folders[v]))
	}
	return out
}

// MachinesAdded is the result of each machine on a line, with its notes.
func MachinesAdded(pg Page, w int, list []AddedMachine) (lines []string) {
	name := 0
	for _, m := range list {
		name = max(name, term.Width(term.Clean(m.Name)))
	}
	name = min(name, 40)
	for _, m := range list {
		trust := "not attested: its key is in a file"
		if m.Attested {
			trust = "attested by its TPM"
			if m.Vendor != "" {
				trust += " of " + m.Vendor
			}
		}
		severity, verdict := plan.Info, fmt.Sprintf("prepared as %s in %s, %s", m.as(), m.Took.Round(100*time.Millisecond), trust)
		switch {
		case m.Error != "":
			severity, verdict = plan.Block, m.Error
		case m.Member && len(m.Changes) == 0:
			verdict = "a node already, and its balancer has all control planes"
		case m.Member:
			verdict = fmt.Sprintf("a node already; its balancer has all control planes, after %s", m.Took.Round(100*time.Millisecond))
		case len(m.Changes) == 0:
			verdict = "prepared already, " + trust
		}
		sign, st := SeveritySignOf(pg, severity)
		lines = append(lines, pg.Row(w).Add(st, sign+" ").Col(term.Strong, term.Clean(m.Name), name+2).Hang(term.Plain, term.Clean(verdict))...)
		for _, n := range m.Notes {
			lines = append(lines, pg.Row(w).Pad(2).Add(term.Faint, term.Clean(n)).String())
		}
	}
	return lines
}
