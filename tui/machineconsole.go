package tui

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/callhome"
	"constellation/engine/enrol"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/workspace"
	"constellation/tui/console"
	"constellation/tui/view"
)

// consoleMachines is how a console works with the machines of a workspace, by the code of the verbs; nil if its
// configuration has no list of machines.
func consoleMachines(s *session, eng Engine, ws *workspace.Workspace) *console.Machines {
	if c, err := ws.Config(); err != nil || !workspace.HasMachineList(c) {
		return nil
	}
	v := &inventory{s, ws, func() (Engine, error) { return eng, nil }}
	var saved savedTexts
	return &console.Machines{
		List: v.list,
		Check: func(ctx context.Context, to console.MachineLogin, group string, ask console.Ask) (machinecheck.Report, error) {
			o := sshOf(to)
			r := machinecheck.Report{Schema: plan.Schema, Time: s.Now().UTC(), CLI: s.Release}
			targets, err := o.targets()
			if err == nil {
				r.Role, err = machinecheck.ParseRole(group)
			}
			if err != nil {
				return r, err
			}
			r.Machines = s.CheckMachines(ctx, machinecheck.Request{Targets: targets, SSH: o.asking(s, prompts(ask)), Needs: needsOf(ws, r.Role)}, func(machinecheck.Result) {})
			if ctx.Err() != nil {
				return r, context.Cause(ctx)
			}
			return r, machineVerdict(r.Machines)
		},
		Logs: func(ctx context.Context, name string, to console.MachineLogin, ask console.Ask, line func(string)) error {
			o := sshOf(to)
			target, err := o.oneTarget()
			if err != nil {
				return err
			}
			reach := o.asking(s, prompts(ask))
			reach.Target = target
			w := &cleanWriter{to: lineWriter(line)}
			defer w.end()
			return v.logs(ctx, enrol.LogRequest{Machine: name, Lines: logLines, Follow: true}, reach, w)
		},
		Add: func(n console.NewMachines, ask console.Ask) (console.Addition, error) {
			a := addingOf(n)
			secrets := prompts(ask)
			x, err := a.begin(v, a.ssh.asking(s, secrets))
			return &consoleAddition{x, secrets}, err
		},
		Calls: func(n console.NewMachines) (console.Calls, error) {
			x := &consoleCalls{saved: &saved}
			var err error
			x.callers, err = addingOf(n).beginCalls(v, n.Callers, x)
			return x, err
		},
		Close:   func() { _ = saved.delete(nil) }, // a file that cannot be deleted is 0600, and its token is worthless
		Invalid: invalidField,
		Remove: func(n console.Removing, ask console.Ask) (console.Removal, error) {
			r := &removing{ssh: *sshOf(n.MachineLogin), gone: n.Gone, ignoreCluster: n.IgnoreCluster}
			x, err := r.begin(v, n.Name)
			secrets := prompts(ask)
			return &consoleRemoval{x, r.ssh.asking(s, secrets), secrets}, err
		},
	}
}

// sshOf returns the flags of a login.
func sshOf(to console.MachineLogin) *sshOptions {
	return &sshOptions{machines: to.Machines, key: to.Key, jump: to.Jump, hostKeys: to.HostKeys, sudo: to.Sudo, timeout: sshhost.DefaultTimeout}
}

// addingOf returns the flags of machines to add.
func addingOf(n console.NewMachines) *adding {
	d, _ := time.ParseDuration(n.ValidFor) // 0 is not valid
	return &adding{
		ssh: *sshOf(n.MachineLogin), group: n.Group, name: n.Name, address: n.Address, labels: n.Labels, taints: n.Taints, spare: n.Spare,
		tpm: n.TPM, tpmRoots: n.TPMRoots, programs: n.Programs, packages: n.Packages, proxy: n.Proxy,
		call: calling{printCommand: n.Way == console.ByCommand, cloudInit: n.Way == console.ByCloudInit, listen: n.Listen, source: n.Source, validFor: d},
	}
}

// invalidField returns an error if the value of a field of the form is not valid alone.
func invalidField(n console.NewMachines, flag string) error {
	a := addingOf(n)
	switch flag {
	case nameAddress:
		_, err := a.callers(n.Callers, workspace.Machine{})
		return err
	case "--valid-for":
		if _, err := time.ParseDuration(n.ValidFor); err != nil {
			return badFlag(fmt.Errorf("--valid-for %q is no duration", n.ValidFor), "write it as 30m or 2h")
		}
	}
	return a.invalid(flag)
}

// prompts are those of a console.
func prompts(ask console.Ask) *secretPrompts {
	return &secretPrompts{ask: ask, known: map[string][]byte{}}
}

