package assets_test

import (
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"constellation/assets"
)

// The old design, R21: privileged pods upgrade hosts, with the host's processes and its whole
// file system, writable, from images with mutable tags. TestPodsAreRestricted lists the rules of
// the restricted level that each pod breaks, on a real API server.
func TestWeakPointR21NoPodOwnsItsHost(t *testing.T) {
	// The tag of a release and a digest are immutable.
	fixed := regexp.MustCompile(`(:v\d+\.\d+\.\d+|@sha256:[0-9a-f]{64})$`)
	pods := 0
	for _, chart := range charts {
		var deployments []*appsv1.Deployment
		var daemons []*appsv1.DaemonSet
		documents(t, rendered(t, chart, "v1.1.0", nil), func(kind string) any {
			switch kind {
			case "Deployment":
				deployments = append(deployments, &appsv1.Deployment{})
				return deployments[len(deployments)-1]
			case "DaemonSet":
				daemons = append(daemons, &appsv1.DaemonSet{})
				return daemons[len(daemons)-1]
			case "Pod", "Job", "CronJob", "StatefulSet", "ReplicaSet":
				t.Errorf("chart %s has a %s, which this test does not check", chart, kind)
			}
			return nil
		})
		all := map[string]corev1.PodSpec{}
		for _, d := range deployments {
			all[d.Name] = d.Spec.Template.Spec
		}
		for _, d := range daemons {
			all[d.Name] = d.Spec.Template.Spec
		}
		for name, pod := range all {
			pods++
			if pod.HostPID || pod.HostIPC {
				t.Errorf("%s shares the host's process namespace", name)
			}
			for _, m := range mountsOfHost(t, &pod) {
				dir, _, _ := strings.Cut(m, " ")
				if dir == "/" || slices.Contains([]string{"/etc", "/usr", "/var", "/run", "/root", "/etc/kubernetes"}, dir) {
					t.Errorf("%s mounts %s", name, m)
				}
			}
			for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
				s := c.SecurityContext
				if s == nil || s.Privileged != nil && *s.Privileged || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || s.Capabilities == nil || !slices.Contains(s.Capabilities.Drop, "ALL") {
					t.Errorf("%s: container %s is privileged, or may escalate: %+v", name, c.Name, s)
				}
				if !fixed.MatchString(c.Image) {
					t.Errorf("%s: image %s has a mutable tag", name, c.Image)
				}
			}
		}
	}
	if pods < 3 {
		t.Errorf("only %d pods were checked", pods)
	}
	// Hosts are upgraded by one of their own services, which is not a pod: it has a
	// socket and an authorized user.
	unit, err := fs.ReadFile(assets.Systemd(), "constellation-agent.service")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"ExecStart=/usr/lib/constellation/agent -operator 65532\n", "RuntimeDirectoryMode=0711\n", "StateDirectoryMode=0700\n"} {
		if !strings.Contains(string(unit), line) {
			t.Errorf("the agent's unit has no line %q", line)
		}
	}
}
