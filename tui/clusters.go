package tui

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"constellation/engine"
	"constellation/engine/adopt"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/preferences"
	"constellation/engine/workspace"
	"constellation/tui/console"
	"constellation/tui/term"
	"constellation/tui/view"
)

// severalClusters returns the contexts to show if the folder has no workspace: nil if it has one,
// if the user named it, or if there is no kubeconfig. In the workspace of an adopted cluster it is the
// context of that.
func severalClusters(s *session, named bool) (*cluster.Contexts, preferences.Preferences, error) {
	prefs := preferences.Default()
	if s.Clusters == nil {
		return nil, prefs, nil
	}
	ws, _, err := s.workspace()
	if err != nil {
		return nil, prefs, err
	}
	var of cluster.Access
	if ws.Unmanaged() {
		of.Kubeconfig = ws.Path(workspace.KubeconfigFile)
	} else if named || slices.ContainsFunc([]string{workspace.ConfigFile, workspace.StateFile, workspace.KubeconfigFile, plan.RunsDir}, ws.Has) {
		return nil, prefs, nil
	}
	k, err := s.Clusters.List(of)
	if err != nil {
		s.log.Debug("no clusters to list", "err", err)
		return nil, prefs, nil
	}
	if prefs, err = preferences.Read(s.Env); err != nil {
		return nil, prefs, err
	}
	return &k, prefs, nil
}

// showClusters shows the clusters of a kubeconfig on the terminal.
func showClusters(ctx context.Context, s *session, k *cluster.Contexts, prefs preferences.Preferences) error {
	stderr, restore, err := captureStderr()
	if err != nil {
		return &plan.Error{Op: "show the console", Err: err}
	}
	defer restore()
	list := recentFirst(k.List, prefs.Recent)
	adoption, err := consoleAdoption(s, k)
	if err != nil {
		return err
	}
	o := console.Options{
		Commands: view.CommandFormatter{Program: s.Program}, Now: s.Now,
		FixedBackground: prefs.Theme != preferences.ThemeAuto,
		Display:         func(d term.Display) term.Display { return themed(d, prefs.Theme) },
		Clusters: &console.Clusters{
			List: list, Adopt: adoption, Answer: time.Duration(prefs.Limits.Answer), Parallel: prefs.Limits.Parallel,
			Guarded: prefs.Guarded, PluginText: stderr.take,
			Opened: func(name string) error { return preferences.Opened(s.Env, name, s.Now()) },
			Look: func(ctx context.Context, name string) check.Glance {
				sel, err := k.Select(name)
				if err != nil {
					return check.Glance{Context: name, State: check.GlanceInvalid, Problem: err.Error()}
				}
				return s.Clusters.Look(ctx, sel)
			},
			Check: func(ctx context.Context, name string, dryRun bool, emit func(plan.Event)) (check.ClusterCheck, error) {
				sel, err := k.Select(name)
				if err != nil {
					return check.ClusterCheck{}, err
				}
				return s.Clusters.Check(ctx, sel, 0, check.ForeignRequest{DryRun: dryRun}, emit)
			},
		},
	}
	end, err := console.Run(ctx, s.Stdin.(*os.File), s.Stdout.(*os.File), s.Env, o) // term.NotInteractive has checked the files
	for _, l := range end.Summary {
		fmt.Fprintln(s.out, l)
	}
	if err != nil {
		return err
	}
	if end.Exit != 0 {
		return exitStatus(end.Exit)
	}
	return nil
}

