//go:build linux

package plans

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"constellation/operator/api/upgradev1"
)

// processEnv names the file with the configuration of a controller. If it is set, the test binary
// runs that controller.
const processEnv = "CONSTELLATION_TEST_PLANS"

type processConfig struct {
	Kubeconfig, Namespace string
	// Points are the points at which it crashes, each once: a file in Once records the crash.
	Points []string
	Once   string
}

func init() {
	path := os.Getenv(processEnv)
	if path == "" {
		return
	}
	if err := process(path); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func process(path string) error {
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
		Cluster: access, Namespace: c.Namespace, Name: "system-upgrade-controller", Settings: DefaultSettings(), Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
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

func writeKubeconfig(access *rest.Config, file string) error {
	k := clientcmdapi.NewConfig()
	k.Clusters["c"] = &clientcmdapi.Cluster{Server: access.Host, CertificateAuthorityData: access.CAData}
	k.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: access.CertData, ClientKeyData: access.KeyData}
	k.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	k.CurrentContext = "x"
	return clientcmd.WriteToFile(*k, file)
}

// TestControllerIsKilled kills a controller before and after each of its effects.
func TestControllerIsKilled(t *testing.T) { killed(t, newWorld(t)) }

// killed kills and restarts the controller before and after each of its effects.
func killed(t *testing.T, w *world) {
	s := w.site(t, "killed", 4)
	dir, once := t.TempDir(), t.TempDir()
	c := processConfig{Kubeconfig: filepath.Join(dir, "kubeconfig"), Namespace: s.ns, Once: once}
	if err := writeKubeconfig(s.controller, c.Kubeconfig); err != nil {
		t.Fatal(err)
	}
	// The cordon is removed before the node is marked, because there is a delay.
	for _, effect := range []string{"cordon note", "create job", "write status", "uncordon", "mark node", "delete job"} {
		c.Points = append(c.Points, "before:"+effect, "after:"+effect)
	}
	b, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "config")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	var said lines
	lives := 0
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			cmd := exec.CommandContext(ctx, os.Args[0])
			cmd.Env = append(os.Environ(), processEnv+"="+file)
			cmd.Stdout, cmd.Stderr = &said, &said
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			err := cmd.Run()
			lives++
			if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
				t.Errorf("a controller ended by itself: %v", err)
				return
			}
		}
	}()
	defer func() {
		cancel()
		<-ended
		if t.Failed() {
			t.Logf("log of the controllers:\n%s", said.tail())
		}
		t.Logf("%d lives", lives)
	}()
	s.plan(`
metadata: {name: killed}
spec: {concurrency: 2, version: v1, serviceAccountName: system-upgrade, cordon: true, postCompleteDelay: 1s, upgrade: {image: a}}
`)
	missing := func() (all []string) {
		for _, p := range c.Points {
			if _, err := os.Stat(filepath.Join(once, p)); err != nil {
				all = append(all, p)
			}
		}
		return all
	}
	s.longer("the plan is complete", func() (string, bool) {
		p := s.get("killed")
		return fmt.Sprintf("%+v; not killed at %q", p.Status, missing()), cond(p, upgradev1.ConditionComplete).Status == "True"
	})
	// What only a new version does: a Job that runs is deleted.
	hold := make(chan struct{})
	s.set(func(ctx context.Context, _ *corev1.Pod, _ string) error {
		select {
		case <-hold:
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	s.edit("killed", `{"spec":{"version":"v2"}}`)
	s.longer("two Jobs of the new version run", func() (string, bool) {
		n := 0
		for _, j := range s.jobs() {
			if j.Labels[upgradev1.LabelVersion] == "v2" {
				n++
			}
		}
		return fmt.Sprint(n), n == 2
	})
	s.edit("killed", `{"spec":{"version":"v3"}}`)
	close(hold)
	s.longer("it was killed at every point, and the Plan is complete again", func() (string, bool) {
		p := s.get("killed")
		return fmt.Sprintf("%+v; not killed at %q", p.Status, missing()), len(missing()) == 0 && p.Status.LatestVersion == "v3" && cond(p, upgradev1.ConditionComplete).Status == "True"
	})
	// Each node was upgraded once to v1, in spite of all crashes of its controller.
	ran := map[string]int{}
	for _, l := range s.log() {
		if strings.HasSuffix(l, " upgrade") {
			ran[l]++
		}
	}
	for _, name := range s.nodes {
		n := s.nodeNamed(name)
		if n.Spec.Unschedulable || n.Annotations[annotationCordoned] != "" || n.Labels["plan.upgrade.cattle.io/killed"] != s.get("killed").Status.LatestHash {
			t.Errorf("Node %s: unschedulable %t, annotations %v, labels %v", name, n.Spec.Unschedulable, n.Annotations, n.Labels)
		}
		// v1 and v3, and v2 where it was begun.
		if c := ran[name+" upgrade"]; c < 2 || c > 3 {
			t.Errorf("Node %s was upgraded %d times", name, c)
		}
	}
}

// longer is eventually with a timeout for a dozen restarts.
func (s *site) longer(what string, holds func() (string, bool)) {
	s.Helper()
	deadline := time.Now().Add(3 * time.Minute)
	for {
		is, ok := holds()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("%s: not so after 3 minutes; it is: %s", what, is)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
