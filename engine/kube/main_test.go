package kube

import (
	"os"
	"testing"

	"constellation/engine/sandbox/controlplane/controlplanetest"
)

func TestMain(m *testing.M) { os.Exit(controlplanetest.Run(m)) }
