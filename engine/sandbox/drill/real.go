package drill

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sandbox/recorder"
	standins "constellation/engine/sandbox/simulated"
	"constellation/engine/workspace"
	"constellation/operator/decision"
)

// workers is the number of workers in a drill with processes: with one control plane
// that is the smallest cluster in which every step occurs.
const workers = 2

// consoleProgram returns the path of constellation: beside this program, or in PATH.
func consoleProgram() (string, error) {
	const name = "constellation"
	if self, err := os.Executable(); err == nil {
		path := filepath.Join(filepath.Dir(self), name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path, nil
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", &plan.Error{Op: "find the program " + name, Err: err, Exit: plan.ExitUsage, Remedy: "install " + name + " beside constellation-sandbox; `make build` builds both"}
	}
	return path, nil
}

// running creates a cluster of real or simulated machines with the commands of a user,
// and upgrades it likewise. It has the lasting faults from the start.
func (d *Drills) running(ctx context.Context, kind, place string, spec engine.DrillSpec, vs versions, lasting []string, say teller) (_ *site, err error) {
	exe, err := consoleProgram()
	if err != nil {
		return nil, err
	}
	agnhost := ""
	for _, v := range []string{vs.kubernetesTo, vs.kubernetesFrom} {
		a, err := build.Load(d.dirs.Cache, v)
		if err != nil {
			return nil, &plan.Error{Op: "find Kubernetes " + v, Err: errors.New("it is not in the cache"), Exit: plan.ExitBlocked, Remedy: "build it with `constellation sandbox fetch " + v + "`"}
		}
		for _, image := range a.Images {
			if strings.HasPrefix(image.Ref, agnhostImage) {
				agnhost = image.Ref // of the version before the upgrade
			}
		}
	}
	ws := filepath.Join(place, clusterDir)
	if err := os.MkdirAll(ws, 0o700); err != nil {
		return nil, err
	}
	down := func(ctx context.Context) error { return d.boxes.Down(ctx, ws, nil) }
	con := &console{versions: vs, exe: exe, workspace: ws, log: filepath.Join(place, "console.log"), say: say}
	defer func() {
		if err != nil {
			clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleaning)
			defer cancel()
			err = errors.Join(err, down(clean))
		}
	}()
	info, err := d.boxes.Up(ctx, engine.SandboxSpec{
		Workspace: ws, ControlPlanes: spec.ControlPlanes, Workers: workers, Kubernetes: vs.kubernetesFrom, Image: vs.releaseFrom, Release: vs.releaseFrom, Machines: kind, Faults: lasting, Cloud: spec.Cloud,
	}, nil)
	if err != nil {
		return nil, err
	}
	say("machines run; `constellation init`")
	if err := con.once(ctx, "init", "--non-interactive", "--yes"); err != nil {
		return nil, err
	}
	access, err := clientcmd.BuildConfigFromFlags("", filepath.Join(ws, workspace.KubeconfigFile))
	if err != nil {
		return nil, err
	}
	box, host, err := d.dirs.Reach(info.Name, d.log)
	if err != nil {
		return nil, err
	}
	api, err := client.New(access, client.Options{})
	if err != nil {
		return nil, err
	}
	service, err := web(ctx, api, agnhost)
	if err != nil {
		return nil, err
	}
	encrypts, err := keepSecret(ctx, api, ws)
	if err != nil {
		return nil, err
	}
	var killUnit func(ctx context.Context, machine, program string) error
	var runs func(ctx context.Context) []recorder.Run
	how := ""
	if spec.InPlace {
		how = "in place, "
		if err := keepMachines(ctx, access); err != nil {
			return nil, err
		}
		killUnit = func(ctx context.Context, name, program string) error { return killProgram(ctx, host, name, program) }
		runs = func(ctx context.Context) []recorder.Run { return lastRuns(ctx, box, host) }
	}
	kill := func(ctx context.Context) error { return killLeader(ctx, api, host) }
	var cannot []recorder.Rule
	if kind == simulated { // simulated Services have no reachable address, and the host name is this computer's
		service, cannot = "", []recorder.Rule{recorder.ServiceAnswers, recorder.LeaseMoved}
		kill = func(ctx context.Context) error { return killSimulated(ctx, box, host) }
	}
	planes := "1 control plane"
	if spec.ControlPlanes > 1 {
		planes = fmt.Sprint(spec.ControlPlanes, " control planes")
	}
	laterPlanes := func(ctx context.Context) (names []string) {
		all, err := box.Instances(ctx)
		if err != nil {
			return nil // it is listed again soon
		}
		for _, i := range all {
			if i.Role == cloud.ControlPlane {
				names = append(names, i.Name)
			}
		}
		return names
	}
	names := laterPlanes(ctx)
	if len(names) != spec.ControlPlanes {
		return nil, fmt.Errorf("list control planes: the sandbox has %q, want %d", names, spec.ControlPlanes)
	}
	slices.Sort(names)
	machines, err := atVendor(box, spec.Cloud, info.Name)
	if err != nil {
		return nil, err
	}
	limit := 15*time.Minute + time.Duration(spec.ControlPlanes)*5*time.Minute // one is replaced after the other
	where := ""
	if spec.Cloud != ownCloud {
		limit += decision.CreateDeadline // a machine whose operation is lost is given up then
		where = " in an emulated " + spec.Cloud
	}
	return &site{
		machines: machines, size: spec.ControlPlanes + workers,
		kubernetes:    vs.kubernetesTo,
		what:          fmt.Sprintf("%s and %d workers, %s machines%s, %s%s", planes, workers, kind, where, encryption[encrypts]+how, vs),
		controlPlanes: names, limit: limit,
		cluster: access, cloud: box, host: host, service: service, unseen: cannot, nameless: kind == simulated,
		limits: recorder.Limits{Join: 3 * time.Minute, Secret: secretName, Encrypted: encrypts},
		begin:  con.begin, rest: con.rest, close: func(ctx context.Context) error { con.stop(); return down(ctx) },

		laterPlanes:  laterPlanes,
		killOperator: kill,
		killConsole:  con.kill,
		kill:         killUnit,
		runs:         runs,
		power: func(ctx context.Context, name string) error {
			id := sandboxapi.ProviderID(info.Name, name)
			return errors.Join(box.StopInstance(ctx, id), box.RebootInstance(ctx, id))
		},
		powerAll: func(ctx context.Context, announce func([]string)) ([]string, error) {
			return powerAll(ctx, box, info.Name, announce)
		},
		away: func(ctx context.Context, names []string, since time.Time) []string {
			return away(ctx, api, box, names, since)
		},
	}, nil
}

