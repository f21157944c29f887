package tui

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/words"
	"constellation/tui/term"
)

// fixed completes a value from a list.
func fixed(values ...string) func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return values, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeNodes completes one argument: a node of the cluster, or also a group of nodes.
func completeNodes(s *session, groups bool) cobra.CompletionFunc {
	const done = cobra.ShellCompDirectiveNoFileComp
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, done
		}
		eng, _, _, err := s.engineOf()
		if err != nil {
			return nil, done
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), 2*time.Second) // completion must not block the shell
		defer cancel()
		st, err := eng.Status(ctx)
		if err != nil {
			return nil, done
		}
		var out []string
		for _, n := range st.Nodes {
			out = append(out, n.Name)
			if groups && n.Group != "" && !slices.Contains(out, n.Group) {
				out = append(out, n.Group)
			}
		}
		slices.Sort(out)
		return out, done
	}
}

// completeBackup completes the ID of a backup as the one argument, the newest first.
func completeBackup(s *session) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		const done = cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
		if len(args) > 0 {
			return nil, done
		}
		eng, _, _, err := s.engineOf()
		if err != nil {
			return nil, done
		}
		dir, _ := cmd.Flags().GetString("dir")
		all, err := eng.ListBackups(cmd.Context(), dir, false, nil)
		if err != nil {
			return nil, done
		}
		var out []string
		for _, b := range all {
			text := fmt.Sprintf("%s, %s", term.Ago(b.Created, s.Now()), words.Count(int(b.Objects), "object"))
			if !b.Complete {
				text = "incomplete"
			}
			out = append(out, b.ID+"\t"+text)
		}
		return out, done
	}
}

// completeOnly completes the types of the backup given as argument, or of the newest.
func completeOnly(s *session) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		const done = cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
		eng, _, _, err := s.engineOf()
		if err != nil {
			return nil, done
		}
		dir, _ := cmd.Flags().GetString("dir")
		if len(args) == 0 {
			all, err := eng.ListBackups(cmd.Context(), dir, false, nil)
			i := slices.IndexFunc(all, func(b engine.BackupEntry) bool { return b.Complete })
			if err != nil || i < 0 {
				return nil, done
			}
			args = []string{all[i].ID}
		}
		m, _, err := eng.ShowBackup(dir, args[0])
		if err != nil {
			return nil, done
		}
		objects := map[engine.Selector]int64{}
		for _, t := range m.Types {
			if t.Objects > 0 {
				objects[engine.Selector{Group: t.Group, Resource: t.Resource}] += t.Objects
			}
		}
		var out []string
		for o, n := range objects {
			out = append(out, o.String()+"\t"+words.Count(int(n), "object"))
		}
		slices.Sort(out)
		return out, done
	}
}

// completeRuns completes the runs of the workspace, and files.
func completeRuns(s *session) cobra.CompletionFunc {
	return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		eng, _, _, err := s.engineOf()
		if err != nil {
			return nil, cobra.ShellCompDirectiveDefault
		}
		runs, err := eng.Runs()
		if err != nil {
			return nil, cobra.ShellCompDirectiveDefault
		}
		out := []string{"last"}
		for _, r := range runs {
			out = append(out, r.ID)
		}
		return out, cobra.ShellCompDirectiveDefault
	}
}
