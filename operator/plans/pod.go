package plans

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Reasons of nodes, by what the pod of their Job does.
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

// lastWords is how much of what a container said last is told, in bytes.
const lastWords = 300

// podNews is what the newest pod of a Job says; the zero value is nothing worth telling.
type podNews struct {
	pod             string
	made            time.Time
	reason, message string
}

// isBad reports whether a pod does not get on.
func (n podNews) isBad() bool {
	switch n.reason {
	case reasonDrainBlocked, reasonUnschedulable, reasonImage, reasonContainer, reasonPodFailed:
		return true
	}
	return false
}

// newsOf is what a pod of a Job says about how it makes progress. What changes by itself every so
// often, such as how long is waited until an image is pulled again, is not in it.
func newsOf(p *corev1.Pod) podNews {
	n := podNews{pod: p.Name, made: p.CreationTimestamp.Time}
	say := func(reason, format string, args ...any) podNews {
		n.reason, n.message = reason, fmt.Sprintf(format, args...)
		return n
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			return say(reasonUnschedulable, "pod %s finds no place: %s", p.Name, c.Message)
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
			return say(reasonPodFailed, "%s", text)
		case s.Running != nil && doing[c.Name] != "":
			return say(doing[c.Name], "%s", runs(c.Name, p.Name))
		case s.Waiting == nil:
		case slices.Contains([]string{"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable", "ImageInspectError"}, s.Waiting.Reason):
			return say(reasonImage, "image %s of container %s cannot be pulled", c.Image, c.Name)
		case slices.Contains([]string{"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}, s.Waiting.Reason):
			return say(reasonContainer, "container %s of pod %s cannot be started: %s", c.Name, p.Name, cmp.Or(s.Waiting.Message, s.Waiting.Reason))
		}
	}
	return n
}

// runs says that a container does.
func runs(container, pod string) string {
	return fmt.Sprintf("container %s of pod %s runs", container, pod)
}

// lastLine is the last line of a text that is not empty, and not much of it.
func lastLine(text string) string {
	text = strings.TrimSpace(text)
	text = strings.TrimSpace(text[strings.LastIndexByte(text, '\n')+1:])
	if len(text) > lastWords {
		text = cut(text, lastWords) + "…"
	}
	return text
}

// cut is the begin of a text, of at most n bytes.
func cut(text string, n int) string { return strings.ToValidUTF8(text[:n], "") }

// setPod takes over what a pod of a Job says. What a pod said that is gone stays, until there
// is another one or the Job is complete or gone.
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
		return // of that its log tells
	}
	if known && was.made.After(n.made) || was == n || n.reason == "" && was.pod == n.pod || j != nil && j.phase == jobComplete {
		return
	}
	b.news[p.job] = n
	if j != nil && was.reason+was.message != n.reason+n.message {
		b.wake(j.plan, podsGather)
	}
}

// podsGather is how long is waited for more pods to say something: each that does may cost a
// write of the status.
const podsGather = 500 * time.Millisecond
