// Package gcp manages the machines of a cluster in Google Cloud, through Google's own client of
// Compute Engine. It hides zonal managed instance groups behind the contract of
// [constellation/engine/cloud/providers].
//
// The package was run against the emulator of package gcptest alone, never against Google. It has the
// view of the operator, [Cloud], that of the console, [Console], and that of a machine, [Machine]. Package
// api sends the requests. Package infra makes network, load balancer and groups. Package attest judges the evidence of machines, for which a
// [Lookup] reads them. docs/clouds/gcp.md lists what tests cover.
//
// # Names and identity
//
// The provider ID of a machine is gce://PROJECT/ZONE/NAME. Its name is that of its group's machines, a
// hyphen and its token. In Compute Engine, a new machine can have the name of a deleted one, and a group
// can recreate a machine under its name. Three means prevent damage by that:
//
//   - The incarnation is the number that Compute Engine assigns to each machine, once. A deletion reads
//     the machine first, and does nothing if its number differs.
//   - A creation first reads the operations of the zone that inserted or deleted machines. They contain
//     the names of deleted machines, too. Machines of these names are not created again.
//   - Groups with autohealing are refused.
//
// A machine that the group has not created yet has no number. Its key is its provider ID alone.
//
// Requests of one group are batched. docs/clouds/gcp.md has rate limits and credentials.
package gcp

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"time"

	compute "google.golang.org/api/compute/v1"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/api"
)

const (
	// Name is the name of the provider.
	Name = "gcp"
	// LabelUID is the label of machines with the UID of their cluster. A group belongs to a cluster if its
	// instance template has this label and LabelRole.
	LabelUID = "constellation-uid"
	// LabelRole is the label of machines with their role.
	LabelRole = "constellation-role"
	// LabelVersion is the label of an image with its version, in which hyphens replace dots.
	LabelVersion = "constellation-version"

	// MaxAge is the age that a description of a machine may have.
	MaxAge = 10 * time.Second
	// MovingAge is the age that a description of a machine may have that is being created or deleted.
	MovingAge = time.Second

	// lost is how long an operation is waited for. Operations of this package end when something is scheduled, within seconds.
	lost = time.Minute

	pageSize  = 500 // the largest of Compute Engine
	tokenSize = 41  // of the longest: 24 digits, a hyphen and 16 digits
	maxName   = 63
)

// Options describe the machines of a cluster. Project, UID and Zones are required.
type Options struct {
	Project string
	// UID is the value of LabelUID.
	UID string
	// Zones are searched for groups and machines.
	Zones []string
	// Endpoint is the URL of the API, up to and with the version; empty: Google's.
	Endpoint string
	// HTTP sends the requests with their credentials. Nil: the default credentials are found.
	HTTP *http.Client
}

// Cloud implements providers.Control. It is safe for concurrent use.
type Cloud struct {
	project, uid string
	zones        []string
	client       *api.Client
	api          *compute.Service // of client

	turn chan struct{} // of the call of Describe that reads

	mu        sync.Mutex
	asked     map[string]int                       // by provider ID: calls of Describe that wait
	templates map[string]*compute.InstanceTemplate // by name; templates do not change
	groups    map[string]group                     // by ID, as last read
	seen      map[string]observation               // by provider ID
	leaving   map[string]time.Time                 // keys whose deletion was accepted, and when
	pending   map[string]map[string]bool           // names by group ID: accepted, and not seen yet
	made      map[string]birth                     // by provider ID: the first machine that had it
	looked    map[string]time.Time                 // by zone: the newest insert operation that was read
	failures  map[string]int                       // by names of a creation: how many failed or were lost
}

// birth is the first machine that had a provider ID.
type birth struct {
	number uint64 // 0: its creation was accepted, and its number is not known
	at     time.Time
}

// bear records a machine, unless an older one had its ID. Callers hold the lock.
func (c *Cloud) bear(id string, b birth) {
	if first := c.made[id]; first.number == 0 || b.at.Before(first.at) {
		c.made[id] = b
	}
}

// observation is a machine as it was at a time.
type observation struct {
	cloud.Instance
	at time.Time
}

// group is a managed instance group of the cluster.
type group struct {
	cloud.Group
	zone, name string
	base       string // of the names of its machines
	template   string // name
	autoheals  bool
	paginated  bool // its machines come in pages
}

// New returns the machines of a cluster. It sends nothing yet, but may read files that have credentials.
func New(ctx context.Context, o Options) (*Cloud, error) {
	if o.Project == "" || o.UID == "" || len(o.Zones) == 0 {
		return nil, errors.New("open Google Cloud: project, UID or zones are missing")
	}
	client, err := api.Dial(ctx, o.Endpoint, o.HTTP)
	if err != nil {
		return nil, err
	}
	return &Cloud{
		project: o.Project, uid: o.UID, zones: o.Zones, client: client, api: client.API, turn: make(chan struct{}, 1), asked: map[string]int{},
		templates: map[string]*compute.InstanceTemplate{}, groups: map[string]group{}, seen: map[string]observation{}, leaving: map[string]time.Time{},
		pending: map[string]map[string]bool{}, made: map[string]birth{}, looked: map[string]time.Time{}, failures: map[string]int{},
	}, nil
}

