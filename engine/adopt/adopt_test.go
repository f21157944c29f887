package adopt_test

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"constellation/engine/adopt"
	"constellation/engine/cloud"
	"constellation/engine/distribution"
	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/internal/testneeds"
)

const config = `apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: v1.36.4
controlPlaneEndpoint: 10.0.0.1:6443
networking: {podSubnet: 10.244.0.0/16, serviceSubnet: 10.96.0.0/12, dnsDomain: cluster.local}
`

var now = time.Date(2026, 11, 27, 6, 0, 0, 0, time.UTC)

// facts are those of a sound cluster with one control plane and one worker.
func facts() adopt.Facts {
	return adopt.Facts{
		UID: "uid-1", Unread: map[adopt.Part]string{}, Config: config,
		Nodes: []adopt.Node{
			{Name: "cp-0", Address: "10.0.0.11", Role: cloud.ControlPlane, Kubernetes: "v1.36.4", Ready: true},
			{Name: "worker-0", Address: "10.0.0.21", Role: cloud.Worker, Kubernetes: "v1.36.4", Ready: true},
		},
		StaticPods: []adopt.StaticPod{{Component: "etcd", Node: "cp-0", Images: []string{"registry.k8s.io/etcd:3.6.8-0"}, Args: etcdArgs()}},
	}
}

func etcdArgs() []string {
	const pki = "/etc/kubernetes/pki/etcd/"
	return []string{
		"etcd", "--advertise-client-urls=https://10.0.0.11:2379", "--cert-file=" + pki + "server.crt", "--client-cert-auth=true", "--data-dir=/var/lib/etcd", "--feature-gates=InitialCorruptCheck=true",
		"--initial-advertise-peer-urls=https://10.0.0.11:2380", "--initial-cluster=cp-0=https://10.0.0.11:2380", "--key-file=" + pki + "server.key", "--listen-client-urls=https://127.0.0.1:2379",
		"--listen-metrics-urls=http://127.0.0.1:2381", "--listen-peer-urls=https://10.0.0.11:2380", "--name=cp-0", "--peer-cert-file=" + pki + "peer.crt", "--peer-client-cert-auth=true",
		"--peer-key-file=" + pki + "peer.key", "--peer-trusted-ca-file=" + pki + "ca.crt", "--snapshot-count=10000", "--trusted-ca-file=" + pki + "ca.crt", "--watch-progress-notify-interval=5s",
	}
}

func examine(f adopt.Facts, name string, found ...plan.Finding) adopt.Report {
	return adopt.Examine(f, adopt.Request{
		Context: "admin@prod", Server: "https://10.0.0.1:6443", Kubernetes: "v1.36.4", Flags: " --context admin@prod", Found: found,
		Distribution: distribution.Distribution{Name: name, Title: name, Upgrade: "its tool"},
	}, now)
}

func ids(r adopt.Report) (out []string) {
	for _, f := range r.Findings {
		out = append(out, string(f.Severity)+" "+f.ID)
	}
	return out
}

