package build

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// buildFlags are the same for every program. -trimpath makes the bytes independent
// of where the sources lie.
const buildFlags = "-trimpath -buildvcs=false"

// noDWARF omits debug information, because all programs are linked without it. compilerGC turns garbage collection in
// compilers and linkers off below 1 GiB. Together they save a quarter of the processor time. They change no function of a
// program, so its key does not contain them.
const noDWARF = "-gcflags=all=-dwarf=false"

var compilerGC = []string{"GOGC=off", "GOMEMLIMIT=1GiB"}

// buildEnv fixes variables that would otherwise come from the user's environment and change
// the result. GOFLAGS is set to its default, because an empty value
// would use the user's configuration file.
func buildEnv() []string {
	return []string{
		"CGO_ENABLED=0", "GOOS=linux", "GOARCH=" + runtime.GOARCH, "GOAMD64=v1", "GOARM64=v8.0",
		"GOFLAGS=-mod=readonly", "GOWORK=off", "GO111MODULE=on",
	}
}

// Cost of the work, in units of unitTime of one core. They only affect the progress
// and its first estimate.
const (
	costPackage = 1
	costLink    = 15
	costImage   = 5
	costTools   = 15
	// costDownload is that of a published archive.
	costDownload = 150

	unitTime = 200 * time.Millisecond
)

// A builder makes what its store lacks. The lock of the store is held.
type builder struct {
	*store
	recipe  recipe
	options Options
	meter   *meter
}

// build makes everything that is missing. Downloads come first, so
// that a missing network shows before minutes of work.
//
// A program is copied from another version that has it, else taken from a published archive, else
// compiled.
func (b *builder) build(ctx context.Context) error {
	lacks := b.missing(b.recipe, b.options.FromSource)
	if lacks.tools {
		b.meter.plan(costTools)
	}
	b.meter.plan(int64(costImage * len(lacks.images)))
	rest, err := b.reuse(ctx, lacks.programs)
	if err != nil {
		return err
	}
	if rest, err = b.download(ctx, rest); err != nil {
		return err
	}
	if lacks.tools {
		if err := b.tools(ctx); err != nil {
			return b.fail("fetch the packet filter tools of kube-proxy", err)
		}
	}
	if err := b.programs(ctx, rest); err != nil {
		return err
	}
	// Only now the outdated images are known: a rebuilt program
	// need not have changed.
	return b.images(ctx, b.missing(b.recipe, b.options.FromSource).images)
}

