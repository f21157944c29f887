package kube

import (
	"crypto/sha256"
	"encoding/json"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// podPower has the fields of a pod's spec that are compared: image and command, account, and
// access to the node. No API server adds defaults to these fields when it reads an object, in any
// release, so they are in etcd as the API server returns them.
type podPower struct {
	Node, Account, Runtime string
	Network, PID, IPC      bool
	Volumes                []volumePower
	Containers             []containerPower
}

type volumePower struct {
	Name, HostPath, Secret, ConfigMap, Claim string
}

type containerPower struct {
	Name, Image   string
	Command, Args []string
	Env           [][2]string
	Mounts        [][3]string
	Privileged    bool
	Escalates     *bool
	User          *int64
	Adds          []corev1.Capability
}

// podSpecOf returns the spec of a pod, or of the pods that a workload makes; nil for other
// objects and versions.
func podSpecOf(o runtime.Object) *corev1.PodSpec {
	switch o := o.(type) {
	case *corev1.Pod:
		return &o.Spec
	case *corev1.ReplicationController:
		if o.Spec.Template == nil {
			return nil
		}
		return &o.Spec.Template.Spec
	case *appsv1.Deployment:
		return &o.Spec.Template.Spec
	case *appsv1.DaemonSet:
		return &o.Spec.Template.Spec
	case *appsv1.StatefulSet:
		return &o.Spec.Template.Spec
	case *appsv1.ReplicaSet:
		return &o.Spec.Template.Spec
	case *batchv1.Job:
		return &o.Spec.Template.Spec
	case *batchv1.CronJob:
		return &o.Spec.JobTemplate.Spec.Template.Spec
	}
	return nil
}

// powerDigest returns the SHA-256 of the podPower of a spec.
func powerDigest(s *corev1.PodSpec) ([]byte, error) {
	p := podPower{Node: s.NodeName, Account: s.ServiceAccountName, Network: s.HostNetwork, PID: s.HostPID, IPC: s.HostIPC}
	if s.RuntimeClassName != nil {
		p.Runtime = *s.RuntimeClassName
	}
	for i := range s.Volumes {
		v := &s.Volumes[i]
		out := volumePower{Name: v.Name}
		if v.HostPath != nil {
			out.HostPath = v.HostPath.Path
		}
		if v.Secret != nil {
			out.Secret = v.Secret.SecretName
		}
		if v.ConfigMap != nil {
			out.ConfigMap = v.ConfigMap.Name
		}
		if v.PersistentVolumeClaim != nil {
			out.Claim = v.PersistentVolumeClaim.ClaimName
		}
		p.Volumes = append(p.Volumes, out)
	}
	for i := range s.InitContainers {
		p.add(&s.InitContainers[i])
	}
	for i := range s.Containers {
		p.add(&s.Containers[i])
	}
	for i := range s.EphemeralContainers {
		c := corev1.Container(s.EphemeralContainers[i].EphemeralContainerCommon)
		p.add(&c)
	}
	b, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(b)
	return sum[:], nil
}

func (p *podPower) add(c *corev1.Container) {
	// An empty list and none are the same.
	out := containerPower{Name: c.Name, Image: c.Image, Command: append([]string(nil), c.Command...), Args: append([]string(nil), c.Args...)}
	for i := range c.Env {
		out.Env = append(out.Env, [2]string{c.Env[i].Name, c.Env[i].Value})
	}
	for i := range c.VolumeMounts {
		m := &c.VolumeMounts[i]
		out.Mounts = append(out.Mounts, [3]string{m.Name, m.MountPath, m.SubPath})
	}
	if x := c.SecurityContext; x != nil {
		out.Privileged = x.Privileged != nil && *x.Privileged
		out.Escalates, out.User = x.AllowPrivilegeEscalation, x.RunAsUser
		if x.Capabilities != nil {
			out.Adds = append(out.Adds, x.Capabilities.Add...)
		}
	}
	p.Containers = append(p.Containers, out)
}
