package tui

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/tui/term"
)

// format is the value of -o.
type format string

const (
	text   format = "text"
	asJSON format = "json"
	// asMarkdown is accepted by verbs whose flag is a checkFormat.
	asMarkdown format = "markdown"
)

func (f *format) String() string { return string(*f) }

func (f *format) Type() string { return "text|json" }

func (f *format) Set(s string) error {
	if s != string(text) && s != string(asJSON) {
		return errors.New("want text or json")
	}
	*f = format(s)
	return nil
}

// checkFormat is the value of -o where markdown is allowed, too.
type checkFormat string

func (f *checkFormat) String() string { return string(*f) }

func (f *checkFormat) Type() string { return "text|json|markdown" }

func (f *checkFormat) Set(s string) error {
	switch s {
	case "text", "json", "markdown":
		*f = checkFormat(s)
		return nil
	}
	return errors.New("want text, json or markdown")
}

func outputFlag(cmd *cobra.Command, f *format, usage string) {
	*f = text
	cmd.Flags().VarP(f, "output", "o", usage)
	_ = cmd.RegisterFlagCompletionFunc("output", fixed("text", "json"))
}

// accessFlags adds the flags of kubectl that select a cluster and a user.
func accessFlags(s *session, cmd *cobra.Command, a *cluster.Access) {
	fl := cmd.Flags()
	fl.StringVar(&a.Kubeconfig, "kubeconfig", "", "kubeconfig `file` (default: the workspace's; without one KUBECONFIG, or ~/.kube/config)")
	fl.StringVar(&a.Context, "context", "", "`context` of the kubeconfig")
	fl.StringVar(&a.ClusterName, "cluster", "", "`cluster` of the kubeconfig, instead of the context's")
	fl.StringVar(&a.User, "user", "", "`user` of the kubeconfig, instead of the context's")
	fl.StringVar(&a.As, "as", "", "`user` to impersonate")
	fl.StringVar(&a.AsUID, "as-uid", "", "`UID` to impersonate")
	fl.StringArrayVar(&a.AsGroups, "as-group", nil, "`group` to impersonate; may be repeated")
	fl.DurationVar(&a.RequestTimeout, "request-timeout", 0, "limit of one request, such as 10s (0: the program's limits)")
	_ = cmd.MarkFlagFilename("kubeconfig")
	_ = cmd.RegisterFlagCompletionFunc("context", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		if s.Clusters == nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names, err := s.Clusters.Contexts(*a)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	})
}

// impersonates refuses parts of a user to impersonate without the user's name.
func impersonates(a cluster.Access) error {
	if a.As == "" && (a.AsUID != "" || len(a.AsGroups) > 0) {
		return &plan.Error{Op: "read flags", Err: errors.New("--as-group and --as-uid need --as"), Exit: plan.ExitUsage, Remedy: "name the user to impersonate with --as"}
	}
	return nil
}

// applyFlags adds the flags that apply and execute share.
func applyFlags(cmd *cobra.Command, r *engine.ApplyRequest, o *runOptions) {
	fl := cmd.Flags()
	fl.BoolVarP(&o.yes, "yes", "y", false, "accept the plan and its ordinary warnings")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "never prompt")
	fl.StringArrayVar(&r.Acknowledge, "ack", nil, "`ID` of a finding to acknowledge; may be repeated")
	fl.StringSliceVar(&r.Skip, "skip-phases", nil, "comma-separated `steps` to skip: "+strings.Join(engine.ApplySteps, ", "))
	fl.BoolVar(&r.Rehearse, "dry-run", false, "rehearse the plan; change nothing")
	fl.DurationVar(&o.timeout, "timeout", 0, "stop after this time, such as 1h; run again to resume (0: no limit)")
	o.out = text
	fl.VarP((*checkFormat)(&o.out), "output", "o", "output format: text, json for one event per line, or markdown for a summary at the end (progress goes to stderr)")
	_ = cmd.RegisterFlagCompletionFunc("output", fixed("text", "json", "markdown"))
	_ = cmd.RegisterFlagCompletionFunc("ack", fixed("measurements-weaker", "oldest-supports-kubernetes", "local-data", "no-backup"))
	_ = cmd.RegisterFlagCompletionFunc("skip-phases", fixed(engine.ApplySteps...))
}

// feedFlags adds the flags that select the release feed.
func feedFlags(cmd *cobra.Command, r *engine.FeedRequest) {
	cmd.Flags().StringVar(&r.Feed, "feed", "", "release feed: folder, https `address` or bundle:FILE (default: from the configuration)")
	feedKeyFlag(cmd, &r.FeedKeys)
	_ = cmd.MarkFlagDirname("feed")
}

func feedKeyFlag(cmd *cobra.Command, keys *[]string) {
	cmd.Flags().StringArrayVar(keys, "feed-key", nil, "public key `file` that verifies the feed; may be repeated")
	_ = cmd.MarkFlagFilename("feed-key", "pub", "pem")
}

// backupDirFlag adds --dir, the directory of backups.
func backupDirFlag(cmd *cobra.Command, dir *string, usage string) {
	backupDirFlagNamed(cmd, "dir", dir, usage)
}

