//go:build linux

package agent

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/agent/upgradeproto"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/engine/version"
	"constellation/internal/delay"
)

// Stages of a run, in order. Each skips the work that an earlier run has done, so an
// interrupted run restarts with the first one.
const (
	stageVerify         = "verify"
	stagePackages       = "upgrade-packages"
	stageInstallKubeadm = "install-kubeadm"
	stagePlan           = kubeadm.UpgradePlan
	stageApply          = kubeadm.UpgradeApply
	stageNode           = kubeadm.UpgradeNode
	stageAddons         = "addons"
	stageInstallKubelet = "install-kubelet"
	stageRestartKubelet = "restart-kubelet"
	stageWaitForAPI     = "wait-for-api"
)

// States of a stage.
const (
	running     = "running"
	done        = "done"
	failed      = "failed"
	interrupted = "interrupted"
)

const (
	// kubeletTimeout is how long a kubelet may take to be healthy after its start.
	kubeletTimeout = 2 * time.Minute
	// installTimeout is how long components may take. The least rate of downloads bounds each attempt alone: a
	// server that breaks off in time is asked again.
	installTimeout = 2 * time.Hour
	// apiTimeout is how long the API server may take to become stable at the end of a run.
	apiTimeout = 5 * time.Minute
	// kubeadm is retried with backoff while it has no API server.
	pauseMin = time.Second
	pauseMax = 15 * time.Second
	// retryTimeout limits the retries, from the first attempt on.
	retryTimeout = 15 * time.Minute
)

// upgrader runs one upgrade at a time, and stores the latest.
type upgrader struct {
	host    Host
	log     *slog.Logger
	dir     *os.Root
	boot    string
	journal *journal

	// starting is held from the decision on a request until it is in effect.
	starting sync.Mutex
	// life ends with the agent; work then stops where it can be resumed.
	life context.Context //nolint:containedctx // runs outlive the requests that start them
	wg   sync.WaitGroup

	// packaging is held while packages are changed.
	packaging sync.Mutex

	mu      sync.Mutex
	running int // runs that have not ended; two for a moment, if one follows a final message at once
}

// openUpgrader reads the state of an earlier agent. If its kubeadm still runs, the run
// continues; otherwise it was interrupted.
func openUpgrader(life context.Context, h Host, log *slog.Logger) (*upgrader, error) {
	boot, err := kubeadm.BootID()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(h.stateDir(), 0o700); err != nil {
		return nil, fmt.Errorf("create the agent's directory: %w", err)
	}
	dir, err := os.OpenRoot(h.stateDir())
	if err != nil {
		return nil, fmt.Errorf("open the agent's directory: %w", err)
	}
	u := &upgrader{host: h, log: log, dir: dir, boot: boot, life: life}
	if u.journal, err = openJournal(dir, boot, log); err != nil {
		dir.Close()
		return nil, err
	}
	u.wg.Go(func() { u.mendPackages(life) })
	req, _, final := u.journal.latest()
	if req == nil || final {
		return u, nil
	}
	o, err := parseOrder(req)
	unvouched := err
	if err == nil {
		unvouched = h.vouched(o) // the previous agent may not have verified anything
	}
	p, _ := u.journal.kubeadm()
	running := p != nil && p.Running()
	if unvouched == nil && running {
		log.Info("running kubeadm found", "pid", p.PID, "token", req.GetToken())
		u.start(o, p)
		return u, nil
	}
	if r := u.journal.run(false); r.GetMessage() == "" {
		why := "the agent ended"
		if unvouched != nil {
			why = clip("components: " + unvouched.Error())
		}
		if u.journal.head.Boot != boot {
			why = "the host was restarted"
		}
		// If it cannot be written, the next agent finds the same state.
		_ = u.journal.stageIs(u.journal.current(), interrupted, why)
	}
	log.Warn("interrupted upgrade found", "token", req.GetToken(), "stage", u.journal.current())
	if running { // it still writes the files
		return u, nil
	}
	// At once: without them the host may have no API server, and then no request reaches this agent to resume the run.
	if pods, files, err := u.restore(); len(pods)+len(files) > 0 || err != nil {
		log.Warn("files of an interrupted upgrade restored", "static_pods", pods, "files", files, "err", err)
	}
	return u, nil
}

