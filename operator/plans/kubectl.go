package plans

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	policyv1client "k8s.io/client-go/kubernetes/typed/policy/v1"
	"k8s.io/client-go/rest"
	"k8s.io/kubectl/pkg/drain"
)

// kubectlCommands are the kubectl commands that Jobs use.
var kubectlCommands = []string{"cordon", "drain", "uncordon"}

// evictAgain is the pause before a refused eviction is retried.
const evictAgain = 5 * time.Second

// IsKubectl reports whether arguments are those of a command of [Kubectl].
func IsKubectl(args []string) bool {
	return len(args) > 0 && slices.Contains(kubectlCommands, args[0])
}

// Kubectl implements `kubectl cordon`, `drain` and `uncordon` for one node, with the flags that Jobs
// use. So the init containers of Jobs can use this program's image instead of another one. Kubectl
// returns when the node is drained, or an error if it cannot be.
func Kubectl(ctx context.Context, access *rest.Config, args []string, out, errs io.Writer) error {
	if !IsKubectl(args) || len(args) < 2 {
		return fmt.Errorf("usage: one of %q and the name of a node", kubectlCommands)
	}
	verb, name := args[0], args[1]
	h := &drain.Helper{Ctx: ctx, Out: out, ErrOut: errs, ChunkSize: 500}
	f := flag.NewFlagSet(verb, flag.ContinueOnError)
	f.SetOutput(errs)
	if verb == "drain" {
		f.StringVar(&h.PodSelector, "pod-selector", "", "`labels` of the pods to drain")
		f.BoolVar(&h.IgnoreAllDaemonSets, "ignore-daemonsets", false, "ignore pods of DaemonSets")
		f.BoolVar(&h.DeleteEmptyDirData, "delete-emptydir-data", false, "evict pods that use emptyDir volumes")
		f.BoolVar(&h.DeleteEmptyDirData, "delete-local-data", false, "older name of --delete-emptydir-data")
		f.BoolVar(&h.Force, "force", false, "evict pods without a controller")
		f.DurationVar(&h.Timeout, "timeout", 0, "time limit; 0: none")
		f.IntVar(&h.GracePeriodSeconds, "grace-period", -1, "grace period of pods in `seconds`; negative: that of each pod")
		f.BoolVar(&h.DisableEviction, "disable-eviction", false, "delete pods instead of evicting them")
		f.IntVar(&h.SkipWaitForDeleteTimeoutSeconds, "skip-wait-for-delete-timeout", 0, "do not wait for pods whose deletion began this many `seconds` ago")
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
	told := &budgets{Interface: c, of: map[string]string{}}
	h.Client = told
	// Same as kubectl; without it requests repeat without a pause.
	if h.EvictErrorRetryDelay = evictAgain; h.Timeout > 0 {
		h.EvictErrorRetryDelay = min(evictAgain, h.Timeout)
	}
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
		return fmt.Errorf("drain Node %s: %w%s", name, err, told.all())
	}
	fmt.Fprintf(out, "node/%s drained\n", name)
	return nil
}

// budgets wraps the API server of a drain. It adds the name of the PodDisruptionBudget to the error
// of a refused eviction, and records it.
type budgets struct {
	kubernetes.Interface

	mu sync.Mutex
	of map[string]string // by namespace/name
}

// all returns the blocked pods with their budgets; empty: none.
func (b *budgets) all() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out strings.Builder
	for _, pod := range slices.Sorted(maps.Keys(b.of)) {
		fmt.Fprintf(&out, "; pod %s: %s", pod, b.of[pod])
	}
	return out.String()
}

func (b *budgets) PolicyV1() policyv1client.PolicyV1Interface {
	return policy{b.Interface.PolicyV1(), b}
}

type policy struct {
	policyv1client.PolicyV1Interface
	budgets *budgets
}

func (p policy) Evictions(namespace string) policyv1client.EvictionInterface {
	return evictions{p.PolicyV1Interface.Evictions(namespace), p.budgets}
}

type evictions struct {
	policyv1client.EvictionInterface
	budgets *budgets
}

func (e evictions) Evict(ctx context.Context, pod *policyv1.Eviction) error {
	err := e.EvictionInterface.Evict(ctx, pod)
	cause, kept := apierrors.StatusCause(err, policyv1.DisruptionBudgetCause)
	e.budgets.mu.Lock()
	defer e.budgets.mu.Unlock()
	if !kept {
		delete(e.budgets.of, pod.Namespace+"/"+pod.Name)
		return err
	}
	e.budgets.of[pod.Namespace+"/"+pod.Name] = cause.Message
	var status *apierrors.StatusError
	if !errors.As(err, &status) {
		return err
	}
	said := *status
	said.ErrStatus.Message += " " + cause.Message
	return &said
}
