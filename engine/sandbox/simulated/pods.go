package simulated

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/engine/attestation/certifier"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
	"constellation/engine/sandbox/build"
	"constellation/internal/delay"
)

// servicesRegistry is the registry in the image names of our own services.
const servicesRegistry = "registry.constellation.example/"

// pods are the pods of a machine that run as processes, static ones among them.
type pods struct {
	c *computer

	mu  sync.Mutex
	all map[string]*workload // by the kubelet's key of a pod
}

func newPods(c *computer) *pods { return &pods{c: c, all: map[string]*workload{}} }

// workload is a pod that runs as processes.
type workload struct {
	hash       string
	pod        *corev1.Pod
	containers []*container
	cancel     context.CancelFunc
	wg         sync.WaitGroup
	grace      time.Duration
	dir        string // removed at its end; empty: none
}

// container is a process that is restarted when it ends.
type container struct {
	spec *corev1.Container

	mu       sync.Mutex
	running  bool
	ready    bool
	process  *process // the running one
	started  time.Time
	restarts int32
	last     string // how the last process ended
	waits    string // waiting reason in a pod that is to end; empty: an earlier container still runs
	// Final termination; nil before it.
	ended *corev1.ContainerStateTerminated
	// Outputs of the current process, and of the previous one; nil if there was none.
	output, before *output
}

// state returns the state for the status. id differs for each start.
func (c *container) state() (id string, running, ready bool, started time.Time, restarts int32, last string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.output != nil {
		id = c.output.id
	}
	return id, c.running, c.ready, c.started, c.restarts, c.last
}

// said returns the output of the current process, or of the previous one; nil if there was none.
func (c *container) said(before bool) *output {
	c.mu.Lock()
	defer c.mu.Unlock()
	if before {
		return c.before
	}
	return c.output
}

func (p *pods) get(key string) *workload {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all[key]
}

// list returns a copy of the running workloads.
func (p *pods) list() map[string]*workload {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[string]*workload{}
	for k, w := range p.all {
		out[k] = w
	}
	return out
}

// start runs the containers of a pod, and forwards node ports to theirs. It calls command
// at each start of a process.
func (p *pods) start(key, hash string, pod *corev1.Pod, dir string, ports map[int]int, command func(*corev1.Container) (*exec.Cmd, error)) *workload {
	ctx, cancel := context.WithCancel(context.Background()) // until it is stopped
	w := &workload{hash: hash, pod: pod, cancel: cancel, dir: dir, grace: graceOf(pod)}
	for i := range pod.Spec.Containers {
		c := &container{spec: &pod.Spec.Containers[i]}
		w.containers = append(w.containers, c)
		w.wg.Go(func() { p.keep(ctx, w, c, command) })
		w.wg.Go(func() { p.probe(ctx, c) })
	}
	for nodePort, port := range ports {
		w.wg.Go(func() { p.forward(ctx, nodePort, port) })
	}
	p.mu.Lock()
	p.all[key] = w
	p.mu.Unlock()
	return w
}

// graceOf is the termination grace period of a pod.
func graceOf(pod *corev1.Pod) time.Duration {
	if s := pod.Spec.TerminationGracePeriodSeconds; s != nil {
		return min(time.Duration(*s)*time.Second, 30*time.Second)
	}
	return stopGrace
}

// stop ends a pod's processes and returns when they are gone.
func (p *pods) stop(key string) {
	w := p.get(key)
	if w == nil {
		return
	}
	w.cancel()
	w.wg.Wait()
	if w.dir != "" {
		_ = os.RemoveAll(w.dir) // the machine's directory is removed in the end
		for _, v := range w.pod.Spec.Volumes {
			if v.EmptyDir != nil {
				_ = os.Remove(p.c.emptyDir(w.pod, v.Name)) // likewise
			}
		}
	}
	p.mu.Lock()
	if p.all[key] == w {
		delete(p.all, key)
	}
	p.mu.Unlock()
}

func (p *pods) stopAll() {
	var wg sync.WaitGroup
	for key := range p.list() {
		wg.Go(func() { p.stop(key) })
	}
	wg.Wait()
}

