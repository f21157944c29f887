package preflight

// placement says where pods go that a drain evicts.
type placement struct {
	// lost are the pods that find no place, with why.
	lost map[*pod]string
}
