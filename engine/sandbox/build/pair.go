package build

// The versions of demo, tests, drills and CI: clusters start with the first, and upgrades lead to the
// second. Makefile and .ci read this file. Older minors are supported, and tested by `make soak`.
const (
	DefaultVersion = "v1.36.4" // also of a new sandbox
	NextVersion    = "v1.37.2"
)