func (u *upgrader) close() {
	u.wg.Wait()
	u.journal.close()
	u.dir.Close()
}

// status describes the latest run; nil if there was none.
func (u *upgrader) status() *upgradeproto.Run { return u.journal.run(u.isRunning()) }

func (u *upgrader) isRunning() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.running > 0
}

// take decides what to do with o. It returns the start of the run that answers it, and whether
// that run is new.
func (u *upgrader) take(ctx context.Context, o *order) (started time.Time, begun bool, err error) {
	u.starting.Lock()
	defer u.starting.Unlock()
	if u.life.Err() != nil {
		return time.Time{}, false, status.Error(codes.Unavailable, errStopping.Error())
	}
	busy := u.isRunning() // first: a run sends its final message before it ends
	latest, started, final := u.journal.latest()
	busy = busy && !final // the next request may follow the message at once
	switch {
	case latest == nil:
	case busy && same(latest, o.proto):
		return started, false, nil
	case busy:
		return time.Time{}, false, status.Errorf(codes.FailedPrecondition, "%s is in progress, in stage %s; retry when it has ended", words(latest), u.journal.current())
	case latest.GetToken() == o.proto.GetToken() && !same(latest, o.proto):
		return time.Time{}, false, status.Errorf(codes.InvalidArgument, "token: %s was another request; choose a new token", words(latest))
	case latest.GetToken() == o.proto.GetToken() && final:
		return started, false, nil
	}
	if err := u.host.admit(ctx, o); err != nil {
		if ctx.Err() != nil {
			return time.Time{}, false, toStatus(err)
		}
		return time.Time{}, false, status.Error(codes.FailedPrecondition, err.Error())
	}
	if latest != nil && !final && same(latest, o.proto) {
		// A caller that only attaches does not ask for that, and the host may take pods.
		o.proto.KeepKubelet = o.proto.GetKeepKubelet() || latest.GetKeepKubelet()
		o.proto.UpgradePackages = o.proto.GetUpgradePackages() && !o.proto.GetKeepKubelet()
		err = u.journal.resume(o.proto, u.boot)
	} else {
		begun = true
		err = u.journal.begin(o.proto, u.boot)
	}
	if err != nil {
		return time.Time{}, false, toStatus(err)
	}
	u.start(o, nil)
	_, started, _ = u.journal.latest()
	return started, begun, nil
}

// start works on o, first on a kubeadm that still runs, if any.
func (u *upgrader) start(o *order, found *kubeadm.Process) {
	u.mu.Lock()
	u.running++
	u.mu.Unlock()
	u.wg.Go(func() {
		err := u.run(u.life, o, found)
		stage := u.journal.current()
		switch {
		case err == nil:
			u.journal.succeed()
			u.log.Info("upgrade succeeded", "token", o.proto.GetToken(), "version", o.version.String())
		case u.life.Err() != nil:
			// Not the end of the run: the next agent resumes from disk.
			u.log.Info("upgrade interrupted", "token", o.proto.GetToken(), "stage", stage)
		default:
			_ = u.journal.stageIs(stage, failed, "") // the failure includes the details
			u.journal.fail(&upgradeproto.Failure{Stage: stage, Message: clip(err.Error()), Remedy: remedy(err)})
			u.log.Error("upgrade failed", "token", o.proto.GetToken(), "stage", stage, "err", err)
		}
		u.mu.Lock()
		u.running--
		u.mu.Unlock()
	})
}

// remedy returns a user's remedy for err; often only a retry.
func remedy(err error) string {
	var e *kubeadm.Error
	var p *packagesError
	switch {
	case errors.As(err, &p):
		return p.remedy
	case errors.Is(err, component.ErrDigest):
		return "The component's server delivers content other than the published one; fix the source, or use another one."
	case errors.Is(err, syscall.ENOSPC):
		return "Free space on the host's disk; images and logs are usual."
	case errors.Is(err, kubeadm.ErrDeadline):
		return "Check the control plane's containers and the kubelet's log on the host; completed stages stay."
	case errors.As(err, &e):
		return "See kubeadm's output above; fix the cause and retry with a new token. Completed stages stay."
	}
	return "Retry with a new token."
}

