package plan

import "slices"

// Consent is what a user must still accept before a plan may run.
type Consent struct {
	// Findings must be acknowledged by ID.
	Findings []Finding
	// Plan is set if the plan with its ordinary warnings must be accepted.
	Plan bool
}

// ConsentTo returns what must still be accepted if the user passed --yes and acknowledged
// findings by ID. Acknowledging every warning by ID counts as --yes. A rehearsal needs no
// consent, and a plan without effect needs no --yes.
func ConsentTo(p *Plan, yes bool, acknowledged []string) Consent {
	if p.Rehearsal {
		return Consent{}
	}
	warned := slices.DeleteFunc(p.Warnings(), func(f Finding) bool { return f.Named || slices.Contains(acknowledged, f.ID) })
	harmless := p.Finished() || p.OnlyWatches()
	return Consent{Findings: p.Unacknowledged(), Plan: !yes && !harmless && (len(warned) > 0 || len(p.Warnings()) == 0)}
}

// IDs returns the distinct IDs of findings.
func IDs(findings []Finding) (out []string) {
	for _, f := range findings {
		if !slices.Contains(out, f.ID) {
			out = append(out, f.ID)
		}
	}
	return out
}
