package plan

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"constellation/engine/words"
)

// ChartChange is what applying a chart does.
type ChartChange struct {
	Chart     string `json:"chart"`
	Namespace string `json:"namespace"`
	// From and To are versions; From is empty if the chart is not installed.
	From string `json:"from,omitempty"`
	To   string `json:"to"`
	// Content says that the same version has another content.
	Content bool `json:"content,omitempty"`
	// Values are those that are given to the chart and change; Defaults is how many of its
	// own do.
	Values   []ValueChange `json:"values,omitempty"`
	Defaults int           `json:"defaults,omitempty"`
	// Destroys are sentences about what is lost, Objects what they are about.
	Destroys []string `json:"destroys,omitempty"`
	Objects  []string `json:"objects,omitempty"`
	// ByHand describes changes of the installation by other programs; empty if there are none.
	ByHand string `json:"byHand,omitempty"`
}

// Same reports whether applying the chart changes nothing.
func (c ChartChange) Same() bool {
	return c.From == c.To && !c.Content && len(c.Values) == 0 && len(c.Destroys) == 0
}

// ValueChange is a value of a chart that changes.
type ValueChange struct {
	// Path is like joinservice.image or env[0].value.
	Path string `json:"path"`
	// From and To are JSON, shortened; empty if there is none. Of what is Hidden both are
	// empty.
	From   string `json:"from,omitempty"`
	To     string `json:"to,omitempty"`
	Hidden bool   `json:"hidden,omitempty"`
}

// String is "replicas: 1 to 2".
func (v ValueChange) String() string {
	switch {
	case v.Hidden:
		return v.Path + ": (hidden, changed)"
	case v.From == "":
		return v.Path + ": " + v.To + " (new)"
	case v.To == "":
		return v.Path + ": " + v.From + " (removed)"
	}
	return v.Path + ": " + v.From + " to " + v.To
}

// ValueLines are the values that change, one line each.
func (x ChartChange) ValueLines() (out []string) {
	for _, v := range x.Values {
		out = append(out, v.String())
	}
	return out
}

// String is "cilium 1.16.9 to 1.17.4".
func (x ChartChange) String() string {
	switch x.From {
	case "":
		return x.Chart + " " + x.To + " (new)"
	case x.To:
		return x.Chart + " " + x.To
	}
	return x.Chart + " " + x.From + " to " + x.To
}

// Line says what a chart changes, without its values.
func (x ChartChange) Line() string {
	s := "chart " + x.String()
	if x.Content {
		s += ", with other content"
	}
	if n := len(x.Values); n > 0 {
		s += ", " + words.Count(n, "value") + " " + words.Verb(n, "change")
	}
	if x.Defaults > 0 {
		s += fmt.Sprintf(", %d of its defaults change", x.Defaults)
	}
	return s
}

// String is "PCR 9: 0202… to 1212…", with digests cut to what people compare.
func (m MeasurementChange) String() string {
	short := func(s string) string {
		digest, rest, _ := strings.Cut(s, " ")
		if len(digest) > 12 {
			digest = digest[:12] + "…"
		}
		return strings.TrimSpace(digest + " " + rest)
	}
	text := fmt.Sprintf("PCR %d: %s to %s", m.PCR, cmp.Or(short(m.From), "not required"), cmp.Or(short(m.To), "not required"))
	if m.Weaker {
		text += ", which is weaker"
	}
	return text
}

// ComponentCheck is one row of the version table.
type ComponentCheck struct {
	Name string `json:"name"` // "Kubernetes", "OS image", "Services", "join-service", "CLI"
	// Kind is cli, image, services, kubernetes, or for parts ServiceOfRelease and ServiceOfKubernetes.
	Kind string `json:"kind"`
	// Part says that the row belongs to the one above it that has no Part: a service of
	// a release, or one that is bound to the version of Kubernetes.
	Part bool `json:"part,omitempty"`
	// Now is what runs; "v1.35.4-v1.36.3" while it is mixed.
	Now string `json:"now"`
	// Reachable are the newer versions that can be reached in one hop with this program, oldest
	// first.
	Reachable []string `json:"reachable,omitempty"`
	// NextHop and Newest are the versions after the next hop, and the newest known;
	// empty if they are not newer than Now.
	NextHop string `json:"nextHop,omitempty"`
	Newest  string `json:"newest,omitempty"`
	// Goal is the version at the end of the path; empty if it is not newer than Now.
	Goal string `json:"goal,omitempty"`
	// Verdict is the row in a few words: "not updated", "1 hop", "after hop 1", "in services".
	// It names the version where the path ends if that is not the newest: "v1.36.3 in hop 2".
	Verdict string `json:"verdict"`
}

// Changes is what a hop does to the cluster.
type Changes struct {
	// Nodes is how many nodes are replaced, by group.
	Nodes map[string]int `json:"nodes"`
	// InPlace is how many nodes are upgraded as they are, by group: their machines stay.
	InPlace map[string]int `json:"inPlace,omitempty"`
	// KindsAdded, KindsChanged and KindsRemoved are names of definitions.
	KindsAdded   []string `json:"kindsAdded,omitempty"`
	KindsChanged []string `json:"kindsChanged,omitempty"`
	KindsRemoved []string `json:"kindsRemoved,omitempty"`
	// Measurements are the registers that get another value.
	Measurements []MeasurementChange `json:"measurements,omitempty"`
	// ConfigMaps are created or changed: "kube-system/join-config (changed)".
	ConfigMaps []string `json:"configMaps,omitempty"`
	Charts     []string `json:"charts,omitempty"`
	// ChartChanges are the same as the cluster has them, with values; empty if that could not
	// be compared.
	ChartChanges []ChartChange `json:"chartChanges,omitempty"`
	// Images are those of services: name, from, to.
	Images []ImageChange `json:"images,omitempty"`
	// Least and Most bound the duration; Basis says where they come from.
	Least time.Duration `json:"leastNs"`
	Most  time.Duration `json:"mostNs"`
	Basis string        `json:"basis"`
}

// MeasurementChange is a register whose demanded value changes.
type MeasurementChange struct {
	PCR uint32 `json:"pcr"`
	// From and To are hex, with " (warns only)" if so; empty if nothing is demanded.
	From string `json:"from"`
	To   string `json:"to"`
	// Weaker reports whether the new demand lets more machines pass.
	Weaker bool `json:"weaker,omitempty"`
}

// ImageChange is a container image that a hop replaces.
type ImageChange struct {
	Service string `json:"service"`
	From    string `json:"from"`
	To      string `json:"to"`
}
