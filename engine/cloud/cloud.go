// Package cloud has the types of a cloud: instances, the groups that own them, their roles
// and images, and the metadata of an instance.
//
// It also has the errors that every provider shares. Providers live
// in subpackages; [constellation/engine/cloud/sandboxapi] speaks to the cloud that
// package sandbox runs on this computer. Interfaces are declared by their
// consumers.
//
// # Identity
//
// A cloud may reuse the name and the provider ID of a deleted machine. Nothing passes
// from the old machine to the new one:
//
//   - A machine is identified by its [Key]: the provider ID and, in clouds that reuse IDs,
//     the incarnation. A key is never reused. At most one machine has an ID at a time.
//     Records contain keys: PendingNodes, JoiningNodes, the record of revoked machines,
//     the annotations of a Node, and the hash in the token of a replacement.
//   - Calls with a key find and delete only the machine of that incarnation. An ID without
//     incarnation names the machine that has the ID now.
//   - A token makes one machine. The cloud remembers it for [TokenMemory] after the
//     deletion of that machine, even if another machine has the name by then. The
//     operator does not repeat a token after it has seen its machine.
//   - Kubernetes identifies a node by its name. So a machine gets no join ticket while a
//     Node of its name exists. The operator deletes the Node of a deleted machine, even if
//     another machine has its name and ID by then. The new Node inherits nothing from it.
//   - A revocation applies to one key. Only that machine is removed, and only its address
//     is refused. Its name is refused as well until the certificates of the old machine
//     have expired, because a certificate proves a name and nothing more. A new machine
//     of that name waits. It is not treated as revoked, and can join afterwards.
package cloud

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// Role is what an instance does in its cluster.
type Role string

// The two roles. The zero value is no role and is never valid.
const (
	ControlPlane Role = "control-plane"
	Worker       Role = "worker"
)

// Valid reports whether r is one of the two roles.
func (r Role) Valid() bool { return r == ControlPlane || r == Worker }

// State is where an instance is in its life, in the words of the PendingNode API.
type State string

// States of an instance. An instance that the cloud no longer knows is Terminated.
const (
	Unknown     State = "Unknown"
	Creating    State = "Creating"
	Ready       State = "Ready" // the machine runs; it need not be a Node yet
	Stopped     State = "Stopped"
	Terminating State = "Terminating"
	Terminated  State = "Terminated"
	Failed      State = "Failed"
)

// Instance is one machine as its cloud describes it.
type Instance struct {
	// Name is also the host name and the name of the Kubernetes node.
	Name string `json:"name"`
	// ProviderID is what the Node's spec.providerID holds; see the provider's
	// package for its format.
	ProviderID string `json:"providerID"`
	// Incarnation distinguishes machines that had the same ProviderID one after the other:
	// a unique number of the cloud, or the creation time. Empty: the cloud never reuses
	// the ProviderID.
	Incarnation string `json:"incarnation,omitempty"`
	// Group is the ID of the scaling group that owns the instance.
	Group string `json:"group"`
	Role  Role   `json:"role"`
	State State  `json:"state"`
	// Image is the reference of the OS image that the instance was created from.
	Image string `json:"image"`
	// IP is the address of the instance in the cluster's network.
	IP netip.Addr `json:"ip"`
	// PodCIDR is the range that the cloud routes to the instance.
	PodCIDR netip.Prefix `json:"podCIDR"`
	Created time.Time    `json:"created"`
	// Token is the idempotency token of the request that created the instance; empty if it
	// had none, for example if the instance came with a group's count.
	Token string `json:"token,omitempty"`
	// EvidenceKey identifies the key with which the machine must make its evidence, as the Key of an
	// attestation's statement does. Empty: any key that is certified for the instance.
	EvidenceKey string `json:"evidenceKey,omitempty"`
	// Message says why the state is what it is, for people; often empty.
	Message string `json:"message,omitempty"`
	// CloudProvider is the kubelet's --cloud-provider that the machine's own description demands; empty: that of the
	// cloud. Only the view of the machine on itself has it.
	CloudProvider string `json:"cloudProvider,omitempty"`
	// Spare is whether the machine is enrolled and belongs to its group only while it is assigned.
	Spare bool `json:"spare,omitempty"`
}

// keySeparator separates the ID from the incarnation. Provider IDs are URIs without a
// fragment, so none contains it.
const keySeparator = "#"

// Key returns the key of the instance. See Identity in the package comment.
func (i Instance) Key() string { return Key(i.ProviderID, i.Incarnation) }

