package simulated

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os/exec"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/internal/delay"
)

// unpullable is the suffix of registry hosts whose images cannot be pulled: no real host has it.
const unpullable = ".invalid"

// errandTime is the default duration of a container that has no program here.
const errandTime = time.Second

// startErrand runs the containers of a pod that is to end, like a Job's: its init containers one
// after the other, then the others concurrently. Containers of our images are processes.
// For the others their commands define the simulated behavior (see acts).
func (k *kubelet) startErrand(ctx context.Context, pod *corev1.Pod, ours bool) (*workload, error) {
	w := &workload{pod: pod, grace: graceOf(pod)}
	var command func(*corev1.Container) (*exec.Cmd, error)
	all := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
	if ours {
		w.dir = k.c.path(podsDir, string(pod.UID))
		var kubeconfig string
		var err error
		if command, kubeconfig, err = k.programs(ctx, pod, w.dir); err != nil {
			return nil, err
		}
		run := command
		command = func(spec *corev1.Container) (*exec.Cmd, error) {
			cmd, err := run(spec)
			if err == nil && kubeconfig != "" {
				cmd.Env = append(cmd.Env, "KUBECONFIG="+kubeconfig)
			}
			return cmd, err
		}
	}
	for i := range all {
		w.containers = append(w.containers, &container{spec: &all[i]})
	}
	running, cancel := context.WithCancel(context.Background()) // until it is stopped
	w.cancel = cancel
	w.wg.Go(func() {
		inits := len(pod.Spec.InitContainers)
		for _, c := range w.containers[:inits] {
			if k.c.pods.runErrand(running, w, c, command) != 0 {
				return
			}
		}
		for _, c := range w.containers[inits:] {
			w.wg.Go(func() { k.c.pods.runErrand(running, w, c, command) })
		}
	})
	k.c.pods.mu.Lock()
	k.c.pods.all[string(pod.UID)] = w
	k.c.pods.mu.Unlock()
	return w, nil
}

// runErrand runs a container until it has finally ended, and returns its exit code. If ctx
// ends first, the code is not zero.
func (p *pods) runErrand(ctx context.Context, w *workload, c *container, command func(*corev1.Container) (*exec.Cmd, error)) int {
	host, _, _ := strings.Cut(c.spec.Image, "/")
	host, _, _ = strings.Cut(host, ":")
	if strings.HasSuffix(host, unpullable) {
		for _, reason := range []string{"ErrImagePull", "ImagePullBackOff"} {
			if !delay.For(ctx, 2*time.Second) {
				return -1
			}
			c.mu.Lock()
			c.waits = reason
			c.mu.Unlock()
		}
		<-ctx.Done()
		return -1
	}
	for pause := time.Second; ; pause = min(2*pause, 10*time.Second) {
		end := p.errandOnce(ctx, w, c, command)
		if ctx.Err() != nil {
			return -1
		}
		again := end.ExitCode != 0 && w.pod.Spec.RestartPolicy == corev1.RestartPolicyOnFailure
		c.mu.Lock()
		c.running, c.process = false, nil
		if again {
			c.waits = "CrashLoopBackOff"
		} else {
			c.ended = &end
		}
		c.mu.Unlock()
		if !again {
			return int(end.ExitCode)
		}
		if !delay.For(ctx, pause) {
			return -1
		}
		c.mu.Lock()
		c.restarts++
		c.mu.Unlock()
	}
}

