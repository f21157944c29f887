package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/provenance"
	"constellation/internal/testneeds"
)

// These variables name the folders that `make release` wrote: of this release, and of the release
// before. Without the second one the release before is made from the first.
const (
	packagesEnv       = "CONSTELLATION_PACKAGES"
	packagesBeforeEnv = "CONSTELLATION_PACKAGES_BEFORE"
	// clusterEnv also creates clusters with the programs of the packages.
	clusterEnv = "CONSTELLATION_E2E_PACKAGES"
)

// installedDir is the folder of the programs in a package.
const installedDir = "usr/lib/constellation"

// TestPackages installs, upgrades and removes the packages with the system's own tools in a
// private root. A console and a sandbox run meanwhile.
func TestPackages(t *testing.T) {
	testneeds.Root(t, "to give the files of a package to root")
	for _, tool := range []*packageTool{dpkg(), rpm()} {
		t.Run(tool.format, func(t *testing.T) { packageLife(t, tool) })
	}
}

// packageLife is the life of a package on one computer.
func packageLife(t *testing.T, tool *packageTool) {
	for _, program := range tool.programs {
		testneeds.Program(t, program, tool.needs)
	}
	next := packageFile(t, packagesEnv, tool.format)
	if next == "" {
		t.Skipf("needs a release with a %s of this architecture: run `make release`, and set %s to bin/release", tool.format, packagesEnv)
	}
	tool.t, tool.root, tool.scratch = t, newPrivateRoot(t), t.TempDir()
	before := packageFile(t, packagesBeforeEnv, tool.format)
	if before == "" {
		before = tool.older(next)
	}
	host := namesOfHost(t)

	// What other packages have installed stays.
	for _, dir := range []string{"usr/bin", "usr/lib", "usr/share/doc/other", "usr/share/bash-completion/completions", "usr/share/fish/vendor_completions.d", "usr/share/zsh/site-functions", "usr/share/zsh/vendor-completions", "var/lib", "tmp"} {
		must(t, os.MkdirAll(filepath.Join(tool.root, dir), 0o755))
		must(t, os.WriteFile(filepath.Join(tool.root, dir, "other"), []byte(dir), 0o644))
	}
	empty := tool.tree()
	if scripts := tool.scripts(next); scripts != "" {
		t.Errorf("%s has maintainer scripts, which must work with a root other than /:\n%s", next, scripts)
	}

	tool.install(before)
	bin := filepath.Join(tool.root, "usr", "bin")
	old := startOnTerminal(t, filepath.Join(bin, "constellation"))
	t.Cleanup(func() { _ = old.cmd.Process.Kill() }) // if the test fails before it ends by itself
	old.until(t, "constellation-conf.yaml", frameEnd)
	c, own := packagedSandbox(t, bin)

	tool.install(next)
	tool.wantTree("the upgrade", empty, tool.contents(next))
	wantSelfVerified(t, filepath.Join(bin, "constellation"))
	old.press(t, "?")
	old.until(t, "constellation-conf.yaml", frameEnd, "Keys", frameEnd)
	if c != nil {
		// The machines of the sandbox are those of the release before, and the new program operates them.
		if up := c.machinesUp(); up != 2 {
			t.Errorf("%d machines are running after the upgrade, want 2", up)
		}
		c.run(time.Minute, "sandbox", "machine", "reboot", "worker-0").want(plan.ExitDone)
		if up := c.machinesUp(); up != 2 {
			t.Errorf("%d machines are running after a restart by the new program, want 2", up)
		}
		if os.Getenv(clusterEnv) != "" {
			c.run(8*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
		}
		c.run(time.Minute, "sandbox", "down").want(plan.ExitDone)
		c.bin = own
	}

	tool.remove()
	tool.wantTree("the removal", empty, nil)
	if out := tool.known(); out != "" {
		t.Errorf("%s still knows the package:\n%s", tool.format, out)
	}
	old.seen = nil
	old.press(t, "\x1b")
	old.until(t, frameEnd)
	old.press(t, "q")
	guard := time.AfterFunc(time.Minute, func() { _ = old.cmd.Process.Kill() })
	defer guard.Stop()
	old.exit(t)
	if now := namesOfHost(t); !slices.Equal(host, now) {
		t.Errorf("this computer had\n%s\nand now has\n%s", strings.Join(host, "\n"), strings.Join(now, "\n"))
	}
}

// TestClusterFromPackage creates a cluster of real machines with the programs of an unpacked deb,
// in an empty home.
func TestClusterFromPackage(t *testing.T) {
	testneeds.OptIn(t, clusterEnv, "two minutes")
	testneeds.Program(t, "dpkg-deb", "dpkg")
	deb := packageFile(t, packagesEnv, "deb")
	if deb == "" {
		t.Skipf("needs a deb of this architecture: run `make release`, and set %s to bin/release", packagesEnv)
	}
	c := newReal(t)
	tree := t.TempDir()
	home, err := os.MkdirTemp("/tmp", "con") // socket paths must be short
	must(t, err)
	t.Cleanup(func() {
		if err := os.RemoveAll(home); err != nil {
			t.Error(err)
		}
	})
	if out, err := exec.CommandContext(t.Context(), "dpkg-deb", "--extract", deb, tree).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v\n%s", err, out)
	}
	cache, err := os.UserCacheDir() // has Kubernetes and the machines' system
	must(t, err)
	own := c.bin
	c.bin, c.dir = filepath.Join(tree, "usr", "bin"), filepath.Join(home, "demo")
	c.env = []string{"HOME=" + home, "XDG_CACHE_HOME=" + cache, "XDG_STATE_HOME="}
	wantSelfVerified(t, filepath.Join(c.bin, "constellation"))
	c.up(1, 1)
	c.run(8*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	must(t, os.Symlink(filepath.Join(own, "kubectl"), filepath.Join(c.bin, "kubectl")))
	c.wantNodes("control-plane-0", "worker-0")
	c.wantVIP("worker-0")
}

// packagedSandbox starts simulated machines with the program in bin. It also returns the folder of a
// copy of the programs, for the end of the test. Without a built Kubernetes it returns nil.
func packagedSandbox(t *testing.T, bin string) (c *cloud, own string) {
	t.Helper()
	cache, err := os.UserCacheDir()
	must(t, err)
	if _, err := os.Stat(filepath.Join(cache, "constellation", "kubernetes", current, "bin", "kubeadm")); err != nil {
		t.Logf("no sandbox runs during the upgrade: Kubernetes %s is not in the cache", current)
		return nil, ""
	}
	c = newSimulated(t)
	own, c.bin = filepath.Join(filepath.Dir(c.bin), "copy"), bin
	share(t, filepath.Join(bin, "..", "lib", "constellation"), own)
	t.Cleanup(func() { c.bin = own }) // of a test that failed
	c.run(2*time.Minute, "sandbox", "up", "--machines", "simulated", "--control-planes", "1", "--workers", "1", "--kubernetes", current).want(plan.ExitDone)
	return c, own
}

// machinesUp returns how many machines of the sandbox are running.
func (c *cloud) machinesUp() (n int) {
	c.t.Helper()
	var status struct {
		Machines []struct{ Boot string }
	}
	if err := json.Unmarshal([]byte(c.run(time.Minute, "sandbox", "status", "-o", "json").want(plan.ExitDone).stdout), &status); err != nil {
		c.t.Fatal(err)
	}
	for _, m := range status.Machines {
		if m.Boot == "ready" {
			n++
		}
	}
	return n
}

// wantSelfVerified checks that each program has the digest of its statement. Signatures are
// checked if the release has them.
func wantSelfVerified(t *testing.T, program string) {
	t.Helper()
	args := []string{"self", "verify", "-o", "json"}
	if key := os.Getenv("CONSTELLATION_PACKAGES_KEY"); key != "" {
		args = append(args, "--key", key)
	}
	out, err := exec.CommandContext(t.Context(), program, args...).Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	var answer struct {
		Verified bool
		engine.SelfReport
	}
	must(t, json.Unmarshal(out, &answer))
	signed := len(args) > 4
	for _, p := range answer.Problems {
		if signed || p.ID != provenance.NoKey && p.ID != provenance.NoSignature {
			t.Errorf("self verify reports %s %s: %s", p.ID, p.File, p.Text)
		}
	}
	if len(answer.Programs) < 6 || answer.Verified != signed {
		t.Errorf("self verify reports verified: %t, %d programs", answer.Verified, len(answer.Programs))
	}
}

// packageTool is a system's own tool for packages, with a private root.
type packageTool struct {
	t             *testing.T
	format        string
	programs      []string
	needs         string // the Debian package of the programs
	root, scratch string

	install  func(file string)
	remove   func()
	known    func() string // what the tool's database says about the package
	scripts  func(file string) string
	contents func(file string) map[string]entry
	older    func(file string) string
	database string // the folder of the tool's database in the root
}

// run runs a program with a minimal environment, so that no setting of the user changes its root,
// and returns its output.
func (p *packageTool) run(name string, args ...string) string {
	p.t.Helper()
	cmd := exec.CommandContext(p.t.Context(), name, args...)
	cmd.Dir = p.scratch
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=" + p.scratch, "LC_ALL=C.UTF-8", "TMPDIR=" + p.scratch}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		p.t.Fatalf("%s: %v\n%s%s", cmd, err, tail(out.String()), tail(errs.String()))
	}
	return out.String()
}

