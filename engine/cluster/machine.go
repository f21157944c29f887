package cluster

import (
	"strings"
	"time"

	"constellation/engine/cloud"
)

// GroupName is the last part of a group's ID.
func GroupName(id string) string { return id[strings.LastIndexByte(id, '/')+1:] }

// CloudMachine is an instance and how far its start has come.
type CloudMachine struct {
	cloud.Instance
	// Stage is NodeCreating, NodeBooting, NodeFailed, NodeGone, or "" when it is up.
	Stage string
	Since time.Time // of the last start; zero if the cloud does not tell
	// Console is the path of its console's log; empty if there is none here.
	Console string
}