// errandOnce runs a container to its end and returns the result.
func (p *pods) errandOnce(ctx context.Context, w *workload, c *container, command func(*corev1.Container) (*exec.Cmd, error)) corev1.ContainerStateTerminated {
	end := corev1.ContainerStateTerminated{Reason: "Completed", StartedAt: metav1.Now()}
	fail := func(code int, message string) corev1.ContainerStateTerminated {
		end.ExitCode, end.Reason, end.Message, end.FinishedAt = int32(code), "Error", message, metav1.Now()
		return end
	}
	out, err := newOutput(p.c, w.pod, c.spec.Name)
	if err != nil {
		return fail(128, err.Error())
	}
	var proc *process
	if isOurs(c.spec.Image) {
		cmd, err := command(c.spec)
		if err == nil {
			cmd.Stdout, cmd.Stderr, cmd.WaitDelay = out, out, time.Second
			proc, err = spawn(cmd)
		}
		if err != nil {
			out.end()
			return fail(128, err.Error())
		}
	}
	c.mu.Lock()
	c.running, c.waits, c.process, c.started = true, "", proc, end.StartedAt.Time
	c.output, c.before = out, c.output
	c.mu.Unlock()
	var code int
	if proc == nil {
		code = pretend(ctx, acts(slices.Concat(c.spec.Command, c.spec.Args)), out)
	} else {
		select {
		case <-ctx.Done():
			proc.stop(w.grace)
		case <-proc.done:
		}
		if code = proc.cmd.ProcessState.ExitCode(); code < 0 {
			code = 137 // it was killed
		}
	}
	out.end()
	if code != 0 {
		return fail(code, lastWords(ctx, c.spec, out))
	}
	end.FinishedAt = metav1.Now()
	return end
}

// lastWords is the termination message that a kubelet takes from the output of a failed container, if the pod requests that.
func lastWords(ctx context.Context, spec *corev1.Container, out *output) string {
	if spec.TerminationMessagePolicy != corev1.TerminationMessageFallbackToLogsOnError {
		return ""
	}
	var b bytes.Buffer
	if err := out.send(ctx, &b, corev1.PodLogOptions{TailLines: new(int64(80))}, func() {}); err != nil {
		return err.Error()
	}
	return string(b.Bytes()[max(0, b.Len()-2048):])
}

// act is one command of a container without a program.
type act struct {
	say  string
	wait time.Duration
	code int
	end  bool // with code; later acts are ignored
	then bool // only if the one before it had code 0
}

// acts parses a command for a simulated machine: true, false, sleep, echo and exit have
// their usual meaning, also several of them in `sh -c`. For any other command it returns
// nil, which means: run for a second and succeed.
func acts(command []string) []act {
	if len(command) == 0 {
		return nil
	}
	if name := path.Base(command[0]); len(command) != 3 || name != "sh" && name != "bash" || command[1] != "-c" {
		a, ok := actOf(command)
		if !ok {
			return nil
		}
		return []act{a}
	}
	var all []act
	for line := range strings.FieldsFuncSeq(command[2], func(r rune) bool { return r == ';' || r == '\n' }) {
		for i, part := range strings.Split(line, "&&") {
			a, ok := actOf(strings.Fields(part))
			if !ok {
				return nil
			}
			a.then = i > 0
			all = append(all, a)
		}
	}
	return all
}

func actOf(words []string) (act, bool) {
	if len(words) == 0 {
		return act{}, false
	}
	switch name, args := path.Base(words[0]), words[1:]; {
	case name == "echo":
		return act{say: strings.Trim(strings.Join(args, " "), `"'`) + "\n"}, true
	case name == "true" && len(args) == 0:
		return act{}, true
	case name == "false" && len(args) == 0:
		return act{code: 1}, true
	case name == "exit" && len(args) == 1:
		code, err := strconv.ParseUint(args[0], 10, 8)
		return act{code: int(code), end: true}, err == nil
	case name == "sleep" && len(args) == 1 && args[0] == "infinity":
		return act{wait: 1<<63 - 1}, true
	case name == "sleep" && len(args) == 1:
		d, err := time.ParseDuration(args[0])
		if err != nil {
			d, err = time.ParseDuration(args[0] + "s")
		}
		return act{wait: d}, err == nil && d >= 0
	}
	return act{}, false
}

