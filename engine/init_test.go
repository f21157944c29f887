package engine_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/bootstrapper/initproto"
	"constellation/engine"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/internal/golden"
)

func TestInitMakesACluster(t *testing.T) {
	s := newStage(t, 1, 2)
	events, p := s.mustInit()
	checkStream(t, events, nil)

	if ids, want := stepIDs(p), []string{"preflight", "init-first-node", "write-kubeconfig", "components", "join-config", "charts", "set-target", "wait-ready"}; !cmp.Equal(ids, want) {
		t.Errorf("steps %v, want %v", ids, want)
	}
	if got, want := states(events), "preflight:running preflight:done init-first-node:running init-first-node:done write-kubeconfig:running write-kubeconfig:done components:running components:done join-config:running join-config:done charts:running charts:done set-target:running set-target:done wait-ready:running wait-ready:done"; got != want {
		t.Errorf("states\n%s\nwant\n%s", got, want)
	}
	for file, mode := range map[string]fs.FileMode{workspace.MasterSecretFile: 0o600, workspace.KubeconfigFile: 0o600, workspace.StateFile: 0o600, workspace.ConfigFile: 0o644} {
		if info, err := os.Stat(filepath.Join(s.dir, file)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", file, info, err)
		}
	}
	if _, err := os.Stat(filepath.Join(s.dir, engine.PendingFile)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is left: %v", engine.PendingFile, err)
	}
	if k := s.read(workspace.KubeconfigFile); !strings.Contains(k, "server: https://127.0.0.1:36443") || !strings.Contains(k, "U0VDUkVULUtFWS1PRi1BRE1JTg==") {
		t.Errorf("kubeconfig:\n%s", k)
	}
	m := s.machines[0]
	if runs, acks := m.counts(); runs != 1 || acks != 1 {
		t.Errorf("%d runs, %d acknowledgements", runs, acks)
	}
	if m.seenAtAck != s.read(workspace.KubeconfigFile) {
		t.Errorf("when the machine received the acknowledgement of its result, this was stored: %q", m.seenAtAck)
	}
	st := s.state()
	if st.ClusterValues.InitNode != "sandbox://demo/control-plane-0" || !bytes.Equal(st.ClusterValues.ClusterID, m.clusterID) || len(m.clusterID) != 32 {
		t.Errorf("state says %q %x, machine %x", st.ClusterValues.InitNode, []byte(st.ClusterValues.ClusterID), m.clusterID)
	}
	j, err := s.cluster.JoinConfig(t.Context())
	if err != nil || j.ClusterID != hex.EncodeToString(m.clusterID) || j.TrustRoots != s.rootsPEM || !strings.HasPrefix(j.Attestation, `{"variant":"tpm2","measurements":{"11":{"expected":"`) {
		t.Errorf("join configuration %+v, %v", j, err)
	}
	target, err := s.cluster.NodeTarget(t.Context())
	if err != nil || target.Image != "sandboxes/demo/images/v1.1.0" || target.ImageVersion != "v1.1.0" || target.Kubernetes != "v1.35.4" || !regexp.MustCompile(`^k8s-components-sha256-[0-9a-f]{64}$`).MatchString(target.Components) {
		t.Errorf("target %+v, %v", target, err)
	}
	if want := []string{"PublishComponents", "PublishJoinConfig", "ApplyKinds"}; !cmp.Equal(s.cluster.Calls()[:3], want) {
		t.Errorf("calls %v", s.cluster.Calls())
	}

	// The record is what was emitted.
	var recorded []plan.Event
	for line := range strings.Lines(s.read(filepath.Join(plan.RunsDir, p.ID, engine.EventsFile))) {
		var e plan.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		recorded = append(recorded, e)
	}
	a, _ := json.Marshal(events)
	b, _ := json.Marshal(recorded)
	if !bytes.Equal(a, b) {
		t.Errorf("emitted and recorded differ:\n%s\n%s", a, b)
	}
	if info, err := os.Stat(filepath.Join(s.dir, plan.RunsDir, p.ID, engine.EventsFile)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("record: %v, %v", info, err)
	}

	var res plan.Result
	last := events[len(events)-1]
	if err := json.Unmarshal(last.Data, &res); err != nil || res.Status != plan.StateDone || res.Nodes != 3 || len(res.Files) != 3 || res.Resume != "" || len(res.Next) == 0 {
		t.Errorf("result %+v, %v", res, err)
	}
	text := fmt.Sprint(nodeLines(events))
	for _, want := range []string{"control-plane-0 booting>joining", "joining>not-ready", "worker-0 ", ">ready"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %s", want, text)
		}
	}
	var sources []string
	for _, e := range events {
		if e.Kind == plan.KindLog && e.Node != "" {
			sources = append(sources, e.Source+" "+e.Node+" "+e.Text)
		}
	}
	if all := strings.Join(sources, "\n"); !strings.Contains(all, `kubeadm control-plane-0 [certs] Generating "ca" certificate and key`) || !strings.Contains(all, "kubeadm worker-1 [kubelet-start] Starting the kubelet") {
		t.Errorf("lines\n%s", all)
	}
}

func stepIDs(p *plan.Plan) (ids []string) {
	for _, s := range p.Steps {
		ids = append(ids, s.ID)
	}
	return ids
}

func states(events []plan.Event) string {
	var out []string
	for _, e := range events {
		if e.Kind == plan.KindStep {
			out = append(out, e.Step+":"+e.State)
		}
	}
	return strings.Join(out, " ")
}

func nodeLines(events []plan.Event) (out []string) {
	for _, e := range events {
		if e.Kind == plan.KindNode {
			out = append(out, e.Node+" "+e.From+">"+e.To)
		}
	}
	return out
}