// consoleAdoption is how the console adopts a cluster of the list. New workspaces are folders below the
// current one, with the name of the cluster.
func consoleAdoption(s *session, k *cluster.Contexts) (*console.Adoption, error) {
	base := s.dir
	open := func(dir string) (console.Adopted, error) {
		s.dir = dir
		eng, ws, abs, err := s.engineOf()
		if err != nil {
			return console.Adopted{}, err
		}
		g, err := guardOf(s, cluster.Access{})
		if err != nil {
			return console.Adopted{}, err
		}
		return console.Adopted{Dir: abs, Options: workspaceOptions(s, eng, ws, abs, g)}, nil
	}
	folder := func(r *adopt.Report) string { return filepath.Join(base, engine.FolderOf(r.Name)) }
	a := &console.Adoption{
		Folder: func(r *adopt.Report) string {
			if dir, err := filepath.Abs(folder(r)); err == nil {
				return dir
			}
			return folder(r)
		},
		Own: map[string]console.Adopted{},
		Examine: func(ctx context.Context, name string, emit func(plan.Event)) (adopt.Report, error) {
			sel, err := k.Select(name)
			if err != nil {
				return adopt.Report{}, err
			}
			return s.Clusters.Examine(ctx, sel, adopt.Request{CLI: s.Release, Flags: contextFlags(sel.Access, &sel)}, emit)
		},
	}
	a.Write = func(name string, r *adopt.Report) (console.Adopted, error) {
		sel, err := k.Select(name)
		if err != nil {
			return console.Adopted{}, err
		}
		s.dir = folder(r)
		ws, _, err := s.newWorkspace()
		if err != nil {
			return console.Adopted{}, err
		}
		if err := ws.CanAdopt(r.UID); err != nil {
			return console.Adopted{}, err
		}
		if err := writeAdoption(s, ws, &sel, r); err != nil {
			return console.Adopted{}, err
		}
		done, err := open(s.dir)
		for _, file := range r.Written {
			f := plan.File{Path: ws.Path(file)}
			if info, err := os.Stat(f.Path); err == nil {
				f.Mode = fmt.Sprintf("%04o", info.Mode().Perm())
			}
			done.Written = append(done.Written, f)
		}
		return done, err
	}
	ws, _, err := s.workspace()
	if err != nil || !ws.Unmanaged() {
		return a, nil //nolint:nilerr // there is no workspace yet
	}
	own, err := open(base)
	if err != nil {
		return nil, err
	}
	for _, x := range k.List {
		a.Own[x.Name] = own
	}
	return a, nil
}

// themed returns the capabilities of a terminal with a theme.
func themed(d term.Display, theme string) term.Display {
	switch theme {
	case preferences.ThemeDark:
		d.Light = false
	case preferences.ThemeLight:
		d.Light = true
	case preferences.ThemeMono:
		d.Colours = term.NoColours
	}
	return d
}

// recentFirst sorts contexts: the current one, those that were opened last, the others by name.
func recentFirst(list []cluster.Context, recent []preferences.Recent) []cluster.Context {
	rank := func(c cluster.Context) int {
		if c.Current {
			return -1
		}
		if i := slices.IndexFunc(recent, func(r preferences.Recent) bool { return r.Context == c.Name }); i >= 0 {
			return i
		}
		return len(recent)
	}
	out := slices.Clone(list)
	slices.SortStableFunc(out, func(a, b cluster.Context) int { return rank(a) - rank(b) })
	return out
}

// captured is what other programs write to stderr while the console owns the terminal.
type captured struct {
	mu   sync.Mutex
	text []byte
}

// maxCaptured bounds the text that is kept, in bytes.
const maxCaptured = 16 << 10

// Write implements io.Writer.
func (c *captured) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.text = append(c.text, b...)
	if n := len(c.text) - maxCaptured; n > 0 {
		c.text = c.text[n:]
	}
	return len(b), nil
}

// take returns the text since the last call.
func (c *captured) take() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	text := string(c.text)
	c.text = nil
	return text
}

// captureStderr makes os.Stderr a pipe until restore is called. client-go gives it to credential
// plugins, whose messages would otherwise be written over the screen.
func captureStderr() (c *captured, restore func(), err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	c = &captured{}
	before := os.Stderr
	os.Stderr = w
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(c, r) // it ends when all writers have closed
	}()
	return c, func() {
		os.Stderr = before
		w.Close()
		r.Close()
		<-copied
	}, nil
}
