// Package testneeds declares what a test needs beyond the Go toolchain: root, a Kubernetes API server,
// real machines, a network, minutes.
//
// Each function declares one requirement and skips the test if the requirement is not met. With
// -short no requirement counts as met, so `go test -short ./...` (which `make check` runs) starts no
// cluster and behaves the same for root and for other users. Declarations are test attributes:
// .ci/testreport reads them from `go test -json` and prints who ran, who was skipped, and why.
package testneeds

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
)

// Attribute is the key of the test attributes that declare requirements.
const Attribute = "needs"

// T is the part of *testing.T and *testing.B that this package uses. It is an interface so that
// importers do not link package testing.
type T interface {
	Helper()
	Attr(key, value string)
	Skipf(format string, args ...any)
}

// Root skips the test unless root runs it, for example to mount a file system.
func Root(t T, why string) {
	t.Helper()
	declare(t, "root")
	if os.Geteuid() != 0 {
		t.Skipf("needs root: %s", why)
	}
}

// ControlPlane declares that the test starts etcd and kube-apiserver. The caller skips if their
// binaries are missing, because only it knows where it looks for them.
func ControlPlane(t T) {
	t.Helper()
	declare(t, "control plane")
}

// Kubernetes skips the test unless this version of Kubernetes was built on this computer. It returns
// the directory of its binaries.
func Kubernetes(t T, version string) string {
	t.Helper()
	declare(t, "Kubernetes binaries")
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skipf("needs Kubernetes %s: no cache directory: %v", version, err)
	}
	dir := filepath.Join(cache, "constellation", "kubernetes", version, "bin")
	if _, err := os.Stat(filepath.Join(dir, "kubeadm")); err != nil {
		t.Skipf("needs Kubernetes %[1]s: run `bin/constellation sandbox fetch %[1]s`, which builds it from source", version)
	}
	return dir
}

// Machines skips the test unless root runs it on Linux, where real machines (containers with systemd,
// kubelet and a TPM emulator) can run.
func Machines(t T) {
	t.Helper()
	declare(t, "real machines")
	if runtime.GOOS != "linux" || os.Geteuid() != 0 {
		t.Skipf("needs real machines, and so Linux and root")
	}
}

// Hollow declares that the test starts a control plane with machines that are processes.
func Hollow(t T) {
	t.Helper()
	declare(t, "hollow machines")
	if runtime.GOOS != "linux" {
		t.Skipf("needs hollow machines, and so Linux")
	}
}

// Sockets declares that the test opens thousands of connections. The caller skips if the limit on
// open files is too low.
func Sockets(t T) {
	t.Helper()
	declare(t, "thousands of sockets")
}

// Network skips the test unless CONSTELLATION_TEST_NETWORK permits downloads.
func Network(t T, why string) {
	t.Helper()
	declare(t, "network")
	if os.Getenv("CONSTELLATION_TEST_NETWORK") == "" {
		t.Skipf("needs the network: %s; set CONSTELLATION_TEST_NETWORK=1 to run it", why)
	}
}

// Time declares that the test takes long, for example "20 s".
func Time(t T, long string) {
	t.Helper()
	if Short() {
		t.Attr(Attribute, "time")
		t.Skipf("takes %s: not run with -short", long)
	}
	declare(t, "time")
}

// OptIn skips the test unless the environment variable is set. It is for tests that take minutes each;
// `make soak` sets all variables.
func OptIn(t T, variable, cost string) {
	t.Helper()
	declare(t, "opt-in")
	if os.Getenv(variable) == "" {
		t.Skipf("takes %s; set %s=1 to run it", cost, variable)
	}
}

// Program skips the test unless the program is in PATH, and returns its path. Programs are the only
// requirement that may be met with -short. pkg is the Debian package that holds the program.
func Program(t T, name, pkg string) string {
	t.Helper()
	t.Attr(Attribute, "program "+name)
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("needs %s: install the package %s", name, pkg)
	}
	return path
}

// File skips the test unless the file exists. Like programs, files may be there with -short. pkg is the Debian package
// that has it.
func File(t T, path, pkg string) {
	t.Helper()
	t.Attr(Attribute, "file "+path)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("needs %s: install the package %s", path, pkg)
	}
}

// Tree makes the cached result of a package's tests depend on all files of the repository, which .ci/run and .ci/test.sh
// hash into CONSTELLATION_TREE. Call it before a test runs a program that reads these files, such as go list: Go observes
// only the files and environment variables that the test process itself reads.
func Tree() { _ = os.Getenv("CONSTELLATION_TREE") }

// Short reports whether the test runs with -short. Tests that repeat something many times repeat it
// less often then.
func Short() bool {
	f := flag.Lookup("test.short")
	return f != nil && f.Value.String() == "true"
}

func declare(t T, what string) {
	t.Helper()
	t.Attr(Attribute, what)
	if Short() {
		t.Skipf("needs %s: not run with -short", what)
	}
}

// Number is the value of an environment variable that sets the size of a test, and otherwise without one.
func Number(t interface {
	Helper()
	Fatalf(format string, args ...any)
}, variable string, otherwise int,
) int {
	t.Helper()
	s := os.Getenv(variable)
	if s == "" {
		return otherwise
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("%s is %q, want a number above 0", variable, s)
	}
	return n
}