// pretend runs the acts of a container without a program, and returns its exit code.
func pretend(ctx context.Context, all []act, out *output) (code int) {
	if all == nil {
		fmt.Fprintln(out, StandIn+" runs nothing of this image")
		if !delay.For(ctx, errandTime) {
			return 137
		}
		return 0
	}
	for _, a := range all {
		if a.then && code != 0 {
			continue
		}
		if _, err := out.Write([]byte(a.say)); err != nil || !delay.For(ctx, a.wait) {
			return 137
		}
		if code = a.code; a.end {
			break
		}
	}
	return code
}

// errandStatus adds the containers of a pod that is to end to its status.
func errandStatus(w *workload, s *corev1.PodStatus) {
	all := make([]corev1.ContainerStatus, 0, len(w.containers))
	for _, c := range w.containers {
		all = append(all, c.errand())
	}
	inits := len(w.pod.Spec.InitContainers)
	s.InitContainerStatuses, s.ContainerStatuses = all[:inits], all[inits:]
	s.Phase = errandPhase(s.InitContainerStatuses, s.ContainerStatuses)
}

// errand is the status of a container that is to end.
func (c *container) errand() corev1.ContainerStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := corev1.ContainerStatus{
		Name: c.spec.Name, Image: c.spec.Image, ImageID: "simulated://" + c.spec.Image, RestartCount: c.restarts,
		Ready: c.running || c.ended != nil && c.ended.ExitCode == 0, Started: new(c.running),
	}
	if c.output != nil {
		s.ContainerID = c.output.id
	}
	switch {
	case c.ended != nil:
		s.State.Terminated = c.ended
	case c.running:
		s.State.Running = &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(c.started.Truncate(time.Second))}
	default:
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: cmp.Or(c.waits, "PodInitializing")}
	}
	return s
}

func errandPhase(inits, containers []corev1.ContainerStatus) corev1.PodPhase {
	failed := func(c corev1.ContainerStatus) bool {
		return c.State.Terminated != nil && c.State.Terminated.ExitCode != 0
	}
	waiting := func(c corev1.ContainerStatus) bool { return c.State.Waiting != nil }
	over := func(c corev1.ContainerStatus) bool { return c.State.Terminated != nil }
	switch {
	case slices.ContainsFunc(inits, failed):
		return corev1.PodFailed
	case slices.ContainsFunc(inits, func(c corev1.ContainerStatus) bool { return !over(c) }), len(containers) > 0 && !slices.ContainsFunc(containers, func(c corev1.ContainerStatus) bool { return !waiting(c) }):
		return corev1.PodPending
	case slices.ContainsFunc(containers, func(c corev1.ContainerStatus) bool { return !over(c) }):
		return corev1.PodRunning
	case slices.ContainsFunc(containers, failed):
		return corev1.PodFailed
	}
	return corev1.PodSucceeded
}

// cutOff sets the status of a pod whose containers ran when their machine was switched off: they
// are gone, and the pod failed.
func cutOff(pod *corev1.Pod, s *corev1.PodStatus) bool {
	ran := func(c corev1.ContainerStatus) bool { return c.State.Running != nil || c.State.Terminated != nil }
	if !slices.ContainsFunc(slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses), ran) {
		return false
	}
	s.Phase = corev1.PodFailed
	end := func(all []corev1.ContainerStatus) (out []corev1.ContainerStatus) {
		for _, c := range all {
			if r := c.State.Running; r != nil {
				c.Ready, c.Started = false, new(bool)
				c.State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
					ExitCode: 137, Reason: "ContainerStatusUnknown", Message: "The container could not be located when the pod was terminated", StartedAt: r.StartedAt, FinishedAt: metav1.Now(),
				}}
			}
			out = append(out, c)
		}
		return out
	}
	s.InitContainerStatuses, s.ContainerStatuses = end(pod.Status.InitContainerStatuses), end(pod.Status.ContainerStatuses)
	return true
}