func dpkg() *packageTool {
	p := &packageTool{format: "deb", programs: []string{"dpkg", "dpkg-deb"}, needs: "dpkg", database: "var/lib/dpkg"}
	admin := func(args ...string) string {
		p.t.Helper()
		// The configuration of this computer may leave out files and names its log.
		return p.run("dpkg", append([]string{"--root=" + p.root, "--log=" + filepath.Join(p.scratch, "log"), "--path-include=/*", "--force-unsafe-io"}, args...)...)
	}
	p.install = func(file string) {
		p.t.Helper()
		for _, dir := range []string{"info", "updates", "triggers"} {
			must(p.t, os.MkdirAll(filepath.Join(p.root, p.database, dir), 0o755))
		}
		status, err := os.OpenFile(filepath.Join(p.root, p.database, "status"), os.O_CREATE|os.O_WRONLY, 0o644)
		must(p.t, err)
		must(p.t, status.Close())
		admin("--install", file)
	}
	p.remove = func() { admin("--remove", "constellation") }
	p.known = func() string {
		b, err := os.ReadFile(filepath.Join(p.root, p.database, "status"))
		must(p.t, err)
		files, err := filepath.Glob(filepath.Join(p.root, p.database, "info", "constellation*"))
		must(p.t, err)
		return string(b) + strings.Join(files, "\n")
	}
	p.scripts = func(file string) (out string) {
		dir := filepath.Join(p.scratch, "control")
		p.run("dpkg-deb", "--control", file, dir)
		for _, script := range []string{"preinst", "postinst", "prerm", "postrm", "config", "triggers"} {
			if b, err := os.ReadFile(filepath.Join(dir, script)); err == nil {
				out += script + "\n" + string(b)
			}
		}
		return out
	}
	p.contents = func(file string) map[string]entry {
		cmd := exec.CommandContext(p.t.Context(), "dpkg-deb", "--fsys-tarfile", file)
		pipe, err := cmd.StdoutPipe()
		must(p.t, err)
		must(p.t, cmd.Start())
		out := map[string]entry{}
		for r := tar.NewReader(pipe); ; {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			must(p.t, err)
			e := entry{mode: h.FileInfo().Mode(), link: h.Linkname}
			if e.mode.IsRegular() {
				e.digest = digest(p.t, r)
			}
			out[filepath.Clean(h.Name)] = e
		}
		must(p.t, cmd.Wait())
		return out
	}
	p.older = func(file string) string {
		tree := p.olderTree(file)
		control := filepath.Join(tree, "DEBIAN", "control")
		b, err := os.ReadFile(control)
		must(p.t, err)
		lines := strings.Split(string(b), "\n")
		for i, line := range lines {
			if strings.HasPrefix(line, "Version: ") {
				lines[i] = "Version: " + olderVersion
			}
		}
		must(p.t, os.WriteFile(control, []byte(strings.Join(lines, "\n")), 0o644))
		before := filepath.Join(p.scratch, "before.deb")
		p.run("dpkg-deb", "-Zzstd", "-z1", "--build", tree, before)
		must(p.t, os.RemoveAll(tree))
		return before
	}
	return p
}

