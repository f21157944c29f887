package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"constellation/engine/plan"
	"constellation/internal/testneeds"
)

// Versions of the hop on which etcd goes from 3.6 to 3.7.
const (
	etcdMinorFrom, etcdMinorTo = "v1.36.4", "v1.37.2"
	// Tags of etcd: of the older minor, of a new cluster with it, and of the newer minor.
	etcdOlder, etcdBefore, etcdAfter = "3.6.8-0", "3.6.11-0", "3.7.0-0"
)

// The control plane loses its power while kubeadm replaces etcd 3.6 by 3.7: the only one, and each
// of three. The upgrade ends when its command is given again, no data is lost, and every member has
// the new etcd. On real machines the test also checks that a user's customizations survive.
//
//	for v in v1.36.4 v1.37.2; do bin/constellation sandbox fetch $v; done
//	CONSTELLATION_E2E_UPGRADE=1 go test -timeout 60m -run TestEtcdMinorSurvivesPowerCuts .
func TestEtcdMinorSurvivesPowerCutsOnRealMachines(t *testing.T) {
	for _, controlPlanes := range []int{1, 3} {
		t.Run(fmt.Sprint(controlPlanes), func(t *testing.T) { etcdMinor(t, realMachines, controlPlanes) })
	}
}

func TestEtcdMinorSurvivesPowerCutsOnSimulatedMachines(t *testing.T) {
	for _, controlPlanes := range []int{1, 3} {
		t.Run(fmt.Sprint(controlPlanes), func(t *testing.T) { etcdMinor(t, simulatedMachines, controlPlanes) })
	}
}

func etcdMinor(t *testing.T, kind machineKind, controlPlanes int) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_UPGRADE", "ten minutes")
	testneeds.Kubernetes(t, etcdMinorFrom)
	testneeds.Kubernetes(t, etcdMinorTo)
	c, _ := newCluster(t, kind, controlPlanes, 1, "--kubernetes", etcdMinorFrom, "--image", "v1.1.0", "--release", "v1.1.0")
	apply := []string{"upgrade", "apply", "--non-interactive", "--yes", "--to", "v1.1.0", "--kubernetes", etcdMinorTo}
	planes := c.controlPlanes(etcdBefore)
	if len(planes) != controlPlanes {
		t.Fatalf("%v run etcd %s, want %d control planes", planes, etcdBefore, controlPlanes)
	}
	c.kubectl("create", "configmap", "kept", "--from-literal=before=3.7")
	// In place, so that customizations of the machines stay, and every member is upgraded by kubeadm.
	c.kubectl("patch", "scalinggroup", "control-plane", "--type=merge", "-p", `{"spec":{"strategy":"InPlace"}}`)
	coreDNS := c.coreDNS()
	if kind == realMachines {
		c.customizeConfig()
		c.customizeMachines(planes)
	}
	var faults []string
	for _, p := range planes {
		faults = append(faults, "power-cut="+p+":upgrade-etcd")
	}
	booted := c.boots()
	c.run(time.Minute, append([]string{"sandbox", "fault", "set"}, faults...)...).want(plan.ExitDone)

	// An API server that is away can end the command. It continues when it is given again.
	for deadline := time.Now().Add(20 * time.Minute); ; {
		r := c.run(15*time.Minute, apply...)
		if r.code == plan.ExitNothing {
			break
		}
		t.Logf("upgrade apply ended with %d: %s", r.code, lastLine(r.stdout))
		if time.Now().After(deadline) {
			r.want(plan.ExitNothing)
		}
	}
	if got := c.controlPlanes(etcdAfter); !slices.Equal(got, planes) {
		t.Errorf("%v run etcd %s, want %v", got, etcdAfter, planes)
	}
	now := c.boots()
	for _, p := range planes {
		if now[p].Equal(booted[p]) {
			t.Errorf("the power of %s was not cut", p)
		}
	}
	if got := c.kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.before}"); got != "3.7" {
		t.Errorf("etcd kept %q, want what was written before the hop", got)
	}
	kubelets := c.kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.nodeInfo.kubeletVersion}")
	if got := strings.Fields(kubelets); len(got) != controlPlanes+1 || slices.ContainsFunc(got, func(v string) bool { return v != etcdMinorTo }) {
		t.Errorf("kubelets have %s, want %s", kubelets, etcdMinorTo)
	}
	if kind == realMachines {
		c.wantCustomized(planes, coreDNS)
	}
}

