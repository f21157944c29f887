package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"constellation/engine/version"
	"constellation/internal/podmain"
	"constellation/operator/liblog"
	"constellation/operator/plans"
)

const (
	rolePlans = "plans"
	// envName is the prefix of the environment variables that configure system-upgrade-controller.
	envName = "SYSTEM_UPGRADE_CONTROLLER_"
)

// withoutRole returns the arguments without the role, and whether the role is plans. Without any
// role, an environment of system-upgrade-controller means plans too, so that this program
// can replace it in its Deployment.
func withoutRole(args []string) ([]string, bool) {
	for i, a := range args {
		name, value, has := strings.Cut(strings.TrimLeft(a, "-"), "=")
		if !strings.HasPrefix(a, "-") || name != "role" {
			continue
		}
		n := 1
		if !has && i+1 < len(args) {
			value, n = args[i+1], 2
		}
		return slices.Delete(slices.Clone(args), i, i+n), value == rolePlans
	}
	return args, os.Getenv(envName+"NAME") != ""
}

// carryOut carries out Plans until ctx ends.
func carryOut(ctx context.Context, args []string, lookup func(string) (string, bool)) error {
	f := flag.NewFlagSet("operator --role=plans", flag.ContinueOnError)
	text := func(name string) string { v, _ := lookup(envName + name); return v }
	yes := func(name string) bool { b, _ := strconv.ParseBool(text(name)); return b }
	threads, _ := strconv.Atoi(text("THREADS"))
	var (
		name       = f.String("name", text("NAME"), "`name` of this controller, its lease and a label of its Jobs; also $"+envName+"NAME, as all of these but the last three")
		namespace  = f.String("namespace", text("NAMESPACE"), "`namespace` of Plans, Jobs and the lease")
		kubeconfig = f.String("kubeconfig", text("KUBE_CONFIG"), "kubeconfig `file`; empty inside a pod")
		master     = f.String("master", text("MASTER_URL"), "`URL` of the API server, instead of the kubeconfig's")
		node       = f.String("node-name", text("NODE_NAME"), "unique `name` of this replica; empty: the host's")
		election   = f.Bool("leader-elect", yes("LEADER_ELECT"), "act only when elected")
		count      = f.Int("threads", threads, "number of concurrent reconciliations of Plans; 0 is 2")
		verbose    = f.Bool("debug", yes("DEBUG"), "log debug messages")
		_          = f.String("service-account", "", "ignored")
		metrics    = f.String("metrics", "", "`address` for /metrics; empty serves none")
		health     = f.String("health", "", "`address` for /healthz and /readyz; empty serves none")
		level      slog.LevelVar
	)
	f.TextVar(&level, "log-level", &level, "debug, info, warn or error")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if *verbose {
		level.Set(slog.LevelDebug)
	}
	log := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: &level, ReplaceAttr: podmain.Readable}))
	klog.SetSlogLogger(slog.New(liblog.Handler(log.Handler())))
	settings, err := plans.SettingsFrom(lookup)
	if err != nil {
		log.Warn("setting is invalid, using its default", "err", err)
	}
	cluster, err := reach(*master, *kubeconfig)
	if err != nil {
		return err
	}
	log.Info("starting", "release", version.Release, "role", rolePlans)
	return plans.Run(ctx, plans.Config{
		Cluster: cluster, Name: *name, Namespace: *namespace, Identity: *node, Settings: settings, Election: *election, Threads: *count,
		MetricsAddress: *metrics, HealthAddress: *health, Log: log,
	})
}

func reach(master, kubeconfig string) (*rest.Config, error) {
	if master == "" {
		return podmain.Access(kubeconfig)
	}
	return clientcmd.BuildConfigFromFlags(master, kubeconfig)
}

// kubectl runs the kubectl commands that the Jobs of Plans use.
func kubectl(ctx context.Context, args []string) error {
	cluster, err := podmain.Access(os.Getenv(clientcmd.RecommendedConfigPathEnvVar))
	if err != nil {
		return err
	}
	return plans.Kubectl(ctx, cluster, args, os.Stdout, os.Stderr)
}
