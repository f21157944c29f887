package registry

import (
	"fmt"

	"constellation/engine/component/componentproto"
)

// ToProto returns r as it travels in the init and join protocols; nil without an address.
func ToProto(r Registry) *componentproto.Registry {
	if r.Address == "" {
		return nil
	}
	return &componentproto.Registry{Address: r.Address, CaBundle: r.CABundle, Username: r.Username, Password: r.Password}
}

// FromProto is the reverse of [ToProto]. It validates untrusted input like [Registry.Validate].
func FromProto(p *componentproto.Registry) (Registry, error) {
	if p == nil {
		return Registry{}, nil
	}
	r := Registry{Address: p.GetAddress(), CABundle: p.GetCaBundle(), Username: p.GetUsername(), Password: p.GetPassword()}
	if err := r.Validate(); err != nil {
		return Registry{}, fmt.Errorf("registry: %w", err)
	}
	return r, nil
}