func TestPlanOfInit(t *testing.T) {
	s := newStage(t, 3, 2)
	p, err := s.engine().PlanInit(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s to %s, %v\n", p.Verb, p.Cluster, p.To, p.Nodes)
	for _, st := range p.Steps {
		mark := ""
		if st.Final {
			mark = " (final)"
		}
		fmt.Fprintf(&b, "%s: %s%s\n  %s\n", st.ID, st.Title, mark, st.Effect)
	}
	for _, f := range p.Files {
		fmt.Fprintf(&b, "%s %s %t %s\n", filepath.Base(f.Path), f.Mode, f.Secret, f.Note)
	}
	text := regexp.MustCompile(`sha256-[0-9a-f]{8}`).ReplaceAllString(b.String(), "sha256-XXXXXXXX")
	golden.Equal(t, "testdata/plan-init.txt", text)
	for _, f := range p.Findings {
		if f.Severity != plan.Info {
			t.Errorf("finding %+v", f)
		}
	}
	if names := list(t, s.dir); !cmp.Equal(names, []string{workspace.ConfigFile, workspace.StateFile}) {
		t.Errorf("planning wrote something: %v", names)
	}
	if c := s.cluster.Calls(); len(c) > 0 {
		t.Errorf("planning changed the cluster: %v", c)
	}
}

func list(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestASecondInitHasNothingToDo(t *testing.T) {
	s := newStage(t, 1, 1)
	s.mustInit()
	calls := len(s.cluster.Calls())
	events, p, err := s.init(t.Context(), nil)
	checkStream(t, events, err)
	if plan.ExitCode(err) != plan.ExitNothing || !p.Finished() || p.Resumes() {
		t.Errorf("got %v, finished %t", err, p.Finished())
	}
	if strings.Contains(states(events), "running") || len(s.cluster.Calls()) != calls {
		t.Errorf("something was done: %s, %v", states(events), s.cluster.Calls()[calls:])
	}
	runs, err := s.engine().Runs()
	if err != nil || len(runs) != 2 || runs[0].Status != plan.StateNothing || runs[0].Exit != plan.ExitNothing || runs[1].Status != plan.StateDone || runs[1].Events == 0 || runs[1].Ended.IsZero() {
		t.Errorf("runs %+v, %v", runs, err)
	}
}

// A rollout is no work of init, and init does not hide it.
func TestInitDuringARollout(t *testing.T) {
	s := newStage(t, 1, 1)
	s.mustInit()
	s.cluster.SetRollout(func(r *cluster.Rollout) { r.Observed, r.Reached, r.Busy = true, false, true })
	if _, _, err := s.init(t.Context(), nil); plan.ExitCode(err) != plan.ExitNothing || !strings.Contains(err.Error(), "nothing to do for init") || !strings.Contains(err.Error(), "status") {
		t.Errorf("during a rollout: %v", err)
	}
	s.cluster.SetRollout(func(r *cluster.Rollout) { r.Reached, r.Busy = true, false })
	if _, _, err := s.init(t.Context(), nil); plan.ExitCode(err) != plan.ExitNothing || strings.Contains(err.Error(), "rollout") {
		t.Errorf("after it: %v", err)
	}
}

// A console that is left, or killed, at any step, and then the same command again,
// ends in the same cluster. Nothing is done twice on a machine.
func TestInitIsResumedAtEveryStep(t *testing.T) {
	for _, step := range []string{"preflight", "init-first-node", "write-kubeconfig", "components", "join-config", "charts", "set-target", "wait-ready"} {
		t.Run("left at "+step, func(t *testing.T) {
			s := newStage(t, 1, 1)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			events, _, err := s.init(ctx, func(e plan.Event) {
				if e.Kind == plan.KindStep && e.Step == step && e.State == plan.StateRunning {
					cancel()
				}
			})
			checkStream(t, events, err)
			last := events[len(events)-1]
			if step == "wait-ready" {
				if err != nil || last.State != plan.StateDetached {
					t.Errorf("left after the target was set: %v, %s", err, last.State)
				}
			} else if plan.ExitCode(err) != plan.ExitStopped && (err != nil || step != "set-target") {
				t.Errorf("left before the target was set: %v, %s", err, last.State)
			}
			s.resume(step)
		})
	}
	// A kill is harsher: nothing runs after it. Each call of the cluster is the last once.
	for _, call := range []string{"Version", "PublishComponents", "PublishJoinConfig", "OutdatedKinds", "ApplyKinds", "ApplyChart constellation-operator", "ApplyChart constellation-services", "Expect", "SetNodeTarget", "Nodes"} {
		t.Run("killed at "+call, func(t *testing.T) {
			s := newStage(t, 1, 1)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var dead atomic.Bool
			s.cluster.OnCall(func(c string) error {
				if c == call {
					dead.Store(true)
					cancel()
				}
				if dead.Load() {
					return context.Canceled
				}
				return nil
			})
			if _, _, err := s.init(ctx, nil); err != nil && plan.ExitCode(err) != plan.ExitStopped {
				t.Errorf("got %v", err)
			}
			s.cluster.OnCall(func(c string) error {
				if c == "SetNodeTarget" {
					s.lifeOnce.Do(func() { go s.live() })
				}
				return nil
			})
			s.resume(call)
		})
	}
}

// resume runs init again and checks that the cluster is whole and made once.
func (s *stage) resume(after string) {
	s.t.Helper()
	secret, _ := os.ReadFile(filepath.Join(s.dir, workspace.MasterSecretFile))
	if _, err := s.cluster.NodeTarget(s.t.Context()); err == nil { // the cluster went on alone
		s.lifeOnce.Do(s.live)
	}
	events, p, err := s.init(s.t.Context(), nil)
	if plan.ExitCode(err) == plan.ExitNothing && (after == "wait-ready" || after == "Nodes") {
		return
	}
	if err != nil {
		s.t.Fatalf("the same command again after %s: %v\n%s", after, err, states(events))
	}
	checkStream(s.t, events, err)
	if after != "preflight" && after != "init-first-node" && !p.Resumes() {
		s.t.Errorf("the plan does not say that it resumes: %s", states(events))
	}
	if now, _ := os.ReadFile(filepath.Join(s.dir, workspace.MasterSecretFile)); len(secret) > 0 && !bytes.Equal(now, secret) {
		s.t.Error("the master secret changed")
	}
	runs := 0
	for _, m := range s.machines {
		r, _ := m.counts()
		runs += r
	}
	if runs != 1 {
		s.t.Errorf("kubeadm init ran %d times", runs)
	}
	if _, _, err := s.init(s.t.Context(), nil); plan.ExitCode(err) != plan.ExitNothing {
		s.t.Errorf("a third time: %v", err)
	}
}

func TestLostConnectionToTheFirstNodeIsMadeAgain(t *testing.T) {
	s := newStage(t, 1, 0)
	s.machines[0].cut = 3
	events, _ := s.mustInit()
	lines := 0
	for _, e := range events {
		if e.Kind == plan.KindLog && strings.Contains(e.Text, "[certs]") {
			lines++
		}
	}
	if runs, _ := s.machines[0].counts(); runs != 1 || lines != 1 {
		t.Errorf("%d runs, the line was reported %d times", runs, lines)
	}
	waits := 0
	for _, e := range events {
		if e.Kind == plan.KindWait && strings.Contains(e.Text, "its work goes on") {
			waits++
		}
	}
	if waits != 1 {
		t.Errorf("the interruption was reported %d times", waits)
	}
}

func TestOnlyOneMachineIsAskedToBeTheFirst(t *testing.T) {
	s := newStage(t, 3, 0)
	for _, m := range s.machines {
		m.cut = 2 // whichever is first is lost once, and the load balancer moves on
	}
	s.mustInit()
	runs := 0
	for _, m := range s.machines {
		r, _ := m.counts()
		runs += r
	}
	if runs != 1 {
		t.Errorf("%d machines were asked", runs)
	}
}

func TestMachineThatIsGoneIsReplacedByAnother(t *testing.T) {
	s := newStage(t, 3, 0)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s.init(ctx, func(e plan.Event) {
		if e.Kind == plan.KindLog && e.Source == "kubeadm" {
			cancel()
		}
	})
	first := s.state().ClusterValues.InitNode
	if first == "" {
		t.Fatal("no machine was remembered")
	}
	for _, m := range s.machines {
		if strings.HasSuffix(first, m.name) {
			m.stop()
			s.cloud.set(m.name, func(c *cluster.CloudMachine) { c.Stage = plan.NodeGone })
		}
	}
	// The group makes another machine in its place.
	s.cloud.add("control-plane-3", cloud.ControlPlane, 3)
	s.cloud.mu.Lock()
	s.cloud.machines = append(s.cloud.machines[:0:0], filter(s.cloud.machines, func(m cluster.CloudMachine) bool { return m.Stage != plan.NodeGone })...)
	s.cloud.mu.Unlock()
	s.mustInit()
	if now := s.state().ClusterValues.InitNode; now == first {
		t.Errorf("still %s", now)
	}
}

func filter[T any](l []T, keep func(T) bool) (out []T) {
	for _, v := range l {
		if keep(v) {
			out = append(out, v)
		}
	}
	return out
}

func TestInitErrorsHaveCauseAndRemedy(t *testing.T) {
	for _, tt := range []struct {
		name   string
		break_ func(*testing.T, *stage)
		exit   int
		text   string // in the error
		remedy string
	}{
		{name: "a node with other measurements", break_: func(t *testing.T, s *stage) {
			s.cloud.measurements = nil // a cloud that does not say
			m := s.machines[0]
			m.stop()
			other := append([]attestation.MeasuredEvent{}, s.events...)
			other[1].Digest = bytes.Repeat([]byte{0xee}, 32)
			m.boot(s.ca, m.identity(), other, nil)
		}, exit: plan.ExitFailed, text: "measurements differ: PCR 9", remedy: "measurements"},
		{name: "measurements that are not the image's", break_: func(t *testing.T, s *stage) {
			s.cloud.measurements[9] = strings.Repeat("ee", 32)
		}, exit: plan.ExitBlocked, text: "the measurements are not those of image v1.1.0", remedy: "write the value that the image has"},
		{name: "a cloud that we do not trust", break_: func(t *testing.T, s *stage) {
			certPEM, keyPEM, err := attestationtest.CreateCA("other")
			if err != nil {
				t.Fatal(err)
			}
			ca, err := attestationtest.ParseCA(certPEM, keyPEM)
			if err != nil {
				t.Fatal(err)
			}
			m := s.machines[0]
			m.stop()
			m.boot(ca, m.identity(), s.events, nil)
		}, exit: plan.ExitFailed, text: "verify the certificate chain of the first machine's TPM", remedy: "trustRoots"},
		{name: "a machine of another sandbox", break_: func(t *testing.T, s *stage) {
			m := s.machines[0]
			m.stop()
			id := m.identity()
			id.UID = "another"
			m.boot(s.ca, id, s.events, nil)
		}, exit: plan.ExitFailed, text: "check the identity of the first machine", remedy: "initEndpoint"},
		{name: "a worker behind the endpoint", break_: func(t *testing.T, s *stage) {
			m := s.machines[0]
			m.stop()
			id := m.identity()
			id.Role = cloud.Worker
			m.boot(s.ca, id, s.events, nil)
		}, exit: plan.ExitFailed, text: "check the identity of the first machine", remedy: "initEndpoint"},
		{name: "a machine of another cluster", break_: func(t *testing.T, s *stage) {
			m := s.machines[0]
			m.stop()
			m.start(bytes.Repeat([]byte{9}, 32))
		}, exit: plan.ExitBlocked, text: "check that the first machine is unused", remedy: "unused machines"},
		{
			name: "a wrong init secret", break_: func(t *testing.T, s *stage) { s.secret = []byte("quite another secret, also long.") },
			exit: plan.ExitFailed, text: "wrong init secret", remedy: "init secret in constellation-state.yaml",
		},
		{name: "another initEndpoint than the cloud's", break_: func(t *testing.T, s *stage) {
			s.cloud.initEndpoint = s.balancer.addr()
			s.edit(workspace.StateFile, s.balancer.addr(), "127.0.0.1:1")
		}, exit: plan.ExitBlocked, text: "initEndpoint in constellation-state.yaml leads elsewhere: it says 127.0.0.1:1, and the cloud has 127.0.0.1:", remedy: "write initEndpoint: 127.0.0.1:"},
		{
			name: "another clusterEndpoint than the cloud's", break_: func(t *testing.T, s *stage) { s.cloud.clusterEndpoint = "127.0.0.1:7" },
			exit: plan.ExitBlocked, text: "clusterEndpoint in constellation-state.yaml leads elsewhere", remedy: "sandbox up",
		},
		{name: "an endpoint where something else listens", break_: func(t *testing.T, s *stage) {
			web := httptest.NewServer(http.NotFoundHandler())
			t.Cleanup(web.Close)
			s.edit(workspace.StateFile, s.balancer.addr(), web.Listener.Addr().String())
		}, exit: plan.ExitFailed, text: "the endpoint is not a bootstrapper", remedy: "initEndpoint"},
		{name: "an endpoint where a TLS server listens", break_: func(t *testing.T, s *stage) {
			web := httptest.NewTLSServer(http.NotFoundHandler())
			t.Cleanup(web.Close)
			s.edit(workspace.StateFile, s.balancer.addr(), web.Listener.Addr().String())
		}, exit: plan.ExitFailed, text: "the endpoint is not a bootstrapper", remedy: "initEndpoint"},
		{name: "an endpoint that refuses connections", break_: func(t *testing.T, s *stage) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			l.Close()
			s.edit(workspace.StateFile, s.balancer.addr(), l.Addr().String())
		}, exit: plan.ExitFailed, text: "connection refused", remedy: "check that a machine is up"},
		{name: "machines that never boot", break_: func(t *testing.T, s *stage) { s.machines[0].stop() }, exit: plan.ExitFailed, text: " for the first machine at 127.0.0.1:", remedy: "check that a machine is up"},
		{name: "kubeadm fails", break_: func(t *testing.T, s *stage) {
			s.machines[0].fail = &initproto.Failure{Step: "kubeadm-init", Message: "port 6443 is in use", Remedy: "reset the machine"}
		}, exit: plan.ExitFailed, text: "make control-plane-0 the first node (kubeadm-init): port 6443 is in use", remedy: "reset the machine"},
		{
			name: "the cloud is down", break_: func(t *testing.T, s *stage) {
				s.cloud.down = fmt.Errorf("%w: connection refused", cloud.ErrUnavailable)
			},
			exit: plan.ExitBlocked, text: "sandbox demo does not answer", remedy: "sandbox status",
		},
		{name: "an earlier sandbox of that name", break_: func(t *testing.T, s *stage) { s.cloud.uid = "fedcba9876543210" }, exit: plan.ExitUsage, text: "it belongs to earlier machines of sandbox demo", remedy: "away"},
		{
			name: "a Kubernetes version that the mirror has not", break_: func(t *testing.T, s *stage) { s.edit(workspace.ConfigFile, "v1.35.4", "v1.36.3") },
			exit: plan.ExitBlocked, text: "Kubernetes v1.36.3 is not available here", remedy: "sandbox fetch v1.36.3",
		},
		{
			name: "a Kubernetes version that the release has not", break_: func(t *testing.T, s *stage) { s.edit(workspace.ConfigFile, "v1.35.4", "v1.34.2") },
			exit: plan.ExitBlocked, text: "Kubernetes v1.34.2 is not offered", remedy: "constellation-conf.yaml, line ",
		},
		{name: "a release that this program does not know", break_: func(t *testing.T, s *stage) {
			s.edit(workspace.ConfigFile, "microserviceVersion: v1.1.0", "microserviceVersion: v7.0.0")
		}, exit: plan.ExitBlocked, text: "release v7.0.0 is not known", remedy: "name one of them"},
		{name: "an image that is newer than the services", break_: func(t *testing.T, s *stage) {
			s.edit(workspace.ConfigFile, "microserviceVersion: v1.1.0", "microserviceVersion: v1.0.0")
		}, exit: plan.ExitBlocked, text: "image v1.1.0 is newer than the services v1.0.0", remedy: "image: v1.0.0"},
		{
			name: "more workers wanted than there are", break_: func(t *testing.T, s *stage) { s.edit(workspace.ConfigFile, "count: 2", "count: 5") },
			exit: plan.ExitBlocked, text: "group workers has 2 machines, and the configuration wants 5", remedy: "count: 2",
		},
		{name: "a machine that failed to boot", break_: func(t *testing.T, s *stage) {
			s.cloud.set("worker-1", func(m *cluster.CloudMachine) { m.Stage, m.Message = plan.NodeFailed, "no space" })
		}, exit: plan.ExitBlocked, text: "1 machine failed to start: worker-1: no space", remedy: "console"},
		{
			name: "another pod network than the cloud's", break_: func(t *testing.T, s *stage) {
				s.edit(workspace.ConfigFile, "podCIDR: 10.244.0.0/16", "podCIDR: 10.200.0.0/16")
			},
			exit: plan.ExitBlocked, text: "podCIDR is not what the cloud routes", remedy: "podCIDR: 10.244.0.0/16",
		},
		{name: "a wrong configuration", break_: func(t *testing.T, s *stage) { s.edit(workspace.ConfigFile, "count: 2", "count: two") }, exit: plan.ExitUsage, text: "nodeGroups.workers.count", remedy: "config validate"},
		{name: "no state file", break_: func(t *testing.T, s *stage) {
			if err := os.Remove(filepath.Join(s.dir, workspace.StateFile)); err != nil {
				t.Fatal(err)
			}
		}, exit: plan.ExitUsage, text: "there is no constellation-state.yaml", remedy: "sandbox up"},
		{
			name: "the state file of another sandbox", break_: func(t *testing.T, s *stage) { s.edit(workspace.ConfigFile, "name: demo", "name: other") },
			exit: plan.ExitUsage, text: `it belongs to sandbox "demo", and the configuration names "other"`, remedy: "move constellation-state.yaml to a safe place and run `constellation sandbox up`",
		},
		{name: "a kubeconfig of another cluster", break_: func(t *testing.T, s *stage) {
			if err := os.WriteFile(filepath.Join(s.dir, workspace.KubeconfigFile), []byte(testKubeconfig), 0o600); err != nil {
				t.Fatal(err)
			}
		}, exit: plan.ExitUsage, text: "it belongs to another cluster", remedy: "-C"},
		{name: "a chart that does not become ready", break_: func(t *testing.T, s *stage) {
			s.cluster.NeverReady(func(c cluster.Chart) bool { return c.Name == "constellation-operator" })
		}, exit: plan.ExitFailed, text: "install chart constellation-operator", remedy: "again"},
		{name: "an API server that never answers", break_: func(t *testing.T, s *stage) { s.cluster.SetDown(true) }, exit: plan.ExitFailed, text: "the API server at 127.0.0.1:36443 does not answer in time", remedy: "sandbox status"},
		{name: "machines that never become ready", break_: func(t *testing.T, s *stage) { s.nodesOnly.Store(true) }, exit: plan.ExitFailed, text: "nothing changed for", remedy: "console"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t, 1, 2)
			tt.break_(t, s)
			events, _, err := s.init(t.Context(), nil)
			if err == nil || plan.ExitCode(err) != tt.exit || !strings.Contains(err.Error(), tt.text) {
				t.Fatalf("got %v (exit %d), want %q (exit %d)\n%s", err, plan.ExitCode(err), tt.text, tt.exit, states(events))
			}
			if r := plan.Remedy(err); !strings.Contains(r, tt.remedy) {
				t.Errorf("remedy %q, want %q in it", r, tt.remedy)
			}
			if events != nil {
				checkStream(t, events, err)
			}
			if strings.HasPrefix(err.Error(), "check w") {
				if runs, _ := s.machines[0].counts(); runs != 0 {
					t.Error("the machine was asked all the same")
				}
			}
		})
	}
}