func rpm() *packageTool {
	p := &packageTool{format: "rpm", programs: []string{"rpm", "rpmbuild", "dpkg-deb"}, needs: "rpm", database: "var/lib/rpm"}
	admin := func(args ...string) string {
		p.t.Helper()
		return p.run("rpm", append([]string{"--root", p.root, "--dbpath", "/" + p.database, "--noplugins"}, args...)...)
	}
	p.install = func(file string) { admin("--upgrade", "--nosignature", file) }
	p.remove = func() { admin("--erase", "constellation") }
	p.known = func() string { return admin("--query", "--all") }
	p.scripts = func(file string) string {
		return p.run("rpm", "--query", "--package", "--nosignature", "--scripts", "--triggers", file)
	}
	p.contents = func(file string) map[string]entry {
		out := map[string]entry{}
		const format = "[%{FILENAMES}\t%{FILEMODES:octal}\t%{FILEDIGESTS}\t%{FILELINKTOS}\n]"
		for line := range strings.Lines(p.run("rpm", "--query", "--package", "--nosignature", "--queryformat", format, file)) {
			f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
			var mode fs.FileMode
			if _, err := fmt.Sscanf(f[1], "%o", &mode); err != nil || len(f) != 4 {
				p.t.Fatalf("file list has the line %q: %v", line, err)
			}
			e := entry{mode: mode & 0o777, digest: f[2], link: f[3]}
			switch mode &^ 0o7777 {
			case 0o040000:
				e.mode |= fs.ModeDir
			case 0o120000:
				e.mode |= fs.ModeSymlink
			}
			out[strings.TrimPrefix(f[0], "/")] = e
		}
		return out
	}
	p.older = func(file string) string {
		deb := packageFile(p.t, packagesEnv, "deb")
		if deb == "" {
			p.t.Skipf("needs the deb beside %s", file)
		}
		tree := p.olderTree(deb)
		must(p.t, os.RemoveAll(filepath.Join(tree, "DEBIAN")))
		spec := filepath.Join(p.scratch, "before.spec")
		must(p.t, os.WriteFile(spec, []byte(`Name: constellation
Version: `+olderVersion+`
Release: 1
Summary: the release before
License: Apache-2.0
AutoReqProv: no
%description
The release before.
%files
/usr/bin/*
%dir /usr/share/doc/constellation
/usr/share/doc/constellation/*
/usr/lib/constellation
`), 0o600))
		must(p.t, os.RemoveAll(filepath.Join(tree, "usr/share/bash-completion")))
		must(p.t, os.RemoveAll(filepath.Join(tree, "usr/share/fish")))
		must(p.t, os.RemoveAll(filepath.Join(tree, "usr/share/zsh")))
		p.run("rpmbuild", "-bb", "--quiet", "--buildroot", tree, "--define", "_topdir "+p.scratch, "--define", "__os_install_post %{nil}",
			"--define", "debug_package %{nil}", "--define", "_build_id_links none", "--define", "_binary_payload w1.zstdio", spec)
		built, err := filepath.Glob(filepath.Join(p.scratch, "RPMS", "*", "*.rpm"))
		if err != nil || len(built) != 1 {
			p.t.Fatalf("rpmbuild wrote %s: %v", built, err)
		}
		return built[0]
	}
	return p
}