// secretName is the name of the Secret that each drill keeps.
const secretName = "kept"

// encryption describes a cluster that encrypts Secrets.
var encryption = map[bool]string{true: "with encrypted Secrets, "}

// keepSecret creates a Secret that a drill must keep, and reports whether the cluster of the workspace encrypts Secrets in etcd.
func keepSecret(ctx context.Context, api client.Client, dir string) (bool, error) {
	if err := api.Create(ctx, recorder.NewSecret(secretName, []byte(rand.Text()))); err != nil {
		return false, fmt.Errorf("create Secret %s: %w", secretName, err)
	}
	w, err := workspace.OpenWorkspace(dir)
	if err != nil {
		return false, err
	}
	s, err := w.State()
	if err != nil {
		return false, err
	}
	return s.ClusterValues.EncryptsSecrets, nil
}

// powerAll switches all machines of a sandbox off, and then on. Machines that are deleted meanwhile are skipped.
func powerAll(ctx context.Context, box *sandboxapi.Client, sandbox string, announce func([]string)) (names []string, err error) {
	all, err := box.Instances(ctx)
	if err != nil {
		return nil, err
	}
	for _, i := range all {
		if i.State != cloud.Terminating && i.State != cloud.Terminated {
			names = append(names, i.Name)
		}
	}
	slices.Sort(names)
	announce(names)
	for _, do := range []func(context.Context, string) error{box.StopInstance, box.RebootInstance} {
		errs := make([]error, len(names))
		var wg sync.WaitGroup
		for n, name := range names {
			wg.Go(func() {
				if err := do(ctx, sandboxapi.ProviderID(sandbox, name)); !errors.Is(err, cloud.ErrNotFound) {
					errs[n] = err
				}
			})
		}
		wg.Wait()
		err = errors.Join(append(errs, err)...) // machines that are off are switched on in any case
	}
	return names, err
}

