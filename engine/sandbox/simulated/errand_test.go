package simulated

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

func TestCommandsThatMeanSomething(t *testing.T) {
	for _, tt := range []struct {
		name    string
		command []string
		want    []act
	}{
		{name: "nothing", want: nil},
		{name: "a program that is not here", command: []string{"chroot", "/host", "sh", "/run/upgrade.sh"}, want: nil},
		{name: "true", command: []string{"true"}, want: []act{{}}},
		{name: "false, with its path", command: []string{"/bin/false"}, want: []act{{code: 1}}},
		{name: "sleep", command: []string{"sleep", "90"}, want: []act{{wait: 90 * time.Second}}},
		{name: "sleep with a unit", command: []string{"sleep", "2m"}, want: []act{{wait: 2 * time.Minute}}},
		{name: "sleep without end", command: []string{"sleep", "infinity"}, want: []act{{wait: 1<<63 - 1}}},
		{name: "sleep for less than nothing", command: []string{"sleep", "-1"}, want: nil},
		{name: "a script", command: []string{"sh", "-c", "echo 'no space left'; sleep 1 && exit 3"}, want: []act{{say: "no space left\n"}, {wait: time.Second}, {code: 3, end: true, then: true}}},
		{name: "lines", command: []string{"/bin/bash", "-c", "true\n\nfalse\n"}, want: []act{{}, {code: 1}}},
		{name: "an invalid exit code", command: []string{"sh", "-c", "exit 256"}, want: nil},
		{name: "a script with something else in it", command: []string{"sh", "-c", "echo a; apt-get update"}, want: nil},
		{name: "a script of nothing", command: []string{"sh", "-c", " ; "}, want: nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if d := cmp.Diff(tt.want, acts(tt.command), cmp.AllowUnexported(act{})); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestPodsThatEnd(t *testing.T) {
	state := func(what string) corev1.ContainerStatus {
		switch what {
		case "waits":
			return corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}}
		case "runs":
			return corev1.ContainerStatus{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
		case "done":
			return corev1.ContainerStatus{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}
		}
		return corev1.ContainerStatus{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3}}}
	}
	for _, tt := range []struct {
		name              string
		inits, containers []string
		want              corev1.PodPhase
	}{
		{name: "nothing has begun", inits: []string{"waits"}, containers: []string{"waits"}, want: corev1.PodPending},
		{name: "the first one runs", inits: []string{"done", "runs"}, containers: []string{"waits"}, want: corev1.PodPending},
		{name: "the first one failed", inits: []string{"failed", "waits"}, containers: []string{"waits"}, want: corev1.PodFailed},
		{name: "an image cannot be pulled", inits: []string{"done"}, containers: []string{"waits"}, want: corev1.PodPending},
		{name: "one of two runs", containers: []string{"done", "runs"}, want: corev1.PodRunning},
		{name: "one failed and one runs", containers: []string{"failed", "runs"}, want: corev1.PodRunning},
		{name: "one of two failed", containers: []string{"done", "failed"}, want: corev1.PodFailed},
		{name: "all is done", inits: []string{"done"}, containers: []string{"done"}, want: corev1.PodSucceeded},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var inits, containers []corev1.ContainerStatus
			for _, s := range tt.inits {
				inits = append(inits, state(s))
			}
			for _, s := range tt.containers {
				containers = append(containers, state(s))
			}
			if got := errandPhase(inits, containers); got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}

// After a power cycle a machine has no record of the containers that ran before.
func TestPodsOfAMachineThatWasOffFailed(t *testing.T) {
	pod := &corev1.Pod{Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "upgrade", Ready: true, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}}}
	var s corev1.PodStatus
	if !cutOff(pod, &s) || s.Phase != corev1.PodFailed || s.ContainerStatuses[0].Ready || s.ContainerStatuses[0].State.Terminated.ExitCode != 137 {
		t.Errorf("%+v", s)
	}
	if cutOff(&corev1.Pod{}, &s) {
		t.Error("a pod of which nothing has run yet is cut off")
	}
}