func backupDirFlagNamed(cmd *cobra.Command, name string, dir *string, usage string) {
	cmd.Flags().Var((*nonEmptyDir)(dir), name, usage)
	_ = cmd.MarkFlagDirname(name)
}

// nonEmptyDir is the value of a directory flag. It rejects "", the value of an unset shell
// variable.
type nonEmptyDir string

func (d *nonEmptyDir) String() string { return string(*d) }

func (d *nonEmptyDir) Type() string { return "directory" }

func (d *nonEmptyDir) Set(s string) error {
	if s == "" {
		return errors.New("it is empty; omit --dir for the workspace's own directory")
	}
	*d = nonEmptyDir(s)
	return nil
}

// identityFlag adds --identity, a file with a secret key of age.
func identityFlag(cmd *cobra.Command, path *string) {
	cmd.Flags().StringVar(path, "identity", "", "`file` of age-keygen that decrypts the backup (default: $"+engine.IdentityVariable+")")
	_ = cmd.MarkFlagFilename("identity")
}

// restoreFlags adds the flags that select what is restored or compared.
func restoreFlags(s *session, cmd *cobra.Command, r *engine.RestoreRequest) {
	fl := cmd.Flags()
	backupDirFlag(cmd, &r.Dir, "`directory` of the backups (default: constellation-upgrade in the workspace)")
	identityFlag(cmd, &r.Identity)
	fl.StringArrayVar(&r.Only, "only", nil, "restrict to `group/resource[/namespace/name]` and its definition; may be repeated")
	_ = cmd.RegisterFlagCompletionFunc("only", completeOnly(s))
}

// etcdFlag is the value of --etcd: unset, true or false.
type etcdFlag string

func (f *etcdFlag) String() string { return string(*f) }

func (f *etcdFlag) Type() string { return "bool" }

func (f *etcdFlag) Set(v string) error {
	switch v {
	case "true", "false":
		*f = etcdFlag(v)
		return nil
	}
	return errors.New("want true or false")
}

// minorFlag is the value of a flag that is a minor or a patch: v1.37, 1.37.2.
type minorFlag version.Version

func (m *minorFlag) Type() string { return "version" }

func (m *minorFlag) String() string {
	if v := (*version.Version)(m); !v.IsZero() {
		return v.String()
	}
	return ""
}

func (m *minorFlag) Set(s string) error {
	v, err := version.Parse("v" + strings.TrimPrefix(s, "v"))
	if err != nil {
		v, err = version.Parse("v" + strings.TrimPrefix(s, "v") + ".0")
	}
	if err != nil || v.Major() != 1 {
		return errors.New("want a version of Kubernetes such as v1.37 or v1.37.2")
	}
	*m = minorFlag(v)
	return nil
}

// days is a duration such as 30d, 36h or 90m.
type days time.Duration

func (d *days) String() string {
	if t := time.Duration(*d); t > 0 && t%(24*time.Hour) == 0 {
		return strconv.Itoa(int(t/(24*time.Hour))) + "d"
	}
	return time.Duration(*d).String()
}

func (*days) Type() string { return "days" }

func (d *days) Set(v string) error {
	if n, ok := strings.CutSuffix(v, "d"); ok {
		i, err := strconv.ParseUint(n, 10, 16)
		*d = days(time.Duration(i) * 24 * time.Hour)
		if err != nil {
			return errors.New("want a time such as 30d or 36h")
		}
		return nil
	}
	t, err := time.ParseDuration(v)
	if err != nil {
		return errors.New("want a time such as 30d or 36h")
	}
	*d = days(t)
	return nil
}

// oneArg requires exactly one argument. Its error names the argument and the remedy.
func oneArg(argument, remedy string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 {
			return nil
		}
		return &plan.Error{Op: cmd.CommandPath(), Err: fmt.Errorf("got %d arguments, want %s", len(args), argument), Remedy: remedy, Exit: plan.ExitUsage}
	}
}

// exclusiveRE matches cobra's error about flags that exclude each other.
var exclusiveRE = regexp.MustCompile(`; \[(.+)\] were all set$`)

// exclusive words cobra's error about flags that exclude each other.
func exclusive(err error) error {
	m := exclusiveRE.FindStringSubmatch(err.Error())
	if m == nil {
		return err
	}
	return errors.New("--" + strings.ReplaceAll(m[1], " ", " and --") + " exclude each other")
}

// flagError returns which values a flag accepts. pflag would return the parser's error.
func flagError(cmd *cobra.Command, err error) error {
	var absent *pflag.NotExistError
	if errors.As(err, &absent) {
		return suggestFlag(cmd, absent)
	}
	var bad *pflag.InvalidValueError
	if !errors.As(err, &bad) {
		return err
	}
	f := bad.GetFlag()
	want := map[string]string{
		"bool": "true or false", "int": "a whole number", "duration": "a time such as 90s, 10m or 1h30m", "text|json": "text or json",
		"text|json|markdown": "text, json or markdown", "blocking|warning": "blocking or warning",
		"":     "a version such as v1.35.4", // the type of TextVar flags; all of them are versions
		"days": "a time such as 30d or 36h",
	}[f.Value.Type()]
	if want == "" {
		return err
	}
	return fmt.Errorf("--%s is %q, want %s", f.Name, term.Clean(bad.GetValue()), want)
}