// away returns the machines that exist and have no Ready node that reported since a time; see [site].
func away(ctx context.Context, api client.Client, box *sandboxapi.Client, names []string, since time.Time) (list []string) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var nodes corev1.NodeList
	all, err := box.Instances(ctx)
	if err != nil || api.List(ctx, &nodes) != nil {
		return names
	}
	for _, name := range names {
		exists := slices.ContainsFunc(all, func(i cloud.Instance) bool {
			return i.Name == name && i.State != cloud.Terminating && i.State != cloud.Terminated
		})
		ready := slices.ContainsFunc(nodes.Items, func(n corev1.Node) bool {
			return n.Name == name && slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
				return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue && !c.LastHeartbeatTime.Time.Before(since.Truncate(time.Second))
			})
		})
		if exists && !ready {
			list = append(list, name)
		}
	}
	return list
}

// vendorMachines are the machines of a sandbox as an emulated Google Cloud names them.
type vendorMachines struct {
	box           *sandboxapi.Client
	project, zone string
}

// atVendor returns the machines of a sandbox with the provider IDs of an emulated cloud; nil without one.
func atVendor(box *sandboxapi.Client, provider, name string) (recorder.Cloud, error) {
	if provider == ownCloud {
		return nil, nil
	}
	p, ok := providers.Named(provider)
	if !ok || provider != gcp.Name {
		return nil, fmt.Errorf("list machines of cloud %q: its provider IDs are not known", provider)
	}
	section, _ := p.Sandbox(providers.SandboxOf{Name: name})
	zones := section.List("zones")
	return vendorMachines{box, section.Text("project"), zones[0]}, nil
}

// Instances implements [recorder.Cloud].
func (v vendorMachines) Instances(ctx context.Context) ([]cloud.Instance, error) {
	all, err := v.box.Instances(ctx)
	for i := range all {
		_, group, perr := sandboxapi.ParseGroupID(all[i].Group)
		if perr != nil {
			return nil, perr
		}
		all[i].ProviderID, all[i].Group = gcp.ProviderID(v.project, v.zone, all[i].Name), gcp.GroupID(v.project, v.zone, group)
	}
	return all, err
}

// agnhostImage begins the reference of the image with the web server.
const agnhostImage = "registry.k8s.io/e2e-test-images/agnhost:"

// web deploys a web server, with a budget, and returns the address of its service.
func web(ctx context.Context, api client.Client, image string) (string, error) {
	const name = "web"
	labels, replicas, two := map[string]string{"app": name}, int32(3), intstr.FromInt32(2)
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       corev1.ServiceSpec{Selector: labels, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}},
	}
	deployment := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{
				Name: name, Image: image, Command: []string{"/agnhost", "netexec", "--http-port=8080"},
			}}}},
		},
	}
	for _, o := range []client.Object{
		deployment, service,
		&policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &two, Selector: &metav1.LabelSelector{MatchLabels: labels}},
		},
	} {
		if err := api.Create(ctx, o); err != nil {
			return "", fmt.Errorf("create %T: %w", o, err)
		}
	}
	err := until(ctx, 2*time.Minute, "the web server runs", func() bool {
		return api.Get(ctx, client.ObjectKeyFromObject(deployment), deployment) == nil && deployment.Status.ReadyReplicas == replicas
	})
	return service.Spec.ClusterIP + ":80", err
}

// killLeader kills the process of the operator that leads, in its machine.
func killLeader(ctx context.Context, api client.Client, host sandbox.Machines) error {
	// Machines have no pkill. A process is the operator's if that is its program.
	const kill = `for p in /proc/[0-9]*; do case "$(readlink $p/exe)" in */operator) kill -9 ${p#/proc/} && exit 0;; esac; done; exit 1`
	return until(ctx, 3*time.Minute, "an operator leads that could be killed", func() bool {
		var l coordinationv1.Lease
		if err := api.Get(ctx, client.ObjectKey{Namespace: "constellation-system", Name: "constellation-operator"}, &l); err != nil || l.Spec.HolderIdentity == nil {
			return false
		}
		node, _, _ := strings.Cut(*l.Spec.HolderIdentity, "_")
		code, err := host.Exec(ctx, node, []string{"bash", "-c", kill}, machine.Stdio{})
		return err == nil && code == 0
	})
}

