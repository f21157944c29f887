package main

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"constellation/engine/backup"
	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
)

// recovers deletes all control planes except the first, and with them etcd's quorum, and
// recovers the cluster from a snapshot with the commands of docs/backup.md.
func (c *cloud) recovers(kind machineKind, lost ...string) {
	t := c.t
	t.Helper()
	stop, restore := c.recovery(kind)
	c.kubectl("create", "configmap", "kept", "--from-literal=k=v")
	// A replica that ran on a lost machine is replaced meanwhile. Both have to answer the backup.
	c.kubectl("-n", "constellation-system", "rollout", "status", "deployment/constellation-operator", "--timeout=110s")
	c.run(5*time.Minute, "backup", "create", "--etcd").want(plan.ExitDone)
	var list struct {
		Backups []struct {
			ID    string
			Whole bool
		}
	}
	if err := json.Unmarshal([]byte(c.run(time.Minute, "backup", "list", "-o", "json").want(plan.ExitDone).stdout), &list); err != nil || len(list.Backups) == 0 || !list.Backups[0].Whole {
		t.Fatalf("backups %+v, %v", list, err)
	}
	files := filepath.Join(c.dir, plan.RunsDir, list.Backups[0].ID, "backups")
	snapshot := filepath.Join(files, "etcd.snapshot")
	// The operator has a second replica, which verified it with its own member of etcd.
	var manifest backup.Manifest
	b, err := os.ReadFile(filepath.Join(files, "manifest.json"))
	if err == nil {
		err = json.Unmarshal(b, &manifest)
	}
	if err != nil || manifest.Etcd == nil || len(manifest.Etcd.Witnesses) != 1 || manifest.Etcd.Witnesses[0] == manifest.Etcd.Member {
		t.Errorf("the snapshot is described by %+v (%v); want one witness, another member", manifest.Etcd, err)
	}
	c.kubectl("create", "configmap", "forgotten", "--from-literal=k=v")

	c.run(time.Minute, append([]string{"sandbox", "machine", "off"}, lost...)...).want(plan.ExitDone)
	const first = "control-plane-0"
	in, err := os.Open(snapshot)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	at := ""
	if kind == simulatedMachines { // the shell starts in the machine's root directory
		at = "."
	}
	c.shell(time.Minute, first, in, "umask 077 && mkdir -p "+at+"/root && cat > "+at+"/root/etcd.snapshot")
	c.shell(time.Minute, first, strings.NewReader(stop), "bash -e")
	c.shell(2*time.Minute, first, strings.NewReader(restore), "bash -e")

	ready := func(out string) bool { return strings.HasSuffix(strings.TrimSpace(out), "ok") }
	c.eventually(3*time.Minute, "the API server is ready", ready, "get", "--raw", "/readyz")
	c.kubectl(append([]string{"delete", "node"}, lost...)...)
	if out := c.kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.k}"); out != "v" {
		t.Errorf("the object in the snapshot is %q", out)
	}
	if out := c.kubectl("get", "configmap", "forgotten", "--ignore-not-found", "-o", "name"); out != "" {
		t.Errorf("%s was created after the snapshot and still exists", out)
	}
	c.eventually(4*time.Minute, "the operator reconciles the cluster again", func(out string) bool {
		return strings.TrimSpace(out) == "1"
	}, "-n", "constellation-system", "get", "deployment", "constellation-operator", "-o", "jsonpath={.status.readyReplicas}")

	// The lost machines are deleted from the cloud, and new ones join.
	c.run(time.Minute, "sandbox", "up", "--control-planes", "1").want(plan.ExitDone)
	c.run(time.Minute, "sandbox", "up", "--control-planes", "3").want(plan.ExitDone)
	c.eventually(6*time.Minute, "three control planes exist again", func(out string) bool {
		return strings.Count(out, "node/") == 3
	}, "get", "nodes", "-o", "name", "-l", "node-role.kubernetes.io/control-plane")
	c.kubectl("wait", "node", "--all", "--for=condition=Ready", "--timeout=110s")
	c.wantEtcdMembers(3)
}

// recovery returns the commands of docs/backup.md for every control plane and for one of them:
// the first two code blocks about an etcd snapshot. For simulated machines it maps them to the
// machine's directory, where no containerd and no other process runs.
func (c *cloud) recovery(kind machineKind) (stop, restore string) {
	t := c.t
	t.Helper()
	_, text, _ := strings.Cut(read(t, "docs/backup.md"), "### From etcd.snapshot\n")
	parts := strings.Split(text, "```\n")
	if len(parts) < 5 {
		t.Fatal("docs/backup.md has no steps to recover a cluster from a snapshot")
	}
	stop, restore = parts[1], parts[3]
	if kind == realMachines {
		return stop, restore
	}
	k, err := build.Load(filepath.Join(strings.TrimPrefix(c.env[1], "XDG_CACHE_HOME="), "constellation"), current)
	if err != nil {
		t.Fatal(err)
	}
	replace := func(s string, pairs ...[2]string) string {
		for _, p := range pairs {
			if !strings.Contains(s, p[0]) {
				t.Fatalf("docs/backup.md does not contain %q", p[0])
			}
			s = strings.ReplaceAll(s, p[0], p[1])
		}
		return s
	}
	stop = replace(stop,
		[2]string{"/root/", "root/"}, [2]string{"/etc/kubernetes/", "etc/kubernetes/"},
		[2]string{"grep -qsx -e etcd -e kube-apiserver /proc/[0-9]*/comm", `cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' | grep -q -e "^--data-dir=$PWD/" -e "^--tls-cert-file=$PWD/etc"`})
	restore = "root=$PWD\n" + replace(restore,
		[2]string{"cd /root/", "cd root/"}, [2]string{" /root/", " $root/root/"}, [2]string{"/etc/kubernetes/", "$root/etc/kubernetes/"}, [2]string{"/var/lib/", "$root/var/lib/"},
		[2]string{`ctr -n k8s.io images mount "$image" image && cp image/usr/local/bin/etcdutl . && ctr -n k8s.io images unmount --rm image`, "cp " + k.Binaries["etcdutl"] + " ."})
	return stop, restore
}

// shell runs a command in a machine with input on stdin.
func (c *cloud) shell(limit time.Duration, machine string, in io.Reader, command string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := c.command(ctx, "sandbox", "shell", machine, "--", "bash", "-c", command)
	cmd.Stdin = in
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.t.Fatalf("%s on %s: %v\n%s", command, machine, err, tail(string(out)))
	}
}
