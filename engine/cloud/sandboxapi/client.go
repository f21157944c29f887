package sandboxapi

import (
	"context"
	"fmt"
	"net/http"
	"net/url"

	"constellation/engine/cloud"
	"constellation/engine/component"
)

// DefaultControl is where a control plane finds the control API.
const DefaultControl = "http://10.42.0.1:8090"

// Requests and answers of the control API. Objects that belong to a sandbox are
// found under "/v1/" and their ID.
type (
	// GroupList answers GET /v1/groups.
	GroupList struct {
		Groups []cloud.Group `json:"groups"`
	}
	// InstanceList answers GET /v1/instances.
	InstanceList struct {
		Instances []cloud.Instance `json:"instances"`
		// Partial means that the cloud has detected missing instances in the list. A list can lack
		// instances without being marked.
		Partial bool `json:"partial,omitempty"`
	}
	// NewInstances is the body of POST /v1/<group ID>/instances, which answers with an
	// InstanceList in the same order.
	NewInstances struct {
		Tokens []string `json:"tokens"`
	}
	// SomeInstances is the body of POST /v1/instances/describe, which returns an InstanceList
	// of the existing ones.
	SomeInstances struct {
		ProviderIDs []string `json:"providerIDs"`
	}
	// OldInstances is the body of POST /v1/instances/delete.
	OldInstances struct {
		ProviderIDs []string `json:"providerIDs"`
	}
	// ImageList answers GET /v1/images.
	ImageList struct {
		Images []cloud.Image `json:"images"`
	}
	// ComponentList answers GET /v1/components?kubernetes=<version>.
	ComponentList struct {
		Components component.List `json:"components"`
		// Statement vouches for them, see package release; sandboxes that an older program has made have none.
		Statement string `json:"statement,omitempty"`
		// Agent is the enrolment program for agents that verify no statements.
		Agent *component.Component `json:"agent,omitempty"`
	}
	// GroupImage is the body of PUT /v1/<group ID>/image.
	GroupImage struct {
		Image string `json:"image"`
	}
	// GroupCount is the body of PUT /v1/<group ID>/count.
	GroupCount struct {
		Count int `json:"count"`
	}
	// FaultList is the body of GET and PUT /v1/faults.
	FaultList struct {
		Faults []string `json:"faults"`
	}
)

// Client is a client of the control API. It is safe for concurrent use.
type Client struct{ endpoint }

// NewClient returns a client for the API at address: an http URL, which wants a
// token, or "unix:" and the path of the host's socket, which wants none.
func NewClient(address, token string) *Client {
	return &Client{newEndpoint(address, token)}
}

// Groups returns the scaling groups.
func (c *Client) Groups(ctx context.Context) ([]cloud.Group, error) {
	var l GroupList
	if err := c.call(ctx, http.MethodGet, "/v1/groups", nil, nil, &l); err != nil {
		return nil, fmt.Errorf("list groups: %w", err)
	}
	return l.Groups, nil
}

// SetGroupImage sets the image of the group's future instances. Those that exist
// keep theirs.
func (c *Client) SetGroupImage(ctx context.Context, groupID, image string) error {
	if _, _, err := ParseGroupID(groupID); err != nil {
		return err
	}
	if err := c.call(ctx, http.MethodPut, "/v1/"+groupID+"/image", nil, GroupImage{image}, nil); err != nil {
		return fmt.Errorf("set image of group %s: %w", groupID, err)
	}
	return nil
}

// SetGroupCount sets the desired number of instances of a group. Missing ones are created;
// surplus ones are deleted, highest numbers first.
func (c *Client) SetGroupCount(ctx context.Context, groupID string, count int) error {
	if _, _, err := ParseGroupID(groupID); err != nil {
		return err
	}
	if err := c.call(ctx, http.MethodPut, "/v1/"+groupID+"/count", nil, GroupCount{count}, nil); err != nil {
		return fmt.Errorf("set count of group %s: %w", groupID, err)
	}
	return nil
}

