package engine

import (
	"os"
	"path/filepath"
	"runtime/debug"

	"constellation/assets"
	"constellation/engine/plan"
	"constellation/engine/provenance"
	"constellation/engine/release"
)

// SelfReport is the origin of the running program, and whether it is verified.
type SelfReport struct {
	Build provenance.Build `json:"build"`
	provenance.Report
	// Others are programs of other installations in PATH.
	Others []provenance.Other `json:"others,omitempty"`
}

// VerifySelf verifies the running program and the programs beside it against the statements of
// their publisher. keyFiles contain public keys; without any, the program's keys are used.
func VerifySelf(keyFiles []string) (SelfReport, error) {
	keys, err := readFeedKeys(keyFiles)
	if err == nil && len(keyFiles) == 0 {
		keys, err = release.EmbeddedKeys(assets.Releases())
	}
	if err != nil {
		return SelfReport{}, err
	}
	exe, err := os.Executable()
	if err != nil {
		return SelfReport{}, &plan.Error{Op: "find program", Err: err, Remedy: "install it again"}
	}
	info, ok := debug.ReadBuildInfo()
	if !ok { // built without modules, which this program cannot be
		info = &debug.BuildInfo{}
	}
	build := provenance.BuildOf(info)
	r, err := provenance.Verify(exe, build, keys)
	if err != nil {
		return SelfReport{}, &plan.Error{Op: "verify " + exe, Err: err, Remedy: "install it again"}
	}
	return SelfReport{build, r, provenance.Others(r.Dir, filepath.SplitList(os.Getenv("PATH")))}, nil
}
