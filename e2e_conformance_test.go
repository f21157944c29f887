package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine/conformance"
	"constellation/engine/plan"
)

// TestConformanceOfAnEmulatedCloud runs the conformance suite in a sandbox that emulates Google Cloud.
func TestConformanceOfAnEmulatedCloud(t *testing.T) {
	if os.Getenv("CONSTELLATION_E2E_CONFORMANCE") != "1" {
		t.Skip("opt-in: set CONSTELLATION_E2E_CONFORMANCE=1")
	}
	c := newSimulated(t)
	c.run(time.Minute, "sandbox", "up", "--cloud", "gcp", "--machines", "simulated", "--control-planes", "1", "--workers", "1", "--image", "v1.0.0").want(plan.ExitDone)
	out := c.run(25*time.Minute, "conformance", "--provider", "gcp", "-o", "markdown")
	out.want(plan.ExitDone)
	if !strings.HasPrefix(out.stdout, "# Conformance of provider gcp (emulated)\n") || strings.Contains(out.stdout, "failed") {
		t.Errorf("the report is\n%s", out.stdout)
	}
	b, err := os.ReadFile(filepath.Join(c.dir, conformance.PageFile))
	if err != nil || string(b) != out.stdout {
		t.Errorf("%v: %s has\n%s", err, conformance.PageFile, b)
	}
	c.run(time.Minute, "sandbox", "status").want(plan.ExitFailed)
}