// Whatever happens, no secret is in what people see or pass on.
func TestNoSecretIsShown(t *testing.T) {
	s := newStage(t, 1, 1)
	s.machines[0].cut = 4
	events, p := s.mustInit()
	_, _, again := s.init(t.Context(), nil)
	var m workspace.MasterSecret
	if err := json.Unmarshal([]byte(s.read(workspace.MasterSecretFile)), &m); err != nil {
		t.Fatal(err)
	}
	var canaries []string
	for _, b := range [][]byte{s.secret, m.Key, m.Salt} {
		canaries = append(canaries, string(b), hex.EncodeToString(b), strings.ToUpper(hex.EncodeToString(b)), base64.StdEncoding.EncodeToString(b), fmt.Sprintf("%d", b))
	}
	canaries = append(canaries, bootstrapToken, "U0VDUkVULUtFWS1PRi1BRE1JTg==")

	shown := map[string]string{"log": s.log.String(), "error": fmt.Sprint(again)}
	b, err := json.Marshal(events)
	if err != nil {
		t.Fatal(err)
	}
	shown["events"] = string(b)
	if b, err = json.Marshal(p); err != nil {
		t.Fatal(err)
	}
	shown["plan"] = string(b)
	status, err := s.engine().Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if b, err = json.Marshal(status); err != nil {
		t.Fatal(err)
	}
	shown["status"] = string(b)
	home, err := s.engine().Home(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if b, err = json.Marshal(home); err != nil {
		t.Fatal(err)
	}
	shown["home"] = string(b) + fmt.Sprintf("%+v", home)
	err = filepath.WalkDir(filepath.Join(s.dir, plan.RunsDir), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		shown[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(shown) < 8 {
		t.Errorf("looked at %d places only", len(shown))
	}
	for where, text := range shown {
		for _, c := range canaries {
			if strings.Contains(text, c) {
				t.Errorf("%s shows %q", where, c)
			}
		}
	}
	if !strings.Contains(shown["events"], "(hidden)") {
		t.Error("the log line that had the machine's secret is missing entirely")
	}
}

func TestLateServicesAreReportedAndDoNotFailInit(t *testing.T) {
	s := newStage(t, 1, 0)
	s.cluster.SetServices(cluster.Service{Name: "coredns", Version: "v1.13.1", Kind: cluster.ServiceOfKubernetes, Ready: 1, Wanted: 2})
	events, _ := s.mustInit()
	var waits, warnings int
	for _, e := range events {
		if strings.Contains(e.Text, "coredns is ready on 1 of 2") {
			if e.Kind == plan.KindWait {
				waits++
			} else if e.Level == "warn" {
				warnings++
			}
		}
	}
	if waits != 1 || warnings != 1 {
		t.Errorf("%d waits, %d warnings", waits, warnings)
	}
}

func TestStatusShowsKnownData(t *testing.T) {
	s := newStage(t, 1, 2)
	st, err := s.engine().Status(t.Context())
	if err != nil || st.Stage != engine.StageReady || st.Reachable || len(st.Machines) != 3 || st.Counts["wanted"] != 3 {
		t.Errorf("before init: %+v, %v", st, err)
	}
	s.mustInit()
	s.cluster.SetServices(cluster.Service{Name: "join-service", Version: "v1.1.0", Kind: cluster.ServiceOfRelease, Ready: 0, Wanted: 1, Message: "ImagePullBackOff"})
	st, err = s.engine().Status(t.Context())
	if err != nil || st.Stage != engine.StageCluster || !st.Reachable || len(st.Nodes) != 3 || len(st.Machines) != 0 || st.Counts["ready"] != 3 || st.Target != (plan.Target{Release: "v1.1.0", Image: "v1.1.0", Kubernetes: "v1.35.4"}) {
		t.Errorf("after init: %+v, %v", st, err)
	}
	if len(st.Health) == 0 || !strings.Contains(fmt.Sprint(st.Health), "join-service is not ready: 0 of 1 pods") {
		t.Errorf("health %+v", st.Health)
	}
	s.cloud.set("worker-1", func(m *cluster.CloudMachine) { m.Stage, m.Message = plan.NodeFailed, "killed" })
	s.cluster.RemoveNode("worker-1")
	s.cluster.SetDown(true)
	st, err = s.engine().Status(t.Context())
	if err != nil || st.Reachable || !strings.Contains(st.Problem, "does not answer") || len(st.Machines) != 3 || st.Machines[0].State != plan.StateUnknown || st.Machines[2].State != plan.NodeFailed {
		t.Errorf("with the API server down: %+v, %v", st, err)
	}
	s.cloud.down = errors.New("no daemon")
	if st, err = s.engine().Status(t.Context()); err != nil || len(st.Health) < 2 {
		t.Errorf("with everything down: %+v, %v", st, err)
	}
	b, err := json.Marshal(st)
	if err != nil || !bytes.Contains(b, []byte(`"nodes":[]`)) {
		t.Errorf("as JSON: %s, %v", b, err)
	}
}

func TestLinesOfTheJoinServiceAreTakenApart(t *testing.T) {
	for _, tt := range []struct {
		line string
		want plan.Event
	}{
		{`{"time":"t","level":"INFO","msg":"node reported","node":"w","step":"kubeadm-join","state":"running","text":"[x] y","at":"t"}`, plan.Event{Level: "info", Node: "w", Source: "kubeadm", Text: "[x] y"}},
		{`{"level":"INFO","msg":"node reported","node":"w","step":"claim-node","state":"done","text":""}`, plan.Event{Level: "info", Node: "w", Source: "bootstrapper", Text: "claim-node done"}},
		{`{"level":"WARN","msg":"ticket refused","node":"w","err":"no turn","took":1.5}`, plan.Event{Level: "warn", Node: "w", Text: "ticket refused  err=no turn took=1.5"}},
		{`panic: oh no`, plan.Event{Level: "info", Text: "panic: oh no"}},
		{`{"no":"message"}`, plan.Event{Level: "info", Text: `{"no":"message"}`}},
	} {
		if d := cmp.Diff(tt.want, engine.ParseLine(tt.line)); d != "" {
			t.Errorf("%s (-want +got):\n%s", tt.line, d)
		}
	}
}

func TestHomeSaysWhatIsNext(t *testing.T) {
	first := func(h engine.Home) string {
		if len(h.Next) == 0 {
			return ""
		}
		return strings.TrimPrefix(h.Next[0].Command, "constellation ")
	}
	s := newStage(t, 1, 1)
	at := " -C " + s.dir
	for _, tt := range []struct {
		name  string
		do    func()
		stage engine.Stage
		next  string
	}{
		{name: "machines and no cluster", do: func() {}, stage: engine.StageReady, next: "init"},
		{name: "init was left", do: func() {
			ctx, cancel := context.WithCancel(t.Context())
			s.init(ctx, func(e plan.Event) {
				if e.Step == "components" {
					cancel()
				}
			})
			cancel()
		}, stage: engine.StagePartial, next: "init"},
		{name: "a cluster", do: func() { s.mustInit() }, stage: engine.StageCluster, next: "status"},
		{name: "the state is gone", do: func() { os.Remove(filepath.Join(s.dir, workspace.StateFile)) }, stage: engine.StageConfigured, next: "sandbox up"},
		{name: "the configuration is broken", do: func() { s.edit(workspace.ConfigFile, "count: 1", "count: x") }, stage: engine.StageConfigured, next: "config validate"},
		{name: "nothing at all", do: func() { os.Remove(filepath.Join(s.dir, workspace.ConfigFile)) }, stage: engine.StageEmpty, next: "sandbox up"},
	} {
		tt.do()
		h, err := s.engine().Home(t.Context())
		if err != nil || h.Stage != tt.stage || first(h) != tt.next+at {
			t.Errorf("%s: stage %s, next %q, %v; want %s, %q", tt.name, h.Stage, first(h), err, tt.stage, tt.next+at)
		}
	}
}

// A TLS server whose certificate carries no evidence is no bootstrapper, whatever it
// speaks.
func TestPlainTLSIsNotEnough(t *testing.T) {
	s := newStage(t, 1, 0)
	web := httptest.NewUnstartedServer(http.NotFoundHandler())
	web.EnableHTTP2 = true
	web.TLS = &tls.Config{MinVersion: tls.VersionTLS13}
	web.StartTLS()
	defer web.Close()
	s.edit(workspace.StateFile, s.balancer.addr(), web.Listener.Addr().String())
	start := time.Now()
	_, _, err := s.init(t.Context(), nil)
	if err == nil || !strings.Contains(plan.Remedy(err), "is the address of another service") || time.Since(start) > 4*time.Second {
		t.Errorf("after %s: %v", time.Since(start), err)
	}
	if s.state().ClusterValues.InitNode != "" {
		t.Error("it was remembered as the first node")
	}
}

// A failed machine blocks only an init that has not begun. A resumed init reports it and
// continues without it.
func TestFailedMachineDoesNotBlockAResumedInit(t *testing.T) {
	s := newStage(t, 1, 2)
	s.mustInit()
	s.cloud.set("worker-1", func(m *cluster.CloudMachine) { m.Stage, m.Message = plan.NodeFailed, "no space" })
	p, err := s.engine().PlanInit(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if w := p.Warnings(); len(p.Blocked()) > 0 || len(w) != 1 || w[0].Title != "1 machine failed to start" || w[0].Detail != "worker-1: no space" {
		t.Errorf("blocked by %+v, warned of %+v", p.Blocked(), w)
	}
}

// Init waits for an API server that stops answering while nodes join, and afterwards reports what
// happened meanwhile.
func TestInitWaitsForAnAPIServerThatStopsAnswering(t *testing.T) {
	s := newStage(t, 1, 1)
	s.nodesOnly.Store(true)
	var once, back sync.Once
	events, _, err := s.init(t.Context(), func(e plan.Event) {
		if e.Step == "wait-ready" && e.To == plan.NodeNotReady && e.Node == "worker-0" {
			once.Do(func() { s.cluster.SetDown(true) })
		}
		if e.Kind == plan.KindWait && strings.Contains(e.Text, "the API server at 127.0.0.1:36443 has not answered since") {
			back.Do(func() {
				go func() {
					s.cluster.SetDown(false)
					s.nodesOnly.Store(false)
					s.live()
				}()
			})
		}
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, states(events))
	}
	checkStream(t, events, err)
}

// The kubelet of a control plane is Ready before kubeadm labels its Node. Only then does the
// cluster have that control plane.
func TestInitWaitsUntilControlPlanesHaveTheirRole(t *testing.T) {
	s := newStage(t, 1, 1)
	s.unlabelled.Store(true)
	var once sync.Once
	events, _, err := s.init(t.Context(), func(e plan.Event) {
		if e.Kind == plan.KindWait && strings.Contains(e.Text, "kubeadm has not labelled it as a control plane yet") {
			once.Do(func() {
				go func() {
					s.unlabelled.Store(false)
					s.live()
				}()
			})
		}
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, states(events))
	}
	if s.unlabelled.Load() {
		t.Errorf("init ended before a control plane had its role:\n%s", states(events))
	}
	checkStream(t, events, err)
}

// A cloud that stops while charts become ready is reported with a remedy, and init continues when
// it answers again.
func TestCloudThatStopsIsReportedWhileChartsBecomeReady(t *testing.T) {
	s := newStage(t, 1, 0)
	isBack := make(chan struct{})
	s.cluster.OnCall(func(call string) error {
		switch call {
		case "ApplyChart constellation-operator":
			for !slices.Contains(s.cluster.Calls(), "ApplyChart constellation-services") { // which the real one would try again
				time.Sleep(time.Millisecond)
			}
			s.cloud.end(fmt.Errorf("%w: connection refused", cloud.ErrUnavailable))
			s.cluster.SetDown(true)
			select { // as the real one, which tries until its time is over
			case <-isBack:
			case <-t.Context().Done():
			}
		case "SetNodeTarget":
			s.lifeOnce.Do(func() { go s.live() })
		}
		return nil
	})
	var told plan.Event
	events, _, err := s.init(t.Context(), func(e plan.Event) {
		if told.Text == "" && e.Kind == plan.KindWait && e.Object == "api-server" {
			told = e
			s.cloud.end(nil)
			s.cluster.SetDown(false)
			close(isBack)
		}
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, states(events))
	}
	checkStream(t, events, err)
	want := regexp.MustCompile(`^the cloud has stopped, so the cluster is unreachable: the API server at 127\.0\.0\.1:36443 has not answered since \d\d:\d\d:\d\dZ; the run continues when it does$`)
	if !want.MatchString(told.Text) || told.Step != "charts" || !strings.Contains(told.Remedy, "sandbox up -C "+s.dir) {
		t.Errorf("told %+v", told)
	}
}

// As long as the cloud is away no machine can be reached: it is not the machine's fault.
func TestCloudThatStopsIsReportedWhileInitWaitsForTheFirstMachine(t *testing.T) {
	s := newStage(t, 1, 0)
	s.machines[0].stop()
	var back sync.Once
	var told plan.Event
	events, _, err := s.init(t.Context(), func(e plan.Event) {
		switch {
		case e.Kind == plan.KindStep && e.Step == "init-first-node" && e.State == plan.StateRunning:
			s.cloud.end(fmt.Errorf("%w: connection refused", cloud.ErrUnavailable))
		case e.Kind == plan.KindWait && e.Remedy != "":
			back.Do(func() {
				told = e
				s.cloud.end(nil)
				s.machines[0].start(nil)
			})
		}
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, states(events))
	}
	if told.Text != "the cloud does not answer, so no machine is reachable; the run continues when it does" || !strings.Contains(told.Remedy, "sandbox up -C "+s.dir) {
		t.Errorf("told %+v", told)
	}
}

// The bootstrapper returns a result once. A second fetch fails at once, not after the timeout
// for machines that boot.
func TestResultThatWasFetchedBeforeFailsAtOnce(t *testing.T) {
	s := newStage(t, 1, 0)
	s.mustInit()
	api := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(api.Close)
	s.edit(workspace.StateFile, "127.0.0.1:36443", api.Listener.Addr().String())
	if err := os.Remove(filepath.Join(s.dir, workspace.KubeconfigFile)); err != nil {
		t.Fatal(err)
	}
	events, _, err := s.init(t.Context(), nil)
	want := fmt.Sprintf("get the result of the first machine: it was fetched before: the API server at %s answers, and no bootstrapper does", api.Listener.Addr())
	if err == nil || err.Error() != want || !strings.HasPrefix(plan.Remedy(err), "restore constellation-admin.conf from your copy") {
		t.Errorf("got  %v (%s)\nwant %s", err, plan.Remedy(err), want)
	}
	checkStream(t, events, err)
}

// An API server that does not answer either leaves hope: the machine may be booting.
func TestSilentFirstMachineIsWaitedForWhileItsAPIServerIsSilent(t *testing.T) {
	s := newStage(t, 1, 0)
	s.mustInit()
	s.edit(workspace.StateFile, "127.0.0.1:36443", "127.0.0.1:1")
	if err := os.Remove(filepath.Join(s.dir, workspace.KubeconfigFile)); err != nil {
		t.Fatal(err)
	}
	_, _, err := s.init(t.Context(), nil)
	if err == nil || !strings.HasPrefix(err.Error(), "wait ") || !strings.Contains(err.Error(), "s for the first machine at ") {
		t.Errorf("got %v", err)
	}
}

// Of two consoles that ask the same machine, the one that was late leaves nothing
// that could be taken for a cluster's.
func TestInitThatLosesTheRaceLeavesNothingOfItsOwn(t *testing.T) {
	for _, tt := range []struct {
		name string
		lose func(*stage)
		left []string // IDs of new backups
	}{
		{name: "refused by the bootstrapper", lose: func(s *stage) {
			m := s.machines[0]
			m.mu.Lock()
			m.clusterID = bytes.Repeat([]byte{7}, 32)
			m.mu.Unlock()
		}},
		{name: "seen by its evidence", lose: func(s *stage) {
			s.machines[0].stop()
			s.machines[0].start(bytes.Repeat([]byte{7}, 32))
		}},
		{name: "with a master secret of the user's", lose: func(s *stage) {
			s.machines[0].stop()
			s.machines[0].start(bytes.Repeat([]byte{7}, 32))
			secret := `{"key":"` + base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{1}, 32)) + `","salt":"` + base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{2}, 32)) + `"}`
			if err := os.WriteFile(filepath.Join(s.dir, workspace.MasterSecretFile), []byte(secret), 0o600); err != nil {
				s.t.Fatal(err)
			}
		}, left: []string{workspace.MasterSecretFile}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStage(t, 1, 0)
			tt.lose(s)
			before := s.read(workspace.StateFile)
			events, _, err := s.init(t.Context(), nil)
			if plan.ExitCode(err) != plan.ExitBlocked || !strings.HasPrefix(plan.Remedy(err), "another init came first: continue in the directory where it was run") {
				t.Errorf("got %v, exit %d, remedy %q", err, plan.ExitCode(err), plan.Remedy(err))
			}
			want := append([]string{workspace.ConfigFile}, tt.left...)
			want = append(want, workspace.StateFile, plan.RunsDir)
			if got := list(t, s.dir); !cmp.Equal(got, want) {
				t.Errorf("the directory holds %v, want %v", got, want)
			}
			if d := cmp.Diff(before, s.read(workspace.StateFile)); d != "" {
				t.Errorf("the state file changed (-before +after):\n%s", d)
			}
			var res plan.Result
			if err := json.Unmarshal(events[len(events)-1].Data, &res); err != nil || res.Resume != "" {
				t.Errorf("result %+v, %v", res, err)
			}
		})
	}
}

