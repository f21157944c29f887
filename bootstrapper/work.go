package bootstrapper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"constellation/bootstrapper/initproto"
	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
)

// Steps of an init, as they are told.
const (
	stepClaim   = "claim-node"
	stepReset   = "reset-node"
	stepInstall = "install-components"
	stepInit    = "kubeadm-init"

	stateRunning = "running"
	stateDone    = "done"
	stateFailed  = "failed"
)

const (
	// maxInstalls bounds how often the installation of components is tried before the
	// init has failed, and installPatience for how long: what was tried in vain for
	// minutes is told, and the console's next try goes on. What is wrong with a mirror
	// is usually a file that is just being replaced.
	maxInstalls     = 3
	installPatience = 30 * time.Second
	// cloudPatience is for how long a cloud that does not answer is asked again.
	cloudPatience = 30 * time.Second
	// maxInits bounds how often kubeadm init is tried before the init has failed.
	maxInits = 2
	// tellEvery bounds how often the progress of downloads is told.
	tellEvery = 250 * time.Millisecond
	// nodeResetAdvice is what helps after a failure.
	nodeResetAdvice = "mend the cause, then replace the machine, which accepts no second init; in the sandbox by `constellation sandbox down` and `up`"
	// retryAdvice is what helps after one that is not final.
	retryAdvice = "mend the cause, then run the same command again: the machine is still this cluster's and tries again"
)

// initPhases are kubeadm's phases in their order, to show how far it is. Names that
// a version does not have only make a step longer.
var initPhases = []string{
	"preflight", "certs", "kubeconfig", "etcd", "control-plane", "kubelet-start", "wait-control-plane",
	"kubelet-check", "control-plane-check", "upload-config", "mark-control-plane", "bootstrap-token", "kubelet-finalize", "addons",
}

// work makes this machine the first node and tells how it goes. When ctx ends, the
// process is ending, and the next one goes on.
func (s *initServer) work(ctx context.Context, req *initproto.InitRequest) {
	start := time.Now()
	w := &worker{initServer: s, step: stepClaim}
	err := w.run(ctx, req)
	if err == nil {
		h, _ := s.b.lock.holder()
		s.rec.add(success(h))
		s.b.m.Log.Info("cluster begun", "node", h.Node, "took", time.Since(start).Round(time.Millisecond))
		return
	}
	if ctx.Err() != nil {
		s.b.m.Log.Info("init interrupted, the next start goes on", "step", w.step, "err", err)
		return
	}
	retry := w.step == stepClaim || w.step == stepInstall || w.b.host.untouched()
	s.b.m.Log.Error("init failed", "step", w.step, "retry", retry, "err", err)
	// Whoever hears the failure and asks at once finds it recorded and the work ended.
	s.mu.Lock()
	defer s.mu.Unlock()
	s.working = false
	if e := s.b.lock.fail(err.Error(), retry); e != nil {
		s.b.m.Log.Error("failure not recorded", "err", e)
	}
	w.tell(stateFailed, err.Error())
	s.rec.add(failure(w.step, err.Error(), retry))
}

func success(h holder) *initproto.InitResponse {
	return &initproto.InitResponse{Kind: &initproto.InitResponse_Success{Success: &initproto.Success{ClusterId: h.clusterID(), NodeName: h.Node}}}
}

func failure(step, message string, retry bool) *initproto.InitResponse {
	remedy := nodeResetAdvice
	if retry {
		remedy = retryAdvice
	}
	return &initproto.InitResponse{Kind: &initproto.InitResponse_Failure{Failure: &initproto.Failure{Step: step, Message: message, Remedy: remedy, Retry: retry}}}
}

// worker is one run of the work.
type worker struct {
	*initServer
	step string
}

// tell says how the current step is.
func (w *worker) tell(state, text string) {
	w.rec.progress(&initproto.Progress{Step: w.step, State: state, Text: text})
}

func (w *worker) begin(step, text string) {
	w.step = step
	w.tell(stateRunning, text)
}

// run takes the steps. Each may be repeated.
func (w *worker) run(ctx context.Context, req *initproto.InitRequest) error {
	d, err := w.b.understand(req)
	if err != nil {
		return err
	}
	w.begin(stepClaim, "writing the cluster's ID to register 15 of the TPM")
	if err := w.b.lock.seal(ctx); err != nil {
		return err
	}
	w.tell(stateDone, "this machine belongs to cluster "+d.name)

	self, err := w.b.self(ctx)
	if err != nil {
		return err
	}
	lb, err := w.loadBalancer(ctx)
	if err != nil {
		return err
	}
	node := kubeadm.Node{Name: self.Name, ProviderID: self.ProviderID, IP: self.IP}
	cluster := kubeadm.Cluster{
		Name: d.name, Version: d.version, Endpoint: net.JoinHostPort(lb, strconv.Itoa(apiPort)),
		PodCIDR: d.podCIDR, ServiceCIDR: d.serviceCIDR, CertSANs: d.sans,
	}

	if w.dirty && w.b.host.kubeadm.Installed() {
		if err := w.reset(ctx, "an earlier try was not finished"); err != nil {
			return err
		}
	}
	w.dirty = false
	w.begin(stepInstall, names(d.components))
	if err := w.install(ctx, d); err != nil {
		return err
	}
	w.tell(stateDone, names(d.components))

	w.dirty = true
	for try := 1; ; try++ {
		w.begin(stepInit, fmt.Sprintf("Kubernetes %s", d.version))
		err := w.b.host.init(ctx, cluster, node, w.lines())
		if err == nil {
			break
		}
		var k *kubeadm.Error
		if ctx.Err() != nil || try >= maxInits || errors.As(err, &k) && k.InvalidConfig() {
			return err
		}
		w.rec.line("bootstrapper", "warn", fmt.Sprintf("try %d of %d failed: %v", try, maxInits, err))
		if err := w.reset(ctx, "the last try failed"); err != nil {
			return err
		}
	}
	kubeconfig, err := os.ReadFile(filepath.Join(w.b.m.Root, kubeadm.AdminKubeconfig))
	if err != nil {
		return fmt.Errorf("read the administrator's kubeconfig: %w", err)
	}
	// First the result, then the membership, then the word: whoever hears the word
	// finds the rest.
	if err := replaceFile(w.b.state, kubeconfigFile, kubeconfig, 0o600); err != nil {
		return err
	}
	if err := w.b.lock.finish(self.Name); err != nil {
		return err
	}
	w.tell(stateDone, self.Name+" is the first node")
	return nil
}

