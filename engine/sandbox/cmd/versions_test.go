package main

import (
	"slices"
	"testing"

	"constellation/engine/cloud/sandboxapi/sandboxexec"
	"constellation/engine/sandbox/build"
)

// The console lists the Kubernetes versions of a sandbox without the package that builds them.
func TestConsoleListsVersionsThatCanBeBuilt(t *testing.T) {
	if got, want := sandboxexec.KubernetesVersions(), build.Versions(); !slices.Equal(got, want) {
		t.Errorf("the console lists %v, the sandbox builds %v", got, want)
	}
}
