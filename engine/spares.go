package engine

import "constellation/engine/cloud/machines"

// Spare is the state of a spare among enrolled machines.
type Spare = machines.SpareState