// Instances returns the instances of the sandbox, those that are being deleted
// included. As in any cloud the list may lag behind, or lack some: an instance that is
// missing here may exist; only [Client.Instance] proves that it is gone. If the cloud
// marks the list as incomplete, the list comes with an error that wraps cloud.ErrPartial.
func (c *Client) Instances(ctx context.Context) ([]cloud.Instance, error) {
	var l InstanceList
	if err := c.call(ctx, http.MethodGet, "/v1/instances", nil, nil, &l); err != nil {
		return nil, fmt.Errorf("list instances: %w", err)
	}
	if l.Partial {
		return l.Instances, fmt.Errorf("list instances: %w", cloud.ErrPartial)
	}
	return l.Instances, nil
}

// Instance returns one instance. The error wraps cloud.ErrNotFound if the cloud
// does not know it, or no longer.
func (c *Client) Instance(ctx context.Context, providerID string) (cloud.Instance, error) {
	var i cloud.Instance
	path, err := instancePath(providerID)
	if err != nil {
		return i, err
	}
	if err := c.call(ctx, http.MethodGet, path, nil, nil, &i); err != nil {
		return i, fmt.Errorf("read instance %s: %w", providerID, err)
	}
	return i, nil
}

// Describe returns the existing ones of the given instances in the order of providerIDs. An
// instance that is missing in the response is gone, as with [Client.Instance]. It is one request.
func (c *Client) Describe(ctx context.Context, providerIDs []string) ([]cloud.Instance, error) {
	for _, id := range providerIDs {
		if _, _, err := ParseProviderID(id); err != nil {
			return nil, err
		}
	}
	if len(providerIDs) == 0 {
		return nil, nil
	}
	var l InstanceList
	if err := c.callWithin(ctx, bulkTimeout, http.MethodPost, "/v1/instances/describe", nil, SomeInstances{providerIDs}, &l); err != nil {
		return nil, fmt.Errorf("read %s: %w", count(providerIDs), err)
	}
	return l.Instances, nil
}

// CreateInstance is [Client.CreateInstances] for one.
func (c *Client) CreateInstance(ctx context.Context, groupID, token string) (cloud.Instance, error) {
	l, err := c.CreateInstances(ctx, groupID, []string{token})
	if err != nil {
		return cloud.Instance{}, err
	}
	return l[0], nil
}

// CreateInstances adds one instance with the group's image to a group for each
// token, which raises the group's count, and returns them in the order of tokens
// before their machines have booted. It is one request.
//
// A token is the caller's and not the name of a machine. A repeated call with the
// same token returns the instance of the first, even after its deletion, then with
// state cloud.Terminated. A token is at most 63 characters of letters, digits, '.',
// '+' and '-'. After an error each of the instances may exist or not, unless the
// request was not valid; a call with the same tokens finds out.
func (c *Client) CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error) {
	if _, _, err := ParseGroupID(groupID); err != nil {
		return nil, err
	}
	for _, t := range tokens {
		if !ValidToken(t) {
			return nil, fmt.Errorf("create instances in group %s: %q is not a token", groupID, t)
		}
	}
	if len(tokens) == 0 {
		return nil, nil
	}
	var l InstanceList
	err := c.callWithin(ctx, bulkTimeout, http.MethodPost, "/v1/"+groupID+"/instances", nil, NewInstances{tokens}, &l)
	if err == nil && len(l.Instances) != len(tokens) {
		err = fmt.Errorf("%w: %d instances came for %d tokens", cloud.ErrUnavailable, len(l.Instances), len(tokens))
	}
	if err != nil {
		return nil, fmt.Errorf("create %s in group %s: %w", count(tokens), groupID, err)
	}
	return l.Instances, nil
}

// DeleteInstance is [Client.DeleteInstances] for one.
func (c *Client) DeleteInstance(ctx context.Context, providerID string) error {
	return c.DeleteInstances(ctx, []string{providerID})
}

// DeleteInstances deletes instances, which lowers the counts of their groups, and returns
// before the machines are gone. It is one request. Deleting a missing instance is a success.
// After an error some deletions may have begun.
func (c *Client) DeleteInstances(ctx context.Context, providerIDs []string) error {
	for _, id := range providerIDs {
		if _, _, err := ParseProviderID(id); err != nil {
			return err
		}
	}
	if len(providerIDs) == 0 {
		return nil
	}
	if err := c.callWithin(ctx, bulkTimeout, http.MethodPost, "/v1/instances/delete", nil, OldInstances{providerIDs}, nil); err != nil {
		return fmt.Errorf("delete %s: %w", count(providerIDs), err)
	}
	return nil
}