// programs compiles and links, and adopts every binary as soon as it is finished.
func (b *builder) programs(ctx context.Context, programs []program) error {
	if len(programs) == 0 {
		return nil
	}
	b.meter.plan(int64(costLink * len(programs)))
	packages := make(map[string][]string) // by module
	var order []string
	for _, p := range programs {
		if packages[p.module] == nil {
			order = append(order, p.module)
		}
		packages[p.module] = append(packages[p.module], p.pkg)
	}
	tool, err := b.toolchain(ctx, order)
	if err != nil {
		return err
	}

	counts := make(map[string]int64)
	for _, module := range order {
		b.meter.say(StageLoad, "loading the sources of "+module)
		n, err := tool.load(ctx, module, packages[module], func(line string) { b.meter.say(StageLoad, line) })
		if err != nil {
			return b.fail("load the sources of "+module, err)
		}
		counts[module] = n
		b.meter.planPackages(n)
	}

	// All packages first, then all binaries: linking keeps one core busy, compiling all
	// of them, and packages that binaries share are compiled once.
	for _, module := range order {
		var n int64
		b.meter.say(StageCompile, "compiling "+module)
		err := tool.compile(ctx, module, packages[module], func(pkg string) {
			n++
			b.meter.compiled(1, fmt.Sprintf("compiled %d of %d packages of %s: %s", n, counts[module], module, pkg))
		})
		if err != nil {
			return b.fail("compile "+module, err)
		}
		b.meter.compiled(counts[module]-n, "compiled "+module) // the rest was in Go's cache
	}

	stage, remove, err := b.stage()
	if err != nil {
		return err
	}
	defer remove()
	var mu sync.Mutex // guards the store and n
	var n int
	links, ctx := errgroup.WithContext(ctx)
	links.SetLimit(min(2, runtime.NumCPU())) // a link takes up to 2 GB of memory
	for _, p := range programs {
		links.Go(func() error {
			out := filepath.Join(stage, filepath.FromSlash(p.name))
			if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
				return b.fail("link "+p.name, err)
			}
			if err := tool.link(ctx, p, out); err != nil {
				return b.fail("link "+p.name, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if err := b.adopt(out, p.path(), record{Key: p.key(), From: []string{tool.version}}); err != nil {
				return b.fail("keep "+p.name, err)
			}
			n++
			b.meter.advance(costLink, StageLink, fmt.Sprintf("linked %d of %d programs: %s", n, len(programs), p.name))
			return nil
		})
	}
	return links.Wait()
}

// reuse copies those programs that another version has, such as CoreDNS and pause, and returns
// the rest.
func (b *builder) reuse(ctx context.Context, programs []program) (rest []program, err error) {
	stage, remove, err := b.stage()
	if err != nil {
		return nil, err
	}
	defer remove()
	for _, p := range programs {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		found, err := b.reuseOne(p, filepath.Join(stage, filepath.FromSlash(p.name)))
		if err != nil {
			return nil, b.fail("copy "+p.name, err)
		}
		if !found {
			rest = append(rest, p)
		}
	}
	return rest, nil
}

// reuseOne adopts a copy of p, made at out, from the first version that has it.
func (b *builder) reuseOne(p program, out string) (found bool, err error) {
	for _, r := range recipes {
		q, ok := r.program(p.name)
		if r.version == b.recipe.version || !ok {
			continue
		}
		s, err := openStore(b.cacheDir(), r.version)
		if err != nil {
			continue
		}
		key, serves := p.serves(q, s.files[q.path()].Key, r.minor() == b.recipe.minor(), b.options.FromSource)
		if !serves || !s.has(q.path(), s.files[q.path()].Key) {
			continue
		}
		if err := copyProgram(s.path(q.path()), out); err != nil {
			return false, err
		}
		if digest, _, err := digestFile(out); err != nil || digest != s.files[q.path()].Digest {
			continue // it changed after it was checked
		}
		from := s.files[q.path()].From
		if s.files[q.path()].Key != key {
			from = append(slices.Clone(from), r.version)
		}
		if err := b.adopt(out, p.path(), record{Key: key, From: from}); err != nil {
			return false, err
		}
		b.meter.say(StageLink, "copied "+p.name+" from "+r.version)
		return true, nil
	}
	return false, nil
}

func copyProgram(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	return writeProgram(to, in)
}

// writeProgram writes an executable file.
func writeProgram(to string, in io.Reader) (err error) {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// A toolchain is the go command, with the modules of one version written out.
type toolchain struct {
	goPath  string
	version string // "go1.26.8"
	src     string // directory of the modules
}

// toolchain writes the modules out and finds the go command that they need.
func (b *builder) toolchain(ctx context.Context, modules []string) (*toolchain, error) {
	t := &toolchain{src: filepath.Join(b.dir, "src")}
	for _, module := range modules {
		dir := filepath.Join(t.src, module)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, b.fail("write module "+module, err)
		}
		for name, content := range moduleFiles(module) {
			if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
				return nil, b.fail("write module "+module, err)
			}
		}
	}
	var err error
	if t.goPath, err = exec.LookPath("go"); err != nil {
		return nil, b.fail("find the Go toolchain", errNoGo)
	}
	// Inside a module, so that go can switch to the version that the module wants.
	err = t.run(ctx, modules[0], func(line string) { t.version = line }, nil, "env", "GOVERSION")
	if err != nil {
		return nil, b.fail("ask the Go toolchain for its version", err)
	}
	return t, nil
}