// clip keeps an error short enough for a status.
func clip(s string) string {
	if len(s) > 2048 {
		return strings.ToValidUTF8(s[:2048], "") + "..."
	}
	return s
}

// run executes o, stage by stage.
func (u *upgrader) run(ctx context.Context, o *order, found *kubeadm.Process) error {
	if found != nil {
		// Its result is unknown, so it is run again: kubeadm skips completed work.
		_, next := u.journal.kubeadm()
		u.say("info", "the agent was restarted; kubeadm upgrade "+found.Verb+" still runs")
		if err := u.wait(ctx, found, next); err != nil && !repeatable(err) {
			return err
		}
	}
	for _, s := range u.stages(o.proto) {
		// Each stage is recorded on disk before it starts.
		if err := u.journal.stageIs(s.name, running, ""); err != nil {
			return fmt.Errorf("begin stage %s: %w", s.name, err)
		}
		if err := s.do(ctx, o); err != nil {
			return err
		}
		if err := u.journal.stageIs(s.name, done, ""); err != nil {
			return fmt.Errorf("end stage %s: %w", s.name, err)
		}
	}
	return nil
}

// stage is a part of a run.
type stage struct {
	name string
	do   func(context.Context, *order) error
}

// stages returns those of an upgrade, in order.
func (u *upgrader) stages(req *upgradeproto.UpgradeRequest) []stage {
	all := []stage{{stageVerify, u.verify}}
	if req.GetUpgradePackages() { // first: if it fails, Kubernetes is as before
		all = append(all, stage{stagePackages, u.upgradePackages})
	}
	all = append(all, stage{stageInstallKubeadm, u.installKubeadm})
	switch req.GetWhat() {
	case upgradeproto.What_ADDONS:
		return append(all, stage{stageAddons, u.upgradeAddons})
	case upgradeproto.What_APPLY:
		all = append(all, stage{stagePlan, u.kubeadmStage(stagePlan)}, stage{stageApply, u.kubeadmStage(stageApply)})
	case upgradeproto.What_NODE, upgradeproto.What_WHAT_UNSPECIFIED:
		all = append(all, stage{stageNode, u.kubeadmStage(stageNode)})
	}
	if !req.GetKeepKubelet() {
		all = append(all, stage{stageInstallKubelet, u.installKubelet}, stage{stageRestartKubelet, u.restartKubelet})
	}
	return append(all, stage{stageWaitForAPI, u.waitForAPI})
}

func (u *upgrader) say(level, text string) { u.journal.line("agent", level, text, 0) }

// verify checks the host again: it may have changed since the request was accepted.
func (u *upgrader) verify(ctx context.Context, o *order) error {
	if err := u.mend(); err != nil {
		return err
	}
	return u.host.admit(ctx, o)
}

// mend restores static pods, certificates and configuration that an interrupted kubeadm lost.
func (u *upgrader) mend() error {
	pods, files, err := u.restore()
	for _, pod := range pods {
		u.say("warn", "static pod "+pod+" was restored from its backup")
	}
	for _, file := range files {
		u.say("warn", file+" was incomplete, and restored from its copy")
	}
	return err
}

// restore is mend without a line in the journal.
func (u *upgrader) restore() (pods, files []string, err error) {
	root, err := os.OpenRoot(u.host.path())
	if err != nil {
		return nil, nil, err
	}
	defer root.Close()
	pods, err = kubeadm.RestoreManifests(root)
	files, other := kubeadm.RestoreRenewed(root, u.dir)
	return pods, files, errors.Join(err, other)
}

// keepRenewed copies what kubeadm is about to renew. Without the copies an upgrade is possible all the same.
func (u *upgrader) keepRenewed() {
	root, err := os.OpenRoot(u.host.path())
	if err == nil {
		err = errors.Join(kubeadm.KeepRenewed(root, u.dir), root.Close())
	}
	if err != nil {
		u.say("warn", clip(err.Error()))
	}
}