// olderVersion is the version of a release before that is made from the one under test.
const olderVersion = "0.9.0"

// olderTree unpacks a deb as a release before: its programs have other bytes, and it has a folder
// that the next release lacks.
func (p *packageTool) olderTree(deb string) string {
	p.t.Helper()
	tree := filepath.Join(p.scratch, "before")
	p.run("dpkg-deb", "--raw-extract", deb, tree)
	programs := filepath.Join(tree, installedDir)
	must(p.t, os.Rename(filepath.Join(programs, "releases", "v1.0.0"), filepath.Join(programs, "releases", "v0.9.0")))
	for _, name := range []string{"constellation", "constellation-sandbox", "releases/v0.9.0/agent"} {
		f, err := os.OpenFile(filepath.Join(programs, name), os.O_APPEND|os.O_WRONLY, 0)
		must(p.t, err)
		_, err = f.WriteString("the release before") // behind what is executed
		must(p.t, err)
		must(p.t, f.Close())
	}
	return tree
}

// packageFile returns the package of a format in the folder that a variable names. It is empty
// without the variable, or if the release was built for other targets.
func packageFile(t *testing.T, variable, format string) string {
	t.Helper()
	dir := os.Getenv(variable)
	if dir == "" {
		return ""
	}
	pattern := map[string]string{"deb": "constellation_*_amd64.deb", "rpm": "constellation-*.x86_64.rpm"}[format]
	files, err := filepath.Glob(filepath.Join(dir, pattern))
	must(t, err)
	if len(files) > 1 {
		t.Fatalf("%s has %d packages, want 1: %s", dir, len(files), files)
	}
	if len(files) == 0 {
		return ""
	}
	file, err := filepath.Abs(files[0])
	must(t, err)
	return file
}

// entry is a file of a tree or of a package.
type entry struct {
	mode         fs.FileMode
	digest, link string
}

func digest(t *testing.T, r io.Reader) string {
	t.Helper()
	h := sha256.New()
	_, err := io.Copy(h, r)
	must(t, err)
	return hex.EncodeToString(h.Sum(nil))
}

