package tui

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"constellation/engine/cloud/providers"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

func configCommand(s *session) *cobra.Command {
	cmd := group("config", "Write, check and migrate the configuration",
		"Write, check and migrate constellation-conf.yaml, which describes the desired cluster.\nPrint your preferences.",
		`  constellation config generate sandbox
  constellation config validate`)
	cmd.AddCommand(configGenerate(s), configValidate(s), configMeasure(s), configMigrate(s), configPreferences(s))
	return cmd
}

func configGenerate(s *session) *cobra.Command {
	var o workspace.GenerateOptions
	cmd := &cobra.Command{
		Use:   "generate PROVIDER",
		Short: "Write a new configuration",
		Long: `Write a new, commented constellation-conf.yaml into the workspace. An existing file is
never replaced.

If the workspace has a sandbox, the file gets the sandbox's measurements and versions. The name
machines stands for provider enrolled.`,
		Example: `  constellation config generate sandbox --name demo
  constellation config generate machines --name prod    # Linux machines that exist already
  constellation -C demo config generate sandbox --kubernetes ` + first(s.Kubernetes),
		Args:              oneArg("the name of a provider", "use "+words.Or(providers.Names())),
		ValidArgsFunction: fixed(providers.Names()...),
		RunE: func(cmd *cobra.Command, args []string) error {
			ws, dir, err := s.newWorkspace()
			if err != nil {
				return err
			}
			if slices.Contains(providers.Sandboxed(), args[0]) {
				if o.Sandbox = s.findSandbox(cmd.Context(), dir); o.Sandbox != nil && o.Sandbox.Provider() != args[0] {
					o.Sandbox = nil
				}
			}
			b, err := workspace.GenerateConfig(args[0], o)
			if err != nil {
				return err
			}
			path, err := ws.WriteConfig(b)
			if err != nil {
				return err
			}
			fmt.Fprintf(s.out, "wrote %s\n", term.Clean(path))
			p, _ := providers.Named(args[0]) // GenerateConfig knows it
			refused, remedy := "", ""
			if p.Fixed != nil {
				refused, remedy = p.Fixed(nil)
			}
			switch up := providers.AdviceFor(args[0], nil).Up; {
			case refused != "" && o.Sandbox == nil:
				fmt.Fprintf(s.out, "remark  init cannot make this cluster: %s\nnext  %s\n", refused, remedy)
			case up != "" && o.Sandbox == nil:
				fmt.Fprintf(s.out, "next  %s\n", s.command(up))
			case p.Infra && o.Sandbox == nil:
				fmt.Fprintf(s.out, "next  set project and service accounts there, then: %s\n", s.command("infra plan"))
			case p.Enrolled || p.Inventory:
				fmt.Fprintf(s.out, "next  set endpoint there, then: %s --group control-plane --ssh USER@HOST\n", s.command("machine add"))
			default:
				fmt.Fprintf(s.out, "next  %s\n", s.command("init"))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&o.Name, "name", "", "name of the cluster")
	cmd.Flags().StringVar(&o.Kubernetes, "kubernetes", "", "Kubernetes version, such as "+first(s.Kubernetes))
	_ = cmd.RegisterFlagCompletionFunc("kubernetes", fixed(s.Kubernetes...))
	_ = cmd.RegisterFlagCompletionFunc("name", fixed())
	return cmd
}

func first(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}

// validation is the JSON output of config validate.
type validation struct {
	Schema string                 `json:"schema"`
	File   string                 `json:"file"`
	Valid  bool                   `json:"valid"`
	Errors []workspace.FieldError `json:"errors"`
}

func configValidate(s *session) *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Check the configuration",
		Long: `Check constellation-conf.yaml and list all errors, each with its line and a remedy. The
exit code is 2 if there are errors.`,
		Example: `  constellation config validate
  constellation config validate -o json | jq '.errors[].field'`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ws, _, err := s.workspace()
			if err != nil {
				return err
			}
			b, err := ws.ReadConfig()
			if err != nil {
				return err
			}
			c, err := workspace.ParseConfig(b)
			var list *workspace.ConfigErrors
			if err != nil && !errors.As(err, &list) {
				return err
			}
			if out == asJSON {
				v := validation{Schema: plan.Schema, File: view.ConfigFile, Valid: err == nil, Errors: []workspace.FieldError{}}
				if list != nil {
					v.Errors = list.Errors
				}
				if err := document(s.out, v); err != nil {
					return err
				}
				if list != nil {
					return exitStatus(plan.ExitUsage)
				}
				return nil
			}
			if list != nil {
				return &plan.Error{Err: list, Exit: plan.ExitUsage}
			}
			image := ""
			if !c.Image.IsZero() {
				image = ", image " + c.Image.String()
			}
			services := ""
			if !c.Services.IsZero() {
				services = ", release " + c.Services.String()
			}
			fmt.Fprintf(s.out, "%s is valid: cluster %s, %s, %s, Kubernetes %s%s%s\n", view.ConfigFile, term.Clean(c.Name),
				words.Count(c.ControlPlanes(), "control plane"), words.Count(c.Workers(), "worker"), c.Kubernetes, image, services)
			return nil
		},
	}
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func configMigrate(s *session) *cobra.Command {
	return &cobra.Command{
		Use:   "migrate",
		Short: "Convert the configuration to the current format",
		Long: `Convert constellation-conf.yaml to the configuration format of this program. Comments and
layout are kept. The exit code is 3 if the file has that format already.`,
		Example: `  constellation config migrate`,
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ws, _, err := s.workspace()
			if err != nil {
				return err
			}
			b, err := ws.ReadConfig()
			if err != nil {
				return err
			}
			b, changed, err := workspace.MigrateConfig(b)
			if err != nil {
				return usage(err)
			}
			if !changed {
				fmt.Fprintf(s.out, "%s has the current format already\n", view.ConfigFile)
				return exitStatus(plan.ExitNothing)
			}
			if err := ws.ReplaceConfig(b); err != nil {
				return err
			}
			fmt.Fprintf(s.out, "%s now has the current format\n", view.ConfigFile)
			return nil
		},
	}
}

// usage gives configuration errors the exit code for bad usage, unless err has an exit
// code already.
func usage(err error) error {
	var list *workspace.ConfigErrors
	var e *plan.Error
	if errors.As(err, &list) && !errors.As(err, &e) {
		return &plan.Error{Err: list, Exit: plan.ExitUsage}
	}
	return err
}