// container returns a container of a pod that runs as processes; nil if there is none. The API
// server has static pods as mirror pods, whose names end with the node's name.
func (p *pods) container(namespace, pod, node, name string) *container {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range p.all {
		if w.pod.Namespace != namespace || w.pod.Name != pod && w.pod.Name+"-"+node != pod {
			continue
		}
		for _, c := range w.containers {
			if c.spec.Name == name {
				return c
			}
		}
	}
	return nil
}

// logFile is the output file of the nth start of a container.
func (c *computer) logFile(pod *corev1.Pod, name string, n int) string {
	return c.root("var/log/pods", fmt.Sprintf("%s_%s_%s.%d.log", pod.Namespace, pod.Name, name, n))
}

// keep runs a container's process and restarts it until ctx ends.
func (p *pods) keep(ctx context.Context, w *workload, c *container, command func(*corev1.Container) (*exec.Cmd, error)) {
	pause := time.Second
	for ctx.Err() == nil {
		begun := time.Now()
		how := p.once(ctx, w, c, command)
		if ctx.Err() != nil {
			return
		}
		c.mu.Lock()
		c.running, c.ready, c.last = false, false, how
		c.restarts++
		c.mu.Unlock()
		p.c.log.Warn("container ended", "pod", w.pod.Name, "container", c.spec.Name, "how", how)
		if time.Since(begun) > time.Minute {
			pause = time.Second
		}
		if !delay.For(ctx, pause) {
			return
		}
		pause = min(2*pause, 10*time.Second)
	}
}

// once runs the process to its end and returns the result.
func (p *pods) once(ctx context.Context, w *workload, c *container, command func(*corev1.Container) (*exec.Cmd, error)) string {
	cmd, err := command(c.spec)
	if err != nil {
		return err.Error()
	}
	out, err := newOutput(p.c, w.pod, c.spec.Name)
	if err != nil {
		return err.Error()
	}
	defer out.end()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = time.Second // its remaining children have the same output
	proc, err := spawn(cmd)
	if err != nil {
		return err.Error()
	}
	c.mu.Lock()
	c.running, c.process, c.started = true, proc, time.Now()
	c.output, c.before = out, c.output
	c.ready = c.spec.ReadinessProbe == nil
	c.mu.Unlock()
	select {
	case <-ctx.Done():
		proc.stop(w.grace)
	case <-proc.done:
	}
	return cmd.ProcessState.String()
}

// probe runs the readiness probe of a container.
func (p *pods) probe(ctx context.Context, c *container) {
	probe := c.spec.ReadinessProbe
	if probe == nil || probe.HTTPGet == nil {
		return
	}
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // as kubelets probe
	}}
	period := time.Duration(max(probe.PeriodSeconds, 1)) * time.Second
	for pause := 100 * time.Millisecond; delay.For(ctx, pause); {
		url := p.c.probeURL(c.spec, probe.HTTPGet)
		ok := false
		if req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil); err == nil {
			if resp, err := client.Do(req); err == nil {
				resp.Body.Close()
				ok = resp.StatusCode < 400
			}
		}
		c.mu.Lock()
		c.ready = ok && c.running
		c.mu.Unlock()
		if pause = period; !ok {
			pause = min(period, 500*time.Millisecond)
		}
	}
}

func (c *computer) probeURL(spec *corev1.Container, get *corev1.HTTPGetAction) string {
	host := c.IP.String()
	scheme := strings.ToLower(string(get.Scheme))
	if scheme == "" {
		scheme = "http"
	}
	return scheme + "://" + net.JoinHostPort(host, strconv.Itoa(portOf(spec, get.Port))) + get.Path
}

// portOf resolves the name of a port.
func portOf(spec *corev1.Container, port intstr.IntOrString) int {
	if port.Type == intstr.Int {
		return port.IntValue()
	}
	for _, p := range spec.Ports {
		if p.Name == port.StrVal {
			return int(p.ContainerPort)
		}
	}
	return 0
}

