package cluster

// LocalData is what is on the disks of nodes. No backup holds it, and it is lost when
// its node is replaced.
type LocalData struct {
	// Volumes are bound to claims, sorted by claim.
	Volumes []LocalVolume `json:"volumes,omitempty"`
	// EmptyDirs and HostPaths count pods with such volumes, hostPath only where they can
	// be written. Parts of the cluster itself are left out.
	EmptyDirs int `json:"emptyDirs,omitempty"`
	HostPaths int `json:"hostPaths,omitempty"`
}

// LocalVolume is a PersistentVolume whose data is on one node.
type LocalVolume struct {
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	Volume    string `json:"volume"`
	// Nodes is where it can be used; empty if nothing tells where the data is.
	Nodes []string `json:"nodes,omitempty"`
	// Path is that on the node's disk; empty if a driver knows it alone.
	Path string `json:"path,omitempty"`
	// Bytes is the capacity; zero if none is told.
	Bytes int64 `json:"bytes,omitempty"`
	// Workloads are those whose pods use it, "statefulset/db/postgres"; empty if none runs.
	Workloads []string `json:"workloads,omitempty"`
}
