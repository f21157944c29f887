package kube

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/distribution"
	"constellation/engine/kube/preflight"
	"constellation/engine/plan"
	"constellation/engine/words"
)

// Contexts returns the contexts that a kubeconfig has, sorted.
func Contexts(a cluster.Access) ([]string, error) {
	c, err := mergedKubeconfig(a)
	if err != nil {
		return nil, err
	}
	return slices.Sorted(maps.Keys(c.Contexts)), nil
}

// mergedKubeconfig reads the files that a selects and merges them as kubectl does.
func mergedKubeconfig(a cluster.Access) (*clientcmdapi.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = a.Kubeconfig
	rules.DefaultClientConfig = nil
	files := rules.GetLoadingPrecedence()
	if a.Kubeconfig != "" {
		files = []string{a.Kubeconfig}
	}
	c, err := rules.Load()
	if err != nil {
		// The error could quote secrets of the file.
		for _, f := range files {
			switch _, ferr := clientcmd.LoadFromFile(f); {
			case ferr == nil || errors.Is(ferr, fs.ErrNotExist) && a.Kubeconfig == "":
				continue
			case errors.Is(ferr, fs.ErrNotExist), errors.Is(ferr, fs.ErrPermission):
				var path *fs.PathError
				if errors.As(ferr, &path) {
					ferr = path.Err
				}
				err = ferr
			default:
				err = errors.New("it is not a valid kubeconfig")
			}
			return nil, &plan.Error{Op: "read kubeconfig " + f, Err: err, Exit: plan.ExitUsage, Remedy: "name a kubeconfig with --kubeconfig or the variable KUBECONFIG"}
		}
		return nil, &plan.Error{Op: "read kubeconfig", Err: errors.New("it is not valid"), Exit: plan.ExitUsage, Remedy: "name a kubeconfig with --kubeconfig or the variable KUBECONFIG"}
	}
	if len(c.Contexts) == 0 {
		return nil, &plan.Error{
			Op: "find a cluster", Err: fmt.Errorf("no context in %s", words.And(files)), Exit: plan.ExitUsage,
			Remedy: "name a kubeconfig with --kubeconfig or the variable KUBECONFIG",
		}
	}
	return c, nil
}

// CredentialVerb is the first argument with which this program runs a credential plugin.
const CredentialVerb = "credential-plugin"

// Select returns the cluster that a selects. Credential plugins of other contexts do not run. If
// self is a path of this program, it runs the plugin of the context as a child; see
// [RunCredentialPlugin].
func Select(a cluster.Access, self string) (cluster.Selected, error) {
	c, err := mergedKubeconfig(a)
	if err != nil {
		return cluster.Selected{}, err
	}
	s, err := selectIn(c, a, self)
	if err == nil {
		s.Note = shadowed(a, s)
	}
	return s, err
}

// shadowed returns a note about a file of KUBECONFIG in which the context of s leads to another
// cluster. As for kubectl, the first file that has a name defines it; kubeadm gives the same names
// to all clusters.
func shadowed(a cluster.Access, s cluster.Selected) string {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	files := rules.GetLoadingPrecedence()
	if a.Kubeconfig != "" || len(files) < 2 {
		return ""
	}
	for _, f := range files {
		c, err := clientcmd.LoadFromFile(f)
		if err != nil || c.Contexts[s.Context] == nil {
			continue // a file that does not exist is none
		}
		k := c.Clusters[cmp.Or(a.ClusterName, c.Contexts[s.Context].Cluster)]
		if k != nil && k.Server != "" && k.Server != s.Server {
			return fmt.Sprintf("Context %s leads to %s, because a file of KUBECONFIG defines these names first. In %s it leads to %s: select that with --kubeconfig.", printable(s.Context), printable(s.Server), printable(f), printable(k.Server))
		}
	}
	return ""
}