// tree returns all files in the private root, except for the tool's database.
func (p *packageTool) tree() map[string]entry {
	p.t.Helper()
	out := map[string]entry{}
	must(p.t, filepath.WalkDir(p.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(p.root, path)
		if err != nil {
			return err
		}
		if rel == p.database {
			return fs.SkipDir
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		e := entry{mode: info.Mode()}
		switch {
		case e.mode.IsRegular():
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			e.digest = digest(p.t, f)
		case e.mode&fs.ModeSymlink != 0:
			e.mode = fs.ModeSymlink
			e.link, err = os.Readlink(path)
		}
		out[rel] = e
		return err
	}))
	return out
}

// wantTree checks that the root has what it had at first, the files of the package, and nothing else.
func (p *packageTool) wantTree(after string, empty, files map[string]entry) {
	p.t.Helper()
	want := maps.Clone(empty)
	for name, e := range files {
		if e.mode&fs.ModeSymlink != 0 {
			e.mode = fs.ModeSymlink // its permissions mean nothing
		}
		if _, ok := empty[name]; !ok {
			want[name] = e
		}
	}
	got := p.tree()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if g, ok := got[name]; !ok {
			p.t.Errorf("after %s, %s is missing", after, name)
		} else if g != want[name] {
			p.t.Errorf("after %s, %s is %v, want %v", after, name, g, want[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if _, ok := want[name]; !ok {
			p.t.Errorf("after %s, %s is left", after, name)
		}
	}
}

// newPrivateRoot returns an empty directory for a tool that writes below it as root.
func newPrivateRoot(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "constellation-root")
	must(t, err)
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	must(t, os.Chmod(dir, 0o755)) //nolint:gosec // another user runs the programs in it
	must(t, checkPrivateRoot(dir, os.TempDir()))
	return dir
}

// checkPrivateRoot returns an error unless dir is an empty directory below temp, by a path without
// links: tools would otherwise change this computer.
func checkPrivateRoot(dir, temp string) error {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return err
	}
	below, err := filepath.Rel(temp, dir)
	switch {
	case err != nil:
		return err
	case real != dir || !filepath.IsAbs(dir):
		return fmt.Errorf("private root %q is not an absolute path without links", dir)
	case temp == "" || filepath.Clean(temp) == "/" || below == "." || !filepath.IsLocal(below):
		return fmt.Errorf("private root %s is not below %q", dir, temp)
	}
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) > 0 {
		err = fmt.Errorf("private root %s has %d entries, want 0", dir, len(entries))
	}
	return err
}

func TestPrivateRootIsRefused(t *testing.T) {
	temp, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	fresh, full, link, file := filepath.Join(temp, "fresh"), filepath.Join(temp, "full"), filepath.Join(temp, "link"), filepath.Join(temp, "file")
	must(t, os.MkdirAll(filepath.Join(full, "etc"), 0o700))
	must(t, os.Mkdir(fresh, 0o700))
	must(t, os.Symlink("/", link))
	must(t, os.WriteFile(file, nil, 0o600))
	if err := checkPrivateRoot(fresh, temp); err != nil {
		t.Errorf("a fresh directory is refused: %v", err)
	}
	for _, dir := range []string{"/", "", "/usr", temp, full, link, link + "/tmp", file, filepath.Join(temp, "missing"), temp + "/fresh/.."} {
		if err := checkPrivateRoot(dir, temp); err == nil {
			t.Errorf("%q below %q is accepted", dir, temp)
		}
	}
	for _, above := range []string{"/", "", full} {
		if err := checkPrivateRoot(fresh, above); err == nil {
			t.Errorf("%q below %q is accepted", fresh, above)
		}
	}
	if err := checkPrivateRoot("/", "/"); err == nil {
		t.Error("the root of this computer is accepted")
	}
}

// namesOfHost lists the files of this computer, outside of homes and temporary folders, with the
// name of the package, and whether the host's own databases know it.
func namesOfHost(t *testing.T) (out []string) {
	t.Helper()
	for _, dir := range []string{"/bin", "/etc", "/opt", "/usr", "/var/lib", "/var/cache"} {
		_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && strings.Contains(d.Name(), "constellation") {
				out = append(out, path)
			}
			return nil // what vanishes meanwhile is not ours
		})
	}
	for _, file := range []string{"/var/lib/dpkg/status", "/var/log/dpkg.log"} {
		if b, err := os.ReadFile(file); err == nil && bytes.Contains(b, []byte("constellation")) {
			out = append(out, file+" names it")
		}
	}
	return out
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
