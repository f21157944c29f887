package plans

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Reasons of nodes, from the state of their Job's pod.
const (
	reasonPreparing     = "Preparing"
	reasonCordoning     = "Cordoning"
	reasonDraining      = "Draining"
	reasonDrainBlocked  = "DrainBlocked"
	reasonUpgrading     = "Upgrading"
	reasonUnschedulable = "PodUnschedulable"
	reasonImage         = "ImagePullError"
	reasonContainer     = "ContainerError"
	reasonPodFailed     = "PodFailed"
)

// lastWords is the maximum length of a container's termination message in reports, in bytes.
const lastWords = 300

// podNews is the state of the newest pod of a Job; the zero value needs no report.
type podNews struct {
	pod             string
	made            time.Time
	reason, message string
}

// isBad reports whether a pod makes no progress.
func (n podNews) isBad() bool { return isBad(n.reason) }

// isBad reports whether a reason is that of a pod that makes no progress.
func isBad(reason string) bool {
	switch reason {
	case reasonDrainBlocked, reasonUnschedulable, reasonImage, reasonContainer, reasonPodFailed:
		return true
	}
	return false
}

// newsOf returns the progress of a Job's pod. It omits values that change periodically, such as the
// backoff of an image pull.
func newsOf(p *corev1.Pod) podNews {
	n := podNews{pod: p.Name, made: p.CreationTimestamp.Time}
	setState := func(reason, format string, args ...any) podNews {
		n.reason, n.message = reason, fmt.Sprintf(format, args...)
		return n
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			return setState(reasonUnschedulable, "pod %s is not scheduled: %s", p.Name, c.Message)
		}
	}
	doing := map[string]string{"prepare": reasonPreparing, "cordon": reasonCordoning, "drain": reasonDraining, "upgrade": reasonUpgrading}
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		switch s := c.State; {
		case s.Terminated != nil && s.Terminated.ExitCode != 0:
			text := fmt.Sprintf("container %s of pod %s ended with exit code %d", c.Name, p.Name, s.Terminated.ExitCode)
			if s.Terminated.Reason != "Error" && s.Terminated.Reason != "" {
				text += " (" + s.Terminated.Reason + ")"
			}
			if said := lastLine(s.Terminated.Message); said != "" {
				text += ": " + said
			}
			return setState(reasonPodFailed, "%s", text)
		case s.Running != nil && doing[c.Name] != "":
			return setState(doing[c.Name], "%s", runs(c.Name, p.Name))
		case s.Waiting == nil:
		case slices.Contains([]string{"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable", "ImageInspectError"}, s.Waiting.Reason):
			return setState(reasonImage, "image %s of container %s cannot be pulled", c.Image, c.Name)
		case slices.Contains([]string{"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}, s.Waiting.Reason):
			return setState(reasonContainer, "container %s of pod %s cannot be started: %s", c.Name, p.Name, cmp.Or(s.Waiting.Message, s.Waiting.Reason))
		}
	}
	return n
}

// runs formats the message about a running container.
func runs(container, pod string) string {
	return fmt.Sprintf("container %s of pod %s runs", container, pod)
}

// lastLine returns the last non-empty line of a text, truncated.
func lastLine(text string) string {
	text = strings.TrimSpace(text)
	text = strings.TrimSpace(text[strings.LastIndexByte(text, '\n')+1:])
	if len(text) > lastWords {
		text = cut(text, lastWords) + "…"
	}
	return text
}

// cut truncates a text to at most n bytes.
func cut(text string, n int) string { return strings.ToValidUTF8(text[:n], "") }

// setPod stores the state of a Job's pod. The state of a deleted pod stays until the Job has a new
// pod, is complete, or is deleted.
func (b *book) setPod(p *pod) {
	if p.job == "" || p.deleting {
		return
	}
	n := p.news
	b.mu.Lock()
	defer b.mu.Unlock()
	j := b.jobs[p.job]
	was, known := b.news[p.job]
	if was.reason == reasonDrainBlocked && n.reason == reasonDraining && was.pod == n.pod {
		return // its log reports that
	}
	if known && was.made.After(n.made) || was == n || n.reason == "" && was.pod == n.pod || j != nil && j.phase == jobComplete {
		return
	}
	b.news[p.job] = n
	if j != nil && was.reason+was.message != n.reason+n.message {
		b.wake(j.plan, podsGather)
	}
}

// podsGather is the delay to collect changes of several pods, because each may cost a write of the
// status.
const podsGather = 500 * time.Millisecond