// count says how many instances a request was for, or which one.
func count(names []string) string {
	if len(names) == 1 {
		return "instance " + names[0]
	}
	return fmt.Sprint(len(names), " instances")
}

// RebootInstance switches a machine off and on again. Its disk and its TPM's
// persistent state stay. It returns when PID 1 runs again.
func (c *Client) RebootInstance(ctx context.Context, providerID string) error {
	path, err := instancePath(providerID)
	if err != nil {
		return err
	}
	if err := c.callWithin(ctx, actionTimeout, http.MethodPost, path+"/reboot", nil, nil, nil); err != nil {
		return fmt.Errorf("reboot instance %s: %w", providerID, err)
	}
	return nil
}

// StopInstance pulls a machine's plug. The instance stays, as cloud.Stopped.
func (c *Client) StopInstance(ctx context.Context, providerID string) error {
	path, err := instancePath(providerID)
	if err != nil {
		return err
	}
	if err := c.callWithin(ctx, actionTimeout, http.MethodPost, path+"/stop", nil, nil, nil); err != nil {
		return fmt.Errorf("stop instance %s: %w", providerID, err)
	}
	return nil
}

// Images returns the catalogue of OS images.
func (c *Client) Images(ctx context.Context) ([]cloud.Image, error) {
	var l ImageList
	if err := c.call(ctx, http.MethodGet, "/v1/images", nil, nil, &l); err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return l.Images, nil
}

// Components returns kubeadm, kubelet and kubectl of a Kubernetes version as this
// cloud's mirror serves them, with the digests of what this computer built. The
// error wraps cloud.ErrNotFound and names what can be had.
func (c *Client) Components(ctx context.Context, kubernetesVersion string) (component.Signed, error) {
	var l ComponentList
	q := url.Values{"kubernetes": {kubernetesVersion}}
	if err := c.call(ctx, http.MethodGet, "/v1/components", q, nil, &l); err != nil {
		return component.Signed{}, fmt.Errorf("list components of Kubernetes %s: %w", kubernetesVersion, err)
	}
	return component.Signed{List: l.Components, Statement: l.Statement, Agent: l.Agent}, nil
}

// Sandbox describes the sandbox and its machines.
func (c *Client) Sandbox(ctx context.Context) (Info, error) {
	var i Info
	if err := c.call(ctx, http.MethodGet, "/v1/sandbox", nil, nil, &i); err != nil {
		return i, fmt.Errorf("describe sandbox: %w", err)
	}
	return i, nil
}

// SetFaults replaces the faults that the cloud injects; none switches them off.
// Only the host may do so.
func (c *Client) SetFaults(ctx context.Context, faults []string) error {
	if err := c.call(ctx, http.MethodPut, "/v1/faults", nil, FaultList{faults}, nil); err != nil {
		return fmt.Errorf("set faults: %w", err)
	}
	return nil
}

// SetHollowTimes sets how long hollow machines take for what begins from now on. Only
// the host may do so, where machines are hollow.
func (c *Client) SetHollowTimes(ctx context.Context, t HollowTimes) error {
	if err := c.call(ctx, http.MethodPut, "/v1/times", nil, t, nil); err != nil {
		return fmt.Errorf("set times of hollow machines: %w", err)
	}
	return nil
}

// Shutdown ends the daemon. With machines, all machines are removed first and the
// call returns when nothing is left of them; otherwise they run on and the next
// start finds them. Only the host may do so.
func (c *Client) Shutdown(ctx context.Context, machines bool) error {
	q := url.Values{}
	if machines {
		q.Set("machines", "true")
	}
	if err := c.callWithin(ctx, actionTimeout, http.MethodPost, "/v1/shutdown", q, nil, nil); err != nil {
		return fmt.Errorf("shut down sandbox: %w", err)
	}
	return nil
}

func instancePath(providerID string) (string, error) {
	sandbox, machine, err := ParseProviderID(providerID)
	if err != nil {
		return "", err
	}
	return "/v1/sandboxes/" + sandbox + "/instances/" + machine, nil
}
