package cluster

import "constellation/engine/cloud"

// CloudMachine is an instance and how far its start has come.
type CloudMachine = cloud.Machine