// consoleAddition is an addition for a console.
type consoleAddition struct {
	*addition
	secrets *secretPrompts
}

// Check is addition.check. It prompts for secrets again: a wrong one may be why it is repeated.
func (x *consoleAddition) Check(ctx context.Context) (machinecheck.Report, error) {
	x.secrets.forget()
	return x.check(ctx)
}

// Compare is addition.compare.
func (x *consoleAddition) Compare(ctx context.Context, step func(int, enrol.Step)) ([]view.AddedMachine, error) {
	err := x.compare(ctx, step)
	return slices.Clone(x.report.Machines), err
}

// Install is addition.install.
func (x *consoleAddition) Install(ctx context.Context, step func(int, enrol.Step), done func(int, enrol.Result)) ([]view.AddedMachine, error) {
	err := x.install(ctx, step, done)
	return slices.Clone(x.report.Machines), err
}

// consoleCalls are machines that call a console, and the waitingView of the wait.
type consoleCalls struct {
	*callers
	events console.CallEvents
	saved  *savedTexts

	mu    sync.Mutex
	texts []string // empty unless it waits
}

// Wait is callers.wait.
func (x *consoleCalls) Wait(ctx context.Context, e console.CallEvents) ([]view.AddedMachine, error) {
	x.events = e
	err := x.wait(ctx)
	x.mu.Lock()
	x.texts = nil
	x.mu.Unlock()
	err = cmp.Or(err, x.saved.delete(x))
	if len(x.waiting.results) == 0 { // it did not listen
		return nil, err
	}
	return slices.Clone(x.report.Machines), err
}

// Save writes a text to a file in the workspace, and returns its name.
func (x *consoleCalls) Save(i int) (string, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if i >= len(x.texts) {
		return "", errors.New("nothing is printed for the machine")
	}
	name := x.machines[i].Name + "-command.sh"
	if x.call.cloudInit {
		name = x.machines[i].Name + "-user-data.yaml"
	}
	name = "constellation-" + name
	return name, x.saved.write(x.ws, name, x.texts[i], x)
}

// savedTexts are the files that a console wrote for machines which call, each with the wait that it belongs to.
type savedTexts struct {
	mu    sync.Mutex
	files map[string]*consoleCalls
}

// write writes a file of the workspace that only its owner can read, or replaces that of a console that was killed.
func (s *savedTexts) write(ws *workspace.Workspace, name, text string, of *consoleCalls) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ws.Write(name, []byte(text), 0o600); err != nil {
		return err
	}
	if s.files == nil {
		s.files = map[string]*consoleCalls{}
	}
	s.files[ws.Path(name)] = of
	return nil
}

// delete deletes the files of a wait; nil means of all.
func (s *savedTexts) delete(of *consoleCalls) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for path, x := range s.files {
		if of != nil && x != of {
			continue
		}
		if gone := os.Remove(path); gone != nil && !errors.Is(gone, fs.ErrNotExist) {
			err = cmp.Or(err, fmt.Errorf("delete a worthless command: %w", gone))
		}
		delete(s.files, path)
	}
	return err
}

func (x *consoleCalls) listening(w *waiting, l *callhome.Listener) {
	out := console.Listening{At: l.Console(0), Until: l.Expires()}
	for i := range w.machines {
		out.Texts = append(out.Texts, w.text(l, i))
	}
	x.mu.Lock()
	x.texts = out.Texts
	x.mu.Unlock()
	x.events.Listening(out)
}

func (x *consoleCalls) step(i int, s enrol.Step) { x.events.Step(i, s) }
func (x *consoleCalls) ended(i int, err error)   { x.events.Ended(i, err) }
func (x *consoleCalls) note(line string)         { x.events.Note(line) }

// consoleRemoval is a removal for a console.
type consoleRemoval struct {
	*removal
	reach   sshhost.Options
	secrets *secretPrompts
}

// Outside is removal.outside.
func (x *consoleRemoval) Outside(ctx context.Context) error { return x.outside(ctx) }

// Give is removal.give. The answer to the question may be old, so it reads again whether the machine is a node.
func (x *consoleRemoval) Give(ctx context.Context, step func(enrol.Step)) (enrol.Outcome, error) {
	x.secrets.forget()
	unlock, err := x.hold()
	if err != nil {
		return enrol.Outcome{}, err
	}
	defer unlock()
	if err := x.outside(ctx); err != nil {
		return enrol.Outcome{}, err
	}
	r, err := x.give(ctx, x.reach, step)
	return r.Outcome, err
}

// lineWriter gives each written line to a function.
type lineWriter func(line string)

func (f lineWriter) Write(p []byte) (int, error) {
	f(strings.TrimSuffix(string(p), "\n"))
	return len(p), nil
}
