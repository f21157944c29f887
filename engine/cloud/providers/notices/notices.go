// Package notices is the part of the registry of clouds for the agent: which cloud announces the end of a machine, and how. It
// links no vendor's client, because the agent runs as root on every machine.
package notices

import (
	"constellation/engine/cloud/gcp/metadata"
	"constellation/engine/cloud/notice"
)

// sources has, by the name of its provider, each cloud that announces something.
var sources = map[string]func(address string) notice.Source{
	"gcp": func(address string) notice.Source { return metadata.Open(address).Notices },
}

// Of returns the source of a machine's provider, whose metadata server has an address; empty: the default of the provider. It
// is nil if the cloud announces nothing.
func Of(provider, address string) notice.Source {
	if open := sources[provider]; open != nil {
		return open(address)
	}
	return nil
}
