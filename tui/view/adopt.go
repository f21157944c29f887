package view

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"constellation/engine/adopt"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
)

// AdoptReport renders what adopting a cluster would do and what stands in the way. The commands of pg select
// the cluster.
func AdoptReport(pg Page, w int, r *adopt.Report) []string {
	lines := []string{"examination of context " + term.Clean(r.Context) + " (" + term.Clean(r.Server) + ")"}
	severity, verdict := plan.Info, "can be adopted: nothing stands in the way"
	if n := len(r.Blocked()); n > 0 {
		severity, verdict = plan.Block, "cannot be adopted: "+words.Count(n, "finding")+" in the way"
	}
	sign, st := SeveritySignOf(pg, severity)
	lines = append(lines, pg.Row(w).Add(st, sign+" ").Add(term.Strong, verdict).String(), "")
	row := func(head, text string) {
		lines = append(lines, pg.Row(w).Pad(2).Col(term.Faint, head, 16).Hang(term.Plain, term.Clean(text))...)
	}
	row("Kubernetes", r.Kubernetes)
	row("distribution", r.Distribution.Title)
	if len(r.Offers) == 0 {
		adoptFacts(r, row)
	}
	if len(r.Findings) > 0 {
		lines = append(lines, "", pg.Rule(w, "Findings", ""))
		for i := range r.Findings {
			f := &r.Findings[i]
			sign, st := SeveritySignOf(pg, f.Severity)
			lines = append(lines, pg.Row(w).Pad(2).Add(st, sign+" ").Hang(term.Plain, term.Clean(f.Title+" ["+f.ID+"]"))...)
			lines = append(lines, FindingDetail(pg, w, 4, *f)...)
		}
	}
	list := func(title string, items []string) {
		if len(items) == 0 {
			return
		}
		lines = append(lines, "", pg.Rule(w, title, ""))
		for _, item := range items {
			for k, p := range term.Wrap(term.Clean(pg.Commands.Text(item)), max(20, w-4)) {
				lines = append(lines, []string{"  - ", "    "}[min(k, 1)]+p)
			}
		}
	}
	list("What fits this cluster", r.Offers)
	if len(r.Offers) == 0 {
		list("What adopting does", r.Would)
		list("What it never touches", r.Never)
		var offered []string
		for _, h := range r.Hardening {
			offered = append(offered, h.Name+": "+h.Effect)
		}
		list("Hardening that you can add: list the names in provider.machines.hardening", offered)
	}
	for _, n := range append(r.Notes[:len(r.Notes):len(r.Notes)], adoptNote(r)) {
		if n != "" {
			lines = append(lines, "")
			lines = append(lines, term.Wrap(term.Clean(n), w)...)
		}
	}
	return lines
}

// adoptNote is how the cluster is upgraded after an adoption; empty if it is not adopted.
func adoptNote(r *adopt.Report) string {
	if len(r.Offers) > 0 || r.Upgrade != adopt.Upgrade {
		return ""
	}
	return "Upgrades stay with kubeadm until the operator is installed, which is a step of its own: `constellation adopt --operator`."
}

// adoptFacts writes what was found.
func adoptFacts(r *adopt.Report, row func(head, text string)) {
	if r.Configured != "" && r.Configured != r.Kubernetes {
		row("kubeadm-config", r.Configured)
	}
	if r.Endpoint != "" {
		row("endpoint", r.Endpoint)
	}
	etcd := r.Etcd.Mode
	if len(r.Etcd.Members) > 0 {
		etcd += ", " + words.Count(len(r.Etcd.Members), "member") + " (" + strings.Join(r.Etcd.Members, ", ") + ")"
	}
	if r.Etcd.Version != "" {
		etcd += ", version " + r.Etcd.Version
	}
	row("etcd", etcd)
	network := "none recognised; routes may be made outside the cluster"
	if len(r.Network) > 0 {
		network = addOnsText(r.Network)
	}
	row("network", network)
	if len(r.AddOns) > 0 {
		row("add-ons", addOnsText(r.AddOns))
	}
	for i, n := range r.Nodes {
		head := ""
		if i == 0 {
			head = "nodes"
		}
		if i == maxAdopted {
			row(head, fmt.Sprintf("and %d more: -o json lists all", len(r.Nodes)-i))
			break
		}
		state := "Ready"
		if !n.Ready {
			state = "not Ready"
		}
		if n.Unscheduled {
			state += ", cordoned"
		}
		row(head, strings.Join([]string{n.Name, string(n.Role), cmp.Or(n.Address, "no address"), "kubelet " + n.Kubernetes, cmp.Or(n.Runtime, "unknown runtime"), state}, ", "))
	}
	for i, c := range r.Certificates {
		head := ""
		if i == 0 {
			head = "certificates"
		}
		row(head, fmt.Sprintf("%s: since %s, until %s", c.Of, c.NotBefore.Format(time.DateOnly), c.NotAfter.Format(time.DateOnly)))
	}
	for i, t := range r.Tokens {
		head := ""
		if i == 0 {
			head = "join tokens"
		}
		end := "never ends"
		if !t.Expires.IsZero() {
			end = "until " + t.Expires.UTC().Format(time.RFC3339)
		}
		row(head, strings.TrimSuffix(t.ID+", "+end+", "+t.Description, ", "))
	}
	if n := len(r.Changes); n > 0 {
		row("static pods", words.Count(n, "difference")+" from what kubeadm renders; see below")
	}
}

// maxAdopted is the number of nodes in text.
const maxAdopted = 20

func addOnsText(list []adopt.AddOn) string {
	var out []string
	for _, a := range list {
		out = append(out, strings.TrimSpace(a.Name+" "+a.Version))
	}
	return strings.Join(out, ", ")
}