func (u *upgrader) install(ctx context.Context, l component.List) error {
	limit := cmp.Or(u.host.InstallTimeout, installTimeout)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("components were not installed within %s: the server that has them is too slow", limit))
	defer cancel()
	in := component.Installer{Root: u.host.path(), Log: u.log}
	return in.Install(ctx, l, nil)
}

func (u *upgrader) installKubeadm(ctx context.Context, o *order) error {
	if err := u.install(ctx, o.first); err != nil {
		return err
	}
	v, err := programVersion(ctx, u.host.path("usr/local/bin/kubeadm"), "version", "-o", "short")
	if err == nil {
		err = is("kubeadm", v, o.version)
	}
	return err
}

func is(name, got string, want version.Version) error {
	if v, err := version.Parse(got); err != nil || !v.Equal(want) {
		return fmt.Errorf("%s is %q, want %s", name, got, want)
	}
	return nil
}

// kubeadmStage returns the stage that runs a verb of kubeadm upgrade until it succeeds, or
// fails for a reason other than an unavailable API server.
func (u *upgrader) kubeadmStage(verb string) func(context.Context, *order) error {
	return func(ctx context.Context, o *order) error {
		if err := u.repeat(ctx, o, verb); err != nil {
			return err
		}
		if verb == kubeadm.UpgradePlan {
			return nil
		}
		// An exit code of zero is not sufficient; the manifests show what runs.
		s, err := u.host.staticPods()
		if err != nil {
			return err
		}
		for _, name := range controlPlane {
			image, ok := s[name]
			if !ok && o.proto.GetWhat() == upgradeproto.What_NODE {
				continue
			}
			if err := is(name, tag(image), o.version); err != nil {
				return fmt.Errorf("kubeadm upgrade %s succeeded, but %w", verb, err)
			}
		}
		root, err := os.OpenRoot(u.host.path())
		if err != nil {
			return err
		}
		defer root.Close()
		if err := errors.Join(kubeadm.RemoveOldBackups(root), kubeadm.ForgetRenewed(root, u.dir)); err != nil {
			u.say("warn", clip(err.Error()))
		}
		return nil
	}
}

// repeat runs a verb of kubeadm upgrade until it succeeds, or fails for a reason that a retry does not
// remove.
func (u *upgrader) repeat(ctx context.Context, o *order, verb string) error {
	end := time.Now().Add(retryTimeout)
	for pause := pauseMin; ; pause = min(2*pause, pauseMax) {
		if err := u.mend(); err != nil {
			return err
		}
		config, err := u.host.customized(o.config)
		if err != nil {
			return err
		}
		if verb == kubeadm.UpgradeApply || verb == kubeadm.UpgradeNode {
			u.keepRenewed()
		}
		p, err := u.detached().Start(verb, config, u.journal.started)
		if err == nil {
			err = u.wait(ctx, p, 0)
		}
		if err == nil || !repeatable(err) || time.Now().After(end) {
			return err
		}
		needs := "a healthy API server"
		if errors.Is(err, errAddonsSkipped) {
			needs = "all control planes at its version"
		}
		u.say("warn", fmt.Sprintf("kubeadm upgrade %s is retried in %s: it needs %s", verb, pause, needs))
		if !delay.For(ctx, pause) {
			return context.Cause(ctx)
		}
	}
}

// errAddonsSkipped means that kubeadm has seen a control plane of another version.
var errAddonsSkipped = errors.New("kubeadm skipped the add-ons, because a control plane runs another version")

// repeatable reports whether a retry may succeed.
func repeatable(err error) bool {
	var e *kubeadm.Error
	return errors.Is(err, kubeadm.ErrOutcomeUnknown) || errors.Is(err, errAddonsSkipped) || errors.As(err, &e) && e.Transient()
}

// upgradeAddons upgrades the add-ons of o, except those that the host's options of kubeadm skip.
func (u *upgrader) upgradeAddons(ctx context.Context, o *order) error {
	config, err := u.host.customized(o.config)
	if err != nil {
		return err
	}
	for _, a := range o.addons {
		if config.Upgrade.SkipsAddon(a.name) {
			u.say("info", "the add-on "+a.name+" is left alone: "+kubeadm.UpgradeFile+" skips its phase")
			continue
		}
		if err := u.repeat(ctx, o, a.verb); err != nil {
			return err
		}
	}
	return nil
}