func TestExamine(t *testing.T) {
	t.Parallel()
	block := func(id string) plan.Finding { return plan.Finding{ID: id, Severity: plan.Block, Title: id} }
	for _, tt := range []struct {
		name  string
		edit  func(*adopt.Facts)
		found []plan.Finding
		want  []string
	}{
		{name: "sound", edit: func(*adopt.Facts) {}, want: []string{"warn adopt-control-planes"}},
		{name: "etcd with a dead member", edit: func(*adopt.Facts) {}, found: []plan.Finding{block("etcd-members"), block("removed-apis-used")}, want: []string{"block etcd-members", "warn adopt-control-planes"}},
		{name: "half initialised", edit: func(f *adopt.Facts) { f.Config = "" }, want: []string{"block kubeadm-config", "warn adopt-control-planes"}},
		{name: "half initialised, as the check reports it", edit: func(f *adopt.Facts) { f.Config = "" }, found: []plan.Finding{block("kubeadm-config")}, want: []string{"block kubeadm-config", "warn adopt-control-planes"}},
		{name: "a document of another kind", edit: func(f *adopt.Facts) { f.Config = "kind: Pod\n" }, want: []string{"block kubeadm-config", "warn adopt-control-planes"}},
		{name: "no YAML", edit: func(f *adopt.Facts) { f.Config = "kind: [\x1b" }, want: []string{"block kubeadm-config", "warn adopt-control-planes"}},
		{name: "forbidden", edit: func(f *adopt.Facts) {
			*f = adopt.Facts{Unread: map[adopt.Part]string{
				adopt.PartIdentity: "forbidden", adopt.PartNodes: "forbidden", adopt.PartConfig: "forbidden", adopt.PartPods: "forbidden", adopt.PartAddOns: "forbidden", adopt.PartServers: "forbidden", adopt.PartTokens: "forbidden",
			}}
		}, want: []string{"block adopt-unreadable", "not-checked adopt-add-ons", "not-checked adopt-certificates", "not-checked adopt-manifests", "not-checked adopt-tokens"}},
		{name: "an escape sequence as a node's name", edit: func(f *adopt.Facts) { f.Nodes[1].Name = `\x1b[2J` }, want: []string{"block adopt-node-names", "warn adopt-control-planes"}},
		{name: "an address used twice", edit: func(f *adopt.Facts) { f.Nodes[1].Address = "10.0.0.11" }, want: []string{"block adopt-node-addresses", "warn adopt-control-planes"}},
		{name: "a node without an address", edit: func(f *adopt.Facts) { f.Nodes[1].Address = "" }, want: []string{"warn adopt-control-planes", "warn adopt-node-addresses"}},
		{name: "no control plane", edit: func(f *adopt.Facts) { f.Nodes[0].Role = cloud.Worker }, want: []string{"block adopt-control-planes"}},
		{name: "external etcd", edit: func(f *adopt.Facts) {
			f.Config += "etcd: {external: {endpoints: [https://e-0:2379]}}\n"
			f.StaticPods = nil
		}, want: []string{"warn adopt-control-planes", "not-checked adopt-external-etcd"}},
		{name: "no pod of etcd", edit: func(f *adopt.Facts) { f.StaticPods = nil }, want: []string{"warn adopt-control-planes", "not-checked adopt-etcd"}},
		{name: "a kubeadm without data", edit: func(f *adopt.Facts) { f.Config = strings.Replace(config, "v1.36.4", "v1.31.2", 1) }, want: []string{"warn adopt-control-planes", "not-checked adopt-manifests"}},
		{name: "a kubelet two minors old", edit: func(f *adopt.Facts) { f.Nodes[1].Kubernetes = "v1.34.1" }, want: []string{"warn adopt-control-planes", "warn adopt-old-kubelets"}},
		{name: "a manifest changed by hand", edit: func(f *adopt.Facts) { f.StaticPods[0].Args = append(etcdArgs(), "--quota-backend-bytes=8589934592") }, want: []string{"warn adopt-control-planes", "warn adopt-manifests"}},
		{name: "a token without an end", edit: func(f *adopt.Facts) { f.Tokens = []adopt.Token{{ID: "abcdef", Joins: true}} }, want: []string{"warn adopt-control-planes", "warn adopt-tokens"}},
		{name: "tokens that end, and that have ended", edit: func(f *adopt.Facts) {
			f.Tokens = []adopt.Token{{ID: "abcdef", Joins: true, Expires: now.Add(time.Hour)}, {ID: "ghijkl", Joins: true, Expires: now.Add(-time.Hour)}}
		}, want: []string{"warn adopt-control-planes", "ok adopt-tokens"}},
		{name: "an unfinished upgrade", edit: func(f *adopt.Facts) {
			f.StaticPods = append(f.StaticPods, adopt.StaticPod{Component: "kube-apiserver", Node: "cp-0", Images: []string{"registry.k8s.io/kube-apiserver:v1.35.4"}})
		}, want: []string{"warn adopt-control-planes", "warn adopt-manifests", "warn adopt-mixed-versions"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := facts()
			tt.edit(&f)
			if got := ids(examine(f, distribution.Kubeadm, tt.found...)); !slices.Equal(got, tt.want) {
				t.Errorf("findings %q, want %q", got, tt.want)
			}
		})
	}
}

