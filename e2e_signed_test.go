package main

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/plan"
)

// TestMachinesRunVouchedComponentsOnly attacks with write access to NodeVersion and to
// ConfigMaps in kube-system: it names programs of its own as components of new machines.
// Machines must not run them.
func TestMachinesRunVouchedComponentsOnly(t *testing.T) {
	t.Parallel()
	c, _ := newCluster(t, simulatedMachines, 1, 0)
	owned := filepath.Join(filepath.Dir(c.dir), "owned")
	program := "#!/bin/sh\ntouch " + owned + "\necho " + current + "\n"
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
	name := cluster.ComponentsName(l)
	file := filepath.Join(c.dir, "components.json")
	object := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q,"namespace":"kube-system"},"data":{"components":%q,"cluster-version":%q}}`, name, list, current)
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
	if !strings.Contains(statement, current) {
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

// TestMachinesFollowTheFeedOfAReleaseBuilder moves the signing key out of the cloud, to a release
// builder who publishes a feed with the documented commands. The first publication is signed with
// the key of the machines' images, which authorizes the builder's own key, the next one with that
// key. An upgrade from the feed replaces the control plane by a machine that has verified the
// feed's statement.
func TestMachinesFollowTheFeedOfAReleaseBuilder(t *testing.T) {
	t.Parallel()
	c, _ := newCluster(t, simulatedMachines, 1, 0, "--release", "v1.0.0", "--image", "v1.0.0", "--kubernetes", current)
	builder := filepath.Join(filepath.Dir(c.dir), "builder")
	if err := os.Mkdir(builder, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(builder, 0o777); err != nil { // the program runs as another user
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(builder, name) }
	if err := os.Rename(filepath.Join(c.sandboxDir(), "release-key.pem"), at("machines.key")); err != nil {
		t.Fatal(err)
	}
	public, err := os.ReadFile(filepath.Join(c.sandboxDir(), "images", "v1.0.0", "release-keys.pem"))
	if err != nil {
		t.Fatal(err)
	}
	put := func(name string, b []byte) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(at(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at(name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("machines.key.pub", public)
	if err := unix.Kill(c.daemonPID(), unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	c.run(time.Minute, "sandbox", "up").want(plan.ExitDone)

	// The components of the cluster, as an older program has published them.
	name := c.kubectl("get", "nodeversion", "constellation-version", "-o", "jsonpath={.spec.kubernetesComponentsReference}")
	c.kubectl("-n", "kube-system", "annotate", "configmap", name, "constellation.edgeless.systems/components-statement-")
	list := c.kubectl("-n", "kube-system", "get", "configmap", name, "-o", "jsonpath={.data.components}")

	for _, v := range []string{"v1.0.0", "v1.1.0"} {
		b, err := os.ReadFile(filepath.Join("assets", "releases", "releases", v+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		put("releases/"+v+".yaml", b)
	}
	put("releases/v1.1.0/components/mirror.json", fmt.Appendf(nil, `{"kubernetes": %q, "arch": %q, "components": %s}`, current, runtime.GOARCH, list))
	c.run(time.Minute, "release", "key", "new", at("own.key")).want(plan.ExitDone)
	c.run(time.Minute, "release", "build", "--from", at("releases"), "--out", at("feed"), "--key", at("machines.key"), "--trust", at("machines.key.pub"), "--trust", at("own.key.pub")).want(plan.ExitDone)
	c.run(time.Minute, "release", "build", "--from", at("releases"), "--out", at("feed"), "--key", at("own.key")).want(plan.ExitDone)
	c.run(time.Minute, "release", "verify", at("feed"), "--feed-key", at("machines.key.pub")).want(plan.ExitDone)

	var forged atomic.Bool
	files := http.FileServer(http.Dir(at("feed")))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if forged.Load() && strings.Contains(r.URL.Path, "/v1.1.0/components/") {
			b, err := os.ReadFile(at("feed" + r.URL.Path))
			if err != nil {
				http.NotFound(w, r)
				return
			}
			w.Write([]byte(strings.Replace(string(b), current, "v1.99.0", 1)))
			return
		}
		files.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	c.run(time.Minute, "upgrade", "check", "--write-config").want(plan.ExitDone)
	apply := []string{"upgrade", "apply", "--non-interactive", "--yes", "--feed", server.URL, "--feed-key", at("machines.key.pub")}
	forged.Store(true)
	if r := c.run(2*time.Minute, apply...).want(plan.ExitBlocked); !strings.Contains(r.stdout+r.stderr, "the feed's statement over the components of Kubernetes "+current+" is not genuine") {
		t.Errorf("a forged statement:\n%s\n%s", r.stdout, r.stderr)
	}
	forged.Store(false)
	c.run(8*time.Minute, apply...).want(plan.ExitDone)
	c.wantVersions("v1.1.0", current, 1, 0)
	statement := c.kubectl("-n", "kube-system", "get", "configmap", name, "-o", `jsonpath={.metadata.annotations.constellation\.edgeless\.systems/components-statement}`)
	published, err := filepath.Glob(at("feed/releases/v1.1.0/components/" + strings.Repeat("[0-9a-f]", 64) + ".json"))
	if err != nil || len(published) != 1 {
		t.Fatalf("%q, %v", published, err)
	}
	if b, err := os.ReadFile(published[0]); err != nil || statement != string(b) {
		t.Errorf("ConfigMap %s has another statement than the feed: %v\n%s", name, err, statement)
	}
	c.wantNodes("control-plane-1")
}