// loadBalancer asks the cloud for its address, and rides a cloud out that is away for
// a moment.
func (w *worker) loadBalancer(ctx context.Context) (string, error) {
	start := time.Now()
	var p pause
	for {
		lb, err := w.b.m.Metadata.LoadBalancer(ctx)
		if err == nil {
			return lb, nil
		}
		err = fmt.Errorf("find the load balancer: %w", err)
		passing := errors.Is(err, cloud.ErrUnavailable) || errors.Is(err, cloud.ErrThrottled)
		if ctx.Err() != nil || !passing || time.Since(start) > cloudPatience {
			return "", err
		}
		w.rec.line("bootstrapper", "warn", err.Error())
		if err := p.wait(ctx, 0, w.hurried(quietPause)); err != nil {
			return "", err
		}
	}
}

// hurried is how long a pause may be, which is less in tests.
func (w *worker) hurried(limit time.Duration) time.Duration {
	if w.b.m.hurry > 0 {
		return w.b.m.hurry
	}
	return limit
}

// install installs the components, and tries a few times.
func (w *worker) install(ctx context.Context, d demand) error {
	start := time.Now()
	var p pause
	for try := 1; ; try++ {
		err := w.b.host.installer.Install(ctx, d.components, w.downloads(d.components))
		if err == nil {
			break
		}
		if ctx.Err() != nil || try >= maxInstalls || time.Since(start) > installPatience {
			return err
		}
		w.rec.line("bootstrapper", "warn", fmt.Sprintf("try %d of %d failed: %v", try, maxInstalls, err))
		if err := p.wait(ctx, 0, w.hurried(maxPause)); err != nil {
			return err
		}
	}
	v, err := w.b.host.kubeadm.Version(ctx)
	if err != nil {
		return err
	}
	if !v.Equal(d.version) {
		return fmt.Errorf("installed kubeadm is %s, but Kubernetes %s was asked for", v, d.version)
	}
	return nil
}

func (w *worker) reset(ctx context.Context, why string) error {
	w.begin(stepReset, why)
	if err := w.b.host.kubeadm.Reset(ctx, w.lines()); err != nil {
		return err
	}
	w.tell(stateDone, "nothing is left of it")
	return nil
}

// lines passes kubeadm's lines on, and tells which phase it is in.
func (w *worker) lines() func(kubeadm.Line) {
	phase := -1
	return func(l kubeadm.Line) {
		if i := slices.Index(initPhases, l.Phase); i > phase && w.step == stepInit {
			phase = i
			w.rec.progress(&initproto.Progress{
				Step: w.step, State: stateRunning, Text: l.Phase + ": " + l.Text, Current: int64(i) + 1, Total: int64(len(initPhases)),
			})
		}
		w.rec.line("kubeadm", levelName(l.Level), lineText(l))
	}
}

// lineText is how a line of kubeadm is shown.
func lineText(l kubeadm.Line) string {
	if l.Phase == "" {
		return l.Text
	}
	return "[" + l.Phase + "] " + l.Text
}

func levelName(l slog.Level) string { return strings.ToLower(l.String()) }

// downloads tells how many bytes of all components are there.
func (w *worker) downloads(l component.List) func(component.Component, int64, int64) {
	var mu sync.Mutex
	done, total := map[string]int64{}, map[string]int64{}
	var told time.Time
	return func(c component.Component, d, t int64) {
		mu.Lock()
		defer mu.Unlock()
		done[c.Name], total[c.Name] = d, t
		if now := time.Now(); d != t && now.Sub(told) < tellEvery {
			return
		} else {
			told = now
		}
		p := &initproto.Progress{Step: w.step, State: stateRunning, Text: "bytes of " + names(l)}
		for _, n := range done {
			p.Current += n
		}
		for _, n := range total {
			p.Total += n
		}
		if len(total) < len(l) || slices.Contains(values(total), 0) {
			p.Total = 0 // not all sizes are known yet
		}
		w.rec.progress(p)
	}
}

func values(m map[string]int64) (v []int64) {
	for _, n := range m {
		v = append(v, n)
	}
	return v
}

func names(l component.List) string {
	n := make([]string, len(l))
	for i, c := range l {
		n[i] = c.Name
	}
	return strings.Join(n, ", ")
}