// controlPlanes returns the nodes that run etcd with a tag, sorted.
func (c *cloud) controlPlanes(tag string) []string {
	c.t.Helper()
	out := c.kubectl("-n", "kube-system", "get", "pods", "-l", "component=etcd", "-o", `jsonpath={range .items[*]}{.spec.nodeName} {.spec.containers[0].image}{"\n"}{end}`)
	var names []string
	for l := range strings.Lines(out) {
		if name, ok := strings.CutSuffix(strings.TrimSpace(l), " registry.k8s.io/etcd:"+tag); ok && strings.Contains(c.kubectl("get", "nodes", "-o", "name")+"\n", "node/"+name+"\n") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// boots returns when each machine booted last.
func (c *cloud) boots() map[string]time.Time {
	c.t.Helper()
	var status struct {
		Machines []struct {
			Name    string
			Started time.Time
		}
	}
	out := c.run(time.Minute, "sandbox", "status", "-o", "json").want(plan.ExitDone).stdout
	if err := json.Unmarshal([]byte(out), &status); err != nil || len(status.Machines) == 0 {
		c.t.Fatalf("read boot times: %v: %s", err, out)
	}
	all := map[string]time.Time{}
	for _, m := range status.Machines {
		all[m.Name] = m.Started
	}
	return all
}

// customizeConfig sets a flag of the API server and a feature gate in kubeadm's configuration.
func (c *cloud) customizeConfig() {
	t := c.t
	t.Helper()
	config := c.kubectl("-n", "kube-system", "get", "configmap", "kubeadm-config", "-o", "jsonpath={.data.ClusterConfiguration}")
	var settings map[string]any
	if err := yaml.Unmarshal([]byte(config), &settings); err != nil {
		t.Fatal(err)
	}
	apiServer, ok := settings["apiServer"].(map[string]any)
	if !ok {
		t.Fatalf("kubeadm's configuration is\n%s", config)
	}
	args, _ := apiServer["extraArgs"].([]any)
	apiServer["extraArgs"] = append(args, map[string]any{"name": "event-ttl", "value": "2h0m0s"})
	settings["featureGates"] = map[string]any{"RootlessControlPlane": false}
	changed, err := yaml.Marshal(settings)
	if err != nil {
		t.Fatal(err)
	}
	patch, err := json.Marshal(map[string]any{"data": map[string]string{"ClusterConfiguration": string(changed)}})
	if err != nil {
		t.Fatal(err)
	}
	c.kubectl("-n", "kube-system", "patch", "configmap", "kubeadm-config", "--type=merge", "-p", string(patch))
}

// customizeMachines writes patches and options of kubeadm to the control planes.
func (c *cloud) customizeMachines(planes []string) {
	c.t.Helper()
	for _, p := range planes {
		if out, code := c.asRoot(p, `set -e
mkdir -p /etc/kubernetes/patches
cat >/etc/kubernetes/patches/kube-apiserver+json.yaml <<'END'
[{"op": "add", "path": "/metadata/annotations/mine", "value": "kept"}]
END
cat >/etc/kubernetes/kubeadm-upgrade.yaml <<'END'
apiVersion: kubeadm.k8s.io/v1beta4
kind: UpgradeConfiguration
apply:
  skipPhases: [addon/coredns]
node:
  skipPhases: [addon/coredns]
END
`); code != 0 {
			c.t.Fatalf("customize %s: exit code %d: %s", p, code, out)
		}
	}
}

// wantCustomized checks that the changes of customizeConfig and customizeMachines are still in effect.
func (c *cloud) wantCustomized(planes []string, coreDNS string) {
	t := c.t
	t.Helper()
	for _, p := range planes {
		out := c.kubectl("-n", "kube-system", "get", "pod", "kube-apiserver-"+p, "-o", "jsonpath={.metadata.annotations.mine} {.spec.containers[0].command}")
		if !strings.HasPrefix(out, "kept ") || !strings.Contains(out, "--event-ttl=2h0m0s") {
			t.Errorf("the API server of %s lost its annotation or its flag: %s", p, out)
		}
	}
	config := c.kubectl("-n", "kube-system", "get", "configmap", "kubeadm-config", "-o", "jsonpath={.data.ClusterConfiguration}")
	if !strings.Contains(config, "RootlessControlPlane: false") || !strings.Contains(config, "event-ttl") || strings.Contains(config, "imageTag: "+etcdBefore) {
		t.Errorf("kubeadm's configuration is\n%s", config)
	}
	// The skipped phase left CoreDNS as it was.
	if image := c.coreDNS(); image != coreDNS {
		t.Errorf("CoreDNS is %s, was %s, and its phase was to be skipped", image, coreDNS)
	}
}

// olderEtcd gives the cluster the etcd of its Kubernetes, as older programs made clusters: a hop of
// etcd comes before the next minor. A patch of etcd can be downgraded.
func (c *cloud) olderEtcd(kind machineKind) {
	t := c.t
	t.Helper()
	planes := c.controlPlanes(etcdBefore)
	if len(planes) == 0 || c.etcdTag() != etcdBefore {
		t.Fatalf("a new cluster has the tag %q, want etcd %s on all control planes, not on %v", c.etcdTag(), etcdBefore, planes)
	}
	c.kubectl("patch", "nodeversion", "constellation-version", "--type=merge", "-p", `{"spec":{"etcdImageTag":""}}`)
	config := c.kubectl("-n", "kube-system", "get", "configmap", "kubeadm-config", "-o", "jsonpath={.data.ClusterConfiguration}")
	data, err := json.Marshal(map[string]any{"data": map[string]string{"ClusterConfiguration": strings.Replace(config, "    imageTag: "+etcdBefore+"\n", "", 1) + "\n"}})
	if err != nil {
		t.Fatal(err)
	}
	c.kubectl("-n", "kube-system", "patch", "configmap", "kubeadm-config", "--type=merge", "-p", string(data))
	manifest := "etc/kubernetes/manifests/etcd.yaml" // in the directory of a simulated machine
	if kind == realMachines {
		manifest = "/" + manifest
	}
	for _, p := range planes {
		if out, code := c.asRoot(p, "sed -i 's/etcd:"+etcdBefore+"/etcd:"+etcdOlder+"/' "+manifest); code != 0 {
			t.Fatalf("%s: %s", p, out)
		}
		c.eventually(2*time.Minute, p+" has the older etcd", func(out string) bool { return strings.Contains(out, p+" registry.k8s.io/etcd:"+etcdOlder+" True\n") },
			"-n", "kube-system", "get", "pods", "-l", "component=etcd", "-o", `jsonpath={range .items[*]}{.spec.nodeName} {.spec.containers[0].image} {.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}`)
	}
	if tag := c.etcdTag(); tag != "" {
		t.Fatalf("kubeadm's configuration still has the tag %q", tag)
	}
}

// coreDNS returns the image of CoreDNS.
func (c *cloud) coreDNS() string {
	c.t.Helper()
	return c.kubectl("-n", "kube-system", "get", "deployment", "coredns", "-o", "jsonpath={.spec.template.spec.containers[0].image}")
}

// Control planes that are upgraded in place get the etcd between both minors by their own agents, one
// after the other, and stay.
//
//	for v in v1.36.4 v1.37.2; do bin/constellation sandbox fetch $v; done
//	CONSTELLATION_E2E_UPGRADE=1 go test -timeout 30m -run TestEtcdHopInPlaceOnSimulatedMachines .
func TestEtcdHopInPlaceOnSimulatedMachines(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_UPGRADE", "six minutes")
	testneeds.Kubernetes(t, etcdMinorFrom)
	testneeds.Kubernetes(t, etcdMinorTo)
	c, _ := newCluster(t, simulatedMachines, 3, 1, "--kubernetes", etcdMinorFrom, "--image", "v1.1.0", "--release", "v1.1.0")
	c.olderEtcd(simulatedMachines)
	c.kubectl("patch", "scalinggroup", "control-plane", "--type=merge", "-p", `{"spec":{"strategy":"InPlace"}}`)
	identities := func() string {
		return c.kubectl("get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name} {.metadata.uid}{"\n"}{end}`)
	}
	before, planes := identities(), []string{"control-plane-0", "control-plane-1", "control-plane-2"}
	apply := []string{"upgrade", "apply", "--non-interactive", "--yes", "--to", "v1.1.0", "--kubernetes", etcdMinorTo}
	c.run(10*time.Minute, apply...).want(plan.ExitDone)
	if got := c.controlPlanes(etcdBefore); !slices.Equal(got, planes) {
		t.Errorf("%v run etcd %s, want %v", got, etcdBefore, planes)
	}
	if now := identities(); now != before {
		t.Errorf("nodes are %s, were %s", now, before)
	}
	if cordoned := c.kubectl("get", "nodes", "-o", "jsonpath={.items[?(@.spec.unschedulable)].metadata.name}"); cordoned != "" {
		t.Errorf("nodes %s are cordoned", cordoned)
	}
	c.run(10*time.Minute, apply...).want(plan.ExitDone)
	if got := c.controlPlanes(etcdAfter); !slices.Equal(got, planes) {
		t.Errorf("%v run etcd %s, want %v", got, etcdAfter, planes)
	}
	c.run(2*time.Minute, apply...).want(plan.ExitNothing)
}
