package support

import (
	"fmt"
	"strings"
	"time"
)

// Index lists what a bundle contains and what it lacks. It is INDEX.json of the bundle.
type Index struct {
	Schema string    `json:"schema"`
	Time   time.Time `json:"time"`
	// CLI is the version of this program, Platform that of this computer.
	CLI      string `json:"cli"`
	Platform string `json:"platform"`
	// Context and Server name the cluster; empty without one. Reachable is set if its API server answered.
	Context   string `json:"context,omitempty"`
	Server    string `json:"server,omitempty"`
	Reachable bool   `json:"reachable"`
	// Kubernetes is the version of the API server.
	Kubernetes string     `json:"kubernetes,omitempty"`
	Since      *time.Time `json:"since,omitempty"`
	Nodes      []string   `json:"nodes,omitempty"`
	MaxFile    int64      `json:"maxFile"`
	MaxSize    int64      `json:"maxSize"`
	Files      []File     `json:"files"`
	// Missing is what could not be collected.
	Missing []Missing `json:"missing"`
	// MissingRules is a ClusterRole with the rights that were missing.
	MissingRules string `json:"missingRules,omitempty"`
	// Redacted has the numbers of all files.
	Redacted      []Redaction `json:"redacted"`
	NeverIncluded []string    `json:"neverIncluded"`
}

// File is a file of a bundle.
type File struct {
	Path string `json:"path"`
	// Source is what it was read from: a file, or a request.
	Source string `json:"source"`
	Bytes  int    `json:"bytes"`
	// Cut says what of the source is not in the file; empty if nothing was cut off.
	Cut      string      `json:"cut,omitempty"`
	Redacted []Redaction `json:"redacted,omitempty"`
}

// Redaction is a number of secrets that were removed.
type Redaction struct {
	Kind  string `json:"kind"`
	Count int    `json:"count"`
}

// Missing is something that could not be collected.
type Missing struct {
	What   string `json:"what"`
	Source string `json:"source,omitempty"`
	Why    string `json:"why"`
	Remedy string `json:"remedy,omitempty"`
}

// Text is the index for people: INDEX.txt of the bundle.
func (x *Index) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Support bundle of constellation %s, %s\n", x.CLI, x.Time.Format(time.RFC3339))
	if x.Server != "" {
		state := "did not answer"
		if x.Reachable {
			state = "Kubernetes " + x.Kubernetes
		}
		fmt.Fprintf(&b, "Cluster %s at %s: %s\n", x.Context, x.Server, state)
	}
	if x.Since != nil {
		fmt.Fprintf(&b, "Since %s\n", x.Since.Format(time.RFC3339))
	}
	if len(x.Nodes) > 0 {
		fmt.Fprintf(&b, "Nodes %s\n", strings.Join(x.Nodes, ", "))
	}
	b.WriteString("\nRead it before you send it: it has names and addresses of machines, and names of pods and images.\n")
	fmt.Fprintf(&b, "\nFiles (%d)\n", len(x.Files))
	for _, f := range x.Files {
		fmt.Fprintf(&b, "  %s\n      %d bytes from %s\n", f.Path, f.Bytes, f.Source)
		if f.Cut != "" {
			fmt.Fprintf(&b, "      cut off: %s\n", f.Cut)
		}
		if len(f.Redacted) > 0 {
			fmt.Fprintf(&b, "      redacted: %s\n", counts(f.Redacted))
		}
	}
	fmt.Fprintf(&b, "\nNot collected (%d)\n", len(x.Missing))
	for _, m := range x.Missing {
		fmt.Fprintf(&b, "  %s: %s\n", m.What, m.Why)
		if m.Source != "" {
			fmt.Fprintf(&b, "      from %s\n", m.Source)
		}
		if m.Remedy != "" {
			fmt.Fprintf(&b, "      %s\n", m.Remedy)
		}
	}
	if x.MissingRules != "" {
		fmt.Fprintf(&b, "\nRights that were missing\n%s", indent(x.MissingRules))
	}
	b.WriteString("\nRedacted in all files\n")
	if len(x.Redacted) == 0 {
		b.WriteString("  nothing\n")
	}
	for _, r := range x.Redacted {
		fmt.Fprintf(&b, "  %d: %s\n", r.Count, r.Kind)
	}
	b.WriteString("\nNever included\n")
	for _, n := range x.NeverIncluded {
		fmt.Fprintf(&b, "  %s\n", n)
	}
	return b.String()
}

func counts(list []Redaction) string {
	out := make([]string, len(list))
	for i, r := range list {
		out[i] = fmt.Sprintf("%d of %s", r.Count, r.Kind)
	}
	return strings.Join(out, ", ")
}

func indent(s string) string {
	var b strings.Builder
	for line := range strings.Lines(s) {
		b.WriteString("  " + line)
	}
	return b.String()
}
