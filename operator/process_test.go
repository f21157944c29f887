//go:build linux

package operator

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/hollow"
	"constellation/internal/testneeds"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// processEnv names the file with the configuration of an operator. If it is set, the test binary
// runs that operator.
const processEnv = "CONSTELLATION_TEST_OPERATOR"

func init() {
	if path := os.Getenv(processEnv); path != "" {
		if err := operatorProcess(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// processConfig is the configuration of an operator in a separate process.
type processConfig struct {
	Kubeconfig, Metadata, Control, Socket, Node string
	// Points are the points at which it crashes, each once: a file in Once records the crash.
	Points []string
	Once   string
}

func operatorProcess(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var c processConfig
	if err := json.Unmarshal(b, &c); err != nil {
		return err
	}
	access, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		return err
	}
	return Run(context.Background(), Config{
		Cluster: access, Namespace: namespace, Cloud: sandboxapi.NewInCluster(sandboxapi.NewMetadata(c.Metadata), c.Control), Agent: c.Socket, Node: c.Node,
		CloudInterval: 100 * time.Millisecond, NoElection: true, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		at: func(point string) {
			if !slices.Contains(c.Points, point) {
				return
			}
			f, err := os.OpenFile(filepath.Join(c.Once, point), os.O_CREATE|os.O_EXCL, 0o600)
			if err != nil {
				return
			}
			_ = f.Close()
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		},
	})
}

// operators starts one operator after the other, each in a process of its own.
type operators struct {
	t      *testing.T
	config string
	log    string

	mu    sync.Mutex
	now   *os.Process
	lives int
}

// run starts operators until ctx ends. Each has to be killed; one that ends by itself is an
// error.
func (o *operators) run(ctx context.Context) {
	for ctx.Err() == nil {
		f, err := os.OpenFile(o.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			o.t.Error(err)
			return
		}
		fmt.Fprintln(f, "--- a new process")
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), processEnv+"="+o.config)
		cmd.Stdout, cmd.Stderr = f, f
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		o.mu.Lock()
		err = cmd.Start()
		o.now = cmd.Process
		o.lives++
		o.mu.Unlock()
		if err != nil {
			o.t.Error(err)
			return
		}
		err = cmd.Wait()
		_ = f.Close()
		if w, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || w.Signal() != syscall.SIGKILL {
			o.t.Errorf("an operator ended by itself: %v\n%s", err, o.tail())
			return
		}
	}
}

// kill kills the running operator.
func (o *operators) kill() {
	o.mu.Lock()
	defer o.mu.Unlock()
	_ = o.now.Kill()
}

func (o *operators) count() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.lives
}

// said returns the log of the running operator.
func (o *operators) said() string {
	b, err := os.ReadFile(o.log)
	if err != nil {
		return ""
	}
	return string(b[bytes.LastIndex(b, []byte("--- a new process")):])
}

func (o *operators) tail() string {
	b, _ := os.ReadFile(o.log)
	return string(b[max(0, len(b)-4000):])
}

// ring is etcd: a process for each control plane, called as its Node.
type ring struct {
	t   *testing.T
	bin string

	mu      sync.Mutex
	members map[string]*etcdProcess
}

type etcdProcess struct {
	client, peer string
	cmd          *exec.Cmd
}