// selectIn is Select in a kubeconfig that was read. It does not change c.
func selectIn(all *clientcmdapi.Config, a cluster.Access, self string) (cluster.Selected, error) {
	name := cmp.Or(a.Context, all.CurrentContext)
	if all.Contexts[name] == nil {
		names := slices.Sorted(maps.Keys(all.Contexts))
		if len(names) > 12 {
			names = append(names[:12], fmt.Sprintf("%d more", len(names)-12))
		}
		err := &plan.Error{Op: "select context " + strconv.Quote(name), Err: errors.New("the kubeconfig does not have it"), Exit: plan.ExitUsage, Remedy: "name one with --context: " + strings.Join(names, ", ")}
		if name == "" {
			err.Op, err.Err = "select a context", errors.New("the kubeconfig has no current context")
		}
		return cluster.Selected{}, err
	}
	context := all.Contexts[name].DeepCopy()
	context.Cluster, context.AuthInfo = cmp.Or(a.ClusterName, context.Cluster), cmp.Or(a.User, context.AuthInfo)
	absent := func(kind, of string) error {
		return &plan.Error{Op: "select context " + strconv.Quote(name), Err: fmt.Errorf("the kubeconfig has no %s %q", kind, of), Exit: plan.ExitUsage, Remedy: "list the contexts with `kubectl config get-contexts`"}
	}
	server, user := all.Clusters[context.Cluster].DeepCopy(), all.AuthInfos[context.AuthInfo].DeepCopy()
	if server == nil || server.Server == "" {
		return cluster.Selected{}, absent("cluster", context.Cluster)
	}
	if user == nil {
		if context.AuthInfo != "" {
			return cluster.Selected{}, absent("user", context.AuthInfo)
		}
		user = clientcmdapi.NewAuthInfo()
		context.AuthInfo = "none"
	}
	if a.As != "" {
		user.Impersonate = a.As
	}
	if a.AsUID != "" {
		user.ImpersonateUID = a.AsUID
	}
	if len(a.AsGroups) > 0 {
		user.ImpersonateGroups = a.AsGroups
	}
	if e := user.Exec; e != nil && self != "" {
		e.Args = append([]string{CredentialVerb, "--", e.Command}, e.Args...)
		e.Command = self
	}
	c := clientcmdapi.NewConfig()
	c.CurrentContext = name
	c.Contexts[name], c.Clusters[context.Cluster], c.AuthInfos[context.AuthInfo] = context, server, user
	if err := minify(c); err != nil {
		return cluster.Selected{}, &plan.Error{Op: "read files of context " + strconv.Quote(name), Err: err, Exit: plan.ExitUsage, Remedy: "restore the file or name another context"}
	}
	b, err := clientcmd.Write(*c)
	if err != nil {
		return cluster.Selected{}, errors.New("write kubeconfig: it is not valid") // the error could quote secrets
	}
	return cluster.Selected{Context: name, Server: server.Server, Kubeconfig: b, Identity: identityOf(user), RequestTimeout: a.RequestTimeout, Access: a}, nil
}

