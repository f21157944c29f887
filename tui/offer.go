package tui

import (
	"bufio"
	"context"
	"fmt"
	"strconv"
	"strings"

	"constellation/engine"
)

// offer is something that can be done next: what it is called, and the words of its verb.
type offer struct{ title, verb string }

// offers are what home has at each stage.
var offers = map[engine.Stage][]offer{
	engine.StageEmpty:      {{"Start a sandbox", "sandbox up"}, {"Write a configuration", "config generate sandbox"}},
	engine.StageConfigured: {{"Start the machines", "sandbox up"}, {"Check the configuration", "config validate"}},
	engine.StageReady:      {{"Create the cluster", "init"}, {"Check the configuration", "config validate"}, {"Look at the machines", "status"}},
	engine.StagePartial:    {{"Go on creating the cluster", "init"}, {"Look at the machines", "status"}},
	engine.StageCluster: {
		{"Look at the cluster", "status"},
		{"Check for upgrades", "upgrade check"},
		{"Upgrade, asking before anything is changed", "upgrade apply"},
		{"Make a backup", "backup create"},
		{"List the backups", "backup list"},
		{"See where each node is", "watch --once"},
		{"Past runs", "history"},
	},
}

// askNext is home for those for whom nothing is drawn: it says what there is, and asks in
// words what to do next, below what was written before, until the answer is q or nothing
// more can be read. What a verb that was chosen ends with is told and does not end it, but
// for a signal.
func (s *session) askNext(ctx context.Context) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	for {
		h, err := eng.Home(ctx)
		if err != nil {
			return err
		}
		list := offers[h.Stage]
		fmt.Fprintln(s.out)
		for i, o := range list {
			fmt.Fprintf(s.out, "%d  %s: %s\n", i+1, o.title, s.command(o.verb))
		}
		o, ok := s.chosen(list)
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

// chosen asks for one of a list until it is one, or nothing more is wanted.
func (s *session) chosen(list []offer) (o offer, ok bool) {
	for {
		fmt.Fprintf(s.Stderr, "What next? Type a number from 1 to %d, or q to leave: ", len(list))
		// A terminal gives a line at a time: no more is taken than the answer.
		line, err := bufio.NewReader(s.Stdin).ReadString('\n')
		answer := strings.ToLower(strings.TrimSpace(line))
		if err != nil || answer == "q" {
			return offer{}, false
		}
		if n, err := strconv.Atoi(answer); err == nil && n >= 1 && n <= len(list) {
			return list[n-1], true
		}
	}
}