// load fetches the sources that packages need and returns how many packages they
// are in all. say gets lines about downloads.
func (t *toolchain) load(ctx context.Context, module string, packages []string, say func(string)) (int64, error) {
	var n int64
	sources := make(map[string]string) // directories by module
	const format = "{{.ImportPath}}{{with .Module}} {{.Path}} {{.Dir}}{{end}}"
	args := append([]string{"list", "-trimpath", "-deps", "-f", format}, packages...)
	err := t.run(ctx, module, func(line string) {
		n++
		if f := strings.SplitN(line, " ", 3); len(f) == 3 {
			sources[f[1]] = f[2]
		}
	}, func(line string) bool {
		if rest, ok := strings.CutPrefix(line, "go: downloading "); ok {
			say("fetching " + rest)
			return true
		}
		return false
	}, args...)
	if err == nil && strings.HasPrefix(module, kubernetesPrefix) {
		err = t.share(ctx, module, sources)
	}
	return n, err
}

// sharedModule is the module file that Kubernetes is compiled with.
const sharedModule = "shared.mod"

// anyPatch is the patch that all modules of a minor of Kubernetes have in their sharedModule.
const anyPatch = "999"

// share writes the sharedModule of a module: the same requirements, but the sources of
// Kubernetes are directories, and their versions name the minor only. Go's build cache identifies
// a package by its module's version, so without this each patch would compile all of
// Kubernetes again. The sources were verified against go.sum when load fetched them.
func (t *toolchain) share(ctx context.Context, module string, sources map[string]string) error {
	dir := filepath.Join(t.src, module)
	for from, to := range map[string]string{"go.mod": sharedModule, "go.sum": strings.TrimSuffix(sharedModule, "mod") + "sum"} {
		b, err := os.ReadFile(filepath.Join(dir, from))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, to), b, 0o644); err != nil {
			return err
		}
	}
	patched := modulesOfPatch(string(moduleFiles(module)["go.mod"]), strings.TrimPrefix(module, kubernetesPrefix))
	args := []string{"mod", "edit"}
	for _, path := range slices.Sorted(maps.Keys(patched)) {
		source, ok := sources[path]
		if !ok {
			continue // no package of it is compiled
		}
		link := filepath.Join(dir, "staging", filepath.FromSlash(path))
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			return err
		}
		if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.Symlink(source, link); err != nil {
			return err
		}
		args = append(args, "-require="+path+"@"+patched[path], "-replace="+path+"=./staging/"+path)
	}
	return t.run(ctx, module, nil, nil, append(args, sharedModule)...)
}

// modulesOfPatch returns the modules in the text of a go.mod that have the version of Kubernetes,
// with the version of any patch: v1.37.2 of k8s.io/kubernetes becomes v1.37.999, and v0.37.2 of
// k8s.io/api v0.37.999. The latter are those that the go.mod replaces.
func modulesOfPatch(text, version string) map[string]string {
	_, rest, _ := strings.Cut(version, ".")
	minor, _, _ := strings.Cut(rest, ".")
	out := map[string]string{"k8s.io/kubernetes": "v1." + minor + "." + anyPatch}
	for line := range strings.Lines(text) {
		if path, _, ok := strings.Cut(strings.TrimSpace(line), " => "); ok {
			out[path] = "v0." + minor + "." + anyPatch
		}
	}
	return out
}

// compile fills Go's build cache with packages and all they need, without linking.
// done gets the path of each package that had to be compiled.
func (t *toolchain) compile(ctx context.Context, module string, packages []string, done func(pkg string)) error {
	args := slices.Concat([]string{"list", "-v", "-export"}, flags(module), []string{"-f", "{{.Name}}"}, packages)
	return t.run(ctx, module, nil, func(line string) bool {
		// -v names each package on a line of its own; complaints have spaces.
		if line == "" || strings.ContainsAny(line, " \t:") {
			return false
		}
		done(line)
		return true
	}, args...)
}

func (t *toolchain) link(ctx context.Context, p program, out string) error {
	args := slices.Concat([]string{"build"}, flags(p.module), []string{"-ldflags=" + p.ldflags, "-o", out, p.pkg})
	return t.run(ctx, p.module, nil, nil, args...)
}

// flags are those of compile and link. If they differed, link would compile each package once more.
func flags(module string) []string {
	return append([]string{modFile(module), noDWARF}, strings.Fields(buildFlags)...)
}

// modFile is the flag that names the module file to compile with.
func modFile(module string) string {
	if strings.HasPrefix(module, kubernetesPrefix) {
		return "-modfile=" + sharedModule
	}
	return "-modfile=go.mod"
}