// isOurs reports whether an image is one of our own services.
func isOurs(image string) bool { return strings.HasPrefix(image, servicesRegistry) }

// program returns the program of an image. ok is false if there is none: then the pod is
// only reported as running.
func (c *computer) program(image string) (path string, ok bool, err error) {
	if rest, ours := strings.CutPrefix(image, servicesRegistry); ours {
		name, tag, _ := strings.Cut(rest, ":")
		return servicePath(c.Dir, name, tag), true, nil
	}
	for _, v := range build.Versions() {
		a, err := build.Load(c.Cache, v)
		if errors.Is(err, build.ErrNotCached) {
			continue
		}
		if err != nil {
			return "", false, err
		}
		for _, i := range a.Images {
			name := strings.TrimPrefix(strings.SplitN(image, ":", 2)[0], "registry.k8s.io/")
			if i.Ref != image || !strings.HasPrefix(image, "registry.k8s.io/") {
				continue
			}
			switch name {
			case "etcd":
				// A version may have two: that for the next minor has its own version in its name.
				tag, _, _ := strings.Cut(strings.TrimPrefix(image, "registry.k8s.io/etcd:"), "-")
				return cmp.Or(a.Binaries[tag+"/etcd"], a.Binaries["etcd"]), true, nil
			case "kube-apiserver", "kube-controller-manager", "kube-scheduler":
				return a.Binaries[name], true, nil
			}
			return "", false, nil
		}
	}
	return "", false, nil
}

// local returns the path in the machine's directory for a path of its host.
func (c *computer) local(path string) string {
	for from, to := range map[string]string{
		"/run/constellation-agent":       c.path(agentDir),
		"/var/lib/constellation-tpm":     c.path(tpmDir),
		filepath.Dir(certifier.Socket):   c.path(certifierDir),
		filepath.Dir(kubeadm.KMSSocket):  c.path(kmsDir),
		filepath.Dir(kms.KeysSocket):     c.path(kmsKeysDir),
		"/etc/kubernetes":                c.root("etc/kubernetes"),
		"/var/lib/etcd":                  c.root("var/lib/etcd"),
		"/var/log/kubernetes":            c.root("var/log/kubernetes"),
		"/usr/libexec/kubernetes":        c.root("usr/libexec/kubernetes"),
		"/var/lib/kubelet":               c.root("var/lib/kubelet"),
		"/usr/local/share/constellation": c.root("usr/local/share/constellation"),
	} {
		if path == from || strings.HasPrefix(path, from+"/") {
			return to + strings.TrimPrefix(path, from)
		}
	}
	return path
}

// mountsOf maps the mount paths of a container to paths on this computer.
// volumes has the directories of volumes that are not host paths.
func (c *computer) mountsOf(pod *corev1.Pod, spec *corev1.Container, volumes map[string]string) map[string]string {
	mounts := map[string]string{}
	for _, m := range spec.VolumeMounts {
		for _, v := range pod.Spec.Volumes {
			if v.Name != m.Name {
				continue
			}
			if v.HostPath != nil {
				mounts[m.MountPath] = c.local(v.HostPath.Path)
			} else if dir, ok := volumes[v.Name]; ok {
				mounts[m.MountPath] = filepath.Join(dir, m.SubPath)
			}
		}
	}
	return mounts
}