// Key returns the key of a machine: its provider ID, if incarnation is empty. A fragment of the ID is
// dropped: the kubelet writes its Node's ID, and could name another key that way.
func Key(providerID, incarnation string) string {
	providerID, _ = SplitKey(providerID)
	if providerID == "" || incarnation == "" {
		return providerID
	}
	return providerID + keySeparator + incarnation
}

// SplitKey is the inverse of Key.
func SplitKey(key string) (providerID, incarnation string) {
	providerID, incarnation, _ = strings.Cut(key, keySeparator)
	return providerID, incarnation
}

// SameMachine reports whether two keys name the same machine. A key without incarnation
// matches every machine of its ID. Case does not count in IDs, because some clouds change it
// between calls.
func SameMachine(a, b string) bool {
	idA, incarnationA := SplitKey(a)
	idB, incarnationB := SplitKey(b)
	return strings.EqualFold(idA, idB) && (incarnationA == "" || incarnationB == "" || incarnationA == incarnationB)
}

// TokenMemory is how long a cloud remembers at least that a token has made a machine, from the
// deletion of that machine.
const TokenMemory = time.Hour

// Group is a scaling group: instances of one role made from one image.
type Group struct {
	// ID names the group in the cloud; see the provider's package for its format.
	ID   string `json:"id"`
	Name string `json:"name"`
	Role Role   `json:"role"`
	// Image is the reference that new instances get.
	Image string `json:"image"`
	// Count is the desired number of instances.
	Count int `json:"count"`
	// AutoscalerName is what the cluster autoscaler calls the group.
	AutoscalerName string `json:"autoscalerName"`
}

// NodeSettings are labels and taints that the owner of a machine gives to its Node.
type NodeSettings struct {
	// Name is the name of the Node.
	Name   string
	Labels map[string]string
	// Taints have unique pairs of key and effect.
	Taints []Taint
}

// Taint is a taint of a Node.
type Taint struct {
	Key    string `json:"key"`
	Value  string `json:"value,omitempty"`
	Effect string `json:"effect"`
}

// Image is an entry of the cloud's catalogue of OS images.
type Image struct {
	// Reference is what groups and NodeVersion.spec.image hold.
	Reference string `json:"reference"`
	// Version is the release that the image belongs to, such as v1.1.0.
	Version string `json:"version"`
	// Measurements maps a PCR index to its expected SHA-256 value in hex.
	Measurements map[uint32]string `json:"measurements"`
}

// Errors that providers wrap.
var (
	// ErrNotFound means that the cloud has no such object. Deleting a missing object is not
	// an error.
	ErrNotFound = errors.New("not found")
	// ErrThrottled means the cloud asks for fewer requests (HTTP 429).
	ErrThrottled = errors.New("throttled by the cloud")
	// ErrUnavailable means the cloud could not be reached or failed (HTTP 5xx).
	ErrUnavailable = errors.New("cloud unavailable")
	// ErrPartial comes with a list of which the cloud itself says that it is not
	// whole.
	ErrPartial = errors.New("list is not complete")
	// ErrDenied means that the credentials do not allow the call.
	ErrDenied = errors.New("denied by the cloud")
	// ErrConflict means that the object changed, or that its name is taken
	// (HTTP 409, 412). Reading it again and repeating the call can help.
	ErrConflict = errors.New("conflict in the cloud")
	// ErrCapacity means that the cloud has no machine of the requested kind now.
	// Waiting, another zone or another kind of machine can help.
	ErrCapacity = errors.New("no capacity in the cloud")
	// ErrQuota means that a limit of the account is reached. Only its owner can
	// raise it, or delete something.
	ErrQuota = errors.New("quota of the account is used up")
)

// ThrottledError is an ErrThrottled of a cloud that names a time.
type ThrottledError struct {
	// Until is when the next request may be sent.
	Until time.Time
	// Message is the answer of the cloud; often empty.
	Message string
}

// Error implements error.
func (e *ThrottledError) Error() string {
	text := fmt.Sprintf("%v until %s", ErrThrottled, e.Until.UTC().Format(time.RFC3339))
	if e.Message != "" {
		text += ": " + e.Message
	}
	return text
}

// Unwrap returns ErrThrottled.
func (*ThrottledError) Unwrap() error { return ErrThrottled }

// ThrottledUntil returns the time that a ThrottledError in err names. It is
// zero if there is none, also for an ErrThrottled without a time.
func ThrottledUntil(err error) time.Time {
	if t, ok := errors.AsType[*ThrottledError](err); ok {
		return t.Until
	}
	return time.Time{}
}