func TestFailedMachineOffersTheSameCommandIfThatCanSucceed(t *testing.T) {
	s := newStage(t, 1, 0)
	m := s.machines[0]
	set := func(f *initproto.Failure) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.fail = f
	}
	result := func(events []plan.Event) (res plan.Result) {
		t.Helper()
		if err := json.Unmarshal(events[len(events)-1].Data, &res); err != nil {
			t.Fatal(err)
		}
		return res
	}
	set(&initproto.Failure{Step: "install-components", Message: "install kubelet: digest mismatch", Remedy: "mend the cause", Retry: true})
	for range 2 { // the mirror is as it was
		events, _, err := s.init(t.Context(), nil)
		checkStream(t, events, err)
		if plan.ExitCode(err) != plan.ExitFailed || !strings.HasSuffix(err.Error(), "(install-components): install kubelet: digest mismatch") || plan.Remedy(err) != "mend the cause" {
			t.Fatalf("got %v, remedy %q", err, plan.Remedy(err))
		}
		if res := result(events); res.Status != plan.StateFailed || !strings.Contains(res.Resume, "constellation init") {
			t.Errorf("result %+v", res)
		}
	}
	cluster := s.state().ClusterValues.ClusterID
	set(nil)
	s.mustInit()
	if runs, _ := m.counts(); runs != 1 || !bytes.Equal(cluster, s.state().ClusterValues.ClusterID) {
		t.Errorf("%d claims, cluster %x, was %x", runs, s.state().ClusterValues.ClusterID, cluster)
	}

	s = newStage(t, 1, 0)
	m = s.machines[0]
	set(&initproto.Failure{Step: "kubeadm-init", Message: "port 6443 is in use", Remedy: "replace the machine"})
	events, _, err := s.init(t.Context(), nil)
	if res := result(events); plan.ExitCode(err) != plan.ExitFailed || res.Resume != "" {
		t.Errorf("final failure: %v, result %+v", err, res)
	}
}

func TestLeavingDoesNotWaitForAChart(t *testing.T) {
	s := newStage(t, 1, 0)
	s.cluster.NeverReady(func(c cluster.Chart) bool { return c.Name == "constellation-operator" })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var left time.Time
	events, _, err := s.init(ctx, func(e plan.Event) {
		if e.Object == "constellation-operator" && strings.HasPrefix(e.Text, "deployment") {
			left = time.Now()
			cancel()
		}
	})
	checkStream(t, events, err)
	if plan.ExitCode(err) != plan.ExitStopped || time.Since(left) > 800*time.Millisecond {
		t.Errorf("after %s: %v", time.Since(left), err)
	}
	s.cluster.NeverReady(func(cluster.Chart) bool { return false })
	s.resume("charts")
}
