package cluster

import (
	"strings"

	"constellation/engine/cloud"
)

// GroupName is the last part of a group's ID.
func GroupName(id string) string { return id[strings.LastIndexByte(id, '/')+1:] }

// CloudMachine is an instance and how far its start has come.
type CloudMachine = cloud.Machine