// killSimulated kills the operator's process on the first control plane that has one.
func killSimulated(ctx context.Context, box *sandboxapi.Client, host sandbox.Machines) error {
	stand, ok := host.(*standins.Host)
	if !ok {
		return fmt.Errorf("%T has no simulated machines", host)
	}
	return until(ctx, 3*time.Minute, "an operator runs that could be killed", func() bool {
		all, err := box.Instances(ctx)
		return err == nil && slices.ContainsFunc(all, func(i cloud.Instance) bool {
			return i.Role == cloud.ControlPlane && stand.KillContainer(ctx, i.Name, "operator") == nil
		})
	})
}

// console runs this program as a user does.
type console struct {
	versions

	exe, workspace, log string
	say                 teller

	mu    sync.Mutex
	cmd   *exec.Cmd // that runs
	end   context.CancelFunc
	ended chan struct{}
}

func (c *console) command(out *bytes.Buffer, args ...string) *exec.Cmd {
	cmd := exec.Command(c.exe, append([]string{"-C", c.workspace}, args...)...) //nolint:noctx // it is killed, or asked to end
	cmd.Env = append(os.Environ(), "NO_COLOR=1", "CI=1")
	cmd.Stdout, cmd.Stderr = out, out
	dieWithParent(cmd)
	return cmd
}

// once runs a command to its end.
func (c *console) once(ctx context.Context, args ...string) error {
	var out bytes.Buffer
	cmd := c.command(&out, args...)
	if err := cmd.Start(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("constellation %s: %w: %s", strings.Join(args, " "), err, lastLines(out.String(), 5))
	}
	return nil
}

// begin runs the upgrade command, and repeats it after a hop, a kill or a failure, until
// nothing is left to upgrade.
func (c *console) begin(ctx context.Context, giveUp func(error) bool) error {
	run, end := context.WithCancel(context.WithoutCancel(ctx))
	c.mu.Lock()
	c.end, c.ended = end, make(chan struct{})
	c.mu.Unlock()
	go func() {
		defer close(c.ended)
		// The process ends with this thread if the drill is killed.
		runtime.LockOSThread()
		for run.Err() == nil {
			var out bytes.Buffer
			args := []string{"upgrade", "apply", "--non-interactive", "--yes", "--to", c.releaseTo, "--kubernetes", c.kubernetesTo}
			if c.kubernetesTo != c.kubernetesFrom {
				args = append(args, "--ack", "oldest-supports-kubernetes")
			}
			cmd := c.command(&out, args...)
			c.mu.Lock()
			err := cmd.Start()
			c.cmd = cmd
			c.mu.Unlock()
			if err == nil {
				err = cmd.Wait()
			}
			_ = os.WriteFile(c.log, out.Bytes(), 0o600)
			code := cmd.ProcessState.ExitCode()
			switch code {
			case plan.ExitNothing:
				c.say("the console is done (exit %d)", code)
				return
			case plan.ExitDone:
				c.say("the console is done with a hop (exit %d)", code)
				continue
			}
			if code == plan.ExitUsage || code == plan.ExitBlocked || code == plan.ExitUnacknowledged {
				if giveUp(fmt.Errorf("upgrade apply ended with %d: %s", code, lastLines(out.String(), 6))) {
					return
				}
			}
			if run.Err() == nil {
				c.say("the console ended with %v: %s; the command is given again", err, lastLines(out.String(), 2))
			}
			select {
			case <-run.Done():
			case <-time.After(2 * time.Second):
			}
		}
	}()
	return nil
}

// kill kills the console that runs.
func (c *console) kill(ctx context.Context) error {
	return until(ctx, 10*time.Second, "a console runs that could be killed", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.cmd != nil && c.cmd.ProcessState == nil && c.cmd.Process.Kill() == nil
	})
}

// rest waits for the end of the console, a minute at most.
func (c *console) rest(ctx context.Context) {
	select {
	case <-c.ended:
	case <-ctx.Done():
	case <-time.After(time.Minute):
		c.say("the console does not end though the upgrade is over")
	}
}

func (c *console) stop() {
	c.mu.Lock()
	end, cmd, ended := c.end, c.cmd, c.ended
	c.mu.Unlock()
	if end == nil {
		return
	}
	end()
	_ = cmd.Process.Kill() // already ended is as good
	<-ended
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(len(lines)-n, 0):], " | ")
}