// identityOf is a digest of the credentials of a user, without the place where they were read.
func identityOf(user *clientcmdapi.AuthInfo) string {
	u := user.DeepCopy()
	u.LocationOfOrigin, u.Extensions = "", nil
	b, err := json.Marshal(u)
	if err != nil {
		return ""
	}
	if u.Exec != nil { // interactive parts are not marshalled
		b = fmt.Appendf(b, "%q %q %v", u.Exec.Command, u.Exec.Args, u.Exec.Env)
	}
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

// List returns the contexts of the kubeconfig that a names. It reads the files once. Credential
// plugins of these contexts get no standard input, because a console uses the terminal.
func (c Clusters) List(a cluster.Access) (cluster.Contexts, error) {
	all, err := mergedKubeconfig(a)
	if err != nil {
		return cluster.Contexts{}, err
	}
	for _, u := range all.AuthInfos {
		if e := u.Exec; e != nil && e.InteractiveMode != clientcmdapi.AlwaysExecInteractiveMode {
			e.InteractiveMode = clientcmdapi.NeverExecInteractiveMode
		}
	}
	out := cluster.Contexts{Select: func(name string) (cluster.Selected, error) {
		if x := all.Contexts[name]; x != nil {
			if u := all.AuthInfos[x.AuthInfo]; u != nil && u.Exec != nil && u.Exec.InteractiveMode == clientcmdapi.AlwaysExecInteractiveMode {
				return cluster.Selected{}, &plan.Error{
					Op: "select context " + strconv.Quote(name), Err: errors.New("its credential plugin reads from the terminal"), Exit: plan.ExitUsage,
					Remedy: "constellation check --context " + name,
				}
			}
		}
		return selectIn(all, cluster.Access{Context: name}, c.self)
	}}
	for _, name := range slices.Sorted(maps.Keys(all.Contexts)) {
		x := cluster.Context{Name: name, Current: name == all.CurrentContext}
		if s := all.Clusters[all.Contexts[name].Cluster]; s != nil {
			x.Server = s.Server
		}
		if u := all.AuthInfos[all.Contexts[name].AuthInfo]; u != nil {
			switch {
			case u.Exec != nil:
				x.Plugin = u.Exec.Command
			case u.AuthProvider != nil:
				x.Plugin = u.AuthProvider.Name
			}
		}
		out.List = append(out.List, x)
	}
	return out, nil
}

// Look observes a cluster without a check. It never runs longer than the deadline of ctx.
func (Clusters) Look(ctx context.Context, s cluster.Selected) check.Glance {
	f, err := Open(s.Kubeconfig, 0, nil)
	if err != nil {
		return check.Glance{Schema: plan.Schema, Context: s.Context, Server: s.Server, Problem: "the kubeconfig is not valid", State: check.GlanceInvalid}
	}
	return check.Look(ctx, f, s, time.Now())
}

// minify reduces c to its current context and reads the files that this names.
func minify(c *clientcmdapi.Config) error {
	if err := clientcmdapi.MinifyConfig(c); err != nil {
		return err
	}
	return clientcmdapi.FlattenConfig(c)
}

// Foreign is a cluster without a workspace. It implements [check.Foreign].
type Foreign struct {
	config   *rest.Config
	client   *Client
	requests *preflight.Recorder
}

var _ check.Foreign = (*Foreign)(nil)

// Open returns the cluster of a kubeconfig. It sends no request. timeout bounds each request;
// zero sets no limit.
func Open(kubeconfig []byte, timeout time.Duration, log *slog.Logger) (*Foreign, error) {
	c, err := Connect(kubeconfig, log)
	if err != nil {
		return nil, err
	}
	return open(c, timeout, log)
}

// open returns the cluster of a client.
func open(c *Client, timeout time.Duration, log *slog.Logger) (*Foreign, error) {
	wrap, requests := preflight.Record()
	config := rest.CopyConfig(c.config)
	config.Wrap(wrap)
	config.Timeout = timeout
	config.WarningHandler = rest.NoWarnings{}
	c, err := ForConfig(config, log)
	if err != nil {
		return nil, err
	}
	return &Foreign{config: config, client: c, requests: requests}, nil
}

// credentialLimit bounds the first request, during which a credential plugin can run.
const credentialLimit = credentialTimeout + 5*time.Second

// Version implements [check.Foreign]. A credential plugin does not observe contexts, so that the
// request runs on its own.
func (f *Foreign) Version(ctx context.Context) (string, error) {
	type answer struct {
		version string
		err     error
	}
	got := make(chan answer, 1)
	go func() {
		v, err := f.client.Version(ctx)
		got <- answer{v, err}
	}()
	late := time.NewTimer(credentialLimit)
	defer late.Stop()
	select {
	case a := <-got:
		return a.version, a.err
	case <-ctx.Done():
		return "", ctx.Err()
	case <-late.C:
		return "", fmt.Errorf("read version: %w: no answer within %s", cluster.ErrUnreachable, credentialLimit)
	}
}

// factsLimit bounds the reading of what a distribution is recognised by.
const factsLimit = 10 * time.Second

// Facts implements [check.Foreign]. Facts that cannot be read are absent.
func (f *Foreign) Facts(ctx context.Context) distribution.Facts {
	ctx, cancel := context.WithTimeout(ctx, factsLimit)
	defer cancel()
	facts, _, _ := f.observe(ctx, 100)
	return facts
}

// maxGlanceNodes is the maximum number of nodes that Look lists.
const maxGlanceNodes = 500

// Observe implements [check.Observer].
func (f *Foreign) Observe(ctx context.Context) (distribution.Facts, check.NodeList, error) {
	return f.observe(ctx, maxGlanceNodes)
}

// observe reads what a distribution is recognised by, and at most limit nodes. The error is about
// the nodes.
func (f *Foreign) observe(ctx context.Context, limit int64) (out distribution.Facts, nodes check.NodeList, nodesErr error) {
	var wg sync.WaitGroup
	wg.Go(func() {
		l, err := f.client.core.CoreV1().Nodes().List(ctx, metav1.ListOptions{Limit: limit})
		if err != nil {
			nodesErr = classify(err)
			return
		}
		if l.RemainingItemCount != nil {
			nodes.More = int(*l.RemainingItemCount)
		}
		for i := range l.Items {
			n := &l.Items[i]
			out.Nodes = append(out.Nodes, distribution.Node{
				Name: n.Name, ProviderID: n.Spec.ProviderID, OSImage: n.Status.NodeInfo.OSImage, KubeletVersion: n.Status.NodeInfo.KubeletVersion,
				Labels: n.Labels, Annotations: n.Annotations,
			})
			_, controlPlane := n.Labels[roleLabel]
			nodes.Nodes = append(nodes.Nodes, check.NodeGlance{
				Name: n.Name, Kubernetes: n.Status.NodeInfo.KubeletVersion, ControlPlane: controlPlane, Cordoned: n.Spec.Unschedulable,
				Ready: slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
					return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
				}),
			})
		}
	})
	wg.Go(func() {
		b, err := f.client.core.Discovery().RESTClient().Get().AbsPath("/apis").SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
		var groups metav1.APIGroupList
		if err != nil || json.Unmarshal(b, &groups) != nil {
			return
		}
		for _, g := range groups.Groups {
			out.Groups = append(out.Groups, g.Name)
		}
	})
	wg.Go(func() {
		_, err := f.client.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, "kubeadm-config", metav1.GetOptions{})
		out.KubeadmConfig = err == nil && !apierrors.IsNotFound(err)
	})
	wg.Wait()
	return out, nodes, nodesErr
}

