package main

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/component"
)

// TestMachinesRunVouchedComponentsOnly attacks with write access to NodeVersion and to
// ConfigMaps in kube-system: it names programs of its own as components of new machines.
// Machines must not run them.
func TestMachinesRunVouchedComponentsOnly(t *testing.T) {
	t.Parallel()
	c, _ := newCluster(t, simulatedMachines, 1, 0)
	owned := filepath.Join(filepath.Dir(c.dir), "owned")
	program := "#!/bin/sh\ntouch " + owned + "\necho v1.35.4\n"
	var l component.List
	for _, name := range []string{"kubeadm", "kubelet", "kubectl"} {
		l = append(l, component.Component{
			Name: name, URL: "data:;base64," + base64.StdEncoding.EncodeToString([]byte(program)), Digest: "sha256:" + fmt.Sprintf("%x", sha256.Sum256([]byte(program))), Path: "/usr/local/bin/" + name, Mode: 0o755,
		})
	}
	list, err := json.Marshal(l)
	if err != nil {
		t.Fatal(err)
	}
	name := engine.ComponentsName(l)
	file := filepath.Join(c.dir, "components.json")
	object := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q,"namespace":"kube-system"},"data":{"components":%q,"cluster-version":"v1.35.4"}}`, name, list)
	if err := os.WriteFile(file, []byte(object), 0o644); err != nil {
		t.Fatal(err)
	}
	says := func(text string) bool {
		b, err := os.ReadFile(filepath.Join(c.sandboxDir(), "m", "control-plane-1", "console.log"))
		return err == nil && strings.Contains(string(b), text)
	}
	refused := func(why string) {
		t.Helper()
		for end := time.Now().Add(2 * time.Minute); !says(why); time.Sleep(200 * time.Millisecond) {
			if _, err := os.Stat(owned); err == nil {
				t.Fatal("an unsigned program ran as root on a machine")
			}
			if time.Now().After(end) {
				t.Fatalf("no machine reported a refusal because %s:\n%s", why, c.kubectl("get", "nodeversion,nodes,pendingnodes,joiningnodes", "-o", "wide"))
			}
		}
	}
	honest := c.kubectl("get", "nodeversion", "constellation-version", "-o", "jsonpath={.spec.kubernetesComponentsReference}")
	c.kubectl("apply", "-f", file)
	c.kubectl("patch", "nodeversion", "constellation-version", "--type=merge", "-p", `{"spec":{"kubernetesComponentsReference":"`+name+`"}}`)
	refused("no statement of a release builder")

	// The signed statement of the release does not cover the programs either.
	statement := c.kubectl("-n", "kube-system", "get", "configmap", honest, "-o", `jsonpath={.metadata.annotations.constellation\.edgeless\.systems/components-statement}`)
	if !strings.Contains(statement, "v1.35.4") {
		t.Fatalf("ConfigMap %s has the statement %q", honest, statement)
	}
	c.kubectl("-n", "kube-system", "annotate", "configmap", name, "constellation.edgeless.systems/components-statement="+statement)
	refused("does not cover these components")
	if _, err := os.Stat(owned); err == nil {
		t.Error("an unsigned program ran as root on a machine")
	}
	// The cluster is unchanged, and a valid target upgrades it.
	c.kubectl("patch", "nodeversion", "constellation-version", "--type=merge", "-p", `{"spec":{"kubernetesComponentsReference":"`+honest+`"}}`)
	// The JoiningNode of the rejected machine stays until its deadline; nothing else is left.
	left := func() string { return c.kubectl("get", "pendingnodes", "-o", "name") }
	for end := time.Now().Add(3 * time.Minute); left() != ""; time.Sleep(time.Second) {
		if time.Now().After(end) {
			t.Fatalf("the replacement was not abandoned:\n%s", c.kubectl("get", "nodeversion,nodes,pendingnodes,joiningnodes", "-o", "wide"))
		}
	}
	c.wantNodes("control-plane-0")
	if _, err := os.Stat(owned); err == nil {
		t.Error("an unsigned program ran as root on a machine")
	}
}