// run runs the go command in a module.
func (t *toolchain) run(ctx context.Context, module string, stdout func(string), stderr func(string) (taken bool), args ...string) error {
	return command{
		dir: filepath.Join(t.src, module), env: append(buildEnv(), compilerGC...), stdout: stdout, stderr: stderr,
	}.run(ctx, t.goPath, args...)
}

// A command describes how to run a program. Its functions get lines without their end and
// may be nil. Stderr without a function becomes the error.
type command struct {
	dir    string
	env    []string // beside our own environment
	stdout func(string)
	stderr func(string) (taken bool)
}

// run runs a program to its end. When ctx ends, it and its children are interrupted,
// so that go can remove its temporary files.
func (c command) run(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = c.dir
	cmd.Env = append(os.Environ(), c.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 10 * time.Second
	var complaints []string
	out, errs := &lineWriter{line: c.stdout}, &lineWriter{line: func(line string) {
		if (c.stderr == nil || !c.stderr(line)) && strings.TrimSpace(line) != "" {
			complaints = append(complaints, line)
		}
	}}
	cmd.Stdout, cmd.Stderr = out, errs
	err := cmd.Run()
	out.flush()
	errs.flush()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err == nil {
		return nil
	}
	what := filepath.Base(name) + " " + args[0]
	if len(complaints) == 0 {
		return fmt.Errorf("%s: %w", what, err)
	}
	// A compiler's first message is the cause, with other programs it is the last.
	if len(complaints) > 8 {
		complaints = slices.Concat(complaints[:4], complaints[len(complaints)-4:])
	}
	return fmt.Errorf("%s: %w: %s", what, err, strings.Join(complaints, "; "))
}

// output runs a program and returns the lines of its standard output.
func (c command) output(ctx context.Context, name string, args ...string) ([]string, error) {
	var lines []string
	c.stdout = func(line string) { lines = append(lines, line) }
	err := c.run(ctx, name, args...)
	return lines, err
}

// A lineWriter hands over what is written to it line by line.
type lineWriter struct {
	line func(string)
	rest []byte
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		line, rest, ok := bytes.Cut(w.rest, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		w.say(line)
		w.rest = rest
	}
}

func (w *lineWriter) flush() {
	if len(w.rest) > 0 {
		w.say(w.rest)
		w.rest = nil
	}
}

func (w *lineWriter) say(line []byte) {
	if w.line != nil {
		w.line(string(line))
	}
}

var errNoGo = errors.New("there is no go command on the PATH")

// fail adds the remedy that the text of err suggests. The tools have no
// error codes, only text.
func (b *builder) fail(op string, err error) error {
	return withRemedy(op, err, "constellation sandbox fetch "+b.recipe.version)
}

func withRemedy(op string, err error, again string) error {
	var known *Error
	if errors.As(err, &known) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%s: %w", op, err)
	}
	if again == "" {
		again = "the same command"
	} else {
		again = "`" + again + "`"
	}
	remedy := "see the cause, then run " + again + " again; finished parts are kept"
	text := err.Error()
	switch has := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(text, w) })
	}; {
	case errors.Is(err, errNoGo):
		remedy = "install Go 1.26 or newer (https://go.dev/dl), put `go` on the PATH, and run " + again + " again"
	case errors.Is(err, syscall.ENOSPC) || has("no space left on device"):
		remedy = "free some space (a version needs 2 GB in the cache directory, and Go's build cache up to 6 GB while it is built: `go env GOCACHE`), then run " + again + " again; finished parts are kept"
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS):
		remedy = "the cache is in $XDG_CACHE_HOME/constellation, by default ~/.cache/constellation: set XDG_CACHE_HOME to a directory that you may write to, or run " + again + " as the user whose cache it is"
	case has("requires go >="):
		remedy = "update Go, or let it update itself with GOTOOLCHAIN=auto, and run " + again + " again"
	case has("checksum mismatch", "SECURITY ERROR"):
		remedy = "the download does not match its pinned digest: check GOPROXY and the proxies before it, run `go clean -modcache`, then " + again + " again"
	case has("dial tcp", "no such host", "i/o timeout", "connection refused", "connection reset", "network is unreachable", "proxyconnect", "TLS handshake", "GOPROXY=off", "unexpected EOF",
		"Could not resolve", "Temporary failure resolving", "Failed to fetch", "Unable to connect"):
		remedy = "the sources cannot be reached: connect this computer to the network (or set GOPROXY and HTTPS_PROXY to what it may use) and run " + again + " again; finished parts are kept, and once a version is built no network is needed"
	case has("signal: killed", "cannot allocate memory", "out of memory"):
		remedy = "the computer ran out of memory: linking takes up to 2 GB at a time, twice; close something and run " + again + " again; finished parts are kept"
	}
	return &Error{Op: op, Err: err, Remedy: remedy}
}

