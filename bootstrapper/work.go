package bootstrapper

import (
	"cmp"
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

// Steps of an init, as reported.
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
	// maxInstalls bounds the attempts to install components before the init fails, and
	// installPatience their total time: after minutes the failure is reported, and the console's
	// next attempt continues. A mirror usually fails while a file is being replaced.
	maxInstalls     = 3
	installPatience = 30 * time.Second
	// cloudPatience is how long requests to an unavailable cloud are retried.
	cloudPatience = 30 * time.Second
	// maxInits bounds the attempts of kubeadm init before the init fails.
	maxInits = 2
	// tellEvery is the interval of download progress reports.
	tellEvery = 250 * time.Millisecond
	// nodeResetAdvice is the remedy after a failure.
	nodeResetAdvice = "fix the cause, then replace the machine, which accepts no second init"
	// retryAdvice is the remedy after a failure that is not final.
	retryAdvice = "fix the cause, then run the same command again: the machine is still claimed for this cluster and retries"
)

// initPhases are kubeadm's phases in order, to show progress. A phase that a version lacks
// only makes a step longer.
var initPhases = []string{
	"preflight", "certs", "kubeconfig", "etcd", "control-plane", "kubelet-start", "wait-control-plane",
	"kubelet-check", "control-plane-check", "upload-config", "mark-control-plane", "bootstrap-token", "kubelet-finalize", "addons",
}

// work makes this machine the first node and reports progress. When ctx ends, the process is
// ending, and the next one continues.
func (s *initServer) work(ctx context.Context, req *initproto.InitRequest) {
	start := time.Now()
	w := &worker{initServer: s, step: stepClaim}
	err := w.run(ctx, req)
	if err == nil {
		h, _ := s.b.lock.holder()
		s.rec.add(s.success(h))
		s.b.m.Log.Info("cluster initialized", "node", h.Node, "took", time.Since(start).Round(time.Millisecond))
		return
	}
	if ctx.Err() != nil {
		s.b.m.Log.Info("init interrupted, the next start resumes it", "step", w.step, "err", err)
		return
	}
	retry := w.step == stepClaim || w.step == stepInstall || w.b.host.untouched()
	s.b.m.Log.Error("init failed", "step", w.step, "retry", retry, "err", err)
	// A caller that receives the failure and retries at once finds it recorded and the work
	// ended.
	s.mu.Lock()
	defer s.mu.Unlock()
	s.working = false
	if e := s.b.lock.fail(err.Error(), retry); e != nil {
		s.b.m.Log.Error("failure not recorded", "err", e)
	}
	w.tell(stateFailed, err.Error())
	s.rec.add(failure(w.step, err.Error(), retry))
}

func (s *initServer) success(h holder) *initproto.InitResponse {
	encrypts, err := s.b.encrypts()
	if err != nil { // the console would leave further control planes without keys
		s.b.m.Log.Error("keys of the key service not found", "err", err)
		encrypts = true
	}
	return &initproto.InitResponse{Kind: &initproto.InitResponse_Success{Success: &initproto.Success{ClusterId: h.clusterID(), NodeName: h.Node, EncryptsSecrets: encrypts}}}
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

// tell reports the state of the current step.
func (w *worker) tell(state, text string) {
	w.rec.progress(&initproto.Progress{Step: w.step, State: state, Text: text})
}

func (w *worker) begin(step, text string) {
	w.step = step
	w.tell(stateRunning, text)
}

// run runs the steps. Each may be repeated.
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
	node := kubeadm.Node{Name: self.Name, ProviderID: self.ProviderID, IP: self.IP, CloudProvider: cmp.Or(self.CloudProvider, w.b.m.KubeletCloudProvider)}
	cluster := kubeadm.Cluster{
		Name: d.name, Version: d.version, EtcdTag: d.etcdTag, Endpoint: net.JoinHostPort(lb, strconv.Itoa(w.b.m.APIServerPort)),
		PodCIDR: d.podCIDR, DividePods: w.b.m.DividePods, ServiceCIDR: d.serviceCIDR, CertSANs: d.sans, Off: d.off,
	}
	if d.registry.Address != "" {
		cluster.ImageRepository = d.registry.Repository()
	}

	if w.dirty && w.b.host.kubeadm.Installed() {
		if err := w.reset(ctx, "an earlier attempt was not finished"); err != nil {
			return err
		}
	}
	w.dirty = false
	w.begin(stepInstall, names(d.components))
	if err := w.install(ctx, d); err != nil {
		return err
	}
	w.tell(stateDone, names(d.components))
	if err := w.b.host.write(registryFiles(d.registry)); err != nil {
		return err
	}

	if cluster.EncryptSecrets, err = w.b.encrypts(); err != nil {
		return err
	}
	if err := w.b.awaitKeyService(ctx); err != nil {
		return err
	}

	w.dirty = true
	for try := 1; ; try++ {
		w.begin(stepInit, d.versions())
		err := w.b.host.init(ctx, cluster, node, w.lines())
		if err == nil {
			break
		}
		var k *kubeadm.Error
		if ctx.Err() != nil || try >= maxInits || errors.As(err, &k) && k.InvalidConfig() {
			return err
		}
		w.rec.line("bootstrapper", "warn", fmt.Sprintf("try %d of %d failed: %v", try, maxInits, err))
		if err := w.reset(ctx, "the last attempt failed"); err != nil {
			return err
		}
	}
	kubeconfig, err := os.ReadFile(filepath.Join(w.b.m.Root, kubeadm.AdminKubeconfig))
	if err != nil {
		return fmt.Errorf("read the administrator's kubeconfig: %w", err)
	}
	// First the result, then the membership, then the message: a caller that receives the message
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

// loadBalancer reads its address from the cloud, with retries.
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

// hurried shortens a pause in tests.
func (w *worker) hurried(limit time.Duration) time.Duration {
	if w.b.m.hurry > 0 {
		return w.b.m.hurry
	}
	return limit
}

// install installs the components, with a few retries.
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
		return fmt.Errorf("installed kubeadm is %s, want %s", v, d.version)
	}
	return nil
}

func (w *worker) reset(ctx context.Context, why string) error {
	w.begin(stepReset, why)
	if err := w.b.host.kubeadm.Reset(ctx, w.lines()); err != nil {
		return err
	}
	w.tell(stateDone, "cleaned up")
	return nil
}

// lines passes kubeadm's lines on, and reports its phase.
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

// lineText formats a line of kubeadm.
func lineText(l kubeadm.Line) string {
	if l.Phase == "" {
		return l.Text
	}
	return "[" + l.Phase + "] " + l.Text
}

func levelName(l slog.Level) string { return strings.ToLower(l.String()) }

// downloads reports the progress of all downloads in bytes.
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
