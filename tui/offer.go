package tui

import (
	"context"
	"fmt"
	"strings"

	"constellation/engine"
)

// offer is a possible next command: its title, and the verb with its arguments.
type offer struct{ title, verb string }

// offers are the next commands at each stage of a workspace, after those that lead to
// machines.
var offers = map[engine.Stage][]offer{
	engine.StageConfigured: {{"Check the configuration", "config validate"}},
	engine.StageReady:      {{"Create the cluster", "init"}, {"Check the configuration", "config validate"}, {"Show the machines", "status"}},
	engine.StagePartial:    {{"Resume creating the cluster", "init"}, {"Show the machines", "status"}},
	engine.StageCluster: {
		{"Show the cluster", "status"},
		{"Check for upgrades", "upgrade check"},
		{"Upgrade the cluster (prompts before any change)", "upgrade apply"},
		{"Create a backup", "backup create"},
		{"List backups", "backup list"},
		{"Show the rollout state of each node", "watch --once"},
		{"List past runs", "history"},
	},
}

// adoptedOffers are the next commands in the workspace of an adopted cluster.
var adoptedOffers = []offer{
	{"Show the cluster", "status"},
	{"Check what stands against an upgrade", "check"},
	{"Install the operator (prompts before any change)", "adopt --operator"},
	{"Create a backup", "backup create"},
	{"List backups", "backup list"},
	{"Show the state of each node", "watch --once"},
}

// offersOf returns the next commands of a workspace.
func offersOf(h *engine.Home) []offer {
	if h.Adopted {
		return adoptedOffers
	}
	return offers[h.Stage]
}

// askNext is the home screen in accessible mode: it lists the next commands, prompts for
// one, runs it and repeats, until the user types q or stdin ends. The exit code of a command
// is printed and ends the loop only if a signal ended the command.
func askNext(ctx context.Context, s *session) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	for {
		h, err := eng.Home(ctx)
		if err != nil {
			return err
		}
		var list []offer
		for _, x := range engine.NextSteps(h) {
			list = append(list, offer{x.Title, x.Verb})
		}
		list = append(list, offersOf(&h)...)
		fmt.Fprintln(s.out)
		for i, o := range list {
			fmt.Fprintf(s.out, "%d  %s: %s\n", i+1, o.title, s.command(o.verb))
		}
		o, ok := s.prompt().chosen(list)
		if !ok {
			return nil
		}
		args := append([]string{"-C", s.dir}, strings.Fields(o.verb)...)
		if s.accessible {
			args = append(args, "--accessible")
		}
		if s.debug {
			args = append(args, "--debug")
		}
		if code := newSession(s.App).execute(args); code > 128 {
			return exitStatus(code)
		} else if code != 0 {
			fmt.Fprintf(s.out, "%s ended with exit code %d\n", s.command(o.verb), code)
		}
	}
}