// A meter turns work into Progress, one call at a time.
type meter struct {
	start  time.Time
	report func(Progress)
	ended  chan struct{}

	mu      sync.Mutex
	now     Progress
	told    time.Time
	stopped bool
	// Compilation takes most of the time, and its pace differs most between
	// computers: the estimate is based on it.
	packages, ready int64
	compiling       time.Time
}

// How often the same stage is reported: the compiler finishes dozens of packages a
// second, and a link says nothing for many seconds.
const (
	reportEvery = 200 * time.Millisecond
	heartbeat   = 2 * time.Second
)

func newMeter(start time.Time, report func(Progress)) *meter {
	m := &meter{start: start, report: report, ended: make(chan struct{})}
	if report == nil {
		m.report = func(Progress) {}
	}
	go func() {
		tick := time.NewTicker(heartbeat)
		defer tick.Stop()
		for {
			select {
			case <-m.ended:
				return
			case <-tick.C:
				m.mu.Lock()
				if m.now.Stage != "" {
					m.tell()
				}
				m.mu.Unlock()
			}
		}
	}()
	return m
}

// stop ends the reports: none comes after it.
func (m *meter) stop() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stopped = true
	close(m.ended)
}

// plan adds work that will have to be done.
func (m *meter) plan(cost int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now.Total += cost
}

// planPackages adds packages that will have to be compiled.
func (m *meter) planPackages(n int64) {
	m.plan(n * costPackage)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.packages += n
}

func (m *meter) say(stage Stage, text string) { m.advance(0, stage, text) }

// notice reports a text that must not be lost among others.
func (m *meter) notice(text string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now.Stage, m.now.Text, m.now.Notice = StageLoad, text, true
	m.tell()
	m.now.Notice = false
}

// compiled records n more compiled packages.
func (m *meter) compiled(n int64, text string) {
	m.mu.Lock()
	m.ready += n
	m.mu.Unlock()
	m.advance(n*costPackage, StageCompile, text)
}

func (m *meter) advance(cost int64, stage Stage, text string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	changed := stage != m.now.Stage
	if changed && stage == StageCompile {
		m.compiling = time.Now()
	}
	m.now.Stage, m.now.Text = stage, text
	m.now.Current += cost
	often := stage == StageCompile || stage == StageLoad
	if changed || !often || time.Since(m.told) >= reportEvery {
		m.tell()
	}
}

// tell reports; the caller holds mu.
func (m *meter) tell() {
	if m.stopped {
		return
	}
	m.told = time.Now()
	m.now.Took = m.told.Sub(m.start)
	m.now.Left = 0
	if m.packages > 0 && m.now.Stage != StageLoad {
		var pace time.Duration // per package
		if since := m.told.Sub(m.compiling); m.now.Stage == StageCompile && since > 10*time.Second && m.ready*20 > m.packages {
			pace = since / time.Duration(m.ready)
		}
		packages := m.packages - m.ready
		m.now.Left = left(packages, m.now.Total-m.now.Current-packages*costPackage, pace, runtime.NumCPU())
	}
	m.report(m.now)
}

// left estimates the duration of the remaining packages and other units. pace is the measured
// time per package, zero if unknown.
func left(packages, units int64, pace time.Duration, cores int) time.Duration {
	if pace == 0 {
		pace = costPackage * unitTime / time.Duration(cores)
	}
	rest := time.Duration(packages)*pace + time.Duration(units)*unitTime/time.Duration(cores)
	return rest.Round(time.Second)
}