func (u *upgrader) detached() kubeadm.Detached {
	return kubeadm.Detached{Path: u.host.path("usr/local/bin/kubeadm"), Dir: u.host.stateDir(), Timeout: u.host.KubeadmTimeout}
}

// wait passes on kubeadm's output until it ends.
func (u *upgrader) wait(ctx context.Context, p *kubeadm.Process, from int64) error {
	skipped := false
	err := u.detached().Wait(ctx, p, from, func(l kubeadm.Line, next int64) {
		skipped = skipped || l.AddonsSkipped()
		text := l.Text
		if l.Phase != "" {
			text = "[" + l.Phase + "] " + text
		}
		u.journal.line("kubeadm", strings.ToLower(l.Level.String()), text, next)
	})
	if ofAddons := p.Verb == kubeadm.UpgradeCoreDNS || p.Verb == kubeadm.UpgradeKubeProxy; err == nil && ofAddons && skipped {
		return errAddonsSkipped
	}
	return err
}

func (u *upgrader) installKubelet(ctx context.Context, o *order) error {
	if err := u.install(ctx, o.rest); err != nil {
		return err
	}
	v, err := programVersion(ctx, u.host.path("usr/local/bin/kubelet"), "--version")
	if err == nil {
		err = is("kubelet", v, o.version)
	}
	return err
}

// restartKubelet starts the new kubelet and waits until it is healthy.
func (u *upgrader) restartKubelet(ctx context.Context, _ *order) error {
	restart, address := u.host.RestartKubelet, u.host.KubeletHealth
	if restart == nil {
		restart = systemctlRestart
	}
	if address == "" {
		address = u.host.local("http", "10248", "/healthz")
	}
	if err := restart(ctx); err != nil {
		return fmt.Errorf("restart the kubelet: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, kubeletTimeout, fmt.Errorf("the kubelet was not healthy %s after its restart", kubeletTimeout))
	defer cancel()
	for {
		if healthy(ctx, http.DefaultClient, address) {
			return nil
		}
		if !delay.For(ctx, 200*time.Millisecond) {
			return context.Cause(ctx)
		}
	}
}

// waitForAPI waits until a control plane's API server has answered without interruption for a
// while: a kubelet of another minor treats static pods as changed and replaces them once more,
// soon after its start. Its readiness includes that of etcd.
func (u *upgrader) waitForAPI(ctx context.Context, _ *order) error {
	if s, err := u.host.staticPods(); err != nil || s["kube-apiserver"] == "" {
		return err
	}
	address, calm := u.host.APIHealth, u.host.APICalm
	client := http.DefaultClient
	if address == "" {
		address = u.host.local("https", "6443", "/readyz")
		ca, err := os.ReadFile(u.host.path("etc/kubernetes/pki/ca.crt"))
		if err != nil {
			return fmt.Errorf("read the cluster's authority: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(ca) {
			return errors.New("read the cluster's authority: no certificate in ca.crt")
		}
		// A new connection each time, since an open one proves nothing about the next.
		client = &http.Client{Transport: &http.Transport{
			DisableKeepAlives: true, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool},
		}}
	}
	if calm == 0 {
		calm = 10 * time.Second
	}
	ctx, cancel := context.WithTimeoutCause(ctx, apiTimeout, fmt.Errorf("the API server was not stable within %s", apiTimeout))
	defer cancel()
	for since := time.Now(); time.Since(since) < calm; {
		if !delay.For(ctx, min(calm/10, 500*time.Millisecond)) {
			return context.Cause(ctx)
		}
		if !healthy(ctx, client, address) {
			since = time.Now()
		}
	}
	return nil
}

func healthy(ctx context.Context, client *http.Client, address string) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return false
	}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

func systemctlRestart(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	if out, err := exec.CommandContext(ctx, "systemctl", "restart", "kubelet.service").CombinedOutput(); err != nil {
		return fmt.Errorf("systemctl: %w: %s", err, clip(strings.ToValidUTF8(strings.TrimSpace(string(out)), "")))
	}
	return nil
}