// TestRefusals checks that clusters of others are refused by name with what fits them.
func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		distribution.EKS, distribution.GKE, distribution.AKS, distribution.Kops, distribution.ClusterAPI, distribution.RKE2, distribution.K3s, distribution.Talos, distribution.Kind,
		distribution.OpenShift, distribution.Constellation, distribution.Unknown,
	} {
		r := examine(facts(), name)
		if list := r.Blocked(); len(list) != 1 || list[0].ID != "adopt-distribution" || name != distribution.Unknown && name != distribution.Constellation && !strings.Contains(list[0].Title, name) {
			t.Errorf("%s: %+v", name, list)
		}
		if offers := strings.Join(r.Offers, "\n"); name != distribution.Constellation && (!strings.Contains(offers, "check --context admin@prod") || !strings.Contains(offers, "backup create --context admin@prod")) {
			t.Errorf("%s: offers %q", name, offers)
		}
		if plans := strings.Contains(strings.Join(r.Offers, "\n"), "Plan of upgrade.cattle.io"); plans != (name == distribution.K3s || name == distribution.RKE2) {
			t.Errorf("%s: offers Plans: %t", name, plans)
		}
		if len(r.Would) > 0 {
			t.Errorf("%s: would %q", name, r.Would)
		}
	}
	f := facts()
	f.Unread[adopt.PartConfig] = "forbidden"
	if list := examine(f, distribution.Unknown); list.Findings[0].ID != "adopt-unreadable" {
		t.Errorf("a cluster that could not be read: %+v", list.Findings)
	}
}

func TestNameOf(t *testing.T) {
	t.Parallel()
	for context, want := range map[string]string{
		"kubernetes-admin@kubernetes": "kubernetes-admin-kubernetes", "PROD": "prod", "\x1b[2J": "2j", "---": "cluster", "": "cluster", strings.Repeat("a", 60): strings.Repeat("a", 37),
	} {
		if got := adopt.NameOf(context); got != want {
			t.Errorf("%q: %q, want %q", context, got, want)
		}
	}
}

// TestRendersLikeKubeadm compares the data about static pods with what real kubeadms render: from
// defaults, with an external etcd, and with settings of the user. Nothing differs. Each change by hand
// is found.
func TestRendersLikeKubeadm(t *testing.T) {
	t.Parallel()
	for _, version := range build.Versions() {
		for name, more := range map[string]string{
			"defaults": "",
			"external etcd": "etcd: {external: {endpoints: [https://e-0:2379, https://e-1:2379], caFile: /etc/etcd/ca.crt, certFile: /etc/etcd/c.crt, keyFile: /etc/etcd/c.key}}\n" +
				"networking: {podSubnet: 10.244.0.0/16, serviceSubnet: 10.100.0.0/16, dnsDomain: example.org}\nclusterName: prod\n",
			"settings": "networking: {podSubnet: 10.244.0.0/16}\ncontrollerManager: {extraArgs: [{name: allocate-node-cidrs, value: 'false'}]}\nscheduler: {extraArgs: [{name: v, value: '4'}]}\n" +
				"apiServer: {extraArgs: [{name: authorization-mode, value: 'Node,RBAC,Webhook'}, {name: service-account-issuer, value: a}, {name: service-account-issuer, value: b}], extraVolumes: [{name: audit, hostPath: /var/log/audit, mountPath: /var/log/audit}]}\n" +
				"etcd: {local: {dataDir: /data/etcd, extraArgs: [{name: quota-backend-bytes, value: '8589934592'}]}}\n",
		} {
			t.Run(version+", "+name, func(t *testing.T) {
				t.Parallel()
				path := filepath.Join(testneeds.Kubernetes(t, version), "kubeadm")
				cluster := "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: " + version + "\n" + more
				f := facts()
				f.Config, f.StaticPods = cluster, rendered(t, path, cluster, name != "external etcd")
				if r := examine(f, distribution.Kubeadm); len(r.Changes) > 0 || slices.Contains(ids(r), "not-checked adopt-manifests") {
					t.Errorf("kubeadm's own manifests differ: %+v", r.Changes)
				}
				for _, hand := range []struct {
					edit func(*adopt.StaticPod)
					want string
				}{
					{func(p *adopt.StaticPod) { p.Args = append(p.Args, "--profiling=false") }, "--profiling=false is neither"},
					{func(p *adopt.StaticPod) { p.Args = slices.Delete(p.Args, 1, 2) }, "is missing"},
					{func(p *adopt.StaticPod) { p.Images = append(p.Images, "sidecar") }, "2 containers"},
					{func(p *adopt.StaticPod) { p.Images[0] = "example.org/x:1" }, "its image is example.org/x:1"},
					{func(p *adopt.StaticPod) { p.HostPaths = append(p.HostPaths, "/root") }, "it mounts /root"},
				} {
					for i := range f.StaticPods {
						g := f
						g.StaticPods = slices.Clone(f.StaticPods)
						p := &g.StaticPods[i]
						p.Args, p.Images, p.HostPaths = slices.Clone(p.Args), slices.Clone(p.Images), slices.Clone(p.HostPaths)
						hand.edit(p)
						if r := examine(g, distribution.Kubeadm); len(r.Changes) == 0 || !strings.Contains(fmt.Sprint(r.Changes), hand.want) {
							t.Errorf("%s: changes %+v, want %q", p.Component, r.Changes, hand.want)
						}
					}
				}
			})
		}
	}
}

