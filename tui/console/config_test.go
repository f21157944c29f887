package console

import (
	"testing"
)

func TestSetScalar(t *testing.T) {
	const in = "# my cluster\nversion: v2\nname: demo # short\nkubernetesVersion: \"v1.35.4\"\nnodeGroups:\n  name: inner\n"
	got := string(setScalar(setScalar([]byte(in), "name", "prod"), "kubernetesVersion", "v1.36.3"))
	want := "# my cluster\nversion: v2\nname: prod # short\nkubernetesVersion: v1.36.3\nnodeGroups:\n  name: inner\n"
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if got := string(setScalar([]byte(in), "absent", "x")); got != in {
		t.Errorf("a key that is absent changed the file to\n%s", got)
	}
}