// translate rewrites a process's argument: paths that its pod mounts, and addresses
// of its own machine, its cloud and the cloud's metadata.
func (c *computer) translate(arg string, mounts map[string]string) string {
	longest := ""
	at := -1
	for path, to := range mounts {
		if path == to {
			continue
		}
		for _, before := range []string{"=", "=unix:", ""} {
			i := strings.Index(arg, before+path)
			if i < 0 || before == "" && i != 0 {
				continue
			}
			end := i + len(before) + len(path)
			if (end == len(arg) || arg[end] == '/') && len(path) > len(longest) {
				longest, at = path, i+len(before)
			}
		}
	}
	if longest != "" {
		arg = arg[:at] + mounts[longest] + arg[at+len(longest):]
	}
	flag, value, ok := strings.Cut(arg, "=")
	if !ok {
		return arg
	}
	var parts []string
	seen := map[string]bool{}
	for part := range strings.SplitSeq(value, ",") {
		switch {
		case strings.HasPrefix(part, ":"):
			part = c.IP.String() + part // all addresses of the machine: it has one
		default:
			for from, to := range map[string]string{
				"http://169.254.169.254": c.metadata(),
				"http://10.42.0.1:":      "http://" + Gateway(c.Nodes).String() + ":",
				"//127.0.0.1:":           "//" + c.IP.String() + ":",
			} {
				part = strings.Replace(part, from, to, 1)
			}
			for _, from := range []string{"127.0.0.1", "0.0.0.0"} {
				if part == from || strings.HasPrefix(part, from+":") {
					part = c.IP.String() + strings.TrimPrefix(part, from)
				}
			}
		}
		if strings.Contains(part, "://") && seen[part] {
			continue // two addresses became the same one
		}
		seen[part] = true
		parts = append(parts, part)
	}
	return flag + "=" + strings.Join(parts, ",")
}

// localEncryption has the configuration of an API server's encryption name the socket of this machine.
func (c *computer) localEncryption(args []string) error {
	const flag = "--encryption-provider-config="
	for n, a := range args {
		path, ok := strings.CutPrefix(a, flag)
		if !ok {
			continue
		}
		to, err := c.copyEncryption(path)
		if err != nil {
			return err
		}
		args[n] = flag + to
	}
	return nil
}

// copyEncryption writes the copy of a configuration of encryption that names the socket of this machine, and returns its path.
func (c *computer) copyEncryption(path string) (to string, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read configuration of encryption: %w", err)
	}
	to = path + ".simulated"
	b = bytes.ReplaceAll(b, []byte("unix://"+kubeadm.KMSSocket), []byte("unix://"+c.local(kubeadm.KMSSocket)))
	if old, err := os.ReadFile(to); err == nil && bytes.Equal(old, b) {
		return to, nil
	}
	return to, replaceFile(to, b, 0o600)
}

// followEncryption copies a configuration of encryption that was changed, which a running API server reads.
func (c *computer) followEncryption() error {
	for name := range kubeadm.EncryptionFiles(kubeadm.Encrypt) {
		path := c.root(name)
		if _, err := os.Stat(path + ".simulated"); err != nil {
			continue // no API server reads it
		}
		if _, err := c.copyEncryption(path); err != nil {
			return err
		}
	}
	return nil
}

// staticCommand returns the process of a static pod's container.
func (c *computer) staticCommand(pod *corev1.Pod) func(*corev1.Container) (*exec.Cmd, error) {
	return func(spec *corev1.Container) (*exec.Cmd, error) {
		program, ok, err := c.program(spec.Image)
		if err != nil {
			return nil, err
		}
		if !ok {
			return nil, fmt.Errorf("image %s has no program here; `constellation sandbox fetch` adds a version of Kubernetes", spec.Image)
		}
		mounts := c.mountsOf(pod, spec, nil)
		for _, dir := range mounts {
			// Like DirectoryOrCreate. Files exist at this point.
			if strings.HasPrefix(dir, c.root()) && filepath.Ext(dir) == "" {
				if err := os.MkdirAll(dir, 0o700); err != nil {
					return nil, err
				}
			}
		}
		var args []string
		for _, a := range append(append([]string{}, spec.Command...), spec.Args...)[1:] {
			args = append(args, c.translate(a, mounts))
		}
		switch filepath.Base(program) {
		case "kube-apiserver":
			args = append(args, "--bind-address="+c.IP.String())
			if err := c.localEncryption(args); err != nil {
				return nil, err
			}
		case "etcd":
			args = append(args, "--unsafe-no-fsync") // a throwaway cluster: a power cut of this computer may lose it
		}
		cmd := exec.Command(program, args...) //nolint:noctx // see spawn
		cmd.Env = os.Environ()
		return cmd, nil
	}
}