// rendered returns the static pods that a kubeadm renders.
func rendered(t *testing.T, kubeadm, cluster string, etcd bool) (out []adopt.StaticPod) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "init.yaml")
	init := "apiVersion: kubeadm.k8s.io/v1beta4\nkind: InitConfiguration\nlocalAPIEndpoint: {advertiseAddress: 192.0.2.7}\nnodeRegistration: {name: cp-0, criSocket: unix:///run/containerd/containerd.sock}\n---\n"
	if err := os.WriteFile(file, []byte(init+cluster), 0o600); err != nil {
		t.Fatal(err)
	}
	phases := [][]string{{"control-plane", "all"}}
	if etcd {
		phases = append(phases, []string{"etcd", "local"})
	}
	for _, phase := range phases {
		cmd := exec.CommandContext(t.Context(), kubeadm, slices.Concat([]string{"init", "phase"}, phase, []string{"--dry-run", "--config", file})...)
		cmd.Env = append(os.Environ(), "KUBEADM_INIT_DRYRUN_DIR="+dir)
		if b, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", cmd, err, b)
		}
	}
	pods := map[string]adopt.StaticPod{}
	files, _ := filepath.Glob(filepath.Join(dir, "*.yaml"))
	for _, path := range files {
		var p corev1.Pod
		b, err := os.ReadFile(path)
		if err == nil {
			err = yaml.Unmarshal(b, &p)
		}
		if err != nil {
			t.Fatal(err)
		}
		if p.Kind != "Pod" {
			continue
		}
		s := adopt.StaticPod{Component: p.Labels["component"], Node: "cp-0", Args: p.Spec.Containers[0].Command, Images: []string{p.Spec.Containers[0].Image}}
		for _, v := range p.Spec.Volumes {
			s.HostPaths = append(s.HostPaths, v.HostPath.Path)
		}
		pods[s.Component] = s
	}
	if want := 3; len(pods) < want {
		t.Fatalf("%d static pods, want %d at least", len(pods), want)
	}
	for _, name := range slices.Sorted(maps.Keys(pods)) {
		out = append(out, pods[name])
	}
	return out
}

// Requests that kubelets notice are a flag of check; adopt has none.
func TestRemedyOfWhatCheckMayAsk(t *testing.T) {
	t.Parallel()
	r := examine(facts(), distribution.Kubeadm, plan.Finding{ID: "kubelet-certificates", Severity: plan.NotChecked, Title: "not checked", Remedy: "allow such requests with --dry-run-requests"})
	i := slices.IndexFunc(r.Findings, func(f plan.Finding) bool { return f.ID == "kubelet-certificates" })
	if i < 0 || r.Findings[i].Remedy != "run `constellation check --dry-run-requests --context admin@prod`" {
		t.Errorf("findings %+v", r.Findings)
	}
}