func newRing(t *testing.T, names ...string) *ring {
	t.Helper()
	testneeds.ControlPlane(t)
	bin, err := controlplane.FindBinaries()
	if errors.Is(err, controlplane.ErrNoBinaries) {
		t.Skip(err)
	}
	r := &ring{t: t, bin: filepath.Join(bin, "etcd"), members: map[string]*etcdProcess{}}
	t.Cleanup(func() {
		for _, m := range r.members {
			if m.cmd != nil {
				_ = m.cmd.Process.Kill()
				_ = m.cmd.Wait()
			}
		}
	})
	var all []string
	for _, n := range names {
		m, err := newEtcdProcess()
		if err != nil {
			t.Fatal(err)
		}
		r.members[n] = m
		all = append(all, n+"="+m.peer)
	}
	for _, n := range names {
		if err := r.start(n, "new", strings.Join(all, ",")); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func newEtcdProcess() (*etcdProcess, error) {
	m := &etcdProcess{}
	for _, url := range []*string{&m.client, &m.peer} {
		address, err := freeAddress()
		if err != nil {
			return nil, err
		}
		*url = "http://" + address
	}
	return m, nil
}

// freeAddress returns an unused loopback address. Its port is outside of the kernel's ephemeral
// range, so it stays free for a moment.
func freeAddress() (string, error) {
	var err error
	for range 100 {
		var l net.Listener
		if l, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20_000+rand.IntN(12_000))); err == nil {
			return l.Addr().String(), l.Close()
		}
	}
	return "", err
}

func (r *ring) start(name, state, initial string) error {
	m := r.members[name]
	m.cmd = exec.Command(r.bin, "--name", name, "--data-dir", r.t.TempDir(), "--log-level", "error",
		"--listen-client-urls", m.client, "--advertise-client-urls", m.client, "--listen-peer-urls", m.peer, "--initial-advertise-peer-urls", m.peer,
		"--initial-cluster", initial, "--initial-cluster-state", state, "--heartbeat-interval", "200", "--election-timeout", "2000", "--unsafe-no-fsync")
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return m.cmd.Start()
}

// ask sends a request to the member of a node.
func (r *ring) ask(ctx context.Context, name, path string, body, answer any) error {
	r.mu.Lock()
	m := r.members[name]
	r.mu.Unlock()
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.client+"/v3/"+path, bytes.NewReader(b))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		var refusal struct{ Message string }
		_ = json.NewDecoder(resp.Body).Decode(&refusal)
		return fmt.Errorf("%s: %s: %s", path, resp.Status, refusal.Message)
	}
	return json.NewDecoder(resp.Body).Decode(answer)
}

type etcdMember struct {
	ID        string
	Name      string
	PeerURLs  []string
	IsLearner bool
}

// list is a linearizable read of the members.
func (r *ring) list(ctx context.Context, by string) ([]etcdMember, error) {
	var a struct{ Members []etcdMember }
	err := r.ask(ctx, by, "cluster/member/list", struct{}{}, &a)
	return a.Members, err
}

