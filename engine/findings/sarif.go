package findings

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"path"
	"slices"
	"strings"

	"constellation/engine/plan"
)

const (
	sarifVersion = "2.1.0"
	sarifSchema  = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
	// identityKey is the name of our fingerprint. Its value is [Identity].
	identityKey = "constellationIdentity/v1"
	// sourceRoot is the base of files: the root of the repository.
	sourceRoot = "%SRCROOT%"
)

type sarifLog struct {
	Schema  string     `json:"$schema"`
	Version string     `json:"version"`
	Runs    []sarifRun `json:"runs"`
}

type sarifRun struct {
	Tool        sarifTool         `json:"tool"`
	Invocations []sarifInvocation `json:"invocations"`
	Results     []sarifResult     `json:"results"`
	ColumnKind  string            `json:"columnKind"`
}

type sarifTool struct {
	Driver sarifDriver `json:"driver"`
}

type sarifDriver struct {
	Name    string      `json:"name"`
	Version string      `json:"version"`
	Rules   []sarifRule `json:"rules"`
}

type sarifRule struct {
	ID      string `json:"id"`
	HelpURI string `json:"helpUri,omitempty"`
}

type sarifMessage struct {
	Text string `json:"text"`
}

type sarifInvocation struct {
	ExecutionSuccessful bool                `json:"executionSuccessful"`
	Notifications       []sarifNotification `json:"toolExecutionNotifications,omitempty"`
}

type sarifNotification struct {
	Level      string          `json:"level"`
	Message    sarifMessage    `json:"message"`
	Descriptor sarifReference  `json:"associatedRule"`
	Locations  []sarifLocation `json:"locations,omitempty"`
}

type sarifReference struct {
	ID string `json:"id"`
}

type sarifResult struct {
	RuleID        string             `json:"ruleId"`
	RuleIndex     int                `json:"ruleIndex"`
	Level         string             `json:"level"`
	Message       sarifMessage       `json:"message"`
	Locations     []sarifLocation    `json:"locations,omitempty"`
	Fingerprints  map[string]string  `json:"partialFingerprints"`
	BaselineState string             `json:"baselineState,omitempty"`
	Suppressions  []sarifSuppression `json:"suppressions,omitempty"`
}

type sarifSuppression struct {
	Kind          string `json:"kind"`
	Status        string `json:"status"`
	Justification string `json:"justification"`
}

type sarifLocation struct {
	Physical *sarifPhysical `json:"physicalLocation,omitempty"`
	Logical  []sarifLogical `json:"logicalLocations,omitempty"`
}

type sarifPhysical struct {
	Artifact sarifArtifact `json:"artifactLocation"`
	Region   *sarifRegion  `json:"region,omitempty"`
}

type sarifArtifact struct {
	URI  string `json:"uri"`
	Base string `json:"uriBaseId"`
}

type sarifRegion struct {
	StartLine int `json:"startLine"`
}

type sarifLogical struct {
	Name string `json:"fullyQualifiedName"`
	Kind string `json:"kind"`
}

// Report is what SARIF is made of.
type Report struct {
	// Tool is the version of this program.
	Tool string
	// Dir is the directory of the files, relative to the root of the repository; empty if it is
	// that root.
	Dir string
	// Compared is whether there was a baseline.
	Compared bool
	Findings []Judged
}

// WriteSARIF writes the findings as SARIF 2.1.0. Passed checks are left out, and checks without
// a result are notifications. Text of the cluster or of files is escaped, so that it is neither
// a link nor a placeholder.
func WriteSARIF(w io.Writer, r Report) error {
	run := sarifRun{
		Tool:        sarifTool{Driver: sarifDriver{Name: "constellation", Version: r.Tool, Rules: []sarifRule{}}},
		Invocations: []sarifInvocation{{ExecutionSuccessful: true}},
		Results:     []sarifResult{},
		ColumnKind:  "unicodeCodePoints",
	}
	index := map[string]int{}
	for i := range r.Findings {
		j := &r.Findings[i]
		if j.Severity == plan.Info {
			continue
		}
		at, ok := index[j.ID]
		if !ok {
			at = len(run.Tool.Driver.Rules)
			index[j.ID] = at
			run.Tool.Driver.Rules = append(run.Tool.Driver.Rules, sarifRule{ID: j.ID, HelpURI: helpURI(j.Reference)})
		}
		if j.Severity == plan.NotChecked {
			run.Invocations[0].Notifications = append(run.Invocations[0].Notifications, sarifNotification{
				Level: "note", Message: message(&j.Finding), Descriptor: sarifReference{j.ID}, Locations: locations(&j.Finding, r.Dir),
			})
			continue
		}
		result := sarifResult{
			RuleID: j.ID, RuleIndex: at, Level: "warning", Message: message(&j.Finding), Locations: locations(&j.Finding, r.Dir),
			Fingerprints: map[string]string{identityKey: Identity(&j.Finding)},
		}
		if j.Severity == plan.Block {
			result.Level = "error"
		}
		if r.Compared {
			result.BaselineState = "new"
			if j.Known {
				result.BaselineState = "unchanged"
			}
		}
		if j.Ignored != nil {
			result.Suppressions = []sarifSuppression{{Kind: "external", Status: "accepted", Justification: fmt.Sprintf("%s (until %s)", j.Ignored.Reason, j.Ignored.Until)}}
		}
		run.Results = append(run.Results, result)
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	if err := e.Encode(sarifLog{Schema: sarifSchema, Version: sarifVersion, Runs: []sarifRun{run}}); err != nil {
		return fmt.Errorf("write SARIF: %w", err)
	}
	return nil
}

// helpURI is a reference that is an address.
func helpURI(reference string) string {
	address, _, _ := strings.Cut(reference, " ")
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "https" || u.Host == "" {
		return ""
	}
	return u.String()
}

// literal escapes text in a message: braces would be placeholders, and brackets links.
var literal = strings.NewReplacer(`\`, `\\`, "[", `\[`, "]", `\]`, "{", "{{", "}", "}}")

func message(f *plan.Finding) sarifMessage {
	var b strings.Builder
	b.WriteString(f.Title)
	for _, part := range []struct{ head, text string }{{"", f.Detail}, {"Owner: ", f.Owner}, {"Fix: ", f.Remedy}, {"Command: ", f.Command}} {
		if part.text != "" {
			b.WriteString("\n" + part.head + part.text)
		}
	}
	return sarifMessage{literal.Replace(b.String())}
}

// locations are the places of a finding in files, or else its objects.
func locations(f *plan.Finding, dir string) (out []sarifLocation) {
	var objects []sarifLogical
	for _, o := range f.Objects {
		if l := (sarifLogical{Name: o, Kind: "resource"}); !slices.Contains(objects, l) {
			objects = append(objects, l)
		}
	}
	for i, l := range f.Locations {
		p := &sarifPhysical{Artifact: sarifArtifact{(&url.URL{Path: path.Join(dir, l.File)}).String(), sourceRoot}}
		if l.Line > 0 {
			p.Region = &sarifRegion{l.Line}
		}
		out = append(out, sarifLocation{Physical: p})
		if i == 0 {
			out[0].Logical = objects
		}
	}
	if len(out) == 0 && len(objects) > 0 {
		out = []sarifLocation{{Logical: objects}}
	}
	return out
}
