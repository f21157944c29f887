package component

import (
	"constellation/engine/component/componentproto"
)

// ToProto returns l as it travels in the init and join protocols.
func ToProto(l List) []*componentproto.Component {
	out := make([]*componentproto.Component, 0, len(l))
	for _, c := range l {
		out = append(out, &componentproto.Component{
			Name: c.Name, Url: c.URL, Digest: c.Digest, Path: c.Path, Mode: c.Mode, Extract: c.Extract,
		})
	}
	return out
}

// FromProto is the reverse of [ToProto]. It validates untrusted input like
// [List.Validate].
func FromProto(in []*componentproto.Component) (List, error) {
	l := make(List, 0, len(in))
	for _, c := range in {
		l = append(l, Component{
			Name: c.GetName(), URL: c.GetUrl(), Digest: c.GetDigest(), Path: c.GetPath(), Mode: c.GetMode(), Extract: c.GetExtract(),
		})
	}
	if err := l.Validate(); err != nil {
		return nil, err
	}
	return l, nil
}
