package tui

import (
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"constellation/engine/plan"
	"constellation/tui/view"
)

func rootCommand(s *session) *cobra.Command {
	var nonInteractive bool
	root := &cobra.Command{
		Use:   "constellation",
		Short: "Create, upgrade and operate Kubernetes on attested machines",
		Long: `Constellation creates a Kubernetes cluster on attested machines with kubeadm, checks and
runs its upgrades, and backs it up.

Without a verb it opens the console on the workspace, the folder that holds the files of
one cluster. In a folder without such files it lists the clusters of your kubeconfig; -C .
opens the console on the folder. Without a terminal it prints an overview of the workspace as
text. With --accessible it prints that text, lists the possible next commands and prompts for one.

Exit codes, unless a verb's help lists others: 0 done; 1 failed; 2 bad usage or configuration; 3 nothing to do;
4 blocked by a finding; 5 an acknowledgement is missing; 6 upgrade available (upgrade check
--exit-code only); 7 stopped part-way, can be resumed; 8 another console holds the run;
9 differences found (backup diff only); 129 hung up; 130 interrupted; 143 terminated.`,
		Example: `  constellation                       # open the console on this folder
  constellation -C demo               # open it on another folder
  constellation init --non-interactive --yes -o json | jq .kind`,
		Args:          noVerb,
		Version:       s.Release,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			// Cobra checks groups of flags after this hook, when a wrong use would no longer end with 2.
			if err := cmd.ValidateFlagGroups(); err != nil {
				return exclusive(err)
			}
			s.began = true
			_, s.runs = cmd.Annotations[resumable]
			s.runs = s.runs || slices.Contains(longVerbs, strings.TrimPrefix(cmd.CommandPath(), cmd.Root().DisplayName()+" "))
			if s.debug {
				s.level.Set(slog.LevelDebug)
			}
			s.update = startUpdateNotice(cmd, s)
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !s.interactive(nonInteractive) {
				if err := printHome(cmd.Context(), s); err != nil || nonInteractive || !s.plainly() || !s.asks() {
					return err
				}
				return askNext(cmd.Context(), s)
			}
			if k, prefs, err := severalClusters(s, cmd.Flags().Changed("workspace")); err != nil || k != nil {
				if err != nil {
					return err
				}
				return showClusters(cmd.Context(), s, k, prefs)
			}
			return showConsole(cmd.Context(), s, consoleOptions{})
		},
	}
	if s.Program == view.PluginName {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: s.Program}
	}
	f := root.PersistentFlags()
	f.StringVarP(&s.dir, "workspace", "C", ".", "`folder` with the files of the cluster")
	f.BoolVar(&s.debug, "debug", false, "write a debug log to stderr")
	f.BoolVar(&s.accessible, "accessible", false, "no console: print line by line, prompt in plain text (also ACCESSIBLE=1)")
	root.Flags().BoolVar(&nonInteractive, "non-interactive", false, "print and never prompt")
	_ = root.MarkPersistentFlagDirname("workspace")
	root.Flags().Bool("version", false, "print the version of this program")
	root.SetVersionTemplate("constellation {{.Version}}\n")
	root.SetFlagErrorFunc(flagError)
	if s.Verbs != nil {
		root.Short, root.Long, root.Example = SandboxShort, "Run the verb sandbox of constellation. Call it as `constellation sandbox`.", "  constellation sandbox --help"
		root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		root.AddCommand(s.Verbs(&Invocation{s})...)
		return root
	}
	root.SetHelpCommandGroupID("around")
	root.AddGroup(&cobra.Group{ID: "cluster", Title: "Cluster commands:"}, &cobra.Group{ID: "around", Title: "Other commands:"})
	for _, c := range []*cobra.Command{initCommand(s), adoptCommand(s), checkCommand(s), upgradeCommand(s), backupCommand(s), machineCommand(s), infraCommand(s), certifierCommand(s), encryptionCommand(s), recoverCommand(s), statusCommand(s), verifyCommand(s), watchCommand(s), historyCommand(s), supportCommand(s)} {
		c.GroupID = "cluster"
		root.AddCommand(c)
	}
	for _, c := range []*cobra.Command{configCommand(s), releaseCommand(s), sandboxStub(), conformanceCommand(s), mcpCommand(s), selfCommand(s), versionCommand(s)} {
		c.GroupID = "around"
		root.AddCommand(c)
	}
	root.SetCompletionCommandGroupID("around")
	completionExamples(root)
	return root
}

// completionExamples adds examples to cobra's completion commands.
func completionExamples(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() != "completion" {
			continue
		}
		c.Example = "  source <(constellation completion bash)\n  constellation completion fish > ~/.config/fish/completions/constellation.fish"
		for _, sh := range c.Commands() {
			sh.Example = map[string]string{
				"bash":       "  source <(constellation completion bash)",
				"zsh":        "  constellation completion zsh > \"${fpath[1]}/_constellation\"",
				"fish":       "  constellation completion fish > ~/.config/fish/completions/constellation.fish",
				"powershell": "  constellation completion powershell | Out-String | Invoke-Expression",
			}[sh.Name()]
		}
	}
}

// group is a command that only has subcommands.
func group(use, short, long, example string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long, Example: example,
		Args: noVerb,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
}

// versionAnswer is the JSON output of version.
type versionAnswer struct {
	Schema     string   `json:"schema"`
	Release    string   `json:"release"`
	Go         string   `json:"go"`
	Platform   string   `json:"platform"`
	Kubernetes []string `json:"kubernetes"`
}

func versionCommand(s *session) *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Show the version of this program",
		Long:    "Show the version of this program and the Kubernetes versions that `constellation sandbox fetch` can build.",
		Example: "  constellation version -o json | jq -r .release",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := versionAnswer{plan.Schema, s.Release, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH, s.Kubernetes}
			if out == asJSON {
				return document(s.out, v)
			}
			fmt.Fprintf(s.out, "constellation %s (%s, %s)\nkubernetes    %s\n", v.Release, v.Go, v.Platform, strings.Join(v.Kubernetes, " "))
			return nil
		},
	}
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}