// ProviderID returns the ID of a machine, as the cloud controller manager of Google Cloud writes it.
func ProviderID(project, zone, name string) string {
	return "gce://" + project + "/" + zone + "/" + name
}

var segment = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.:]{0,98}[a-z0-9])?$`)

// ParseProviderID is the inverse of ProviderID. It accepts a key, too.
func ParseProviderID(id string) (project, zone, name string, ok bool) {
	id, _ = cloud.SplitKey(id)
	rest, ok := strings.CutPrefix(id, "gce://")
	parts := strings.Split(rest, "/")
	if !ok || len(parts) != 3 || !segment.MatchString(parts[0]) || !segment.MatchString(parts[1]) || !segment.MatchString(parts[2]) {
		return "", "", "", false
	}
	return parts[0], parts[1], parts[2], true
}

// MachinePage returns the address of the page of a machine in Google's console; empty for the provider ID of another cloud.
func MachinePage(providerID string) string {
	project, zone, name, ok := ParseProviderID(providerID)
	if !ok {
		return ""
	}
	return "https://console.cloud.google.com/compute/instancesDetail/zones/" + zone + "/instances/" + name + "?project=" + url.QueryEscape(project)
}

// GroupID returns the ID of a managed instance group.
func GroupID(project, zone, name string) string {
	return "projects/" + project + "/zones/" + zone + "/instanceGroupManagers/" + name
}

// GroupName returns the name that the ID of a group contains; empty for another ID. The groups of a group of
// nodes in several zones have one name.
func GroupName(id string) string {
	_, name := parseGroupID(id)
	if m := madeName.FindStringSubmatch(name); m != nil {
		return m[1]
	}
	return name
}

// madeName matches the names of the groups of package infra, one for each group of nodes and zone.
var madeName = regexp.MustCompile(`^constellation-[0-9a-f]{8}-(.+)-[a-z]$`)

// GroupNameIn returns the name of the managed instance group that package infra makes for a group of nodes.
func GroupNameIn(uid, group, zone string) string {
	return "constellation-" + uid + "-" + group + "-" + zone[strings.LastIndexByte(zone, '-')+1:]
}

func parseGroupID(id string) (zone, name string) {
	p := strings.Split(id, "/")
	if len(p) != 6 || p[0] != "projects" || p[2] != "zones" || p[4] != "instanceGroupManagers" {
		return "", ""
	}
	return p[3], p[5]
}

// base returns the last segment of a URL.
func base(url string) string { return url[strings.LastIndexByte(url, '/')+1:] }

// between returns the segment of a URL that follows another one.
func between(url, before string) string {
	_, rest, _ := strings.Cut(url, "/"+before+"/")
	out, _, _ := strings.Cut(rest, "/")
	return out
}

// path returns a URL without its host and version: projects/...
func path(url string) string {
	if n := strings.Index(url, "projects/"); n >= 0 {
		return url[n:]
	}
	return url
}

var (
	hexToken  = regexp.MustCompile(`^[0-9a-f]{24}(-[0-9a-f]{16})?$`)
	tokenName = regexp.MustCompile(`^.+?-([0-9a-f]{24}(?:-[0-9a-f]{16})?)$`)
)

// tokenIn returns the token in the name of a machine whose group is not known; empty if it has none.
func tokenIn(name string) string {
	if m := tokenName.FindStringSubmatch(name); m != nil {
		return m[1]
	}
	return ""
}

// tokenOf returns the token in the name of a machine of a group; empty if it has none.
func tokenOf(base, name string) string {
	if token := strings.TrimPrefix(name, base+"-"); hexToken.MatchString(token) {
		return token
	}
	return ""
}

// imageOf returns the image of the boot disk of a template.
func imageOf(t *compute.InstanceTemplate) string {
	if t == nil || t.Properties == nil {
		return ""
	}
	for _, d := range t.Properties.Disks {
		if d.Boot && d.InitializeParams != nil {
			return path(d.InitializeParams.SourceImage)
		}
	}
	return ""
}

// state translates the status of a machine. Compute Engine reports a machine that is being deleted like
// one that is being stopped.
func state(status string) cloud.State {
	return cmp.Or(map[string]cloud.State{
		"PROVISIONING": cloud.Creating, "STAGING": cloud.Creating, "RUNNING": cloud.Ready, "REPAIRING": cloud.Unknown,
		"PENDING_STOP": cloud.Terminating, "STOPPING": cloud.Terminating, "SUSPENDING": cloud.Stopped, "SUSPENDED": cloud.Stopped, "TERMINATED": cloud.Stopped,
	}[status], cloud.Unknown)
}
