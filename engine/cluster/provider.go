package cluster

import "constellation/engine/cloud"

// ProviderInfo is what machines belong to.
type ProviderInfo = cloud.Info
