// Package sandboxexec finds and executes constellation-sandbox, the program that contains the local
// test cloud. The console calls it for the verb sandbox, and to find the sandbox of a workspace.
// It links no part of the test cloud itself. Both programs must belong to the same release: verbs,
// files and state of a sandbox differ between releases.
package sandboxexec

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"constellation/engine"
	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// Name is the name of the program's file.
const Name = "constellation-sandbox"

// KubernetesVersions returns the Kubernetes versions that a sandbox can build, the oldest first. A release may have no entry for the newest.
func KubernetesVersions() []string {
	return []string{"v1.35.4", "v1.35.8", "v1.36.3", "v1.36.4", "v1.37.2"}
}

// versionTimeout bounds the start of the program that prints its release.
const versionTimeout = 10 * time.Second

// FindVerb is the hidden verb below sandbox that Find calls.
const FindVerb = "find"

// self returns the path of the executable of this process, if possible without links.
func self() string {
	exe, err := os.Executable()
	if err != nil {
		return "constellation"
	}
	if real, err := filepath.EvalSymlinks(exe); err == nil {
		return real
	}
	return exe
}

// path returns the path of the program: beside the executable of this process, or in PATH.
func path() (string, error) {
	if exe := self(); filepath.IsAbs(exe) {
		p := filepath.Join(filepath.Dir(exe), Name)
		info, err := os.Stat(p)
		if err == nil && info.Mode().IsRegular() {
			return p, nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", missing(err)
		}
	}
	p, err := exec.LookPath(Name)
	if err != nil {
		return "", missing(err)
	}
	return p, nil
}

func missing(err error) error {
	if errors.Is(err, exec.ErrNotFound) {
		err = errors.New("not found beside constellation and not in PATH")
	}
	return &plan.Error{
		Op: "find the program " + Name, Err: err, Exit: plan.ExitUsage,
		Remedy: "install " + Name + " of the same release beside constellation; packages and archives contain both, and `make build` builds both",
	}
}

// sameRelease returns an error if the program at path does not belong to the release of this process.
// Every release of the program implements --version.
func sameRelease(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, versionTimeout, fmt.Errorf("no answer within %s", versionTimeout))
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	release := strings.TrimPrefix(strings.TrimSpace(string(out)), "constellation ")
	switch {
	case err != nil:
		err = fmt.Errorf("read its release: %w", err)
	case release != version.Release:
		err = fmt.Errorf("its release is %.40q, want %s, the release of %s", release, version.Release, self())
	default:
		return nil
	}
	return &plan.Error{
		Op: "execute " + path, Err: err, Exit: plan.ExitUsage,
		Remedy: "install constellation and " + Name + " from the same release, in one directory; after an upgrade, start constellation again",
	}
}

// Run executes the program with the arguments, terminal, streams and signals of this process, and
// returns its exit code. It refuses a program of another release. Where the system can replace a process, it returns only on an error.
func Run(args []string) (int, error) {
	p, err := path()
	if err != nil {
		return 0, err
	}
	if err := sameRelease(context.Background(), p); err != nil {
		return 0, err
	}
	// With the same name as this process, the program prints commands that the user can copy.
	code, err := replace(p, append([]string{os.Args[0]}, args...))
	if err != nil {
		return 0, &plan.Error{Op: "execute " + p, Err: err, Exit: plan.ExitUsage, Remedy: "install " + Name + " again"}
	}
	return code, nil
}

// Find returns the sandbox called name, or that of the workspace if name is an absolute path. The
// error wraps cloud.ErrNotFound if there is none. InitSecret and Kubeconfig of the result are
// empty.
func Find(ctx context.Context, name string) (engine.SandboxStatus, error) {
	op := "find sandbox " + name
	p, err := path()
	if err != nil {
		return engine.SandboxStatus{}, err
	}
	// Both processes run at once: the console waits for them when it starts.
	mismatch := make(chan error, 1)
	go func() { mismatch <- sameRelease(ctx, p) }()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, p, "sandbox", FindVerb, name)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	if err := <-mismatch; err != nil {
		return engine.SandboxStatus{}, err
	}
	if err != nil {
		if text := strings.TrimSpace(errs.String()); text != "" {
			err = fmt.Errorf("%w: %s", err, text)
		}
		return engine.SandboxStatus{}, &plan.Error{Op: op, Err: err}
	}
	var st *engine.SandboxStatus
	if err := json.Unmarshal(out.Bytes(), &st); err != nil {
		return engine.SandboxStatus{}, &plan.Error{Op: op, Err: fmt.Errorf("decode the output of %s: %w", p, err)}
	}
	if st == nil {
		return engine.SandboxStatus{}, &plan.Error{Op: op, Err: fmt.Errorf("%w: no such sandbox", cloud.ErrNotFound), Remedy: "start it with `constellation sandbox up`"}
	}
	return *st, nil
}

// WhySilent returns why the sandbox of a configuration does not answer. It implements
// engine.Deps.WhySilent.
func WhySilent(ctx context.Context, c *workspace.Config) engine.Silence {
	if c.Provider.Name != "sandbox" {
		return ""
	}
	switch st, err := Find(ctx, c.Provider.Section.Text("name")); {
	case errors.Is(err, cloud.ErrNotFound):
		return engine.CloudGone
	case err == nil && st.State == "stopped":
		return engine.CloudStopped
	}
	return ""
}
