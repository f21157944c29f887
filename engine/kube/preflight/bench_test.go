package preflight

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/internal/footprint"
)

// kubeconfigEnv makes the test binary run one preflight and tell what it cost.
const kubeconfigEnv = "PREFLIGHT_BENCHMARK_KUBECONFIG"

// cost is what a preflight took, of a process that did nothing else.
type cost struct {
	Took     time.Duration
	Heap     uint64 // bytes that the heap got from the system
	Resident uint64 // bytes, at most
	Findings int
}

func TestMain(m *testing.M) {
	if path := os.Getenv(kubeconfigEnv); path != "" {
		if err := measure(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(controlplanetest.Run(m))
}

// measure runs a preflight without evictions and prints its cost.
func measure(kubeconfig string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	r := hop("v1.35.4", "v1.36.3")
	r.ReplaceControlPlanes, r.ReplaceWorkers, r.Surge = true, true, 1
	start := time.Now()
	all, err := Run(context.Background(), config, []check.PreflightRequest{r}, func(plan.Event) {})
	if err != nil {
		return err
	}
	found := all[0]
	for _, f := range found {
		if f.Severity == plan.NotChecked && !slices.Contains([]string{"kubelet-certificates", "running-kubelets"}, f.ID) { // there are no kubelets
			return fmt.Errorf("not everything was checked: %s: %s", f.Title, f.Detail)
		}
	}
	c := cost{Took: time.Since(start), Findings: len(found)}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	c.Heap = m.HeapSys
	if status, err := os.ReadFile("/proc/self/status"); err == nil {
		for line := range strings.Lines(string(status)) {
			if v, ok := strings.CutPrefix(line, "VmHWM:"); ok {
				kb, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")), 10, 64)
				if err != nil {
					return err
				}
				c.Resident = kb << 10
			}
		}
	}
	return json.NewEncoder(os.Stdout).Encode(c)
}

// BenchmarkPreflight measures all of a preflight but evictions, in a process of its
// own, against a real API server with many nodes and pods. To make those takes a
// minute or two that is not measured.
func BenchmarkPreflight(b *testing.B) {
	for _, size := range []struct{ nodes, pods int }{{100, 5_000}, {1_000, 20_000}} {
		b.Run(fmt.Sprintf("%d nodes %d pods", size.nodes, size.pods), func(b *testing.B) {
			kubeconfig := populated(b, size.nodes, size.pods)
			var total time.Duration
			var worst cost
			for b.Loop() {
				cmd := exec.CommandContext(b.Context(), os.Args[0])
				cmd.Env = append(os.Environ(), kubeconfigEnv+"="+kubeconfig)
				var out, failed bytes.Buffer
				cmd.Stdout, cmd.Stderr = &out, &failed
				if err := cmd.Run(); err != nil {
					b.Fatalf("%v: %s", err, failed.String())
				}
				var c cost
				if err := json.Unmarshal(out.Bytes(), &c); err != nil {
					b.Fatal(err)
				}
				total += c.Took
				worst.Heap, worst.Resident = max(worst.Heap, c.Heap), max(worst.Resident, c.Resident)
			}
			b.ReportMetric(total.Seconds()/float64(b.N), "s/preflight")
			b.ReportMetric(float64(worst.Heap)/1e6, "heap-MB")
			b.ReportMetric(float64(worst.Resident)/1e6, "resident-MB")
		})
	}
}

// BenchmarkCheckProgram measures `constellation check` of a cluster without a workspace, from exec to
// exit, with the built program. `kubectl get` of the largest lists that it reads runs interleaved.
// Memory is the peak of the whole process. BENCH_CHECK_SIZE, such as "5000 50000", adds a size.
func BenchmarkCheckProgram(b *testing.B) {
	program, err := filepath.Abs("../../../bin/constellation")
	if err != nil {
		b.Fatal(err)
	}
	kubectl := filepath.Join(filepath.Dir(program), "kubectl")
	for _, p := range []string{program, kubectl} {
		if _, err := os.Stat(p); err != nil {
			b.Skip(err)
		}
	}
	sizes := [][2]int{{100, 5_000}, {1_000, 20_000}}
	if s := os.Getenv("BENCH_CHECK_SIZE"); s != "" {
		var more [2]int
		if _, err := fmt.Sscan(s, &more[0], &more[1]); err != nil {
			b.Fatalf("BENCH_CHECK_SIZE is %q, want nodes and pods", s)
		}
		sizes = append(sizes, more)
	}
	for _, size := range sizes {
		b.Run(fmt.Sprintf("%d nodes %d pods", size[0], size[1]), func(b *testing.B) {
			kubeconfig := populated(b, size[0], size[1])
			run := func(args ...string) (time.Duration, footprint.Peak) {
				cmd := exec.CommandContext(b.Context(), args[0], args[1:]...)
				cmd.Dir = b.TempDir()
				var failed bytes.Buffer
				cmd.Stderr = &failed
				start := time.Now()
				if err := cmd.Start(); err != nil {
					b.Fatal(err)
				}
				sampled := footprint.Sample(cmd.Process.Pid)
				if err := cmd.Wait(); err != nil {
					b.Fatalf("%s: %v: %s", strings.Join(args, " "), err, failed.String())
				}
				return time.Since(start), <-sampled
			}
			var ours, peer []time.Duration
			var most footprint.Peak
			for b.Loop() {
				took, m := run(program, "check", "--kubeconfig", kubeconfig, "-o", "json")
				ours, most.All, most.Own = append(ours, took), max(most.All, m.All), max(most.Own, m.Own)
				took, _ = run(kubectl, "--kubeconfig", kubeconfig, "get", "nodes,pods,deployments,replicasets", "--all-namespaces", "-o", "json")
				peer = append(peer, took)
			}
			slices.Sort(ours)
			slices.Sort(peer)
			b.ReportMetric(ours[len(ours)/2].Seconds(), "s/check")
			b.ReportMetric(peer[len(peer)/2].Seconds(), "s/kubectl")
			b.ReportMetric(most.All/1e6, "MB")
			b.ReportMetric(most.Own/1e6, "MB-own")
		})
	}
}

// populated returns the kubeconfig of a new control plane with nodes and pods.
func populated(b *testing.B, nodes, pods int) (kubeconfig string) {
	b.Helper()
	cp := controlplane.ForTest(b, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount"}})
	populate(b, cp, nodes, pods)
	text, err := cp.Kubeconfig()
	if err != nil {
		b.Fatal(err)
	}
	kubeconfig = filepath.Join(b.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, text, 0o600); err != nil {
		b.Fatal(err)
	}
	return kubeconfig
}

// populate makes nodes and pods: ten of a Deployment, as large as pods usually are.
func populate(b *testing.B, cp *controlplane.ControlPlane, nodes, pods int) {
	b.Helper()
	config := protobuf(cp.Config())
	config.QPS = -1
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		b.Fatal(err)
	}
	group, ctx := errgroup.WithContext(b.Context())
	group.SetLimit(32)
	for i := range nodes {
		group.Go(func() error {
			n := benchNode(i)
			made, err := core.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			made.Status = n.Status
			_, err = core.CoreV1().Nodes().UpdateStatus(ctx, made, metav1.UpdateOptions{})
			return err
		})
	}
	const podsEach = 10
	for i := range pods / podsEach {
		group.Go(func() error {
			name := fmt.Sprintf("app-%d", i)
			template := benchTemplate(name)
			selector := &metav1.LabelSelector{MatchLabels: map[string]string{"app.kubernetes.io/name": name}}
			d, err := core.AppsV1().Deployments("default").Create(ctx, &appsv1.Deployment{
				ObjectMeta: metav1.ObjectMeta{Name: name, Labels: template.Labels}, Spec: appsv1.DeploymentSpec{Replicas: new(int32(podsEach)), Selector: selector, Template: template},
			}, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			rs, err := core.AppsV1().ReplicaSets("default").Create(ctx, &appsv1.ReplicaSet{
				ObjectMeta: metav1.ObjectMeta{Name: name + "-5d9c7b4f6", Labels: template.Labels, OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(d, appsv1.SchemeGroupVersion.WithKind("Deployment"))}},
				Spec:       appsv1.ReplicaSetSpec{Replicas: new(int32(podsEach)), Selector: selector, Template: template},
			}, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			for j := range podsEach {
				p := &corev1.Pod{ObjectMeta: *template.ObjectMeta.DeepCopy(), Spec: *template.Spec.DeepCopy()}
				p.Name = fmt.Sprintf("%s-%d", rs.Name, j)
				p.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(rs, appsv1.SchemeGroupVersion.WithKind("ReplicaSet"))}
				p.Spec.NodeName = benchNode((i*podsEach + j) % nodes).Name
				if _, err := core.CoreV1().Pods("default").Create(ctx, p, metav1.CreateOptions{}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		b.Fatal(err)
	}
}

func benchNode(i int) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%04d", i), Labels: map[string]string{"kubernetes.io/hostname": fmt.Sprintf("node-%04d", i), "topology.kubernetes.io/zone": fmt.Sprintf("zone-%d", i%3)}}}
	if i < 3 {
		n.Labels["node-role.kubernetes.io/control-plane"] = ""
	}
	amount := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("16"), corev1.ResourceMemory: resource.MustParse("64Gi"), corev1.ResourcePods: resource.MustParse("110")}
	n.Status = corev1.NodeStatus{
		Capacity: amount, Allocatable: amount, NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "v1.35.4", ContainerRuntimeVersion: "containerd://2.1.0"},
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}}, // nothing listens there
	}
	n.Status.DaemonEndpoints.KubeletEndpoint.Port = 1
	for j := range 50 {
		n.Status.Images = append(n.Status.Images, corev1.ContainerImage{Names: []string{fmt.Sprintf("registry.example.com/team/app-%d@sha256:%064d", j, j)}, SizeBytes: 1 << 27})
	}
	return n
}

func benchTemplate(name string) corev1.PodTemplateSpec {
	container := corev1.Container{
		Name: "main", Image: "registry.example.com/team/" + name + ":v1.2.3", Command: []string{"/app", "--verbose"},
		Ports:        []corev1.ContainerPort{{ContainerPort: 8080}},
		Resources:    corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("128Mi")}},
		VolumeMounts: []corev1.VolumeMount{{Name: "config", MountPath: "/etc/app"}},
	}
	for i := range 10 {
		container.Env = append(container.Env, corev1.EnvVar{Name: fmt.Sprintf("SETTING_%d", i), Value: strings.Repeat("x", 40)})
	}
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app.kubernetes.io/name": name, "app.kubernetes.io/instance": name, "pod-template-hash": "5d9c7b4f6"}},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{container},
			Volumes:    []corev1.Volume{{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}}}}},
		},
	}
}