// Preflight implements [check.Foreign].
func (f *Foreign) Preflight(ctx context.Context, hops []check.PreflightRequest, emit func(plan.Event)) ([][]plan.Finding, error) {
	found, err := preflight.Run(ctx, f.config, hops, emit)
	if err != nil {
		return nil, fmt.Errorf("run preflight checks: %w", classify(err))
	}
	if n, ok := preflight.NotAllowed(f.requests.Denied()); ok {
		found[0] = append(found[0], n)
	}
	return found, nil
}

// Title implements [check.Foreign].
func (f *Foreign) Title(id string) string { return preflight.Title(id) }

// MissingRules implements [check.Foreign].
func (f *Foreign) MissingRules() string {
	denied := f.requests.Denied()
	if len(denied) == 0 {
		return ""
	}
	return preflight.ClusterRole("constellation-check-missing", preflight.Missing(denied))
}

// CheckRole is the manifest of the least ClusterRole for `check`.
func CheckRole(dryRun bool) string {
	return preflight.ClusterRole("constellation-check", preflight.Rights(dryRun))
}

// Clusters are the clusters of kubeconfigs.
type Clusters struct{ self string }

// NewClusters returns the clusters for this program. Without a path of the program, credential
// plugins run without a limit.
func NewClusters() Clusters {
	path, err := os.Executable()
	if err != nil {
		path = ""
	}
	return Clusters{path}
}

// Contexts returns the contexts that an access can select.
func (Clusters) Contexts(a cluster.Access) ([]string, error) { return Contexts(a) }

// Select returns the selected cluster.
func (c Clusters) Select(a cluster.Access) (cluster.Selected, error) { return Select(a, c.self) }

// Reach returns an error with a remedy if the API server of a cluster does not answer.
func (Clusters) Reach(ctx context.Context, s cluster.Selected) error {
	f, err := openSelected(s, s.RequestTimeout)
	if err != nil {
		return err
	}
	if _, err := f.Version(ctx); err != nil {
		return check.ForeignDown(s, err)
	}
	return nil
}

// openSelected returns the selected cluster.
func openSelected(s cluster.Selected, timeout time.Duration) (*Foreign, error) {
	f, err := Open(s.Kubeconfig, timeout, nil)
	if err != nil {
		return nil, &plan.Error{Op: "use context " + strconv.Quote(s.Context), Err: err, Exit: plan.ExitUsage, Remedy: "correct the kubeconfig"}
	}
	return f, nil
}

// CheckRole returns the manifest of the least ClusterRole for a check.
func (Clusters) CheckRole(dryRun bool) string { return CheckRole(dryRun) }

// Check checks a cluster.
func (Clusters) Check(ctx context.Context, s cluster.Selected, timeout time.Duration, r check.ForeignRequest, emit func(plan.Event)) (check.ClusterCheck, error) {
	f, err := openSelected(s, timeout)
	if err != nil {
		return check.ClusterCheck{}, err
	}
	return check.ForeignCluster(ctx, f, s, r, time.Now(), emit)
}