// join does what kubeadm does on a new control plane: a learner first, then a voter.
func (r *ring) join(ctx context.Context, by, name string) error {
	m, err := newEtcdProcess()
	if err != nil {
		return err
	}
	var added struct {
		Member  etcdMember
		Members []etcdMember
	}
	// etcd refuses for a while, and a learner is no voter before it has caught up.
	again := func(do func() error) error {
		for {
			err := do()
			if err == nil || ctx.Err() != nil {
				return err
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	if err := again(func() error {
		return r.ask(ctx, by, "cluster/member/add", map[string]any{"peerURLs": []string{m.peer}, "isLearner": true}, &added)
	}); err != nil {
		return err
	}
	var initial []string
	for _, o := range added.Members {
		n := o.Name
		if o.ID == added.Member.ID {
			n = name
		}
		initial = append(initial, n+"="+o.PeerURLs[0])
	}
	r.mu.Lock()
	r.members[name] = m
	err = r.start(name, "existing", strings.Join(initial, ","))
	r.mu.Unlock()
	if err != nil {
		return err
	}
	return again(func() error {
		return r.ask(ctx, by, "cluster/member/promote", map[string]any{"ID": added.Member.ID}, &struct{}{})
	})
}

// end kills the member of a machine that is gone.
func (r *ring) end(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m := r.members[name]; m.cmd != nil {
		_ = m.cmd.Process.Kill()
		_ = m.cmd.Wait()
		m.cmd = nil
	}
}

// TestOperatorIsKilledAtControlPlanes upgrades Kubernetes and replaces a control plane,
// the one that leads etcd, with operators that are killed before and after each effect that
// only control planes have, and once while kubeadm runs. etcd is real, with a process per member.
// The agent is real except for kubeadm. The API server and the operators are real, with the rights
// of the chart. Machines are fake.
func TestOperatorIsKilledAtControlPlanes(t *testing.T) {
	testneeds.Time(t, "half a minute")
	const staying, other, leaving, newNode = "control-plane-0", "control-plane-1", "control-plane-2", "control-plane-3"
	etcd := newRing(t, staying, other, leaving)
	c := newCluster(t)
	rig := newHostRig(t)
	rig.host.Name, rig.host.Etcd.Endpoint = staying, etcd.members[staying].client
	rig.write("ctl/hang-apply", "", 0o600)
	rig.up()

	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	t.Cleanup(func() { cancel(); work.Wait() })
	machines, wait, err := hollow.Start(ctx, hollow.Options{
		Cluster: c.cp.Config(), Images: []string{"v1.0.0", "v1.1.0"},
		Times: hollow.Times{Boot: 100 * time.Millisecond, Join: 100 * time.Millisecond, Drain: 100 * time.Millisecond, Off: 100 * time.Millisecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	work.Go(wait)
	work.Go(func() { (&rolling{cluster: c}).deployments(ctx) })

	// Two control planes are at the target, but for Kubernetes, which is upgraded once.
	components, err := json.Marshal(rig.components(newKubernetes).List)
	if err != nil {
		t.Fatal(err)
	}
	for ref, data := range map[string]map[string]string{
		refA: {"cluster-version": oldKubernetes, "components": "[]"}, refB: {"cluster-version": newKubernetes, "components": string(components)},
	} {
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: ref}, Data: data}
		if ref == refB {
			m.Annotations = map[string]string{v1alpha1.AnnotationStatement: rig.components(newKubernetes).Statement}
		}
		c.create(m)
	}
	nv := &v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}, Spec: v1alpha1.NodeVersionSpec{
		Image: sandboxapi.ImageReference("hollow", "v1.1.0"), ImageVersion: "v1.1.0", KubernetesComponentsReference: refB, KubernetesClusterVersion: newKubernetes,
	}}
	c.create(nv)
	nv.Status.JoinComponents = v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}
	if err := errors.Join(
		c.admin.Status().Update(ctx, nv),
		machines.SetImage(sandboxapi.ControlPlaneGroup, "v1.1.0"), machines.Seed(ctx, sandboxapi.ControlPlaneGroup, 2, refB),
		machines.SetImage(sandboxapi.ControlPlaneGroup, "v1.0.0"), machines.Seed(ctx, sandboxapi.ControlPlaneGroup, 1, refA),
	); err != nil {
		t.Fatal(err)
	}
	within := func(what string, holds func() (string, bool)) {
		t.Helper()
		(&rolling{cluster: c}).within(2*time.Minute, what, holds)
	}
	agent := rig.client()
	within("the leaving member leads etcd", func() (string, bool) {
		all, err := agent.Members(ctx)
		if err != nil || slices.ContainsFunc(all, func(m decision.Member) bool { return !m.Healthy || !m.Voter }) || len(all) != 3 {
			return fmt.Sprint(all, err), false
		}
		i := slices.IndexFunc(all, func(m decision.Member) bool { return m.Leader })
		if i < 0 || all[i].Node == leaving {
			return "etcd has no leader", i >= 0
		}
		return fmt.Sprint(agent.MoveLeader(ctx, all[i].Node, leaving)), false
	})

	// Machines that become Nodes join etcd, those that are gone have left it.
	work.Go(func() {
		joined := map[string]bool{staying: true, other: true, leaving: true}
		for ; ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
			there := map[string]bool{}
			for _, i := range machines.Instances() {
				there[i.Name] = true
			}
			var nodes corev1.NodeList
			if err := c.admin.List(ctx, &nodes); err != nil {
				continue
			}
			for _, n := range nodes.Items {
				if there[n.Name] && !joined[n.Name] {
					joined[n.Name] = true
					if err := etcd.join(ctx, staying, n.Name); err != nil && ctx.Err() == nil {
						t.Errorf("%s does not join etcd: %v", n.Name, err)
					}
				}
			}
			for n := range joined {
				if joined[n] && !there[n] {
					joined[n] = false
					all, err := etcd.list(ctx, staying)
					if err == nil && slices.ContainsFunc(all, func(m etcdMember) bool { return m.Name == n }) {
						t.Errorf("machine %s is deleted, and still a member of etcd: %+v", n, all)
					}
					etcd.end(n)
				}
			}
		}
	})
	// etcd serves all clients, and its members are the expected ones.
	var (
		written int
		history []string
		noted   = make(chan struct{})
		noting  context.CancelFunc
	)
	watched, noting := context.WithCancel(ctx)
	note := func(all []etcdMember) {
		var names []string
		for _, m := range all {
			n := m.Name
			if n == "" {
				n = "(new)"
			}
			if m.IsLearner {
				n += " learns"
			}
			names = append(names, n)
		}
		slices.Sort(names)
		if is := strings.Join(names, ", "); len(history) == 0 || history[len(history)-1] != is {
			history = append(history, is)
		}
	}
	work.Go(func() {
		defer close(noted)
		last := time.Now()
		for ; watched.Err() == nil; time.Sleep(20 * time.Millisecond) {
			all, err := etcd.list(watched, staying)
			if err == nil {
				// With the same value in two puts the test could not detect the second.
				err = etcd.ask(watched, staying, "kv/put", map[string]any{"key": []byte("canary"), "value": fmt.Appendf(nil, "%d", written+1)}, &struct{}{})
			}
			if err != nil {
				// An election takes two of these seconds, a busy computer some more.
				if watched.Err() == nil && time.Since(last) > 30*time.Second {
					t.Errorf("etcd has no quorum for 30 s: %v; members were %q", err, history)
					return
				}
				continue
			}
			written++
			last = time.Now()
			note(all)
		}
	})

	var points []string
	for _, kind := range []decision.ActionKind{decision.StartUpgrade, decision.MoveLeader, decision.RemoveMember} {
		points = append(points, "before:"+kind.String(), "after:"+kind.String())
	}
	o := &operators{t: t, config: filepath.Join(t.TempDir(), "operator.json"), log: filepath.Join(t.TempDir(), "operator.log")}
	config := processConfig{Kubeconfig: c.kubeconfig(), Metadata: machines.Metadata, Control: machines.Control, Socket: rig.socket(), Node: staying, Points: points, Once: t.TempDir()}
	b, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.config, b, 0o600); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	work.Go(func() { o.run(ctx) })
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("members of etcd were %q; the operators' log ends with\n%s", history, o.tail())
		}
	})

	within("kubeadm applies", func() (string, bool) { return o.said(), rig.at("apply") })
	lives := o.count()
	o.kill()
	within("another operator follows the run of kubeadm", func() (string, bool) {
		return o.said(), o.count() > lives && strings.Contains(o.said(), "stage=apply")
	})
	rig.release("hang-apply")

	done := func() []string {
		found, err := os.ReadDir(config.Once)
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, f := range found {
			all = append(all, f.Name())
		}
		return all
	}
	within("the control plane is replaced, and no orphan is left", func() (string, bool) {
		var (
			nodes   corev1.NodeList
			pending v1alpha1.PendingNodeList
			joining v1alpha1.JoiningNodeList
			as      v1alpha1.AutoscalingStrategy
			nv      v1alpha1.NodeVersion
		)
		if err := errors.Join(c.admin.List(ctx, &nodes), c.admin.List(ctx, &pending), c.admin.List(ctx, &joining)); err != nil {
			return err.Error(), false
		}
		c.get(v1alpha1.AutoscalingStrategyName, &as)
		c.get(v1alpha1.NodeVersionName, &nv)
		var left []string
		for _, n := range nodes.Items {
			at := n.Name
			for _, a := range []string{v1alpha1.AnnotationCordoned, v1alpha1.AnnotationHeir} {
				if n.Annotations[a] != "" {
					at += " " + a
				}
			}
			if n.Spec.Unschedulable {
				at += " cordoned"
			}
			left = append(left, at)
		}
		instances := machines.Instances()
		is := fmt.Sprintf("Ready %s, waiting %+v; nodes %q, %d machines, %d intents, %d joining, autoscaler %v; died at %q", conditionText(nv.Status, v1alpha1.ConditionReady),
			nv.Status.Waiting, left, len(instances), len(pending.Items), len(joining.Items), as.Spec.Enabled, done())
		return is, conditionText(nv.Status, v1alpha1.ConditionReady) == "True UpToDate" && slices.Equal(left, []string{staying, other, newNode}) && len(instances) == 3 &&
			len(pending.Items) == 0 && len(joining.Items) == 0 && as.Spec.Enabled && as.Annotations[v1alpha1.AnnotationPaused] == ""
	})
	within("all members of etcd are healthy", func() (string, bool) {
		all, err := agent.Members(ctx)
		names := map[string]bool{}
		for _, m := range all {
			names[m.Node] = m.Voter && m.Healthy
		}
		return fmt.Sprint(all, err), maps.Equal(names, map[string]bool{staying: true, other: true, newNode: true})
	})
	noting()
	<-noted
	all, err := etcd.list(ctx, staying) // not every observation was recorded
	if err != nil {
		t.Fatal(err)
	}
	note(all)
	t.Logf("%d operators in %s, %d writes to etcd; its members: %q", o.count(), time.Since(begun).Round(time.Millisecond), written, history)

	if got := done(); len(got) != len(points) || o.count() < len(points)+2 {
		t.Errorf("%d operators died at %q, want all of %q", o.count(), got, points)
	}
	if runs, err := os.ReadFile(filepath.Join(rig.dir, "ctl/runs")); err != nil || string(runs) != "plan\napply\n" {
		t.Errorf("kubeadm ran %q, %v; want one plan and one apply", runs, err)
	}
	// A joining member may be listed in one of these forms, or be missing.
	began, ended := strings.Join([]string{staying, other, leaving}, ", "), strings.Join([]string{staying, other, newNode}, ", ")
	for i, h := range history {
		switch {
		case i == 0 && h == began, i == len(history)-1 && h == ended:
		case i > 0 && i < len(history)-1 && (h == began+", "+newNode || h == began+", "+newNode+" learns" || h == "(new) learns, "+began):
		default:
			t.Errorf("the members of etcd were %q", history)
		}
	}
	var last struct{ Kvs []struct{ Value []byte } }
	if err := etcd.ask(ctx, staying, "kv/range", map[string]any{"key": []byte("canary")}, &last); err != nil || len(last.Kvs) != 1 {
		t.Fatalf("the written key is %+v, %v", last, err)
	}
	if got, want := string(last.Kvs[0].Value), fmt.Sprint(written); got != want && got != fmt.Sprint(written+1) { // one more put may have been in progress
		t.Errorf("the last of the writes to etcd is %s, want %s", got, want)
	}
	if strings.Contains(o.tail(), "is forbidden") {
		t.Errorf("the chart's role lacks rights:\n%s", o.tail())
	}
}

// kubeconfig writes the access of the chart's ServiceAccount.
func (c *cluster) kubeconfig() string {
	c.t.Helper()
	r := c.access()
	k := clientcmdapi.NewConfig()
	k.Clusters["c"] = &clientcmdapi.Cluster{Server: r.Host, CertificateAuthorityData: r.CAData}
	k.AuthInfos["c"] = &clientcmdapi.AuthInfo{ClientCertificateData: r.CertData, ClientKeyData: r.KeyData}
	k.Contexts["c"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "c"}
	k.CurrentContext = "c"
	path := filepath.Join(c.t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*k, path); err != nil {
		c.t.Fatal(err)
	}
	return path
}
