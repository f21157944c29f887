package compat_test

import (
	"strings"
	"testing"

	"constellation/engine/compat"
	"constellation/engine/version"
)

func TestControllerManager(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, built, from, to, want, problem string }{
		{name: "that of the API servers", built: "v1.34.0 v1.35.0 v1.36.0", from: "v1.35.4", to: "v1.35.4", want: "v1.35.0"},
		{name: "never a newer one than the API servers that run", built: "v1.35.0 v1.36.0", from: "v1.35.4", to: "v1.36.4", want: "v1.35.0"},
		{name: "one minor older", built: "v1.34.0 v1.35.0", from: "v1.36.4", to: "v1.36.4", want: "v1.35.0"},
		{name: "two minors older", built: "v1.34.0 v1.35.0", from: "v1.37.2", to: "v1.37.2", problem: "v1.35, and it may be one minor older than v1.37"},
		{name: "two minors older after the hop", built: "v1.35.0", from: "v1.36.4", to: "v1.37.2", problem: "v1.35, and it may be one minor older than v1.37"},
		{name: "only newer ones", built: "v1.36.0", from: "v1.35.4", to: "v1.35.4", problem: "may not be newer than v1.35"},
		{name: "no version to go to", built: "v1.35.0", from: "v1.36.4", want: "v1.35.0"},
		{name: "none", from: "v1.35.4", to: "v1.36.4", problem: "there is none"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var built []version.Version
			for v := range strings.FieldsSeq(tt.built) {
				built = append(built, version.MustParse(v))
			}
			var to version.Version
			if tt.to != "" {
				to = version.MustParse(tt.to)
			}
			got, problem := compat.ControllerManager(built, version.MustParse(tt.from), to)
			if is := got.String(); (tt.want == "") != got.IsZero() || tt.want != "" && is != tt.want {
				t.Errorf("got %s, want %q", is, tt.want)
			}
			if (tt.problem == "") != (problem == "") || !strings.Contains(problem, tt.problem) {
				t.Errorf("problem %q, want %q", problem, tt.problem)
			}
		})
	}
}
