// Package revocation defines the record of revoked machines: where it is kept, what an
// entry holds, and which machines an entry refuses.
//
// The record is one ConfigMap with an entry for each revoked node. The console writes
// it, the join service refuses the machines that it names, and an admission policy reads
// the node names. The package contains data and rules only; it calls no API.
package revocation

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/engine/cloud"
)

// Where the record is kept. A key of its data is the name of a Node, a value is an
// [Entry] as JSON.
const (
	Namespace = "constellation-system"
	ConfigMap = "constellation-revoked-nodes"
)

// A revoked node has up to two PendingNodes, called by one of these prefixes and its name:
// one for the machine that leaves, one for the machine that is made in its place.
const (
	RemovalPrefix = "revoke-"
	RefillPrefix  = "refill-"
)

// CertificateLifetime is the longest time for which a client certificate of a kubelet can
// still be valid after a revocation. Clusters made by release v1.1.0 and before have
// certificates of one year.
const CertificateLifetime = 365 * 24 * time.Hour

// Entry describes one revoked machine.
type Entry struct {
	// ProviderID is the cloud.Key of the machine; Group is the ID of its scaling
	// group, Role its role and Address its address in the cluster's network. ProviderID and
	// Address are empty if the cloud was not asked.
	ProviderID string `json:"providerID"`
	Group      string `json:"group,omitempty"`
	Role       string `json:"role,omitempty"`
	Address    string `json:"address,omitempty"`
	// UID is that of the Node object; empty if there was none.
	UID string `json:"uid,omitempty"`
	// By is who revoked the machine, such as ops@laptop, and Reason why; Reason may be
	// empty.
	By     string `json:"by"`
	Reason string `json:"reason,omitempty"`
	// Since is when it was revoked. After Until no certificate of it is valid any more.
	Since time.Time `json:"since"`
	Until time.Time `json:"until"`
	// Removed is when the cloud had confirmed that the machine is gone; zero: not yet.
	Removed time.Time `json:"removed,omitzero"`
	// Replacement is the name of the node that was made in its place; empty if there is
	// none, or none yet.
	Replacement string `json:"replacement,omitempty"`
}

// List contains the entries of the record by the name of the node.
type List map[string]Entry

// Parse reads the data of the ConfigMap. The list is complete even with an error: an
// entry that cannot be decoded still refuses its name, and names it in the error.
func Parse(data map[string]string) (List, error) {
	list := make(List, len(data))
	var damaged []string
	for node, value := range data {
		var e Entry
		if json.Unmarshal([]byte(value), &e) != nil {
			e = Entry{}
			damaged = append(damaged, node)
		}
		list[node] = e
	}
	if len(damaged) > 0 {
		slices.Sort(damaged)
		return list, fmt.Errorf("decode entries of ConfigMap %s/%s: %s: not valid JSON", Namespace, ConfigMap, strings.Join(damaged, ", "))
	}
	return list, nil
}

// Encode returns the value of an entry.
func (e Entry) Encode() (string, error) {
	for _, t := range []*time.Time{&e.Since, &e.Until, &e.Removed} {
		*t = t.UTC().Truncate(time.Second)
	}
	b, err := json.Marshal(e)
	if err != nil {
		return "", fmt.Errorf("encode entry: %w", err)
	}
	return string(b), nil
}

// Refuses reports whether a machine may not join now, and the name of the entry. A machine is
// refused by its name or by its cloud.Key. The name counts even with another key: the old
// machine's client certificate is for that name. Revoked distinguishes the two.
func (l List) Refuses(name, key string) (node string, refused bool) {
	if node, revoked := l.Revoked(name, key); revoked {
		return node, true
	}
	_, refused = l[name]
	if !refused {
		return "", false
	}
	return name, true
}

// Revoked reports whether a machine was revoked itself, and the name of the entry. Another
// machine that got the name or the ID of a revoked one later was not. An entry without a
// key revokes all machines of its name.
func (l List) Revoked(name, key string) (node string, revoked bool) {
	if e, ok := l[name]; ok && (e.ProviderID == "" || cloud.SameMachine(e.ProviderID, key)) {
		return name, true
	}
	for node, e := range l {
		if e.ProviderID != "" && cloud.SameMachine(e.ProviderID, key) {
			return node, true
		}
	}
	return "", false
}

// Expired returns the sorted names of the entries that are not needed any more at a time.
// An entry without an end does not expire.
func (l List) Expired(now time.Time) []string {
	var out []string
	for node, e := range l {
		if !e.Until.IsZero() && now.After(e.Until) {
			out = append(out, node)
		}
	}
	slices.Sort(out)
	return out
}
