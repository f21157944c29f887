package plans

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/kubectl/pkg/drain"
)

// kubectlCommands are what Jobs need of kubectl.
var kubectlCommands = []string{"cordon", "drain", "uncordon"}

// IsKubectl reports whether arguments are those of a command of [Kubectl].
func IsKubectl(args []string) bool {
	return len(args) > 0 && slices.Contains(kubectlCommands, args[0])
}

// Kubectl does what `kubectl cordon`, `drain` and `uncordon` do for one node, with the flags
// that Jobs give them. So the image of this program can be that of their init containers,
// and none from elsewhere is needed. It returns when the node is drained, or why it cannot be.
func Kubectl(ctx context.Context, access *rest.Config, args []string, out, errs io.Writer) error {
	if !IsKubectl(args) || len(args) < 2 {
		return fmt.Errorf("use one of %q and the name of a node", kubectlCommands)
	}
	verb, name := args[0], args[1]
	h := &drain.Helper{Ctx: ctx, Out: out, ErrOut: errs, ChunkSize: 500}
	f := flag.NewFlagSet(verb, flag.ContinueOnError)
	f.SetOutput(errs)
	if verb == "drain" {
		f.StringVar(&h.PodSelector, "pod-selector", "", "`labels` of the pods that are drained")
		f.BoolVar(&h.IgnoreAllDaemonSets, "ignore-daemonsets", false, "leave pods of DaemonSets where they are")
		f.BoolVar(&h.DeleteEmptyDirData, "delete-emptydir-data", false, "let pods go that have data in emptyDir")
		f.BoolVar(&h.DeleteEmptyDirData, "delete-local-data", false, "the older name of --delete-emptydir-data")
		f.BoolVar(&h.Force, "force", false, "let pods go that nobody makes again")
		f.DurationVar(&h.Timeout, "timeout", 0, "give up after; 0 is never")
		f.IntVar(&h.GracePeriodSeconds, "grace-period", -1, "`seconds` that pods have; negative: what they say")
		f.BoolVar(&h.DisableEviction, "disable-eviction", false, "delete instead of evicting")
		f.IntVar(&h.SkipWaitForDeleteTimeoutSeconds, "skip-wait-for-delete-timeout", 0, "do not wait for pods deleted so many `seconds` ago")
	}
	if err := f.Parse(args[2:]); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	access = rest.CopyConfig(access)
	access.UserAgent = "constellation-" + verb
	c, err := kubernetes.NewForConfig(access)
	if err != nil {
		return fmt.Errorf("connect to API server: %w", err)
	}
	h.Client = c
	n, err := c.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("%s Node %s: %w", verb, name, err)
	}
	if err := drain.RunCordonOrUncordon(h, n, verb != "uncordon"); err != nil {
		return fmt.Errorf("%s Node %s: %w", verb, name, err)
	}
	fmt.Fprintf(out, "node/%s %sed\n", name, map[bool]string{true: "uncordon", false: "cordon"}[verb == "uncordon"])
	if verb != "drain" {
		return nil
	}
	pods, refused := h.GetPodsForDeletion(name)
	if len(refused) > 0 {
		return fmt.Errorf("drain Node %s: %w", name, errors.Join(refused...))
	}
	if w := pods.Warnings(); w != "" {
		fmt.Fprintln(errs, "Warning:", w)
	}
	if err := h.DeleteOrEvictPods(pods.Pods()); err != nil {
		return fmt.Errorf("drain Node %s: %w", name, err)
	}
	fmt.Fprintf(out, "node/%s drained\n", name)
	return nil
}
